"""Forward Kullback-Leibler divergence, KL(teacher || student).

    sum_S p (log p - log q)  [+ rho (log rho - log r)]

Over a full vocabulary, with z the student's logits and tau the temperature: tau dL/dz = q - p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.objectives import (
    Objective,
    StudentProbabilities,
    TeacherProbabilities,
    with_bucket,
)

if TYPE_CHECKING:
    import torch


def on_support(
    student: StudentProbabilities, teacher: TeacherProbabilities, divergence: Divergence
) -> torch.Tensor:
    """Nats [n]. Legitimately negative where the teacher's mass is below 1 (tail none)."""
    loss = (teacher.p * (teacher.log_p - student.log_q)).sum(-1)
    if divergence.tail != "bucket":
        return loss
    rho = teacher.rest
    term = rho.xlogy(rho) - rho * student.log_rest
    return with_bucket(loss, term, student, divergence)


def terms(
    p: torch.Tensor,
    log_p: torch.Tensor,
    q: torch.Tensor,
    log_q: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """p (log p - log q), and 0 where p is 0."""
    return (p * (log_p.where(p > 0, 0.0) - log_q)).where(p > 0, 0.0)


def row_sums(
    log_q: torch.Tensor, log_p: torch.Tensor, divergence: Divergence
) -> tuple[torch.Tensor]:
    """The divergence [n]."""
    return ((log_p.exp() * (log_p - log_q)).sum(-1),)


def gradient(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    sums: tuple[torch.Tensor, ...],
    divergence: Divergence,
) -> torch.Tensor:
    """q - p [n, vp]."""
    return log_q.exp() - log_p.exp()


FORWARD_KL = Objective(on_support=on_support, terms=terms, row_sums=row_sums, gradient=gradient)
