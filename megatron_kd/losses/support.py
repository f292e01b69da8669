"""Both models on the teacher's support and off it, at the loss's temperature: what objectives read.

Both are shifted alike, by the row's largest logit. Autograd differentiates; nothing here knows
about the vocabulary, shards or chunks. See `megatron_kd.losses.objectives` for the symbols.

n rows of a chunk, k support.
"""

import logging

import torch

from megatron_kd.losses.constants import where
from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.kernels import NEG_INF
from megatron_kd.losses.objectives import Objective, StudentProbabilities, TeacherProbabilities

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def teacher_probabilities(
    keep: torch.Tensor,
    logprobs: torch.Tensor,
    log_z_tau: torch.Tensor | None,
    divergence: Divergence,
    dtype: torch.dtype,
) -> TeacherProbabilities:
    """The target [n, k] at the loss's temperature; keep [n, k] says which slots are used.

    In fp64 at first, as 1 - mass may be 1e-7 and a mass 1e-60; as it stands where it only enters a
    sum.
    """
    tau = divergence.temperature
    exact = dtype if divergence.tail == "none" and tau == 1 else torch.float64
    log_p = where(keep, logprobs.to(exact), NEG_INF)
    if tau != 1 and log_z_tau is not None:
        log_p = log_p / tau - log_z_tau.to(exact).unsqueeze(-1)
    elif tau != 1:
        log_p = _tempered_on_support(log_p, tau)
    p = log_p.exp()
    mass = p.sum(-1)
    total = mass
    if divergence.tail == "renormalize":
        share = mass.clamp(min=torch.finfo(exact).tiny)
        log_p, p, total = log_p - share.log().unsqueeze(-1), p / share.unsqueeze(-1), None
    log_p = where(keep, log_p, 0.0)
    return TeacherProbabilities(keep, log_p.to(dtype), p.to(dtype), mass.to(dtype), total)


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
    """log Z [n] of z_s [n, k] and log_r [n], shifted as `student_probabilities` wants them."""
    return ((z_s.exp() * keep).sum(-1) + log_r.exp()).log()


def student_probabilities(
    z_s: torch.Tensor, log_r: torch.Tensor, keep: torch.Tensor
) -> StudentProbabilities:
    """z_s [n, k] and log_r [n], both divided by the temperature.

    Both are relative to the row's largest logit, on the support or off it (`Reading`): so no
    exponential overflows, also of what an unused slot holds, and Z is at least 1.
    """
    on_support = z_s.exp() * keep
    share = on_support.sum(-1)
    off_support = log_r.exp()
    total = share + off_support
    log_z = total.log()
    log_q = (z_s - log_z.unsqueeze(-1)) * keep
    return StudentProbabilities(log_q, log_z, log_r, on_support, off_support, share, total)


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
    tau = divergence.temperature
    student = student_probabilities(z_s if tau == 1 else z_s / tau, log_r, teacher.keep)
    loss = objective.on_support(student, teacher, divergence)
    if divergence.temperature_squared:
        loss = loss * divergence.temperature**2
    return loss, student
