"""The formulas of `full_loss`, per element and per row, for eager blocks and compiled loops.

Letters: n rows, Vp this rank's vocabulary.
"""

import math

import torch

# Stands for a logit that is infinitely far down: finite, so that 0 * log q is 0.
FARTHEST_NATS = -1e30


def log_probability(
    logits: torch.Tensor, m: torch.Tensor, log_sum: torch.Tensor, inverse_tau: torch.Tensor | float
) -> torch.Tensor:
    """[n, Vp] from logits [n, Vp], m [n] and log_sum [n], in the dtype of m."""
    shifted = (logits.to(m.dtype) - m.unsqueeze(-1)) * inverse_tau
    return (shifted - log_sum.unsqueeze(-1)).clamp(min=FARTHEST_NATS)


def row_sums(
    log_q: torch.Tensor, log_p: torch.Tensor, objective: str, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence [n], and KL(q || m) [n] where the gradient needs it (zeros elsewhere)."""
    if objective == "forward_kl":
        total = (log_p.exp() * (log_p - log_q)).sum(-1)
        return total, torch.zeros_like(total)
    if objective == "reverse_kl":
        total = (log_q.exp() * (log_q - log_p)).sum(-1)
        return total, torch.zeros_like(total)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    from_student = (log_q.exp() * (log_q - log_m)).sum(-1)
    from_teacher = (log_p.exp() * (log_p - log_m)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


def gradient(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    divergence: torch.Tensor,
    from_student: torch.Tensor,
    objective: str,
    beta: float,
) -> torch.Tensor:
    """tau * dL/dz [n, Vp]; divergence [n] and from_student [n] are `row_sums` over all shards."""
    q = log_q.exp()
    if objective == "forward_kl":
        return q - log_p.exp()
    if objective == "reverse_kl":
        return q * (log_q - log_p - divergence.unsqueeze(-1))
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return (1 - beta) * q * (log_q - log_m - from_student.unsqueeze(-1))
