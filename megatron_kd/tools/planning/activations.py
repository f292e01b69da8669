"""What a decoder layer keeps for its backward pass, by recompute mode.

Counted per position for Transformer Engine's layers: flash attention keeps its inputs, its output
and one fp32 log-sum-exp per head, never the scores; norms are fused into the product that follows,
which keeps the norm's input and output; the activation function keeps its input; rotary embeddings
keep nothing; there is no dropout.

All sizes are bytes per position on one rank.
"""

from dataclasses import dataclass

from megatron_kd.tools.planning.model_shape import LayerShape, ModelShape
from megatron_kd.tools.planning.run_settings import RunSettings


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per position of one layer on one rank."""

    kept: float
    """Kept from the layer's forward pass to its backward pass."""

    rebuilt: float
    """All that the layer's backward pass needs: `kept` and what recomputation brings back."""

    gradients: float
    """The largest gradients that are alive at once beside `rebuilt`."""


def layer_activations(
    shape: ModelShape, layer: LayerShape, settings: RunSettings
) -> LayerActivations:
    parts = _parts(shape, layer, settings)
    everything = sum(parts.values())
    whole = shape.hidden_size * settings.value_bytes / _sequence_split(settings)
    gradients = 2 * whole + parts["mlp input"] + parts["mlp output"]
    dropped = 0.0
    if settings.recompute.mode == "full":
        dropped = everything - parts["layer input"]
    elif settings.recompute.mode == "selective":
        dropped = sum(parts[name] for name in _dropped(settings, is_moe=bool(layer.experts)))
    return LayerActivations(everything - dropped, everything, gradients)


def kept_by_layers(
    shape: ModelShape, layers: tuple[LayerShape, ...], settings: RunSettings
) -> tuple[float, float]:
    """Bytes per position that a stage keeps, and what its backward pass adds at most."""
    counted = [layer_activations(shape, layer, settings) for layer in layers]
    recompute = settings.recompute
    largest = max(counted, key=lambda x: x.rebuilt)
    if recompute.mode != "full":
        kept = sum(x.kept for x in counted)
        return kept, largest.rebuilt - largest.kept + largest.gradients
    if recompute.method == "block":
        split = min(recompute.layers, len(counted))
        kept = sum(x.kept for x in counted[:split]) + sum(x.rebuilt for x in counted[split:])
        return kept, largest.rebuilt + largest.gradients
    kept = sum(x.kept for x in counted[:: recompute.layers])
    group = min(recompute.layers, len(counted))
    return kept, group * largest.rebuilt + largest.gradients


def _sequence_split(settings: RunSettings) -> int:
    return settings.tensor_parallel if settings.sequence_parallel else 1


def _parts(shape: ModelShape, layer: LayerShape, settings: RunSettings) -> dict[str, float]:
    value, tensor = settings.value_bytes, settings.tensor_parallel
    hidden = value * shape.hidden_size / _sequence_split(settings)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = {
        "layer input": hidden,
        "first norm": hidden,
        "query, key, value": value * (query + 2 * key) / tensor,
        "attention": value * query / tensor,
        "log-sum-exp": 4 * shape.heads / tensor,
        "mlp residual": hidden,
        "second norm": hidden,
    }
    up = 2 if shape.gated else 1
    if not layer.experts:
        ffn = value * shape.ffn_size / tensor
        return parts | {"mlp input": up * ffn, "mlp output": ffn}
    # A token's copies, one for each of its experts, spread evenly over the expert-parallel ranks.
    width = value * shape.experts_per_token * shape.expert_ffn_size
    width /= settings.expert_tensor_parallel * _sequence_split(settings)
    copies = shape.experts_per_token * hidden
    shared = value * shape.shared_ffn_size / tensor
    return parts | {
        "router": 4 * shape.experts / _sequence_split(settings),
        "dispatched": copies,
        "mlp input": up * width,
        "mlp output": width,
        "combined": copies,
        "shared experts": (up + 1) * shared,
    }


def _dropped(settings: RunSettings, is_moe: bool) -> set[str]:
    """Names of the parts that selective recomputation rebuilds, as the settings' modules say."""
    dropped = set()
    by_module = {
        "core_attn": {"log-sum-exp"},  # flash attention's output is the next product's input
        "layernorm": {"first norm", "second norm"},
        "mlp": set() if is_moe else {"second norm", "mlp input", "mlp output"},
        "moe_act": {"mlp output"} if is_moe else set(),
        "moe": {"router", "dispatched", "mlp input", "mlp output", "combined", "shared experts"}
        if is_moe
        else set(),
        "shared_experts": {"shared experts"} if is_moe else set(),
        "mla_up_proj": set(),
    }
    for module in settings.recompute.modules:
        if module not in by_module:
            raise ValueError(
                f"bridge.model.recompute_modules has {module}; the plan knows "
                f"{', '.join(by_module)}"
            )
        dropped |= by_module[module]
    return dropped
