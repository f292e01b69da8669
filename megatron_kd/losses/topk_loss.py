"""What happens to one chunk of rows between a head and the loss, the same for every head.

A head reads a chunk's logits (`vocab_parallel.read_`); this module turns the reading into losses and into the gradients
of what was read. Nothing of size [.., V] passes through here.

Letters: S sequence, B micro-batch, N = S * B positions, n rows of them, K support, T temperatures.
"""

from dataclasses import dataclass

import torch

from megatron_kd.losses.objectives import cross_entropy, divergence, teacher_terms
from megatron_kd.losses.target import Divergence, KDMetrics, TopKTarget
from megatron_kd.losses.vocab_parallel import Columns, Reading, VocabShard, localise


@dataclass(frozen=True)
class Rows:
    """The positions that count, in chunks: all N of them, or those an index names."""

    positions: int  # N
    index: torch.Tensor | None  # [n] int64 into the flattened positions

    @property
    def count(self) -> int:
        return self.positions if self.index is None else self.index.numel()

    def chunks(self, size: int):
        return (slice(i, min(i + size, self.count)) for i in range(0, self.count, size))

    def take(self, values, chunk: slice):
        """values [N, ...] -> [n, ...]"""
        return values[chunk] if self.index is None else values.index_select(0, self.index[chunk])

    def put_(self, out, chunk: slice, values):
        if self.index is None:
            out[chunk] = values
        else:
            out.index_copy_(0, self.index[chunk], values)


@dataclass(frozen=True)
class TopKLoss:
    """A divergence bound to its target, flattened to [N, ...]."""

    options: Divergence
    ids: torch.Tensor  # [N, K]
    logprobs: torch.Tensor  # [N, K]
    log_z_tau: torch.Tensor | None  # [N]
    labels: torch.Tensor | None  # [N]
    rows: Rows

    @classmethod
    def of(cls, options: Divergence, target: TopKTarget, labels, shape, index=None) -> "TopKLoss":
        """shape: the leading [S, B] of the student's tensor, which target and labels must share."""
        options.check_target(target, labels)
        shape = tuple(shape)
        for name, got in (
            ("target", target.ids.shape[:2]),
            ("labels", getattr(labels, "shape", None)),
        ):
            if got is not None and tuple(got) != shape:
                raise ValueError(
                    f"{name} is for [S, B] = {list(got)}, the student for {list(shape)}; both are "
                    "sequence first (transpose a [B, S] batch)"
                )
        if index is not None and (index.dim() != 1 or index.dtype != torch.int64):
            raise ValueError(
                "supervised_index wants int64 [n], rows of the flattened [S * B] positions; got "
                f"{index.dtype} {list(index.shape)}"
            )
        return cls(
            options,
            target.ids.flatten(0, 1),
            target.logprobs.detach().flatten(0, 1),
            None if target.log_z_tau is None else target.log_z_tau.flatten(),
            None if labels is None else labels.flatten(),
            Rows(shape[0] * shape[1], index),
        )

    def check_ids(self, shard: VocabShard) -> None:
        shard.check_ids("target.ids", self.ids)
        if self.labels is not None:
            shard.check_ids("labels", self.labels)

    @property
    def inverse_taus(self) -> tuple[float, ...]:
        """Cross-entropy is at temperature 1 always."""
        tau = self.options.temperature
        return (1 / tau,) if tau == 1 or self.labels is None else (1 / tau, 1.0)

    @property
    def support(self) -> int:
        return self.ids.shape[-1]

    def columns(self, chunk: slice, shard: VocabShard) -> Columns:
        ids, logprobs = self.rows.take(self.ids, chunk), self.rows.take(self.logprobs, chunk)
        labels = None if self.labels is None else self.rows.take(self.labels, chunk)
        return localise(ids, labels, (ids >= 0) & (logprobs != float("-inf")), shard)

    def evaluate(self, gathered, log_r, chunk: slice):
        """gathered [n, K (+ 1)], log_r [T, n] -> loss [n], and detached lm_loss, student and teacher mass."""
        k = self.support
        z_s = gathered[:, :k]
        teacher = teacher_terms(
            self.rows.take(self.ids, chunk),
            self.rows.take(self.logprobs, chunk),
            None if self.log_z_tau is None else self.rows.take(self.log_z_tau, chunk),
            self.options,
            gathered.dtype,
        )
        loss, student = divergence(z_s, log_r[0], teacher, self.options)
        lm_loss = None
        if self.labels is not None:
            labels = self.rows.take(self.labels, chunk)
            lm_loss = cross_entropy(z_s, log_r[-1], gathered[:, k], teacher.keep, labels)
            alpha = self.options.ce_weight
            if alpha:
                loss = (1 - alpha) * loss + alpha * lm_loss
        return loss, (lm_loss, student.q.sum(-1), teacher.mass)

    def differentiate(self, gathered, log_r, chunk: slice, upstream):
        """The same, and upstream [n] pulled back to gathered and log_r."""
        with torch.enable_grad():
            gathered, log_r = gathered.detach().requires_grad_(), log_r.detach().requires_grad_()
            loss, extras = self.evaluate(gathered, log_r, chunk)
            gradients = torch.autograd.grad(loss, (gathered, log_r), upstream.to(loss.dtype))
        return loss.detach(), extras, gradients

    def outputs(self, like) -> "Outputs":
        """Buffers for every position, zero where no row is projected."""
        blank = [like.new_zeros(self.rows.positions) for _ in range(4)]
        if self.labels is None:
            blank[1] = None
        return Outputs(*blank)


@dataclass(frozen=True)
class Outputs:
    loss: torch.Tensor  # [N]
    lm_loss: torch.Tensor | None  # [N]
    student_mass: torch.Tensor  # [N]
    teacher_mass: torch.Tensor  # [N]

    def put_(self, rows: Rows, chunk: slice, loss, extras) -> None:
        for out, value in zip(
            (self.loss, self.lm_loss, self.student_mass, self.teacher_mass),
            (loss, *extras),
            strict=True,
        ):
            if out is not None:
                rows.put_(out, chunk, value.detach())

    def tensors(self):
        return self.loss, self.lm_loss, self.student_mass, self.teacher_mass


def finish(outputs, shape, return_metrics: bool):
    """Back to [S, B], with the metrics where they are asked for."""
    loss, lm_loss, student_mass, teacher_mass = outputs
    loss = loss.view(shape)
    if not return_metrics:
        return loss
    lm_loss = None if lm_loss is None else lm_loss.view(shape)
    return loss, KDMetrics(lm_loss, student_mass.view(shape), teacher_mass.view(shape))


@dataclass
class SavedReadings:
    """Readings of every row, kept between a forward pass and the backward pass that reads the logits again."""

    gathered: torch.Tensor  # [n, K (+ 1)]
    log_r: torch.Tensor  # [T, n]
    m: torch.Tensor  # [n]
    log_sums: torch.Tensor  # [T, n]

    @classmethod
    def empty(cls, loss: TopKLoss, like) -> "SavedReadings":
        n, taus = loss.rows.count, len(loss.inverse_taus)
        columns = loss.support + (loss.labels is not None)
        return cls(
            like.new_empty(n, columns),
            like.new_empty(taus, n),
            like.new_empty(n),
            like.new_empty(taus, n),
        )

    def put_(self, chunk: slice, reading: Reading) -> None:
        self.gathered[chunk], self.log_r[:, chunk] = reading.gathered, reading.log_r
        self.m[chunk], self.log_sums[:, chunk] = reading.m, reading.log_sums

    def take(self, chunk: slice) -> Reading:
        return Reading(
            self.gathered[chunk], self.log_r[:, chunk], self.m[chunk], self.log_sums[:, chunk]
        )

    def tensors(self):
        return self.gathered, self.log_r, self.m, self.log_sums
