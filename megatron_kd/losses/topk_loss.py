"""A divergence from a truncated teacher, chunk by chunk: between a chunk's logits and its losses.

Whoever has the logits of a chunk (`dense`, `sparse_chunked`, `fused_loop`) opens the chunk here,
lets it read the logits, and gets losses and, in place of the logits, their gradient.

s sequence, b micro-batch, n rows of a chunk, k support, vp = v/tp this rank's vocabulary,
t temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kd.losses.constants import where
from megatron_kd.losses.divergence import Divergence, objective_unit
from megatron_kd.losses.kernels import keeps_exponentials
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.objectives import Objective
from megatron_kd.losses.positions import Positions
from megatron_kd.losses.support import (
    divergence_on_support,
    log_normalizer,
    teacher_probabilities,
)
from megatron_kd.losses.target import KDMetrics, TopKTarget
from megatron_kd.losses.vocab_parallel import (
    Reading,
    VocabShard,
    columns_of,
    cut_,
    read_,
    read_exponentials_,
    write_gradient_,
)


@dataclass(frozen=True)
class TopKLoss:
    """A divergence bound to its target, flattened to [s * b, ...], and to this rank's shard."""

    divergence: Divergence
    objective: Objective
    shard: VocabShard
    positions: Positions
    ids: torch.Tensor  # [s * b, k]
    logprobs: torch.Tensor  # [s * b, k]
    log_z_tau: torch.Tensor | None  # [s * b]
    labels: torch.Tensor | None  # [s * b]
    transform: LogitTransform | None  # of what a chunk holds to its logits

    @classmethod
    def of(
        cls,
        divergence: Divergence,
        shard: VocabShard,
        target: TopKTarget,
        labels: torch.Tensor | None,
        shape: Sequence[int],
        index: torch.Tensor | None = None,
        transform: LogitTransform | None = None,
    ) -> "TopKLoss":
        """shape: the leading [s, b] of the student's tensor, which target and labels must share."""
        divergence.check_target(target, labels)
        check_positions("target", target.ids.shape[:2], shape)
        shard.check_ids("target.ids", target.ids)
        check_distinct(target)
        return cls(
            divergence,
            objective_unit(divergence.objective),
            shard,
            Positions(shape[0] * shape[1], check_index(index)),
            target.ids.flatten(0, 1),
            target.logprobs.detach().flatten(0, 1),
            None if target.log_z_tau is None else target.log_z_tau.flatten(),
            check_labels(labels, shape, shard),
            transform,
        )

    Reading = Reading
    tensors_per_chunk = 1

    @property
    def inverse_taus(self) -> tuple[float, ...]:
        return inverse_temperatures(self.divergence, self.labels)

    def begin_pass(self, chunk_rows: int) -> None:
        """Nothing has to be prepared before the chunks of a pass."""

    def end_pass(self) -> None:
        """Nothing has to be released after the chunks of a pass."""

    def open(self, chunk: slice) -> "TopKChunk":
        return TopKChunk(self, chunk)


class TopKChunk:
    """n rows of a `TopKLoss`."""

    def __init__(self, loss: TopKLoss, chunk: slice) -> None:
        def take(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else loss.positions.take(values, chunk)

        self.loss = loss
        self.ids, self.logprobs = take(loss.ids), take(loss.logprobs)
        self.log_z_tau, self.labels = take(loss.log_z_tau), take(loss.labels)
        self.keep = (self.ids >= 0) & (self.logprobs != float("-inf"))
        self.columns = columns_of(self.ids, self.labels, self.keep, loss.shard)
        # Set where `read_` left z as exponentials: [n], see `read_exponentials_`.
        self.exponentials_scale: torch.Tensor | None = None
        # Set where the support is cut out of z, if there is a transform: [n, k (+ 1)].
        self.slopes: torch.Tensor | None = None

    def read_(self, z: torch.Tensor, *, then_differentiate: bool = False) -> Reading:
        """Read logits z [n, vp]; the support is cut out of them.

        then_differentiate: Whether `differentiate_` follows with z as this leaves it.
        """
        taus, shard, transform = self.loss.inverse_taus, self.loss.shard, self.loss.transform
        if then_differentiate and keeps_exponentials(z, taus, transform):
            reading, self.exponentials_scale = read_exponentials_(z, self.columns, taus[0], shard)
            return reading
        if then_differentiate:
            self.slopes = self.columns.slopes(z, transform)
        return read_(z, self.columns, taus, shard, transform)

    def cut_again_(self, z: torch.Tensor) -> None:
        """Cut the support out of logits z [n, vp] that were read before and are here anew."""
        self.slopes = self.columns.slopes(z, self.loss.transform)
        cut_(z, self.columns)

    def evaluate(self, reading: Reading) -> tuple[torch.Tensor, KDMetrics]:
        """loss [n], and what is reported, [n] each: no divergence where that is the loss itself."""
        k = self.columns.support
        label = None if self.labels is None else reading.gathered[:, k]
        return self._evaluate(reading.gathered[:, :k], label, reading.log_r.unbind(-1))

    def differentiate_(
        self, z: torch.Tensor, reading: Reading, upstream: torch.Tensor
    ) -> tuple[torch.Tensor, KDMetrics]:
        """Like `evaluate`; besides, z [n, vp] becomes its gradient under upstream [n]."""
        k, mixes = self.columns.support, bool(self.loss.divergence.ce_weight)
        support, *log_r = (
            x.detach().requires_grad_()
            for x in (reading.gathered[:, :k], *reading.log_r.unbind(-1))
        )
        label = None if self.labels is None else reading.gathered[:, k].detach()
        leaves = [support, *log_r]
        if mixes:
            leaves.append(label.requires_grad_())
        with torch.enable_grad():
            loss, extras = self._evaluate(support, label, log_r)
        # The second log R is for the cross-entropy alone, which may have no share in the loss.
        d_support, *rest = torch.autograd.grad(
            loss, leaves, upstream.to(loss.dtype), materialize_grads=True, allow_unused=True
        )
        d_log_r, d_label = (rest[:-1], rest[-1]) if mixes else (rest, None)
        write_gradient_(
            z,
            reading,
            self.columns,
            d_support,
            d_label,
            d_log_r,
            self.loss.inverse_taus,
            self.exponentials_scale,
            self.loss.transform,
            self.slopes,
        )
        return loss.detach(), extras

    def _evaluate(
        self, z_s: torch.Tensor, z_y: torch.Tensor | None, log_r: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, KDMetrics]:
        """z_s [n, k], z_y [n] or None, log_r [n] for each temperature, shifted alike."""
        divergence = self.loss.divergence
        teacher = teacher_probabilities(
            self.keep, self.logprobs, self.log_z_tau, divergence, z_s.dtype
        )
        loss, student = divergence_on_support(
            z_s, log_r[0], teacher, self.loss.objective, divergence
        )
        unmixed = lm_loss = None
        if self.labels is not None:
            at_one = divergence.temperature == 1
            log_z = student.log_z if at_one else log_normalizer(z_s, log_r[-1], teacher.keep)
            lm_loss = where(self.labels >= 0, log_z - z_y, 0.0)
            if divergence.ce_weight:
                unmixed = loss
                loss = (1 - divergence.ce_weight) * loss + divergence.ce_weight * lm_loss
        return loss, KDMetrics(unmixed, lm_loss, student.mass, teacher.mass)


def inverse_temperatures(divergence: Divergence, labels: torch.Tensor | None) -> tuple[float, ...]:
    """The temperatures at which normalizers are needed: cross-entropy is at 1 always."""
    tau = divergence.temperature
    return (1 / tau,) if tau == 1 or labels is None else (1 / tau, 1.0)


def check_positions(name: str, got: Sequence[int], shape: Sequence[int]) -> None:
    """Refuse a tensor whose leading shape is not the student's [s, b]."""
    if tuple(got) != tuple(shape):
        raise ValueError(
            f"{name} is for [s, b] = {list(got)}, the student for {list(shape)}; all are sequence "
            "first (transpose a [b, s] batch)"
        )


def check_distinct(target: TopKTarget) -> None:
    """Refuse a row that names a token twice, on a CPU: an accelerator would have to wait for it."""
    if target.ids.device.type != "cpu":
        return
    used = (target.ids >= 0) & (target.logprobs != float("-inf"))
    ids = torch.where(used, target.ids, -1).flatten(0, 1).sort(-1).values
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)  # [s * b, k - 1]
    if twice.any():
        row, slot = (int(x) for x in twice.nonzero()[0])
        s, b = divmod(row, target.ids.shape[1])
        raise ValueError(
            f"target.ids name token {int(ids[row, slot])} twice at position s {s}, b {b}: its mass "
            "would count twice; add the probabilities up in one slot, and mark the other -1"
        )


def check_labels(
    labels: torch.Tensor | None, shape: Sequence[int], shard: VocabShard
) -> torch.Tensor | None:
    """The labels flattened to [s * b], or None where there are none."""
    if labels is None:
        return None
    check_positions("labels", labels.shape, shape)
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels want int32 or int64, got {labels.dtype}")
    shard.check_ids("labels", labels)
    return labels.flatten()


def check_index(index: torch.Tensor | None) -> torch.Tensor | None:
    """The index of the supervised rows as it came, or a ValueError."""
    if index is not None and (index.dim() != 1 or index.dtype != torch.int64):
        raise ValueError(
            "supervised_index wants int64 [n], rows of the flattened [s * b] positions; got "
            f"{index.dtype} {list(index.shape)}"
        )
    return index
