"""A divergence from a truncated teacher, chunk by chunk: between a chunk's logits and its losses.

Whoever has the logits of a chunk (`dense`, `sparse_chunked`, `fused_head`) opens the chunk here,
lets it read the logits, and gets losses and, in place of the logits, their gradient.

Letters: S sequence, B micro-batch, N = S * B positions, n rows of a chunk, K support, T
temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kd.losses.divergence import Divergence, objective_unit
from megatron_kd.losses.elementwise import keeps_exponentials
from megatron_kd.losses.objectives import Objective
from megatron_kd.losses.rows import Rows
from megatron_kd.losses.support import (
    cross_entropy,
    divergence_on_support,
    teacher_probabilities,
)
from megatron_kd.losses.target import KDMetrics, LossResult, TopKTarget
from megatron_kd.losses.vocab_parallel import (
    Reading,
    VocabShard,
    cut_,
    localise,
    read_,
    read_exponentials_,
    write_gradient_,
)


@dataclass(frozen=True)
class TopKLoss:
    """A divergence bound to its target, flattened to [N, ...], and to this rank's vocabulary."""

    divergence: Divergence
    objective: Objective
    shard: VocabShard
    rows: Rows
    ids: torch.Tensor  # [N, K]
    logprobs: torch.Tensor  # [N, K]
    log_z_tau: torch.Tensor | None  # [N]
    labels: torch.Tensor | None  # [N]

    @classmethod
    def of(
        cls,
        divergence: Divergence,
        shard: VocabShard,
        target: TopKTarget,
        labels: torch.Tensor | None,
        shape: Sequence[int],
        index: torch.Tensor | None = None,
    ) -> "TopKLoss":
        """shape: the leading [S, B] of the student's tensor, which target and labels must share."""
        divergence.check_target(target, labels)
        check_positions("target", target.ids.shape[:2], shape)
        shard.check_ids("target.ids", target.ids)
        return cls(
            divergence,
            objective_unit(divergence.objective),
            shard,
            Rows(shape[0] * shape[1], check_index(index)),
            target.ids.flatten(0, 1),
            target.logprobs.detach().flatten(0, 1),
            None if target.log_z_tau is None else target.log_z_tau.flatten(),
            check_labels(labels, shape, shard),
        )

    Reading = Reading
    tensors_per_chunk = 1

    @property
    def inverse_taus(self) -> tuple[float, ...]:
        return inverse_temperatures(self.divergence, self.labels)

    def start(self, chunk_rows: int) -> None:
        """Before the chunks of a pass: nothing to prepare."""

    def stop(self) -> None:
        """After them: nothing to let go."""

    def open(self, chunk: slice) -> "TopKChunk":
        return TopKChunk(self, chunk)


class TopKChunk:
    """n rows of a `TopKLoss`."""

    def __init__(self, loss: TopKLoss, chunk: slice) -> None:
        def take(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else loss.rows.take(values, chunk)

        self.loss = loss
        self.ids, self.logprobs = take(loss.ids), take(loss.logprobs)
        self.log_z_tau, self.labels = take(loss.log_z_tau), take(loss.labels)
        keep = (self.ids >= 0) & (self.logprobs != float("-inf"))
        self.columns = localise(self.ids, self.labels, keep, loss.shard)
        self.own: torch.Tensor | None = None  # set where z was left as exponentials

    def read_(self, z: torch.Tensor, *, then_differentiate: bool = False) -> Reading:
        """z [n, valid] logits; the support is cut out of them.

        then_differentiate: `differentiate_` follows with z as this leaves it.
        """
        taus, shard = self.loss.inverse_taus, self.loss.shard
        if then_differentiate and keeps_exponentials(z, taus):
            reading, self.own = read_exponentials_(z, self.columns, taus[0], shard)
            return reading
        return read_(z, self.columns, taus, shard)

    def resume_(self, z: torch.Tensor) -> None:
        """Bring the logits of a chunk that was read before to where `read_` left them."""
        cut_(z, self.columns)

    def evaluate(self, reading: Reading) -> tuple[torch.Tensor, KDMetrics]:
        """loss [n], and what is reported, [n] each: no divergence where that is the loss itself."""
        return self._evaluate(reading.gathered, reading.log_r)

    def differentiate_(
        self, z: torch.Tensor, reading: Reading, upstream: torch.Tensor
    ) -> tuple[torch.Tensor, KDMetrics]:
        """Like `evaluate`; besides, z [n, vp] becomes its gradient under upstream [n]."""
        with torch.enable_grad():
            gathered = reading.gathered.detach().requires_grad_()
            log_r = reading.log_r.detach().requires_grad_()
            loss, extras = self._evaluate(gathered, log_r)
            pulled = torch.autograd.grad(loss, (gathered, log_r), upstream.to(loss.dtype))
        write_gradient_(z, reading, self.columns, *pulled, self.loss.inverse_taus, self.own)
        return loss.detach(), extras

    def _evaluate(
        self, gathered: torch.Tensor, log_r: torch.Tensor
    ) -> tuple[torch.Tensor, KDMetrics]:
        divergence, k = self.loss.divergence, self.columns.support
        z_s = gathered[:, :k]
        teacher = teacher_probabilities(
            self.ids, self.logprobs, self.log_z_tau, divergence, gathered.dtype
        )
        loss, student = divergence_on_support(
            z_s, log_r[:, 0], teacher, self.loss.objective, divergence
        )
        unmixed = lm_loss = None
        if self.labels is not None:
            lm_loss = cross_entropy(z_s, log_r[:, -1], gathered[:, k], teacher.keep, self.labels)
            if divergence.ce_weight:
                unmixed = loss
                loss = (1 - divergence.ce_weight) * loss + divergence.ce_weight * lm_loss
        return loss, KDMetrics(unmixed, lm_loss, student.q.sum(-1), teacher.mass)


def inverse_temperatures(divergence: Divergence, labels: torch.Tensor | None) -> tuple[float, ...]:
    """The temperatures at which normalisers are needed: cross-entropy is at 1 always."""
    tau = divergence.temperature
    return (1 / tau,) if tau == 1 or labels is None else (1 / tau, 1.0)


def check_positions(name: str, got: Sequence[int], shape: Sequence[int]) -> None:
    if tuple(got) != tuple(shape):
        raise ValueError(
            f"{name} is for [S, B] = {list(got)}, the student for {list(shape)}; all are sequence "
            "first (transpose a [B, S] batch)"
        )


def check_labels(
    labels: torch.Tensor | None, shape: Sequence[int], shard: VocabShard
) -> torch.Tensor | None:
    """Flattened, or None."""
    if labels is None:
        return None
    check_positions("labels", labels.shape, shape)
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels want int32 or int64, got {labels.dtype}")
    shard.check_ids("labels", labels)
    return labels.flatten()


def check_index(index: torch.Tensor | None) -> torch.Tensor | None:
    if index is not None and (index.dim() != 1 or index.dtype != torch.int64):
        raise ValueError(
            "supervised_index wants int64 [n], rows of the flattened [S * B] positions; got "
            f"{index.dtype} {list(index.shape)}"
        )
    return index


def finish(
    outputs: Sequence[torch.Tensor | None], shape: Sequence[int], return_metrics: bool
) -> LossResult:
    """From the flat tensors of an autograd function to [S, B], with the metrics where asked for."""
    outputs = [None if x is None else x.view(shape) for x in outputs]
    loss, metrics = outputs[0], KDMetrics(*outputs[1:])
    if not return_metrics:
        return loss
    if metrics.divergence is None:  # a copy, as hosts divide the loss in place
        metrics = metrics._replace(divergence=loss.detach().clone())
    return loss, metrics
