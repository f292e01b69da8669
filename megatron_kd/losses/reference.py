"""The definitions as on paper: whole vocabulary, log_softmax, no chunks, never optimised.

Tests hold every head to these in fp64.

Letters: S sequence, B micro-batch, V vocabulary, K support.
"""

import torch

from megatron_kd.losses.target import Divergence, TopKTarget

NEG_INF = float("-inf")


def topk_loss(
    logits: torch.Tensor,
    target: TopKTarget,
    options: Divergence,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """logits [S, B, V] -> [S, B] nats in the dtype of the logits."""
    logits = logits[..., :vocab_size]
    log_q = torch.log_softmax(logits / options.temperature, -1)  # [S, B, V]
    log_p, keep = _teacher(target, options)  # [S, B, K]
    ids = torch.where(keep, target.ids, 0).long()
    log_q_s = log_q.gather(-1, ids)
    if options.tail == "bucket":
        spare = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool)
        on_support = spare.scatter(-1, torch.where(keep, ids, logits.shape[-1]), True)[..., :-1]
        exists = ~on_support.all(-1, keepdim=True)
        lowest = torch.finfo(log_q.dtype).min
        log_r = log_q.masked_fill(on_support, lowest).logsumexp(-1, keepdim=True)
        rho = (1 - torch.where(keep, log_p.exp(), 0.0).sum(-1, keepdim=True)).clamp(min=0)
        if options.objective == "reverse_kl":
            rho = rho.clamp(min=2.0**-23)
        log_p = torch.cat([log_p, rho.log()], -1)
        log_q_s = torch.cat([log_q_s, log_r], -1)
        keep = torch.cat([keep, exists], -1)
    loss = _sum_over_outcomes(log_p, log_q_s, keep, options)
    if options.temperature_squared:
        loss = loss * options.temperature**2
    if options.ce_weight:
        alpha = options.ce_weight
        loss = (1 - alpha) * loss + alpha * cross_entropy(logits, labels)
    return loss.to(logits.dtype)


def full_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    options: Divergence,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """The same with the whole teacher distribution: both [S, B, V] -> [S, B]."""
    logits, teacher_logits = logits[..., :vocab_size], teacher_logits[..., :vocab_size]
    log_q = torch.log_softmax(logits / options.temperature, -1)
    log_p = torch.log_softmax(teacher_logits / options.temperature, -1)
    everything = torch.ones_like(log_q, dtype=torch.bool)
    loss = _sum_over_outcomes(log_p, log_q, everything, options)
    if options.temperature_squared:
        loss = loss * options.temperature**2
    if options.ce_weight:
        alpha = options.ce_weight
        loss = (1 - alpha) * loss + alpha * cross_entropy(logits, labels)
    return loss


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[S, B] nats at temperature 1, 0 where the label is negative."""
    log_q = torch.log_softmax(logits, -1)
    picked = log_q.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, -picked, 0.0)


def _teacher(target: TopKTarget, options: Divergence) -> tuple[torch.Tensor, torch.Tensor]:
    """log p [S, B, K] in fp64 at the temperature (-inf where unused), and which slots are used."""
    keep = (target.ids >= 0) & (target.logprobs != NEG_INF)
    log_p = torch.where(keep, target.logprobs.double(), NEG_INF)
    if options.temperature != 1 and target.log_z_tau is not None:
        log_p = log_p / options.temperature - target.log_z_tau.double().unsqueeze(-1)
    elif options.temperature != 1:
        mass = log_p.exp().sum(-1, keepdim=True)
        log_p = torch.log_softmax(log_p / options.temperature, -1) + mass.log()
    if options.tail == "renormalise":
        log_p = log_p - log_p.exp().sum(-1, keepdim=True).log()
    return torch.where(keep, log_p, NEG_INF), keep


def _sum_over_outcomes(
    log_p: torch.Tensor, log_q: torch.Tensor, keep: torch.Tensor, options: Divergence
) -> torch.Tensor:
    """sum over outcomes [.., K] that are kept; 0 log 0 = 0."""
    log_p = torch.where(keep, log_p, 0.0)
    log_q = torch.where(keep, log_q, 0.0)
    p, q = log_p.exp(), log_q.exp()
    if options.objective == "forward_kl":
        terms = torch.where(p > 0, p * (torch.where(p > 0, log_p, 0.0) - log_q), 0.0)
    elif options.objective == "reverse_kl":
        terms = q * (log_q - log_p)
    else:
        m = options.beta * p + (1 - options.beta) * q
        log_m = torch.where(m > 0, m, 1.0).log()
        from_p = torch.where(p > 0, p * (torch.where(p > 0, log_p, 0.0) - log_m), 0.0)
        from_q = torch.where(q > 0, q * (log_q - log_m), 0.0)
        terms = options.beta * from_p + (1 - options.beta) * from_q
    return torch.where(keep, terms, 0.0).sum(-1)
