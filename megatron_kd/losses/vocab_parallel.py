"""One shard of the vocabulary: which ids are here, and what makes its numbers global.

The loss is replicated: every rank holds the same z_S and log R after one MAX and one SUM, so no
gradient is reduced again but dH, which is a sum over the shards. Everything here is called from
hand-written backward passes; an autograd collective under a replicated loss would multiply the
gradient by the number of ranks.

n rows of a chunk, k columns asked for, vp = v/tp this rank's vocabulary, t temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_kd.losses.constants import NAN, row_numbers, where
from megatron_kd.losses.kernels import (
    FARTHEST_NATS,
    NEG_INF,
    accumulation_dtype,
    exponentials_,
    max_and_sums,
    to_gradient_,
)
from megatron_kd.losses.logit_transform import LogitTransform, transformed


@dataclass(frozen=True)
class VocabShard:
    """Half-open range of global ids on this rank; ids at or beyond vocab_size are padding."""

    vocab_start_index: int
    rows: int
    """Rows of this rank's output layer, padding included: the same on every rank."""
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, rows: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> "VocabShard":
        """This rank's shard of an output layer of which each rank of the group holds `rows`.

        Raises:
            ValueError: There are fewer rows than vocab_size.
        """
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
    def unpadded_rows(self) -> int:
        """Rows of this shard that are no padding. It differs between ranks."""
        return min(max(self.vocab_size - self.vocab_start_index, 0), self.rows)

    @property
    def vocab_end_index(self) -> int:
        """The first id after those of this rank that are no padding."""
        return self.vocab_start_index + self.unpadded_rows

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of these global ids are on this rank, and their columns here (0 for others)."""
        is_local = (ids >= self.vocab_start_index) & (ids < self.vocab_end_index)
        first = self.vocab_start_index
        return is_local, where(is_local, ids - first if first else ids, 0).long()

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

    index: torch.Tensor  # [n, k (+ 1)] int64, 0 where not on this rank
    is_local: torch.Tensor  # [n, k (+ 1)] bool: on this rank
    is_beyond: torch.Tensor  # [n, k (+ 1)] bool: beyond the vocabulary
    is_first: torch.Tensor  # [n, k] bool: column 0 of this rank
    has_first: torch.Tensor  # [n, 1] bool: column 0 is on the support
    support: int  # k

    def slopes(self, z: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor | None:
        """dz/dx [n, k (+ 1)] at these columns of x, a chunk [n, vp] out of which nothing is cut."""
        if transform is None or not z.shape[-1]:
            return None
        return transform.slopes(z.gather(-1, self.index).to(accumulation_dtype(z.dtype)))


def columns_of(
    ids: torch.Tensor, labels: torch.Tensor | None, keep: torch.Tensor, shard: VocabShard
) -> Columns:
    """The columns of ids [n, k] where keep [n, k] says the slot is used, and of labels [n]."""
    ids = where(keep, ids, -1)
    wanted = ids if labels is None else torch.cat([ids, labels.unsqueeze(-1)], -1)
    is_local, index = shard.locate(wanted)
    is_first = ids == shard.vocab_start_index
    has_first = is_first.any(-1, keepdim=True)
    is_beyond = wanted >= shard.vocab_size
    return Columns(index, is_local, is_beyond, is_first, has_first, ids.shape[-1])


class Reading(NamedTuple):
    """What a head hands to the objectives, and what the gradient pass needs."""

    gathered: torch.Tensor  # [n, k (+ 1)] logits minus the row's top, ≤ 0 also in unused slots
    log_r: torch.Tensor  # [n, t] log R minus top / tau
    m: torch.Tensor  # [n] largest logit off the support, over all shards; finite if there is none
    log_sums: torch.Tensor  # [n, t] log sum exp((z - m) / tau), off the support


def cut_(z: torch.Tensor, columns: Columns) -> None:
    """Scatter -inf over this shard's part of the support."""
    if z.shape[-1]:
        _cut_(z, columns, z.gather(-1, columns.index[:, : columns.support]))


def _cut_(z: torch.Tensor, columns: Columns, found: torch.Tensor) -> None:
    """found [n, k]: what z holds at the columns of the support.

    A slot of another rank points at column 0, and writes there what it found, or -inf where another
    slot cuts that column. Neither scatter_ nor scatter_add_: on CPUs they make an fp32 copy of all
    of a 16-bit z, and adding takes atomics on GPUs.
    """
    k = columns.support
    stays = ~(columns.is_local[:, :k] | columns.has_first)
    z.index_put_((row_numbers(z), columns.index[:, :k]), where(stays, found, NEG_INF))


def _write_support_(z: torch.Tensor, columns: Columns, values: torch.Tensor) -> None:
    """z [n, vp] becomes values [n, k] on the support; a slot of another rank writes to column 0
    what belongs there.
    """
    if not z.shape[-1]:
        return
    k = columns.support
    on_first = where(columns.is_first, values, 0.0).sum(-1, keepdim=True)
    first = torch.where(columns.has_first, on_first, z[:, :1])
    values = torch.where(columns.is_local[:, :k], values, first)
    z.index_put_((row_numbers(z), columns.index[:, :k]), values)


def read_(
    z: torch.Tensor,
    columns: Columns,
    inverse_taus: tuple[float, ...],
    shard: VocabShard,
    transform: LogitTransform | None,
) -> Reading:
    """Read logits z [n, vp]; the support is cut out in place. One MAX and one SUM under TP."""
    gathered = _take_out_(z, columns, transform)
    m, sums = max_and_sums(z, inverse_taus, transform)
    return _over_shards(gathered, m, sums, columns, inverse_taus, shard)


def read_exponentials_(
    z: torch.Tensor, columns: Columns, inverse_tau: float, shard: VocabShard
) -> tuple[Reading, torch.Tensor]:
    """Read logits z [n, vp]; z becomes its exponentials relative to this shard's own maximum.

    The second result [n] makes them relative to the maximum over all shards. Apart from that this
    is `read_` at one temperature, with the same collectives.
    """
    gathered = _take_out_(z, columns, None)
    own_maximum, sums = exponentials_(z, inverse_tau)
    reading = _over_shards(gathered, own_maximum, sums, columns, (inverse_tau,), shard)
    return reading, ((own_maximum - reading.m) * inverse_tau).exp()


def _take_out_(z: torch.Tensor, columns: Columns, transform: LogitTransform | None) -> torch.Tensor:
    """Logits [n, k (+ 1)] at the columns, that of column 0 where they are on another rank, -inf if
    there is none; z loses the support.
    """
    dtype = accumulation_dtype(z.dtype)
    if not z.shape[-1]:
        return z.new_full(columns.index.shape, NEG_INF, dtype=dtype)
    found = z.gather(-1, columns.index)
    _cut_(z, columns, found[:, : columns.support])
    return transformed(found.to(dtype), transform)


def _over_shards(
    gathered: torch.Tensor,
    m: torch.Tensor,
    sums: torch.Tensor,
    columns: Columns,
    inverse_taus: tuple[float, ...],
    shard: VocabShard,
) -> Reading:
    on_support = gathered.amax(-1)  # column 0, where it stands in for others, is a logit as well
    if shard.group is None:
        m_all, top = m, torch.maximum(m, on_support)
    else:
        peaks = torch.stack([m, on_support])  # [2, n]
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=shard.group)
        m_all, top = peaks[0], peaks.amax(0)
    # -inf - -inf is NaN
    m_all = m_all.clamp(min=torch.finfo(m_all.dtype).min)
    if shard.group is not None:
        lower = m - m_all  # this shard's sums are relative to its own maximum
        sums = torch.stack([sums[t] * (lower * x).exp() for t, x in enumerate(inverse_taus)])
        packed = torch.cat([sums, where(columns.is_local, gathered, 0.0).T])
        dist.all_reduce(packed, group=shard.group)
        sums, gathered = packed[: len(inverse_taus)], packed[len(inverse_taus) :].T
    log_sums = sums.log()
    below = m_all - top
    log_r = [log_sums[t].add(below, alpha=x) for t, x in enumerate(inverse_taus)]
    log_r = log_r[0].unsqueeze(-1) if len(log_r) == 1 else torch.stack(log_r, -1)
    # No logit is above the top; a slot that is unused holds 0 under TP, and may be.
    gathered = (gathered - top.unsqueeze(-1)).clamp(FARTHEST_NATS, 0.0)
    gathered = where(~columns.is_beyond, gathered, NAN)
    return Reading(gathered, log_r, m_all, log_sums.T)


def write_gradient_(
    z: torch.Tensor,
    reading: Reading,
    columns: Columns,
    d_support: torch.Tensor,
    d_label: torch.Tensor | None,
    d_log_r: Sequence[torch.Tensor],
    inverse_taus: tuple[float, ...],
    exponentials_scale: torch.Tensor | None = None,
    transform: LogitTransform | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn z [n, vp], of which the support is cut out, into its gradient, in place.

    Args:
        z: Logits, or exponentials of `read_exponentials_`.
        reading: Of these logits.
        columns: Of these rows.
        d_support: [n, k] derivative by reading.gathered on the support.
        d_label: [n] derivative by the label's; None where the loss does not depend on it.
        d_log_r: [n] each, derivatives by the t columns of reading.log_r.
        inverse_taus: One over each of the t temperatures.
        exponentials_scale: [n], the second result of `read_exponentials_`; None for logits.
        transform: What makes logits of z.
        slopes: [n, k (+ 1)], its derivative at these columns; None without a transform.
    """
    k = columns.support
    if slopes is not None:
        d_support = d_support * slopes[:, :k]
        d_label = None if d_label is None else d_label * slopes[:, k]
    scales = []
    for t, inverse_tau in enumerate(inverse_taus):
        # A sum holds its largest term, 1; without a term there is nothing for a scale to meet.
        scale = d_log_r[t] * torch.exp(-reading.log_sums[:, t].clamp(min=0))
        scales.append(scale if inverse_tau == 1 else scale.mul_(inverse_tau))
    if exponentials_scale is not None:
        z.mul_((scales[0] * exponentials_scale).unsqueeze(-1))
    else:
        packed = scales[0].unsqueeze(0) if len(scales) == 1 else torch.stack(scales)
        to_gradient_(z, reading.m, packed, inverse_taus, transform)
    _write_support_(z, columns, d_support.to(z.dtype))
    if d_label is not None and z.shape[-1]:
        add_column_(z, columns.index[:, k], columns.is_local[:, k], d_label)
    return z


def add_column_(
    z: torch.Tensor, index: torch.Tensor, is_local: torch.Tensor, values: torch.Tensor
) -> None:
    """Add values [n] to z [n, vp] at the columns index [n], where they are on this rank."""
    index = index.unsqueeze(-1)
    values = where(is_local, values, 0.0).unsqueeze(-1)
    total = (z.gather(-1, index).to(values.dtype) + values).to(z.dtype)
    z.index_put_((row_numbers(z), index), total)


def gather_sequence(shard_states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[s/tp, b, h] -> [s, b, h], outside autograd."""
    ranks = dist.get_world_size(group)
    full = shard_states.new_empty(shard_states.shape[0] * ranks, *shard_states.shape[1:])
    dist.all_gather_into_tensor(full, shard_states.contiguous(), group=group)
    return full


def reduce_scatter_sequence(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[s, b, h] -> [s/tp, b, h], summed over ranks, outside autograd."""
    ranks = dist.get_world_size(group)
    shard = full.new_empty(full.shape[0] // ranks, *full.shape[1:])
    dist.reduce_scatter_tensor(shard, full.contiguous(), group=group)
    return shard
