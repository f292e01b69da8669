"""How much each channel of a teacher does on real text, measured in one forward pass over it.

As in Minitron (arXiv 2407.14679) nothing is differentiated: activations alone rank the channels. A
feed-forward channel or a key/value group counts by the size of what it adds to the residual stream
(activation and outgoing weight together); a hidden channel by its share of the mean square that
enters the norms, summed over all of them (on SmolLM2 a better choice than the activations behind
the norms).

Shapes: l layers, g key/value groups, f feed-forward width, h hidden, m tokens of a document,
w width of one group's heads together.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_kd.data.sequences import SequenceReader
from megatron_kd.models.channels import Channels, Selection, TeacherShape


@dataclass(frozen=True, kw_only=True)
class Importance:
    """What a pass over calibration text measured."""

    ffn: np.ndarray
    """[l, f]: size of what each feed-forward channel adds to the residual stream."""
    kv_groups: np.ndarray
    """[l, g]: size of what each key/value group adds to the residual stream."""
    hidden: np.ndarray
    """[h]: each hidden channel's share of the mean square before the norms, summed over them."""
    norm_input_power: dict[str, np.ndarray]
    """[h] for each norm's weight: mean square of what enters it."""
    tokens: int
    """How many tokens were measured."""


def measure(
    teacher: str | os.PathLike, documents: Iterable[np.ndarray], *, max_tokens: int
) -> Importance:
    """Runs the teacher over documents and ranks its channels.

    Args:
        teacher: Hugging Face directory of a supported architecture.
        documents: Token arrays [m], each read on its own.
        max_tokens: Stop after the document that reaches this many.

    Raises:
        ValueError: The documents hold no tokens, or ids the teacher does not have.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto").eval().to(device)
    shape = TeacherShape.of(model.config)
    body, tokens = model.model, 0
    probes = _Probes(body, shape)
    try:
        for document in documents:
            if len(document) and int(np.max(document)) >= model.config.vocab_size:
                raise ValueError(
                    f"the calibration data has the token {int(np.max(document))}, the teacher has "
                    f"{model.config.vocab_size}; prepare it with the teacher's tokenizer"
                )
            ids = torch.from_numpy(np.array(document, np.int64))[None].to(device)  # [1, m]
            with torch.inference_mode():
                body(input_ids=ids, use_cache=False)
            tokens += len(document)
            if tokens >= max_tokens:
                break
    finally:
        probes.remove()
    if tokens == 0:
        raise ValueError("the calibration data holds no documents")
    return probes.importance(tokens)


def documents_of(reader: SequenceReader, *, seed: int) -> Iterator[np.ndarray]:
    """The documents of prepared data, sequences in an order drawn from `seed`."""
    for index in np.random.default_rng(seed).permutation(len(reader)):
        sequence = reader[int(index)]
        yield from np.split(sequence.tokens, sequence.cu_seqlens[1:-1])


class _Probes:
    """Hooks that add up activations while the model runs."""

    def __init__(self, body: torch.nn.Module, shape: TeacherShape):
        self.body, self.shape = body, shape
        self.norms = {
            f"model.{name}.weight": module
            for name, module in body.named_modules()
            if name == "norm" or name.endswith("layernorm")
        }
        self.ffn, self.groups, self.power = {}, {}, {}
        self._hooks = []
        for number, layer in enumerate(body.layers):
            self._watch(layer.mlp.down_proj, self._ffn_hook(number))
            self._watch(layer.self_attn.o_proj, self._group_hook(number, layer.self_attn.o_proj))
        for name, module in self.norms.items():
            self._watch(module, self._norm_hook(name))

    def _watch(self, module, hook) -> None:
        self._hooks.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ffn_hook(self, number: int):
        def add(module, inputs, output):
            _add(self.ffn, number, inputs[0].float().square().sum(dim=(0, 1)))  # [f]

        return add

    def _group_hook(self, number: int, projection):
        def add(module, inputs, output):
            groups = inputs[0].unflatten(-1, (self.shape.kv_groups, -1))  # [1, m, g, w]
            outgoing = projection.weight.unflatten(-1, (self.shape.kv_groups, -1))  # [h, g, w]
            added = torch.einsum("bmgw,dgw->bmgd", groups, outgoing)
            _add(self.groups, number, added.float().square().sum(dim=(0, 1, 3)))  # [g]

        return add

    def _norm_hook(self, name: str):
        def add(module, inputs, output):
            _add(self.power, name, inputs[0].float().square().sum(dim=(0, 1)))  # [h]

        return add

    def importance(self, tokens: int) -> Importance:
        layers = range(self.shape.layers)
        outgoing = [
            layer.mlp.down_proj.weight.detach().double().square().sum(dim=0).cpu()  # [f]
            for layer in self.body.layers
        ]
        ffn = torch.stack([self.ffn[number] * outgoing[number] for number in layers])
        return Importance(
            ffn=(ffn / tokens).sqrt().numpy(),
            kv_groups=(torch.stack([self.groups[n] for n in layers]) / tokens).sqrt().numpy(),
            hidden=sum(power / power.sum() for power in self.power.values()).numpy(),
            norm_input_power={name: (p / tokens).numpy() for name, p in self.power.items()},
            tokens=tokens,
        )


def _add(sums: dict, key, value: torch.Tensor) -> None:
    value = value.double().cpu()
    sums[key] = sums[key] + value if key in sums else value


def select_important(
    teacher: TeacherShape,
    layers: Channels,
    importance: Importance,
    *,
    kv_groups: int,
    ffn_size: int,
    hidden_size: int,
) -> Selection:
    """Keeps the most important channels of each axis; ties go to the smaller index.

    Dropping hidden channels changes the mean square the norms divide by, so their weights are
    scaled by the change the calibration text shows.
    """
    hidden = _largest(importance.hidden, hidden_size)
    gains = {}
    if hidden_size < teacher.hidden_size:
        for name, power in importance.norm_input_power.items():  # [h]
            gains[name] = float(np.sqrt(power[list(hidden)].mean() / power.mean()))
    return Selection(
        layers=layers,
        kv_groups=tuple(_largest(importance.kv_groups[layer], kv_groups) for layer in layers),
        ffn=tuple(_largest(importance.ffn[layer], ffn_size) for layer in layers),
        hidden=hidden,
        norm_gains=gains,
    )


def _largest(values: np.ndarray, count: int) -> Channels:
    order = np.argsort(-values, kind="stable")[:count]
    return tuple(sorted(order.tolist()))
