"""Reverse Kullback-Leibler divergence, KL(student || teacher).

    sum_S q (log q - log p)  [+ r (log r - log rho)]

Over a full vocabulary, with z the student's logits, tau the temperature and L the divergence:
tau dL/dz = q (log q - log p - L).
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

# The least teacher tail to divide by: one fp32 rounding of 1, below which 1 - mass is noise.
SMALLEST_REST = 2.0**-23


def on_support(
    student: StudentProbabilities, teacher: TeacherProbabilities, divergence: Divergence
) -> torch.Tensor:
    """Nats [n]. Without a bucket it rewards leaving the support."""
    loss = (student.q * (student.log_q - teacher.log_p)).sum(-1)
    if divergence.tail != "bucket":
        return loss
    log_rho = teacher.rest.clamp(min=SMALLEST_REST).log()
    term = student.rest * (student.log_rest - log_rho)
    return with_bucket(loss, term, student, divergence)


def terms(
    p: torch.Tensor,
    log_p: torch.Tensor,
    q: torch.Tensor,
    log_q: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """q (log q - log p), infinite where p alone is 0."""
    return q * (log_q - log_p)


def row_sums(
    log_q: torch.Tensor, log_p: torch.Tensor, divergence: Divergence
) -> tuple[torch.Tensor]:
    """The divergence [n]."""
    return ((log_q.exp() * (log_q - log_p)).sum(-1),)


def gradient(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    sums: tuple[torch.Tensor, ...],
    divergence: Divergence,
) -> torch.Tensor:
    """q (log q - log p - L) [n, vp], with L the divergence, the first of the sums."""
    return log_q.exp() * (log_q - log_p - sums[0].unsqueeze(-1))


REVERSE_KL = Objective(
    on_support=on_support,
    terms=terms,
    row_sums=row_sums,
    gradient=gradient,
    smallest_rest=SMALLEST_REST,
)
