"""Losses between a student's and a teacher's hidden states, per token.

s sequence, b micro-batch, h hidden.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def mean_squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over h of (predictions − targets)².

    Args:
        predictions: [s, b, h], any floating dtype.
        targets: [s, b, h], any floating dtype; no gradient flows into it.

    Returns:
        [s, b] fp32, in squared units of the hidden state.
    """
    return (predictions.float() - targets.detach().float()).square().mean(dim=-1)


def cosine_distance(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 − cos(predictions, targets) over h; 1 where either is zero.

    Args:
        predictions: [s, b, h], any floating dtype.
        targets: [s, b, h], any floating dtype; no gradient flows into it.

    Returns:
        [s, b] fp32, between 0 and 2, no unit.
    """
    return 1 - F.cosine_similarity(predictions.float(), targets.detach().float(), dim=-1)


HIDDEN_STATE_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": mean_squared_error,
    "cosine": cosine_distance,
}
