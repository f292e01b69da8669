"""Distillation losses over a large vocabulary: exact, chunked, vocabulary-parallel, host-free.

Heads read z_S and log R from logits or from hidden states; objectives are functions of those. See
`objectives`.
"""

from megatron_kd.losses.cross_entropy import fused_cross_entropy
from megatron_kd.losses.dense import dense_kd_loss
from megatron_kd.losses.fused_chunked import fused_chunked_kd_loss
from megatron_kd.losses.fused_online import dense_online_kd_loss, fused_online_kd_loss
from megatron_kd.losses.sparse_chunked import sparse_chunked_kd_loss
from megatron_kd.losses.target import Divergence, KDMetrics, TopKTarget

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
