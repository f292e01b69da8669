"""Which parameters a dense decoder like Llama's has, and which dimension each axis of one is.

An axis is a letter. The host's dialect has v vocabulary and h hidden; beside them stand, because
attention and feed-forward widths are cut and counted apart, q query heads × head width,
g key/value groups × head width, f feed-forward width and c head width (never cut).
"""

import math
import re
from collections.abc import Iterator, Mapping

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "vh",
    "model.norm.weight": "h",
    "lm_head.weight": "vh",
}
_IN_LAYER = {
    "input_layernorm.weight": "h",
    "post_attention_layernorm.weight": "h",
    "self_attn.q_proj.weight": "qh",
    "self_attn.q_proj.bias": "q",
    "self_attn.k_proj.weight": "gh",
    "self_attn.k_proj.bias": "g",
    "self_attn.v_proj.weight": "gh",
    "self_attn.v_proj.bias": "g",
    "self_attn.o_proj.weight": "hq",
    "self_attn.o_proj.bias": "h",
    "self_attn.q_norm.weight": "c",
    "self_attn.k_norm.weight": "c",
    "mlp.gate_proj.weight": "fh",
    "mlp.gate_proj.bias": "f",
    "mlp.up_proj.weight": "fh",
    "mlp.up_proj.bias": "f",
    "mlp.down_proj.weight": "hf",
    "mlp.down_proj.bias": "h",
}
# The numbers of a config.json from which every size follows; the rest has one default for all.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def locate(name: str) -> tuple[int | None, str, str]:
    """Splits a parameter's name into (layer or None, name within the layer, axes).

    Raises:
        ValueError: The name is none of a dense decoder's.
    """
    match = _LAYER.match(name)
    layer, inner = (int(match[1]), match[2]) if match else (None, name)
    axes = (_IN_LAYER if match else _OUTSIDE_LAYERS).get(inner)
    if axes is None:
        raise ValueError(
            f"the teacher has a parameter {name}, which a dense decoder of "
            f"{', '.join(SUPPORTED)} does not have; such a model cannot be cut here"
        )
    return layer, inner, axes


def sizes_in_layer(config: Mapping) -> dict[str, tuple[int, ...]] | None:
    """Shape of every parameter of one layer by its name within the layer; all layers are alike.

    Args:
        config: The content of a config.json.

    Returns:
        None where the architecture is not one of `SUPPORTED` or the file leaves a size open, which
        transformers would fill with a default of the architecture.
    """
    kind = config.get("model_type")
    sizes_known = all(isinstance(config.get(key), int) for key in _SIZES)
    head_dim = config.get("head_dim")
    if kind not in SUPPORTED or not sizes_known or (kind == "qwen3" and not head_dim):
        return None
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    size = {
        "v": config["vocab_size"],
        "h": config["hidden_size"],
        "q": config["num_attention_heads"] * head_dim,
        "g": config["num_key_value_heads"] * head_dim,
        "f": config["intermediate_size"],
        "c": head_dim,
    }
    names = _names_in_layer(kind, config)
    return {name: tuple(size[letter] for letter in _IN_LAYER[name]) for name in names}


def count(shapes: Mapping[str, tuple[int, ...]], *, matrices: bool) -> int:
    """Numbers in the parameters of two axes (matrices) or of one (norms and biases)."""
    return sum(math.prod(shape) for shape in shapes.values() if (len(shape) > 1) == matrices)


def _names_in_layer(kind: str, config: Mapping) -> Iterator[str]:
    attention_bias = kind in ("llama", "qwen3") and config.get("attention_bias")
    mlp_bias = kind == "llama" and config.get("mlp_bias")
    for name in _IN_LAYER:
        part = name.split(".")[-2]
        if name.endswith(".bias"):
            if name.startswith("mlp."):
                exists = mlp_bias
            else:
                exists = attention_bias or (kind == "qwen2" and part != "o_proj")
        else:
            exists = part not in ("q_norm", "k_norm") or kind == "qwen3"
        if exists:
            yield name
