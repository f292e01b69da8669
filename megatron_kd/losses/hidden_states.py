"""Losses between a student's and a teacher's hidden states, per token.

S: sequence positions, B: micro-batch, D: hidden size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def mean_squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over D of (predictions − targets)².

    Args:
        predictions: [S, B, D], any floating dtype.
        targets: [S, B, D], any floating dtype; no gradient flows into it.

    Returns:
        [S, B] fp32, in squared units of the hidden state.
    """
    return (predictions.float() - targets.detach().float()).square().mean(dim=-1)


def cosine_distance(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 − cos(predictions, targets) over D; 1 where either is zero.

    Args:
        predictions: [S, B, D], any floating dtype.
        targets: [S, B, D], any floating dtype; no gradient flows into it.

    Returns:
        [S, B] fp32, between 0 and 2, no unit.
    """
    return 1 - F.cosine_similarity(predictions.float(), targets.detach().float(), dim=-1)


HIDDEN_STATE_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": mean_squared_error,
    "cosine": cosine_distance,
}
