"""A small copy of a model's configuration: sizes are cut, every mechanism stays.

What makes a family itself (attention windows and which layers have them, scaled rotary positions,
experts and how they are chosen, soft caps, biases, tied weights, norms) is kept and moved into
reach: windows and the length at which positions start to be scaled become shorter than the
sequences that are compared.
"""

import json
import math
from pathlib import Path
from typing import Any

SEQUENCE_LENGTH = 96
WINDOW = 8
ORIGINAL_LENGTH = 64
"""Positions that a scaled rotary embedding takes for its original length."""

HEAD_CHANNELS = 16
MOST_LAYERS = 16
MOST_PARAMETERS = 30_000_000

Settings = dict[str, Any]

# Not part of what a model computes in fp32.
LEFT_OUT = ("quantization_config", "auto_map")
ALTERNATIVE_NAMES = {
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "window": ("sliding_window",),
}
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class CannotShrinkError(ValueError):
    """A configuration of which no small copy could be made."""


def shrunken(full: Settings, *, ranks: int = 1, expert_ranks: int = 1, stages: int = 1) -> Settings:
    """What to change in a configuration to make it small.

    Args:
        full: Every setting of the configuration, defaults included, as transformers' `to_dict`.
        ranks: Tensor-parallel ranks that heads, widths and vocabulary are split over.
        expert_ranks: Expert-parallel ranks.
        stages: Pipeline stages, which hold equally many layers.

    Returns:
        Setting → new value, of those that change.

    Raises:
        CannotShrinkError: It names no number of layers or heads, as nested configurations do.
    """
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(full.get(name), int):
            raise CannotShrinkError(f"its configuration has no number under {name}")
    small: Settings = {}
    _widths(full, small, ranks)
    _experts(full, small, ranks, expert_ranks)
    _latent_attention(full, small)
    _linear_attention(full, small, ranks)
    _positions(full, small)
    _layers(full, small, stages)
    _token_ids(full, small)
    return {name: value for name, value in small.items() if full.get(name) != value}


def write_configuration(directory: Path, target: Path, **layout: int) -> Settings:
    """Write the small copy of a directory's config.json to target/config.json.

    Args:
        directory: The model.
        target: An existing folder.
        layout: As for `shrunken`.

    Returns:
        The settings of the copy, defaults included.

    Raises:
        CannotShrinkError: No copy can be made; the message says why.
    """
    from transformers import AutoConfig

    try:
        full = AutoConfig.from_pretrained(directory).to_dict()
        written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        small = written | shrunken(full, **layout)
        for name in LEFT_OUT:
            small.pop(name, None)
        if "rope_parameters" in small:  # transformers 5 would let its older name overrule it
            small.pop("rope_scaling", None)
        for name in ("torch_dtype", "dtype"):
            if name in small:
                small[name] = "float32"
        (target / "config.json").write_text(json.dumps(small, indent=1), encoding="utf-8")
        return AutoConfig.from_pretrained(target).to_dict()
    except CannotShrinkError:
        raise
    except Exception as error:  # whatever a family's configuration class refuses is the reason
        raise CannotShrinkError(f"{type(error).__name__}: {error}") from error


def _widths(full: Settings, small: Settings, ranks: int) -> None:
    heads = full["num_attention_heads"]
    groups = full.get("num_key_value_heads") or heads
    small_groups = groups if groups < ranks else min(groups, 2) if ranks == 1 else ranks
    per_group = heads // groups
    small_heads = small_groups * (per_group if per_group <= 4 else 3)
    small_heads = math.lcm(small_heads, ranks)
    channels = full.get("head_dim") or full["hidden_size"] // heads
    fills = channels * heads == full["hidden_size"]
    width = small_heads * HEAD_CHANNELS + (0 if fills else 32 * ranks)
    small |= {
        "num_attention_heads": small_heads,
        "hidden_size": width,
        "vocab_size": min(full["vocab_size"], 128 * ranks),
    }
    if "num_key_value_heads" in full:
        small["num_key_value_heads"] = small_groups
    if full.get("head_dim"):
        small["head_dim"] = HEAD_CHANNELS
    for name in ("intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"):
        if isinstance(full.get(name), int):
            small[name] = 2 * width
    if isinstance(full.get("moe_intermediate_size"), int):
        small["moe_intermediate_size"] = width
    if full.get("query_pre_attn_scalar"):  # another scale than the head's stays another
        scaled = full["query_pre_attn_scalar"] * HEAD_CHANNELS / channels
        small["query_pre_attn_scalar"] = max(1, round(scaled))


def _experts(full: Settings, small: Settings, ranks: int, expert_ranks: int) -> None:
    for name in ALTERNATIVE_NAMES["experts"]:
        experts = full.get(name)
        if not isinstance(experts, int) or experts <= 1:
            continue
        chosen = full.get("num_experts_per_tok") or 1
        groups = full.get("n_group") or 1
        small_groups = min(groups, 4)
        step = math.lcm(expert_ranks, small_groups)
        wanted = max(8, 4 * small_groups if groups > 1 else 1)
        small[name] = min(experts, -(-wanted // step) * step)
        if "num_experts_per_tok" in full:
            small["num_experts_per_tok"] = min(chosen, max(1, small[name] // 2))
        if groups > 1:
            small["n_group"] = small_groups
            small["topk_group"] = max(1, min(full.get("topk_group") or 1, small_groups // 2))


def _latent_attention(full: Settings, small: Settings) -> None:
    sizes = {
        "q_lora_rank": 24,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_head_dim": 24,
    }
    if not full.get("kv_lora_rank"):
        return
    for name, size in sizes.items():
        if full.get(name):
            small[name] = size
    if "head_dim" in small:  # transformers' name for the rotated channels here
        small["head_dim"] = sizes["qk_rope_head_dim"]


def _linear_attention(full: Settings, small: Settings, ranks: int) -> None:
    if full.get("linear_num_value_heads"):
        small |= {
            "linear_num_key_heads": 2 * ranks,
            "linear_num_value_heads": 4 * ranks,
            "linear_key_head_dim": HEAD_CHANNELS,
            "linear_value_head_dim": HEAD_CHANNELS,
        }


def _positions(full: Settings, small: Settings) -> None:
    for name in ALTERNATIVE_NAMES["window"]:
        if isinstance(full.get(name), int) and full[name] > WINDOW:
            small[name] = WINDOW
    key = "rope_parameters" if full.get("rope_parameters") else "rope_scaling"
    given = full.get(key)
    if not isinstance(given, dict):
        return
    nested = all(isinstance(value, dict) for value in given.values()) and given
    parts = dict(given) if nested else {"": dict(given)}
    longest = full.get("max_position_embeddings")
    for part, rope in parts.items():
        if not isinstance(rope, dict) or _kind(rope) in (None, "default"):
            continue
        rope = dict(rope)
        original = rope.get("original_max_position_embeddings")
        if original:
            rope["original_max_position_embeddings"] = ORIGINAL_LENGTH
        if longest:
            ratio = longest / (original or longest)
            small["max_position_embeddings"] = max(1, round(ORIGINAL_LENGTH * ratio))
        for factors in ("long_factor", "short_factor"):
            if isinstance(rope.get(factors), list):
                rope[factors] = rope[factors][: HEAD_CHANNELS // 2]
        parts[part] = rope
    small[key] = parts if nested else parts[""]


def _kind(rope: Settings) -> str | None:
    return rope.get("rope_type") or rope.get("type")


def _layers(full: Settings, small: Settings, stages: int) -> None:
    """The fewest first layers that hold every kind of layer: two at least, and equally many on each
    pipeline stage."""
    count = full["num_hidden_layers"]
    if full.get("first_k_dense_replace") and full["first_k_dense_replace"] < count:
        small["first_k_dense_replace"] = 1
    if isinstance(full.get("max_window_layers"), int):
        first = full["max_window_layers"]
        small["max_window_layers"] = min(first, 1) if first < count else 2 * MOST_LAYERS
    kinds = full.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        if isinstance(full.get("max_window_layers"), int) and "sliding_attention" in kinds:
            first = kinds.index("sliding_attention")  # by number, whatever comes before
            kinds = kinds[:1] + kinds[first:] if first else kinds
        needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    else:
        kinds, needed = None, 2
    step = full.get("decoder_sparse_step") or 1
    needed = max(needed, 2, step, 1 + small.get("first_k_dense_replace", 0))
    dense = [layer for layer in full.get("mlp_only_layers") or [] if layer < count]
    if dense:
        needed = max(needed, dense[0] + 1)
    needed = -(-needed // stages) * stages
    if needed > max(MOST_LAYERS, stages):
        raise CannotShrinkError(f"{needed} layers are needed to have one of every kind")
    small["num_hidden_layers"] = needed
    if kinds is not None:
        small["layer_types"] = (kinds * needed)[:needed] if len(kinds) < needed else kinds[:needed]
    if dense:
        small["mlp_only_layers"] = [layer for layer in dense if layer < needed]
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if full.get(name):  # what they predict is no part of the model's own logits
            small[name] = 0


def _token_ids(full: Settings, small: Settings) -> None:
    vocabulary = small["vocab_size"]
    for name in TOKEN_IDS:
        ids = full.get(name)
        if isinstance(ids, int):
            small[name] = ids % vocabulary
        elif isinstance(ids, list):
            small[name] = [value % vocabulary for value in ids]
