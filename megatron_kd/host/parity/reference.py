"""What transformers computes: random weights for a shrunken copy, and a model's layers and logits.

s: sequence positions, b: sequences, h: hidden size, v: vocabulary.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kd.host.parity.shrunken import MOST_PARAMETERS, CannotShrinkError

SEED = 20_240
SPREAD = 0.2
"""Standard deviation of what is added to norms, biases and other vectors."""

ATTENTION_GAIN = 2.0
"""Query and key weights are larger than a plain initialisation, so that attention prefers some
positions to others, and a key too many or too few shows."""

DECISIVE_ROUTER_GAIN = 4.0
"""A router's weights are larger too: ties between experts are rare, which rounding would break."""

SEQUENCES = 2


@dataclass(frozen=True)
class Reference:
    """A model's results on some sequences, in fp32 on the CPU."""

    input_ids: torch.Tensor
    """[b, s], int64."""

    hidden_states: list[torch.Tensor]
    """[b, s, h] each: what the first layer reads, then what each layer returns. Empty where the
    model's layers were not found."""

    logits: torch.Tensor
    """[b, s, v]."""

    layer_kinds: list[str]
    """One word for each layer, such as sliding_attention; empty strings where nothing is said."""


def write_random_weights(folder: Path) -> None:
    """Give the model of a folder that holds its config.json random weights, the same every time.

    Raises:
        CannotShrinkError: The copy is not small, or transformers cannot build it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    configuration = (folder / "config.json").read_text(encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            size = sum(parameter.numel() for parameter in model.parameters())
            if size > MOST_PARAMETERS:
                raise CannotShrinkError(f"a copy with few layers still has {size:,} parameters")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except CannotShrinkError:
            raise
        except Exception as error:  # whatever the family's class refuses is the reason
            raise CannotShrinkError(f"{type(error).__name__}: {error}") from error
        _randomize(model)
    model.save_pretrained(folder)
    # transformers' class may leave settings out that it does not know, and the host reads.
    (folder / "config.json").write_text(configuration, encoding="utf-8")


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2 or min(parameter.shape) == 1:
            parameter += SPREAD * noise
            continue
        if "embed" in name:
            parameter.copy_(noise)
            continue
        gain = 1.0
        if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
            gain = ATTENTION_GAIN
        elif name.endswith(("gate.weight", "router.weight")):
            gain = DECISIVE_ROUTER_GAIN
        parameter.copy_(gain / math.sqrt(model.config.hidden_size) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += SPREAD * torch.randn(buffer.shape, generator=generator)


def sequences(vocab_size: int, length: int, padding_id: int | None) -> torch.Tensor:
    """[b, s] token ids, the same every time: random ones, the second sequence ending in padding."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, vocab_size, (SEQUENCES, length), generator=generator)
    if padding_id is not None and 0 <= padding_id < vocab_size:
        ids[-1, -length // 4 :] = padding_id
    return ids


@torch.no_grad()
def run(folder: Path, input_ids: torch.Tensor) -> Reference:
    """Run a directory's model on sequences [b, s], in fp32 with plain attention.

    Raises:
        CannotShrinkError: transformers cannot run it.
    """
    from transformers import AutoModelForCausalLM

    from megatron_kd.models.transformers_faults import mend

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        model.eval()
        mend(model)
        layers = _layers(model)
        hidden_states = []
        hooks = [layers[0].register_forward_pre_hook(_keep_input(hidden_states), with_kwargs=True)]
        hooks += [layer.register_forward_hook(_keep_output(hidden_states)) for layer in layers]
        logits = model(input_ids=input_ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
    except Exception as error:  # whatever the family's class refuses is the reason
        raise CannotShrinkError(f"{type(error).__name__}: {error}") from error
    return Reference(
        input_ids=input_ids,
        hidden_states=hidden_states,
        logits=logits.float(),
        layer_kinds=_kinds(folder, len(layers)),
    )


def _layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    count = model.config.num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of its {count} layers")


def _keep_input(kept: list):
    def hook(module, args, kwargs):
        kept.append((args[0] if args else kwargs["hidden_states"]).clone())

    return hook


def _keep_output(kept: list):
    def hook(module, args, output):
        kept.append((output if isinstance(output, torch.Tensor) else output[0]).clone())

    return hook


def _kinds(folder: Path, count: int) -> list[str]:
    from transformers import AutoConfig

    kinds = getattr(AutoConfig.from_pretrained(folder), "layer_types", None)
    if kinds is None:
        kinds = json.loads((folder / "config.json").read_text()).get("layer_types")
    return list(kinds) if kinds and len(kinds) == count else [""] * count
