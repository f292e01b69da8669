"""Block-packed samples in the host: attention that keeps documents apart, in its `thd` format.

The host (Transformer Engine on GPUs, `host.cpu.layers` on the CPU) takes one packed sequence per
micro-batch, with the places where documents begin, and counts positions from 0 in each of them.
Under context parallelism every rank holds a part of every document.

s: sequence length, d: documents of a sample (a last one may be all padding).
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_kd.data.document_layout import context_parallel_places
from megatron_kd.host.step.device_copy import to_device


def on_this_rank(batch: dict, cu_seqlens: torch.Tensor, cp_group) -> dict:
    """Tensors [1, s, …] of a whole sample → this context-parallel rank's part, [1, s / ranks, …].

    Args:
        batch: Tensors in host memory; a value may be None.
        cu_seqlens: [1, d + 1] int32, from 0 to s.
        cp_group: Context-parallel ranks.
    """
    if cp_group.size() == 1:
        return batch
    places, _ = context_parallel_places(cu_seqlens[0].tolist(), cp_group.rank(), cp_group.size())
    return {
        key: None if value is None else value.index_select(1, places)
        for key, value in batch.items()
    }


def parameters(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """The host's description of a packed sample.

    The bounds are those of the whole sample on every context-parallel rank. Padding follows the
    documents' ends, where causal attention ignores it, so padded and real bounds need no
    distinction.

    Args:
        cu_seqlens: [1, d + 1] int32, in host memory.
    """
    longest = int(cu_seqlens[0].diff().max())
    bounds = to_device(cu_seqlens[0])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
