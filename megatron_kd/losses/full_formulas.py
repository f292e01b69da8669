"""Log-probabilities over this rank's vocabulary, for eager blocks and compiled loops.

Letters: n rows, Vp this rank's vocabulary.
"""

import torch

# Stands for a logit that is infinitely far down: finite, so that 0 * log q is 0.
FARTHEST_NATS = -1e30


def log_probability(
    logits: torch.Tensor, m: torch.Tensor, log_sum: torch.Tensor, inverse_tau: torch.Tensor | float
) -> torch.Tensor:
    """[n, Vp] from logits [n, Vp], m [n] and log_sum [n], in the dtype of m."""
    shifted = (logits.to(m.dtype) - m.unsqueeze(-1)) * inverse_tau
    return (shifted - log_sum.unsqueeze(-1)).clamp(min=FARTHEST_NATS)
