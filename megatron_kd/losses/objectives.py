"""Divergences as functions of two small tensors, one file for all heads.

With z the student's logits (divided by the temperature), S the teacher's support and p its
probabilities there, every loss here depends on z only through z_S [n, K] and log R [n], the
log-sum-exp of everything off the support. A common shift of both changes nothing. Autograd
differentiates; nothing here knows about the vocabulary, shards or chunks.

    log Z = log(exp log R + sum_S exp z_S)      log q = z_S - log Z      log r = log R - log Z

    forward_kl   sum_S p (log p - log q)      [+ rho (log rho - log r)]
    reverse_kl   sum_S q (log q - log p)      [+ r (log r - log rho)]
    jsd          sum_S beta p (log p - log m) + (1 - beta) q (log q - log m)
                                              [+ the same with rho, r]
                 m = beta p + (1 - beta) q

The bracket is the tail as one more outcome (tail="bucket"): rho is the teacher's mass off the
support, r the student's. Why log R and not log Z: 1 - sum_S q loses the student's residual to
cancellation, log R does not.

Letters: n rows, K support.
"""

import logging
import math
from dataclasses import dataclass

import torch

from megatron_kd.losses.target import Divergence

logger = logging.getLogger(__name__)

NEG_INF = float("-inf")
# The least teacher tail that reverse KL divides by: one fp32 rounding of 1, below which 1 - mass is
# noise.
SMALLEST_TAIL = 2.0**-23
_said: set[str] = set()


@dataclass(frozen=True)
class Teacher:
    """The teacher at the temperature of the loss."""

    keep: torch.Tensor  # [n, K] bool: the slot is used
    log_p: torch.Tensor  # [n, K] nats, 0 where unused
    p: torch.Tensor  # [n, K], 0 where unused
    rest: torch.Tensor  # [n] mass off the support, 0 under tail renormalise
    mass: torch.Tensor  # [n] mass on the support before any renormalisation


@dataclass(frozen=True)
class Student:
    """The student on the support and off it."""

    log_q: torch.Tensor  # [n, K] nats, 0 where unused
    q: torch.Tensor  # [n, K], 0 where unused
    log_rest: torch.Tensor  # [n] nats, 0 where nothing lies off the support
    rest: torch.Tensor  # [n]
    has_rest: torch.Tensor  # [n] bool: something lies off the support


def teacher_terms(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    log_z_tau: torch.Tensor | None,
    options: Divergence,
    dtype: torch.dtype,
) -> Teacher:
    """The target [n, K] at the loss's temperature; in fp64, as 1 - mass may be 1e-7."""
    tau = options.temperature
    keep = (ids >= 0) & (logprobs != NEG_INF)
    log_p = torch.where(keep, logprobs.double(), NEG_INF)
    if tau != 1 and log_z_tau is not None:
        log_p = log_p / tau - log_z_tau.double().unsqueeze(-1)
    elif tau != 1:
        log_p = _tempered_on_support(log_p, tau)
    p = log_p.exp()
    mass = p.sum(-1)
    rest = (1 - mass).clamp(min=0)
    if options.tail == "renormalise":
        share = mass.clamp(min=torch.finfo(torch.float64).tiny)
        log_p, p, rest = log_p - share.log().unsqueeze(-1), p / share.unsqueeze(-1), mass * 0
    log_p = torch.where(keep, log_p, 0.0)
    return Teacher(keep, log_p.to(dtype), p.to(dtype), rest.to(dtype), mass.to(dtype))


def _tempered_on_support(log_p: torch.Tensor, tau: float) -> torch.Tensor:
    """mass * softmax_S(log p / tau): the support keeps its mass, as nothing is known off it."""
    if "temperature" not in _said:
        _said.add("temperature")
        logger.warning(
            "temperature %s without a captured normaliser at that temperature: the teacher's mass "
            "on the support is taken to be what it is at temperature 1",
            tau,
        )
    top = log_p.amax(-1, keepdim=True)
    top = torch.where(top == NEG_INF, 0.0, top)
    tempered = (log_p - top) / tau
    total = tempered.exp().sum(-1, keepdim=True).clamp(min=1)
    mass = log_p.exp().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return tempered - total.log() + mass.log()


def log_normaliser(z_s: torch.Tensor, log_r: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """log Z [n]; exact for any common shift, and differentiable where R or the support is empty."""
    masked = torch.where(keep, z_s, NEG_INF)
    shift = torch.maximum(masked.amax(-1), log_r).detach()
    shift = torch.where(shift == NEG_INF, 0.0, shift)
    total = (masked - shift.unsqueeze(-1)).exp().sum(-1) + (log_r - shift).exp()
    return shift + total.log()


def student_terms(z_s: torch.Tensor, log_r: torch.Tensor, keep: torch.Tensor) -> Student:
    """z_s [n, K] and log_r [n], both divided by the temperature and shifted alike."""
    log_z = log_normaliser(z_s, log_r, keep)
    log_q = torch.where(keep, z_s - log_z.unsqueeze(-1), 0.0)
    has_rest = log_r > NEG_INF
    log_rest = torch.where(has_rest, torch.where(has_rest, log_r, 0.0) - log_z, 0.0)
    return Student(
        log_q,
        torch.where(keep, log_q.exp(), 0.0),
        log_rest,
        torch.where(has_rest, log_rest.exp(), 0.0),
        has_rest,
    )


def _with_bucket(
    loss: torch.Tensor, term: torch.Tensor, student: Student, options: Divergence
) -> torch.Tensor:
    if options.tail != "bucket":
        return loss
    return loss + torch.where(student.has_rest, term, 0.0)


def forward_kl(student: Student, teacher: Teacher, options: Divergence) -> torch.Tensor:
    """KL(teacher || student) [n]. Legitimately negative where the mass is below 1 (tail none)."""
    loss = (teacher.p * (teacher.log_p - student.log_q)).sum(-1)
    rho = teacher.rest
    term = torch.xlogy(rho, rho) - rho * student.log_rest
    return _with_bucket(loss, term, student, options)


def reverse_kl(student: Student, teacher: Teacher, options: Divergence) -> torch.Tensor:
    """KL(student || teacher) [n]. Without a bucket it rewards leaving the support."""
    loss = (student.q * (student.log_q - teacher.log_p)).sum(-1)
    log_rho = teacher.rest.clamp(min=SMALLEST_TAIL).log()
    term = student.rest * (student.log_rest - log_rho)
    return _with_bucket(loss, term, student, options)


def jsd(student: Student, teacher: Teacher, options: Divergence) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence [n]: beta KL(p || m) + (1 - beta) KL(q || m)."""
    loss = _jsd_term(teacher.p, teacher.log_p, student.q, student.log_q, options.beta).sum(-1)
    rho = teacher.rest
    log_rho = rho.clamp(min=torch.finfo(rho.dtype).tiny).log()
    term = _jsd_term(rho, log_rho, student.rest, student.log_rest, options.beta)
    return _with_bucket(loss, term, student, options)


def _jsd_term(
    p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor, beta: float
) -> torch.Tensor:
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


OBJECTIVE_FUNCTIONS = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}


def divergence(
    z_s: torch.Tensor, log_r: torch.Tensor, teacher: Teacher, options: Divergence
) -> tuple[torch.Tensor, Student]:
    """Nats [n] and the student's terms, from raw z_s [n, K] and log R [n] at the temperature."""
    student = student_terms(z_s / options.temperature, log_r, teacher.keep)
    loss = OBJECTIVE_FUNCTIONS[options.objective](student, teacher, options)
    if options.temperature_squared:
        loss = loss * options.temperature**2
    return loss, student


def cross_entropy(
    z_s: torch.Tensor,
    log_r: torch.Tensor,
    z_y: torch.Tensor,
    keep: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """[n] nats at temperature 1; 0 where the label is negative (ignored)."""
    log_z = log_normaliser(z_s, log_r, keep)
    return torch.where(labels >= 0, log_z - z_y, 0.0)
