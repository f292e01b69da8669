"""The definitions as on paper: whole vocabulary, log_softmax, no chunks, never optimised.

Tests hold every head to these in fp64.

s sequence, b micro-batch, v vocabulary, k support.
"""

import torch

from megatron_kd.losses.divergence import Divergence, objective_unit
from megatron_kd.losses.kernels import NEG_INF
from megatron_kd.losses.target import TopKTarget


def transformed(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """What a model makes of its output layer's product: scaled, then capped."""
    logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def topk_loss(
    logits: torch.Tensor,
    target: TopKTarget,
    divergence: Divergence,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """logits [s, b, v] -> [s, b] nats in the dtype of the logits."""
    logits = logits[..., :vocab_size]
    log_q = torch.log_softmax(logits / divergence.temperature, -1)  # [s, b, v]
    log_p, keep = _teacher(target, divergence)  # [s, b, k]
    ids = torch.where(keep, target.ids, 0).long()
    log_q_s = log_q.gather(-1, ids)
    if divergence.tail == "bucket":
        spare = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool)
        on_support = spare.scatter(-1, torch.where(keep, ids, logits.shape[-1]), True)[..., :-1]
        exists = ~on_support.all(-1, keepdim=True)
        lowest = torch.finfo(log_q.dtype).min
        log_r = log_q.masked_fill(on_support, lowest).logsumexp(-1, keepdim=True)
        rho = 1 - torch.where(keep, log_p.exp(), 0.0).sum(-1, keepdim=True)
        rho = rho.clamp(min=objective_unit(divergence.objective).smallest_rest)
        log_p = torch.cat([log_p, rho.log()], -1)
        log_q_s = torch.cat([log_q_s, log_r], -1)
        keep = torch.cat([keep, exists], -1)
    loss = _sum_over_outcomes(log_p, log_q_s, keep, divergence)
    if divergence.temperature_squared:
        loss = loss * divergence.temperature**2
    if divergence.ce_weight:
        alpha = divergence.ce_weight
        loss = (1 - alpha) * loss + alpha * cross_entropy(logits, labels)
    return loss.to(logits.dtype)


def full_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    divergence: Divergence,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """A divergence from the whole teacher distribution: both [s, b, v] -> [s, b]."""
    logits, teacher_logits = logits[..., :vocab_size], teacher_logits[..., :vocab_size]
    log_q = torch.log_softmax(logits / divergence.temperature, -1)
    log_p = torch.log_softmax(teacher_logits / divergence.temperature, -1)
    everything = torch.ones_like(log_q, dtype=torch.bool)
    loss = _sum_over_outcomes(log_p, log_q, everything, divergence)
    if divergence.temperature_squared:
        loss = loss * divergence.temperature**2
    if divergence.ce_weight:
        alpha = divergence.ce_weight
        loss = (1 - alpha) * loss + alpha * cross_entropy(logits, labels)
    return loss


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[s, b] nats at temperature 1, 0 where the label is negative."""
    log_q = torch.log_softmax(logits, -1)
    picked = log_q.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, -picked, 0.0)


def _teacher(target: TopKTarget, divergence: Divergence) -> tuple[torch.Tensor, torch.Tensor]:
    """log p [s, b, k] in fp64 at the temperature (-inf where unused), and which slots are used."""
    keep = (target.ids >= 0) & (target.logprobs != NEG_INF)
    log_p = torch.where(keep, target.logprobs.double(), NEG_INF)
    if divergence.temperature != 1 and target.log_z_tau is not None:
        log_p = log_p / divergence.temperature - target.log_z_tau.double().unsqueeze(-1)
    elif divergence.temperature != 1:
        mass = log_p.exp().sum(-1, keepdim=True)
        log_p = torch.log_softmax(log_p / divergence.temperature, -1) + mass.log()
    if divergence.tail == "renormalize":
        log_p = log_p - log_p.exp().sum(-1, keepdim=True).log()
    return torch.where(keep, log_p, NEG_INF), keep


def _sum_over_outcomes(
    log_p: torch.Tensor, log_q: torch.Tensor, keep: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    """sum over outcomes [.., k] that are kept; 0 log 0 = 0."""
    log_p = torch.where(keep, log_p, 0.0)
    log_q = torch.where(keep, log_q, 0.0)
    p, q = log_p.exp(), log_q.exp()
    objective = objective_unit(divergence.objective)
    if objective.terms is None:
        raise ValueError(
            f"objective {divergence.objective} has no terms: its definition as on paper"
        )
    terms = objective.terms(p, log_p, q, log_q, divergence)
    return torch.where(keep, terms, 0.0).sum(-1)
