"""Which positions are worked on, in which chunks, and what is kept of each between two passes.

Letters: N = S * B positions, n rows of a chunk, R rows that are worked on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.target import KDMetrics


@dataclass(frozen=True)
class Rows:
    """All N positions, or those an index names."""

    positions: int  # N
    index: torch.Tensor | None = None  # [R] int64 into the flattened positions

    @property
    def count(self) -> int:
        return self.positions if self.index is None else self.index.numel()

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(i, min(i + size, self.count)) for i in range(0, self.count, size))

    def take(self, values: torch.Tensor, chunk: slice) -> torch.Tensor:
        """values [N, ...] -> [n, ...]"""
        return values[chunk] if self.index is None else values.index_select(0, self.index[chunk])

    def put_(self, out: torch.Tensor, chunk: slice, values: torch.Tensor) -> None:
        if self.index is None:
            out[chunk] = values
        else:
            out.index_copy_(0, self.index[chunk], values)


@dataclass
class Saved:
    """The readings of all R rows, for a backward pass that has the logits again."""

    rows: int
    tensors: list = field(default_factory=list)  # [R, ...] each

    def put_(self, chunk: slice, reading: tuple[torch.Tensor, ...]) -> None:
        """reading: a tuple of tensors [n, ...]"""
        if not self.tensors:
            self.tensors = [x.new_empty(self.rows, *x.shape[1:]) for x in reading]
        for kept, new in zip(self.tensors, reading, strict=True):
            kept[chunk] = new


@dataclass(frozen=True)
class Outputs:
    """The loss of every position and what is reported with it; zero where no row is worked on."""

    loss: torch.Tensor  # [N]
    metrics: KDMetrics  # [N] each; the divergence is None where it is the loss

    @classmethod
    def blank(
        cls, rows: Rows, like: torch.Tensor, divergence: Divergence, has_labels: bool
    ) -> "Outputs":
        def zeros(wanted: bool = True) -> torch.Tensor | None:
            return like.new_zeros(rows.positions) if wanted else None

        mixed = has_labels and bool(divergence.ce_weight)
        return cls(zeros(), KDMetrics(zeros(mixed), zeros(has_labels), zeros(), zeros()))

    def put_(self, rows: Rows, chunk: slice, loss: torch.Tensor, metrics: KDMetrics) -> None:
        rows.put_(self.loss, chunk, loss.detach())
        for out, value in zip(self.metrics, metrics, strict=True):
            if out is not None:
                rows.put_(out, chunk, value.detach())

    def hand_over(self, ctx: Any) -> tuple[torch.Tensor | None, ...]:
        """What an autograd function returns: the loss, and the rest without gradient."""
        ctx.mark_non_differentiable(*(x for x in self.metrics if x is not None))
        return self.loss, *self.metrics
