"""Which positions are worked on, in which chunks, and what is kept of each between two passes.

All tensors are flat: s * b positions (sequence times micro-batch), of which some rows are worked
on, n of them in a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.target import KDMetrics, LossResult


@dataclass(frozen=True)
class Positions:
    """The rows that a loss works on: all s * b positions, or those that an index names."""

    total: int  # s * b
    index: torch.Tensor | None = None  # [rows] int64 into the flattened positions

    @property
    def rows(self) -> int:
        """How many are worked on."""
        return self.total if self.index is None else self.index.numel()

    def chunks(self, size: int) -> Iterator[slice]:
        """The rows in slices of at most `size`."""
        starts = range(0, self.rows, size) if self.rows else ()  # no rows: no size either
        return (slice(i, min(i + size, self.rows)) for i in starts)

    def take(self, values: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The chunk's rows of values [s * b, ...], as [n, ...]."""
        return values[chunk] if self.index is None else values.index_select(0, self.index[chunk])

    def put_(self, out: torch.Tensor, chunk: slice, values: torch.Tensor) -> None:
        """Write values [n, ...] to where the chunk's rows lie in out [s * b, ...]."""
        if self.index is None:
            out[chunk] = values
        else:
            out.index_copy_(0, self.index[chunk], values)


@dataclass
class SavedReadings:
    """What was read of every row's logits, for a backward pass that has the logits again."""

    rows: int
    tensors: list = field(default_factory=list)  # [rows, ...] each

    def put_(self, chunk: slice, reading: tuple[torch.Tensor, ...]) -> None:
        """Keep a chunk's reading, a tuple of tensors [n, ...]."""
        if not self.tensors:
            self.tensors = [x.new_empty(self.rows, *x.shape[1:]) for x in reading]
        for kept, new in zip(self.tensors, reading, strict=True):
            kept[chunk] = new


@dataclass(frozen=True)
class LossOutputs:
    """The loss of every position and what is reported with it; zero where no row is worked on."""

    loss: torch.Tensor  # [s * b]
    metrics: KDMetrics  # [s * b] each; the divergence is None where it is the loss itself

    @classmethod
    def zeros(
        cls, positions: Positions, like: torch.Tensor, divergence: Divergence, has_labels: bool
    ) -> "LossOutputs":
        """Outputs of the dtype and device of `like`, to be filled chunk by chunk."""

        def make(wanted: bool = True) -> torch.Tensor | None:
            return like.new_zeros(positions.total) if wanted else None

        mixed = has_labels and bool(divergence.ce_weight)
        return cls(make(), KDMetrics(make(mixed), make(has_labels), make(), make()))

    def put_(
        self, positions: Positions, chunk: slice, loss: torch.Tensor, metrics: KDMetrics
    ) -> None:
        """Write what a chunk's rows evaluated to, [n] each."""
        positions.put_(self.loss, chunk, loss.detach())
        for out, value in zip(self.metrics, metrics, strict=True):
            if out is not None:
                positions.put_(out, chunk, value.detach())

    def leave(self, ctx: Any) -> tuple[torch.Tensor | None, ...]:
        """What an autograd function returns: the loss, and the metrics without gradient."""
        ctx.mark_non_differentiable(*(x for x in self.metrics if x is not None))
        return self.loss, *self.metrics


def loss_result(
    outputs: tuple[torch.Tensor | None, ...], shape: tuple[int, ...], return_metrics: bool
) -> LossResult:
    """What a loss function returns, from the flat tensors that its autograd function returned.

    Args:
        outputs: Loss and metrics, [s * b] each.
        shape: The leading [s, b].
        return_metrics: Whether the caller wants the metrics.
    """
    loss, *metrics = (None if x is None else x.view(shape) for x in outputs)
    if not return_metrics:
        return loss
    metrics = KDMetrics(*metrics)
    if metrics.divergence is None:  # a copy, as hosts divide the loss in place
        metrics = metrics._replace(divergence=loss.detach().clone())
    return loss, metrics
