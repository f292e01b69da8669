"""A divergence over the whole vocabulary, from both models' logits of one chunk at a time.

With q and p the two distributions at the temperature (rows of student logits z and teacher logits
y), an objective's unit gives sums over the vocabulary and, from those, the gradient by z. Three
passes over the chunk pair: normalizers, the sums, and the gradient in place of z. Under TP one MAX
and one SUM follow the first, one SUM the second.

s sequence, b micro-batch, vp = v/tp this rank's vocabulary, n rows of a chunk, t temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from megatron_kd.losses.constants import NAN, where
from megatron_kd.losses.divergence import Divergence, objective_unit
from megatron_kd.losses.kernels import full_gradient_, full_sums, max_and_sums
from megatron_kd.losses.logit_transform import LogitTransform, transformed
from megatron_kd.losses.objectives import Objective
from megatron_kd.losses.positions import Positions
from megatron_kd.losses.target import KDMetrics
from megatron_kd.losses.topk_loss import TopKLoss, check_index, check_labels, inverse_temperatures
from megatron_kd.losses.vocab_parallel import VocabShard, add_column_


class FullReading(NamedTuple):
    m: torch.Tensor  # [n] the student's largest logit, over all shards
    log_sums: torch.Tensor  # [n, t] log sum exp((z - m) / tau)
    teacher_m: torch.Tensor  # [n]
    teacher_log_sum: torch.Tensor  # [n]
    z_y: torch.Tensor  # [n] the label's logit; 0 without labels
    sums: torch.Tensor  # [n, sums of the objective], the divergence first


class TeacherLogits(Protocol):
    """Where the teacher's logits of a chunk come from."""

    def begin_pass(self, positions: Positions, chunk_rows: int) -> None:
        """Prepare for the chunks of a pass, of at most chunk_rows rows each."""

    def end_pass(self) -> None:
        """Release what the pass needed."""

    def __call__(self, chunk: slice) -> torch.Tensor:
        """The teacher's logits [n, vp] of a chunk, without padding columns."""


@dataclass(frozen=True)
class FullLoss:
    """A divergence bound to a source of teacher logits and to this rank's vocabulary."""

    Reading = FullReading
    tensors_per_chunk = 2

    divergence: Divergence
    objective: Objective
    shard: VocabShard
    positions: Positions
    labels: torch.Tensor | None  # [s * b]
    teacher_logits: TeacherLogits = field(repr=False)
    transforms: tuple[LogitTransform | None, LogitTransform | None]
    """Of what a chunk holds to its logits: the student's and the teacher's."""

    @classmethod
    def of(
        cls,
        divergence: Divergence,
        shard: VocabShard,
        labels: torch.Tensor | None,
        shape: Sequence[int],
        teacher_logits: TeacherLogits,
        index: torch.Tensor | None = None,
        transforms: tuple[LogitTransform | None, LogitTransform | None] = (None, None),
    ) -> "FullLoss":
        divergence.check_labels(labels)
        divergence.check_online()
        positions = Positions(shape[0] * shape[1], check_index(index))
        objective = objective_unit(divergence.objective)
        labels = check_labels(labels, shape, shard)
        return cls(divergence, objective, shard, positions, labels, teacher_logits, transforms)

    def begin_pass(self, chunk_rows: int) -> None:
        """Prepare the teacher's logits for chunks of at most chunk_rows rows."""
        self.teacher_logits.begin_pass(self.positions, chunk_rows)

    def end_pass(self) -> None:
        """Release what the teacher's logits were made from."""
        self.teacher_logits.end_pass()

    def open(self, chunk: slice) -> "FullChunk":
        labels = None if self.labels is None else self.positions.take(self.labels, chunk)
        return FullChunk(self, self.teacher_logits(chunk), labels)


class FullChunk:
    """n rows of a `FullLoss`, with the teacher's logits of them."""

    def __init__(self, loss: FullLoss, y: torch.Tensor, labels: torch.Tensor | None) -> None:
        self.loss, self.y, self.labels = loss, y, labels  # y [n, vp]
        self.taus = inverse_temperatures(loss.divergence, loss.labels)

    def read_(self, z: torch.Tensor, *, then_differentiate: bool = False) -> FullReading:
        """Read logits z [n, vp], which stay as they are."""
        group = self.loss.shard.group
        student_transform, teacher_transform = self.loss.transforms
        m, sums = max_and_sums(z, self.taus, student_transform)
        teacher_m, teacher_sums = max_and_sums(self.y, self.taus[:1], teacher_transform)
        z_y = self._label_logit(z, m)
        if group is not None:
            peaks = torch.stack([m, teacher_m])
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
            lower, teacher_lower = m - peaks[0], teacher_m - peaks[1]
            scaled = [sums[t] * (lower * x).exp() for t, x in enumerate(self.taus)]
            scaled.append(teacher_sums[0] * (teacher_lower * self.taus[0]).exp())
            packed = torch.stack([*scaled, z_y])
            dist.all_reduce(packed, group=group)
            (m, teacher_m), z_y = peaks, packed[-1]
            sums, teacher_sums = packed[: len(self.taus)], packed[len(self.taus) : -1]
        if self.labels is not None:
            beyond = self.labels >= self.loss.shard.vocab_size
            z_y = where(~beyond, z_y, NAN)
        log_sums, teacher_log_sum = sums.log(), teacher_sums[0].log()
        student, teacher = (m, log_sums[0]), (teacher_m, teacher_log_sum)
        totals = full_sums(
            z,
            self.y,
            student,
            teacher,
            self.taus[0],
            self.loss.objective,
            self.loss.divergence,
            self.loss.transforms,
        )
        if group is not None:
            dist.all_reduce(totals, group=group)
        return FullReading(m, log_sums.T, teacher_m, teacher_log_sum, z_y, totals.T)

    def _label_logit(self, z: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        if self.labels is None or z.shape[-1] == 0:
            return torch.zeros_like(m)
        is_local, index = self.loss.shard.locate(self.labels)
        found = z.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(m.dtype)
        return where(is_local, transformed(found, self.loss.transforms[0]), 0.0)

    def cut_again_(self, z: torch.Tensor) -> None:
        """Nothing is cut out of logits that are compared over the whole vocabulary."""

    def evaluate(self, reading: FullReading) -> tuple[torch.Tensor, KDMetrics]:
        """loss [n], and what is reported, [n] each: no divergence where that is the loss itself."""
        divergence = self.loss.divergence
        loss = reading.sums[:, 0]
        if divergence.temperature_squared:
            loss = loss * divergence.temperature**2
        unmixed = lm_loss = None
        if self.labels is not None:
            lm_loss = reading.m + reading.log_sums[:, -1] - reading.z_y
            lm_loss = where(self.labels >= 0, lm_loss, 0.0)
            if divergence.ce_weight:
                unmixed = loss
                loss = (1 - divergence.ce_weight) * loss + divergence.ce_weight * lm_loss
        one = torch.ones_like(loss)
        return loss, KDMetrics(unmixed, lm_loss, one, one)

    def differentiate_(
        self, z: torch.Tensor, reading: FullReading, upstream: torch.Tensor
    ) -> tuple[torch.Tensor, KDMetrics]:
        """Like `evaluate`; besides, z [n, vp] becomes its gradient under upstream [n]."""
        divergence = self.loss.divergence
        upstream = upstream.to(reading.m.dtype)
        kd = upstream * ((1 - divergence.ce_weight) * self.taus[0])
        if divergence.temperature_squared:
            kd = kd * divergence.temperature**2
        ce = None
        if divergence.ce_weight:
            ce = where(self.labels >= 0, upstream * divergence.ce_weight, 0.0)
        log_sums = reading.log_sums.T
        student = (reading.m, log_sums[0], log_sums[-1])
        teacher = (reading.teacher_m, reading.teacher_log_sum)
        at_label = None if ce is None else self._label_gradient(z, ce)
        full_gradient_(
            z,
            self.y,
            student,
            teacher,
            reading.sums.T,
            (kd, ce),
            self.taus[0],
            self.loss.objective,
            divergence,
            self.loss.transforms,
        )
        if ce is not None and z.shape[-1]:
            add_column_(z, *at_label)
        return self.evaluate(reading)

    def _label_gradient(self, z: torch.Tensor, ce: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Columns [n] of the labels, whether they are on this rank, and what each adds there."""
        is_local, index = self.loss.shard.locate(self.labels)
        transform = self.loss.transforms[0]
        if transform is None or not z.shape[-1]:
            return index, is_local, -ce
        x = z.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(ce.dtype)
        return index, is_local, -ce * transform.slopes(x)


ChunkLoss: TypeAlias = TopKLoss | FullLoss
"""What `dense` and `fused_loop` open chunk by chunk."""
