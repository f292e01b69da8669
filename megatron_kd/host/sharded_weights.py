"""Weights that tensor-parallel ranks share, and the host's marks on them.

The host tells a shard from a copy by the attribute `tensor_model_parallel`. A shard without it
counts as a copy: those of ranks above 0 drop out of the gradient norm, and clipping is wrong, with
no error.
"""

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

PARTITION_DIM = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
LISTED = 4


class UnmarkedShardsError(RuntimeError):
    """Weights are split over ranks, and nothing says so."""


def sharded_weights(model: list) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """(name of the layer, its weight, the dimension it is split along) of the host's layers."""
    for chunk in model:
        for name, module in chunk.named_modules():
            for layer, dim in PARTITION_DIM.items():
                weight = getattr(module, "weight", None)
                if isinstance(module, layer) and weight is not None:
                    yield name, weight, dim


def refuse_unmarked(model: list) -> list:
    """Pre-wrap hook: every sharded weight is marked.

    Raises:
        UnmarkedShardsError: Names the first of those that are not.
    """
    unmarked = [
        name
        for name, weight, _ in sharded_weights(model)
        if not getattr(weight, "tensor_model_parallel", False)
    ]
    if unmarked:
        raise UnmarkedShardsError(
            f"{len(unmarked)} weights are split over tensor-parallel ranks but not marked so, "
            f"{', '.join(unmarked[:LISTED])} first: gradient norms would be wrong. This host needs "
            "`mark_sharded_parameters` among its model_hooks in megatron_kd/host/versions"
        )
    return model
