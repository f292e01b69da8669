"""Mark sharded parameters as sharded when the host skipped their initialisation.

`AutoBridge.to_megatron_provider(load_weights=True)` sets `perform_initialization=False`. In
Megatron-Core 0.16 the initialiser is also what sets `tensor_model_parallel` on linear and embedding
weights, so without it the shards of ranks above 0 count as duplicates: they drop out of the
gradient norm, and clipping is wrong under tensor parallelism.
"""

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

PARTITION_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


def mark_sharded_parameters(model: list) -> list:
    """Pre-wrap hook: set the attributes the skipped initialiser would have set; changes no
    value.
    """
    for chunk in model:
        for module in chunk.modules():
            for layer, dim in PARTITION_DIM.items():
                weight = getattr(module, "weight", None)
                if isinstance(module, layer) and weight is not None:
                    weight.tensor_model_parallel = True
                    weight.partition_dim = dim
                    weight.partition_stride = getattr(weight, "partition_stride", 1)
    return model


def unmarked(model: list) -> list[str]:
    """Names of sharded weights that are not marked; empty after `mark_sharded_parameters`."""
    return [
        name
        for chunk in model
        for name, module in chunk.named_modules()
        if isinstance(module, tuple(PARTITION_DIM))
        and getattr(module, "weight", None) is not None
        and not getattr(module.weight, "tensor_model_parallel", False)
    ]
