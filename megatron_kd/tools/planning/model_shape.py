"""A model's sizes from its Hugging Face configuration: no weights, no host.

The parameters of dense decoders like Llama's are counted from config.json alone, which imports
neither PyTorch nor transformers. All other architectures are built by transformers on PyTorch's
meta device, which allocates nothing, and counted there.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from megatron_kd.models.parameter_axes import count, sizes_in_layer

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_UNKNOWN_ATTENTION = ("kv_lora_rank", "linear_num_value_heads", "mamba_num_heads", "ssm_state_size")
_UNGATED = ("gelu_new", "gelu_fast", "gelu_python", "relu2")


@dataclass(frozen=True)
class LayerShape:
    """Parameters of one decoder layer, by how ranks divide them."""

    sharded: int
    """Matrices that tensor parallelism divides."""

    replicated: int
    """Norms, routers and biases: whole on every tensor rank."""

    experts: int = 0
    """Matrices of the routed experts, all of them, divided over expert-parallel ranks."""


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden_size: int
    ffn_size: int
    """Feed-forward width of a layer without experts."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    gated: bool
    """SwiGLU and the like: the first product of the MLP is twice as wide."""

    layers: tuple[LayerShape, ...]
    final: int
    """Parameters after the last layer, other than the output matrix."""

    dtype: str
    """The checkpoint's, as its configuration says: "bfloat16", "float16" or "float32"."""

    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0

    @property
    def parameters(self) -> int:
        matrices = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return (
            matrices + self.final + sum(x.sharded + x.replicated + x.experts for x in self.layers)
        )

    def active_parameters(self, layer: LayerShape) -> float:
        """Parameters of a layer that one token is multiplied with: of the experts, only its own."""
        share = self.experts_per_token / self.experts if layer.experts else 0
        return layer.sharded + share * layer.experts

    def padded_vocab(self, divisor: int, tensor_parallel: int) -> int:
        multiple = divisor * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


def shape_of_directory(path: str | Path, role: str) -> ModelShape:
    """The shape of the model in a Hugging Face directory.

    Raises:
        ValueError: There is no config.json, or the architecture is not one this plan knows.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"no config.json in {path}, from which the {role}'s shape is read; make a student with "
            "`megatron-kd init-student`, or give the directory of a downloaded model (weights are "
            "not needed)"
        )
    name = Path(path).resolve().name
    try:
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        shapes = sizes_in_layer(content)
        if shapes is not None:
            return _shape(SimpleNamespace(**content), name, _count_dense(content, shapes))
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(path))
    except (ValueError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a model configuration: {error}") from error
    return shape_of_config(config, name)


def shape_of_config(config, name: str) -> ModelShape:
    """The shape of a transformers configuration.

    Raises:
        ValueError: It is not a decoder of attention and MLP (or mixture-of-experts) layers.
    """
    config = config.get_text_config()
    _refuse_unknown(config, name)
    return _shape(config, name, _count(config, name))


def _shape(config, name: str, counted: dict) -> ModelShape:
    """config: Anything with a configuration's fields as attributes."""
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    heads = config.num_attention_heads
    activation = _first(config, "hidden_act", "hidden_activation", "activation_function") or "silu"
    expert_ffn = _first(config, "moe_intermediate_size") or config.intermediate_size
    shared = _first(config, "shared_expert_intermediate_size") or (
        (_first(config, "n_shared_experts") or 0) * expert_ffn
    )
    return ModelShape(
        name=name,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        head_dim=_first(config, "head_dim") or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        gated=activation not in _UNGATED,
        dtype=_dtype(config),
        experts=experts,
        experts_per_token=(_first(config, "num_experts_per_tok", "top_k_experts") or 0)
        if experts
        else 0,
        expert_ffn_size=expert_ffn if experts else 0,
        shared_ffn_size=shared if experts else 0,
        **counted,
    )


def _refuse_unknown(config, name: str) -> None:
    for key in _UNKNOWN_ATTENTION:
        if getattr(config, key, None):
            raise ValueError(
                f"{name} has {key}: its layers are not the attention and MLP (or expert) layers "
                "whose activations this plan can count"
            )
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if getattr(config, key, None) is None:
            raise ValueError(
                f"{name}'s configuration ({config.model_type}) has no {key}; the plan covers "
                "decoder-only language models"
            )


def _first(config, *keys):
    return next((v for key in keys if (v := getattr(config, key, None)) is not None), None)


def _dtype(config) -> str:
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")


def _count_dense(content: dict, shapes: dict[str, tuple[int, ...]]) -> dict:
    """`layers`, `final` and `tied` of a dense decoder from the shapes of one layer."""
    layer = LayerShape(count(shapes, matrices=True), count(shapes, matrices=False))
    return dict(
        layers=(layer,) * content["num_hidden_layers"],
        final=content["hidden_size"],
        tied=bool(content.get("tie_word_embeddings")),
    )


def _count(config, name: str) -> dict:
    """`layers`, `final` and `tied`, counted on the architecture."""
    model = _meta_model(config, name)
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    layers = [[0, 0, 0] for _ in range(config.num_hidden_layers)]
    final = 0
    for key, parameter in model.named_parameters():
        if parameter is embedding or parameter is output:
            continue
        place = _LAYER.search(key)
        if place is None:
            final += parameter.numel()
            continue
        layers[int(place[1])][_division(key, parameter)] += parameter.numel()
    return dict(
        layers=tuple(LayerShape(*counts) for counts in layers),
        final=final,
        tied=output is embedding,
    )


def _division(key: str, parameter) -> int:
    """Which field of `LayerShape` counts a parameter: 0 sharded, 1 replicated, 2 experts."""
    if ".experts." in key:
        return 2
    router = re.search(r"\.(router|gate)\.[a-z_]+$", key) is not None
    return 1 if router or parameter.dim() < 2 else 0


def _meta_model(config, name: str):
    import torch
    from transformers import AutoModelForCausalLM

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    # Filling weights that do not exist would take most of the time.
    with torch.device("meta"), no_init_weights():
        try:
            model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()  # which skipping the initialisation has skipped too
            return model
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"transformers cannot build {name}: {error}") from error
