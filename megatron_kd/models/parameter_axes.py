"""Which axis of which parameter a model dimension runs along, for dense decoders like Llama's.

Axes: V vocabulary, D hidden, H query heads × head width, G key/value groups × head width,
F feed-forward width, C head width (never cut).
"""

import re

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "VD",
    "model.norm.weight": "D",
    "lm_head.weight": "VD",
}
_IN_LAYER = {
    "input_layernorm.weight": "D",
    "post_attention_layernorm.weight": "D",
    "self_attn.q_proj.weight": "HD",
    "self_attn.q_proj.bias": "H",
    "self_attn.k_proj.weight": "GD",
    "self_attn.k_proj.bias": "G",
    "self_attn.v_proj.weight": "GD",
    "self_attn.v_proj.bias": "G",
    "self_attn.o_proj.weight": "DH",
    "self_attn.o_proj.bias": "D",
    "self_attn.q_norm.weight": "C",
    "self_attn.k_norm.weight": "C",
    "mlp.gate_proj.weight": "FD",
    "mlp.gate_proj.bias": "F",
    "mlp.up_proj.weight": "FD",
    "mlp.up_proj.bias": "F",
    "mlp.down_proj.weight": "DF",
    "mlp.down_proj.bias": "D",
}


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
