"""One shard of the vocabulary: which ids are here, and what makes its numbers global.

The loss is replicated: every rank holds the same z_S and log R after one MAX and one SUM, so no
gradient is reduced again but dH, which is a sum over the shards. Everything here is called from
hand-written backward passes; an autograd collective under a replicated loss would multiply the
gradient by the number of ranks.

Letters: n rows, K columns asked for, Vp this rank's vocabulary, T temperatures.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_kd.losses.elementwise import (
    NEG_INF,
    accumulation_dtype,
    exponentials_,
    max_and_sums,
    to_gradient_,
)
from megatron_kd.losses.full_formulas import FARTHEST_NATS


@dataclass(frozen=True)
class VocabShard:
    """Half-open range of global ids on this rank; ids at or beyond vocab_size are padding."""

    start: int
    rows: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, rows: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> "VocabShard":
        ranks, rank = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        if vocab_size is None:
            vocab_size = rows * ranks
        if not 0 < vocab_size <= rows * ranks:
            raise ValueError(
                f"vocab_size {vocab_size} does not fit the output layer: {ranks} shard(s) of "
                f"{rows} rows"
            )
        return cls(rank * rows, rows, vocab_size, group if ranks > 1 else None)

    @property
    def valid(self) -> int:
        """Rows of this shard that are no padding."""
        return min(max(self.vocab_size - self.start, 0), self.rows)

    def check_ids(self, name: str, ids: torch.Tensor) -> None:
        """Refuse foreign ids where looking costs no synchronisation; elsewhere they become NaN."""
        if ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"{name} hold id {int(ids.max())}, the vocabulary ends at {self.vocab_size}: the "
                "teacher's tokenizer or its padded vocabulary differs from the student's; mask "
                "those ids with -1"
            )


@dataclass(frozen=True)
class Columns:
    """Columns to gather from a chunk: the support, then the label where there is one."""

    index: torch.Tensor  # [n, K (+ 1)] int64, 0 where not ours
    mine: torch.Tensor  # [n, K (+ 1)] bool
    invalid: torch.Tensor  # [n, K (+ 1)] bool: beyond the vocabulary
    support: int  # K


def localise(
    ids: torch.Tensor, labels: torch.Tensor | None, keep: torch.Tensor, shard: VocabShard
) -> Columns:
    """ids [n, K], labels [n] or None, keep [n, K]: slots that are used."""
    ids = torch.where(keep, ids, -1)
    wanted = ids if labels is None else torch.cat([ids, labels.unsqueeze(-1).to(ids.dtype)], -1)
    mine = (wanted >= shard.start) & (wanted < shard.start + shard.valid)
    index = torch.where(mine, wanted - shard.start, 0).long()
    return Columns(index, mine, wanted >= shard.vocab_size, ids.shape[-1])


class Reading(NamedTuple):
    """What a head hands to the objectives, and what the gradient pass needs."""

    gathered: torch.Tensor  # [n, K (+ 1)] logits minus the row's top; unused slots hold some number
    log_r: torch.Tensor  # [n, T] log R minus top / tau
    m: torch.Tensor  # [n] largest logit off the support, over all shards (0 where there is none)
    log_sums: torch.Tensor  # [n, T] log sum exp((z - m) / tau), off the support


def cut_(z: torch.Tensor, columns: Columns) -> None:
    """Scatter -inf over this shard's part of the support."""
    support = columns.index[:, : columns.support]
    _write_support_(z, columns, torch.full_like(support, NEG_INF, dtype=z.dtype))


def _write_support_(z: torch.Tensor, columns: Columns, values: torch.Tensor) -> None:
    """z [n, valid] becomes values [n, K] on the support; a slot that is not ours writes nothing.

    Such slots point at column 0, which is put back. Neither scatter_ nor scatter_add_: on CPUs they
    make an fp32 copy of all of a 16-bit z, and adding takes atomics on GPUs.
    """
    if not z.shape[-1]:
        return
    index, mine = columns.index[:, : columns.support], columns.mine[:, : columns.support]
    first = z[:, :1].clone()
    z.index_put_((_row_numbers(z), index), values)
    at_first = mine & (index == 0)
    own = torch.where(at_first, values, 0.0).sum(-1, keepdim=True)
    z[:, :1] = torch.where(at_first.any(-1, keepdim=True), own, first)


def read_(
    z: torch.Tensor, columns: Columns, inverse_taus: tuple[float, ...], shard: VocabShard
) -> Reading:
    """z [n, valid] logits; the support is cut out in place. One MAX and one SUM under TP."""
    gathered = _take_out_(z, columns)
    m, sums = max_and_sums(z, inverse_taus)
    return _over_shards(gathered, m, sums, columns, inverse_taus, shard)


def read_exponentials_(
    z: torch.Tensor, columns: Columns, inverse_tau: float, shard: VocabShard
) -> tuple[Reading, torch.Tensor]:
    """The same, and z becomes its exponentials relative to this shard's own maximum.

    The second result [n] makes them relative to the maximum over all shards.
    """
    gathered = _take_out_(z, columns)
    own_m, sums = exponentials_(z, inverse_tau)
    reading = _over_shards(gathered, own_m, sums, columns, (inverse_tau,), shard)
    return reading, ((own_m - reading.m) * inverse_tau).exp()


def _take_out_(z: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Logits [n, K (+ 1)] at the columns, 0 where not ours; the support is cut out of z."""
    dtype = accumulation_dtype(z.dtype)
    if not z.shape[-1]:
        return z.new_zeros(columns.index.shape, dtype=dtype)
    gathered = torch.where(columns.mine, z.gather(-1, columns.index).to(dtype), 0.0)
    cut_(z, columns)
    return gathered


def _over_shards(
    gathered: torch.Tensor,
    m: torch.Tensor,
    sums: torch.Tensor,
    columns: Columns,
    inverse_taus: tuple[float, ...],
    shard: VocabShard,
) -> Reading:
    k = columns.support
    on_support = torch.where(columns.mine[:, :k], gathered[:, :k], NEG_INF).amax(-1)
    peaks = torch.stack([m, on_support])  # [2, n]
    if shard.group is not None:
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=shard.group)
    top = peaks.amax(0)
    m_all = torch.where(peaks[0] == NEG_INF, 0.0, peaks[0])
    if shard.group is not None:
        lower = m - m_all  # this shard's sums are relative to its own maximum
        sums = torch.stack([sums[t] * (lower * x).exp() for t, x in enumerate(inverse_taus)])
        packed = torch.cat([sums, gathered.T])
        dist.all_reduce(packed, group=shard.group)
        sums, gathered = packed[: len(inverse_taus)], packed[len(inverse_taus) :].T
    log_sums = sums.log()
    log_r = torch.stack([(m_all - top) * x + log_sums[t] for t, x in enumerate(inverse_taus)], -1)
    gathered = (gathered - top.unsqueeze(-1)).clamp(min=FARTHEST_NATS)
    gathered = torch.where(columns.invalid, float("nan"), gathered)
    return Reading(gathered, log_r, m_all, log_sums.T)


def write_gradient_(
    z: torch.Tensor,
    reading: Reading,
    columns: Columns,
    d_gathered: torch.Tensor,
    d_log_r: torch.Tensor,
    inverse_taus: tuple[float, ...],
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn z, support cut out, into its gradient: d_gathered [n, K (+ 1)], d_log_r [n, T].

    own: [n] of `read_exponentials_` where z holds exponentials; None where it holds logits.
    """
    empty = reading.log_sums == NEG_INF
    scales = d_log_r * torch.exp(-torch.where(empty, 0.0, reading.log_sums))
    for t, inverse_tau in enumerate(inverse_taus):
        if inverse_tau != 1:
            scales[:, t] *= inverse_tau
    scales = torch.where(empty, 0.0, scales).T.contiguous()
    if own is None:
        to_gradient_(z, reading.m, scales, inverse_taus)
    else:
        z.mul_((scales[0] * own).unsqueeze(-1))
    k = columns.support
    _write_support_(z, columns, d_gathered[:, :k].to(z.dtype))
    if columns.index.shape[1] > k and z.shape[-1]:
        add_column_(z, columns.index[:, k], columns.mine[:, k], d_gathered[:, k])
    return z


def add_column_(
    z: torch.Tensor, index: torch.Tensor, mine: torch.Tensor, values: torch.Tensor
) -> None:
    """z [n, valid]: add values [n] at index [n] where mine."""
    index = index.unsqueeze(-1)
    values = torch.where(mine, values, 0.0).unsqueeze(-1)
    total = (z.gather(-1, index).to(values.dtype) + values).to(z.dtype)
    z.index_put_((_row_numbers(z), index), total)


def _row_numbers(z: torch.Tensor) -> torch.Tensor:
    return torch.arange(z.shape[0], device=z.device).unsqueeze(-1)


def gather_sequence(shard_states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S/tp, B, D] -> [S, B, D], outside autograd."""
    ranks = dist.get_world_size(group)
    full = shard_states.new_empty(shard_states.shape[0] * ranks, *shard_states.shape[1:])
    dist.all_gather_into_tensor(full, shard_states.contiguous(), group=group)
    return full


def reduce_scatter_sequence(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, B, D] -> [S/tp, B, D], summed over ranks, outside autograd."""
    ranks = dist.get_world_size(group)
    shard = full.new_empty(full.shape[0] // ranks, *full.shape[1:])
    dist.reduce_scatter_tensor(shard, full.contiguous(), group=group)
    return shard
