"""Distillation losses over a large vocabulary: exact, chunked, vocabulary-parallel, host-free.

Each public name is imported when it is first asked for, so that `import megatron_kd.losses`, and
`megatron_kd.losses.divergence` on its own, need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_kd.losses.dense import dense_kd_loss
    from megatron_kd.losses.divergence import Divergence
    from megatron_kd.losses.fused_chunked import fused_chunked_kd_loss, fused_cross_entropy
    from megatron_kd.losses.fused_online import dense_online_kd_loss, fused_online_kd_loss
    from megatron_kd.losses.sparse_chunked import sparse_chunked_kd_loss
    from megatron_kd.losses.target import KDMetrics, TopKTarget

_MODULES = {
    "Divergence": "divergence",
    "KDMetrics": "target",
    "TopKTarget": "target",
    "dense_kd_loss": "dense",
    "dense_online_kd_loss": "fused_online",
    "fused_chunked_kd_loss": "fused_chunked",
    "fused_cross_entropy": "fused_chunked",
    "fused_online_kd_loss": "fused_online",
    "sparse_chunked_kd_loss": "sparse_chunked",
}

__all__ = [
    "Divergence",
    "KDMetrics",
    "TopKTarget",
    "dense_kd_loss",
    "dense_online_kd_loss",
    "fused_chunked_kd_loss",
    "fused_cross_entropy",
    "fused_online_kd_loss",
    "sparse_chunked_kd_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
