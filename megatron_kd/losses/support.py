"""Both models on the teacher's support and off it, at the loss's temperature: what objectives read.

A common shift of z_S and log R changes nothing. Autograd differentiates; nothing here knows about
the vocabulary, shards or chunks. See `megatron_kd.losses.objectives` for the symbols.

n rows of a chunk, k support.
"""

import logging

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.kernels import NEG_INF
from megatron_kd.losses.objectives import Objective, StudentProbabilities, TeacherProbabilities

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def teacher_probabilities(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    log_z_tau: torch.Tensor | None,
    divergence: Divergence,
    dtype: torch.dtype,
) -> TeacherProbabilities:
    """The target [n, k] at the loss's temperature; in fp64, as 1 - mass may be 1e-7."""
    tau = divergence.temperature
    keep = (ids >= 0) & (logprobs != NEG_INF)
    log_p = torch.where(keep, logprobs.double(), NEG_INF)
    if tau != 1 and log_z_tau is not None:
        log_p = log_p / tau - log_z_tau.double().unsqueeze(-1)
    elif tau != 1:
        log_p = _tempered_on_support(log_p, tau)
    p = log_p.exp()
    mass = p.sum(-1)
    rest = (1 - mass).clamp(min=0)
    if divergence.tail == "renormalize":
        share = mass.clamp(min=torch.finfo(torch.float64).tiny)
        log_p, p, rest = log_p - share.log().unsqueeze(-1), p / share.unsqueeze(-1), mass * 0
    log_p = torch.where(keep, log_p, 0.0)
    return TeacherProbabilities(keep, log_p.to(dtype), p.to(dtype), rest.to(dtype), mass.to(dtype))


def _tempered_on_support(log_p: torch.Tensor, tau: float) -> torch.Tensor:
    """mass * softmax_S(log p / tau): the support keeps its mass, as nothing is known off it."""
    if "temperature" not in _warned:
        _warned.add("temperature")
        logger.warning(
            "temperature %s without a captured normalizer at that temperature: the teacher's mass "
            "on the support is taken to be what it is at temperature 1",
            tau,
        )
    top = log_p.amax(-1, keepdim=True)
    top = torch.where(top == NEG_INF, 0.0, top)
    tempered = (log_p - top) / tau
    total = tempered.exp().sum(-1, keepdim=True).clamp(min=1)
    mass = log_p.exp().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return tempered - total.log() + mass.log()


def log_normalizer(z_s: torch.Tensor, log_r: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """log Z [n]; exact for any common shift, and differentiable where R or the support is empty."""
    masked = torch.where(keep, z_s, NEG_INF)
    shift = torch.maximum(masked.amax(-1), log_r).detach()
    shift = torch.where(shift == NEG_INF, 0.0, shift)
    total = (masked - shift.unsqueeze(-1)).exp().sum(-1) + (log_r - shift).exp()
    return shift + total.log()


def student_probabilities(
    z_s: torch.Tensor, log_r: torch.Tensor, keep: torch.Tensor
) -> StudentProbabilities:
    """z_s [n, k] and log_r [n], both divided by the temperature and shifted alike."""
    log_z = log_normalizer(z_s, log_r, keep)
    log_q = torch.where(keep, z_s - log_z.unsqueeze(-1), 0.0)
    has_rest = log_r > NEG_INF
    log_rest = torch.where(has_rest, torch.where(has_rest, log_r, 0.0) - log_z, 0.0)
    return StudentProbabilities(
        log_q,
        torch.where(keep, log_q.exp(), 0.0),
        log_rest,
        torch.where(has_rest, log_rest.exp(), 0.0),
        has_rest,
    )


def divergence_on_support(
    z_s: torch.Tensor,
    log_r: torch.Tensor,
    teacher: TeacherProbabilities,
    objective: Objective,
    divergence: Divergence,
) -> tuple[torch.Tensor, StudentProbabilities]:
    """Nats [n] and the student's probabilities.

    Args:
        z_s: [n, k] logits, not yet divided by the temperature.
        log_r: [n] log R at the temperature.
        teacher: Of the same rows.
        objective: The unit of divergence.objective.
        divergence: The options of the loss.
    """
    student = student_probabilities(z_s / divergence.temperature, log_r, teacher.keep)
    loss = objective.on_support(student, teacher, divergence)
    if divergence.temperature_squared:
        loss = loss * divergence.temperature**2
    return loss, student


def cross_entropy(
    z_s: torch.Tensor,
    log_r: torch.Tensor,
    z_y: torch.Tensor,
    keep: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """[n] nats at temperature 1; 0 where the label is negative (ignored)."""
    log_z = log_normalizer(z_s, log_r, keep)
    return torch.where(labels >= 0, log_z - z_y, 0.0)
