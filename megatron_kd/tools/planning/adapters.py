"""Parameters of low-rank adapters (LoRA), as the host puts them beside a layer's products."""

from fnmatch import fnmatchcase

from megatron_kd.config import LoraConfig
from megatron_kd.tools.planning.model_shape import ModelShape


def adapter_parameters(shape: ModelShape, lora: LoraConfig, layers: range) -> int:
    """Parameters of the adapters in some layers, before tensor parallelism divides them.

    Each product that has an adapter adds rank × (inputs + outputs).

    Args:
        layers: Their numbers in the model. Dense ones; experts are not counted.
    """
    return sum(
        lora.dim * (inputs + outputs)
        for layer in layers
        for name, (inputs, outputs) in _products(shape).items()
        if _has_adapter(f"decoder.layers.{layer}.{name}", lora.target_modules)
    )


def _products(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Megatron-Core's name → (inputs, outputs) of a layer's products."""
    hidden, query = shape.hidden_size, shape.heads * shape.head_dim
    key = shape.kv_heads * shape.head_dim
    up = 2 if shape.gated else 1
    return {
        "self_attention.linear_qkv": (hidden, query + 2 * key),
        "self_attention.linear_proj": (query, hidden),
        "mlp.linear_fc1": (hidden, up * shape.ffn_size),
        "mlp.linear_fc2": (shape.ffn_size, hidden),
    }


def _has_adapter(name: str, targets: list[str]) -> bool:
    return any(name.endswith(f".{target}") or fnmatchcase(name, target) for target in targets)
