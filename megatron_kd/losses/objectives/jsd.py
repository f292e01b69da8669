"""Generalized Jensen-Shannon divergence, beta KL(p || m) + (1 - beta) KL(q || m).

    m = beta p + (1 - beta) q
    sum_S beta p (log p - log m) + (1 - beta) q (log q - log m)  [+ the same with rho, r]

Over a full vocabulary, with z the student's logits and tau the temperature:
tau dL/dz = (1 - beta) q (log q - log m - KL(q || m)).
"""

from __future__ import annotations

import math
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


def check(divergence: Divergence) -> None:
    """Refuse a mixture that is one of the two models.

    Raises:
        ValueError: beta is 0 or 1.
    """
    if not 0 < divergence.beta < 1:
        raise ValueError(
            f"beta must lie strictly between 0 and 1 for {divergence.objective}, not "
            f"{divergence.beta}: at the ends the divergence is zero; use objective forward_kl or "
            "reverse_kl"
        )


def _log_mixture(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return (log_p + math.log(beta)).logaddexp(log_q + math.log1p(-beta))


def on_support(
    student: StudentProbabilities, teacher: TeacherProbabilities, divergence: Divergence
) -> torch.Tensor:
    """Nats [n], between 0 and log 2 where the teacher is whole."""
    import torch

    beta = divergence.beta
    loss = _outcomes(teacher.p, teacher.log_p, student.q, student.log_q, beta).sum(-1)
    if divergence.tail != "bucket":
        return loss
    rho = teacher.rest
    log_rho = rho.clamp(min=torch.finfo(rho.dtype).tiny).log()
    term = _outcomes(rho, log_rho, student.rest, student.log_rest, beta)
    return with_bucket(loss, term, student, divergence)


def _outcomes(
    p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor, beta: float
) -> torch.Tensor:
    log_m = _log_mixture(log_p, log_q, beta)
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


def terms(
    p: torch.Tensor,
    log_p: torch.Tensor,
    q: torch.Tensor,
    log_q: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """beta p (log p - log m) + (1 - beta) q (log q - log m), 0 log 0 = 0."""
    beta = divergence.beta
    m = beta * p + (1 - beta) * q
    log_m = m.where(m > 0, 1.0).log()
    from_p = (p * (log_p.where(p > 0, 0.0) - log_m)).where(p > 0, 0.0)
    from_q = (q * (log_q - log_m)).where(q > 0, 0.0)
    return beta * from_p + (1 - beta) * from_q


def row_sums(
    log_q: torch.Tensor, log_p: torch.Tensor, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence [n], and KL(q || m) [n]."""
    beta = divergence.beta
    log_m = _log_mixture(log_p, log_q, beta)
    from_student = (log_q.exp() * (log_q - log_m)).sum(-1)
    from_teacher = (log_p.exp() * (log_p - log_m)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


def gradient(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    sums: tuple[torch.Tensor, ...],
    divergence: Divergence,
) -> torch.Tensor:
    """(1 - beta) q (log q - log m - KL(q || m)) [n, vp], with KL(q || m) the second of the sums."""
    beta = divergence.beta
    log_m = _log_mixture(log_p, log_q, beta)
    return (1 - beta) * log_q.exp() * (log_q - log_m - sums[1].unsqueeze(-1))


JSD = Objective(
    on_support=on_support,
    terms=terms,
    row_sums=row_sums,
    gradient=gradient,
    sums=2,
    check=check,
)
