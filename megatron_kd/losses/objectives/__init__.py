"""What an objective is: a divergence as functions of a few small tensors, one unit per file.

With z the student's logits divided by the temperature, S the teacher's support and p its
probabilities there, every objective depends on z only through z_S [n, k] and log R [n], the
log-sum-exp of everything off the support:

    log Z = log(exp log R + sum_S exp z_S)      log q = z_S - log Z      log r = log R - log Z

rho is the teacher's mass off the support, r the student's; with tail "bucket" the two are one more
outcome. Why log R and not log Z: 1 - sum_S q loses the student's residual to cancellation, log R
does not.

A new objective is a file here (or anywhere) that makes an `Objective`, a line in
`megatron_kd.losses.divergence.OBJECTIVES`, and its row in docs/objectives.md.

Nothing here imports torch when it is loaded: `Divergence` asks a unit whether it accepts a recipe's
values, long before anything is computed.

n rows of a chunk, k support, vp = v/tp this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from megatron_kd.losses.divergence import Divergence


@dataclass(frozen=True)
class TeacherProbabilities:
    """The teacher at the temperature of the loss, on its support and off it."""

    keep: torch.Tensor  # [n, k] bool: the slot is used
    log_p: torch.Tensor  # [n, k] nats, 0 where unused
    p: torch.Tensor  # [n, k], 0 where unused
    mass: torch.Tensor  # [n] mass on the support before any renormalization
    exact_mass: torch.Tensor | None  # [n] the same, unrounded; None under tail renormalize

    @cached_property
    def rest(self) -> torch.Tensor:
        """[n] mass off the support, 0 under tail renormalize."""
        if self.exact_mass is None:
            return self.mass * 0
        return (1 - self.exact_mass).clamp(min=0).to(self.mass.dtype)


@dataclass(frozen=True)
class StudentProbabilities:
    """The student at the temperature of the loss, on the teacher's support and off it. What only
    some objectives read is formed when it is read: a chunk's small work is bound by launches.
    """

    log_q: torch.Tensor  # [n, k] nats, 0 where unused
    log_z: torch.Tensor  # [n] log of the normalizer Z, shifted as the logits are
    log_r: torch.Tensor  # [n] log of Z's part off the support, shifted alike
    on_support: torch.Tensor  # [n, k] parts of Z on the support, 0 where unused
    off_support: torch.Tensor  # [n] exp(log_r)
    share: torch.Tensor  # [n] sum of on_support
    total: torch.Tensor  # [n] Z

    @cached_property
    def q(self) -> torch.Tensor:
        """[n, k], 0 where unused."""
        return self.on_support / self.total.unsqueeze(-1)

    @cached_property
    def mass(self) -> torch.Tensor:
        """[n] on the support."""
        return self.share / self.total

    @cached_property
    def rest(self) -> torch.Tensor:
        """[n] off the support."""
        return self.off_support / self.total

    @cached_property
    def has_rest(self) -> torch.Tensor:
        """[n] bool: something lies off the support."""
        return self.log_r > float("-inf")

    @cached_property
    def log_rest(self) -> torch.Tensor:
        """[n] nats, 0 where nothing lies off the support."""
        finite = self.log_r.where(self.has_rest, 0.0)
        return (finite - self.log_z).where(self.has_rest, 0.0)


Check: TypeAlias = "Callable[[Divergence], None]"
OnSupport: TypeAlias = (
    "Callable[[StudentProbabilities, TeacherProbabilities, Divergence], torch.Tensor]"
)
RowSums: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, Divergence], tuple[torch.Tensor, ...]]"
Gradient: TypeAlias = (
    "Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], Divergence], torch.Tensor]"
)
Terms: TypeAlias = (
    "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Divergence], torch.Tensor]"
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective, whole. Its functions are pure PyTorch and know no shards and no chunks."""

    on_support: OnSupport
    """(student, teacher, divergence) -> nats [n], from a truncated teacher, the bucket included
    where divergence.tail asks for it (`with_bucket`). Autograd differentiates it by log_q, q,
    log_rest and rest."""

    terms: Terms | None = None
    """(p, log_p, q, log_q, divergence) -> what each outcome adds, in the shape of all four: the
    definition as on paper, for `megatron_kd.losses.reference`. p and q may be 0, where log_p and
    log_q are finite or -inf. None: the reference has no such loss."""

    row_sums: RowSums | None = None
    """(log_q [n, vp], log_p [n, vp], divergence) -> `sums` tensors [n], sums over this rank's
    vocabulary: the divergence, then what `gradient` needs besides. None: refused online."""

    gradient: Gradient | None = None
    """(log_q [n, vp], log_p [n, vp], the sums [n] over all shards, divergence) -> the divergence's
    derivative by the student's logits over the temperature [n, vp]. None: refused online."""

    sums: int = 1
    """How many tensors `row_sums` returns."""

    check: Check | None = None
    """(divergence) -> None: refuses values that this objective has no loss for, by a ValueError
    that begins with the field's name. `Divergence` calls it last. None: none is refused."""

    smallest_rest: float = 0.0
    """The least mass off the support that the formula takes the teacher to have."""


def with_bucket(
    loss: torch.Tensor, term: torch.Tensor, student: StudentProbabilities, divergence: Divergence
) -> torch.Tensor:
    """loss [n], plus the bucket's term [n] where the tail is a bucket and holds an outcome."""
    if divergence.tail != "bucket":
        return loss
    return loss + term.where(student.has_rest, 0.0)
