"""What a model does to its output layer's product x before the softmax, and the derivative of it.

    z = c · tanh(scale · x / c)        dz/dx = scale / cosh(scale · x / c)²

Without a cap c, z = scale · x. Losses hold a chunk as x and form z where it is read, in fp32 and
before any temperature, so that nothing is rounded between the two and no pass is added. What was
cut out of a chunk (-inf) stays cut out.

Names: x the product, z logits.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

Factor: TypeAlias = float | torch.Tensor


@dataclass(frozen=True)
class LogitTransform:
    """Scale, then cap.

    Raises:
        ValueError: A value is not positive and finite.
    """

    scale: float = 1.0
    softcap: float | None = None
    """c: logits lie within ±c. None caps nothing."""

    def __post_init__(self) -> None:
        for name, value in (("logit_scale", self.scale), ("logit_softcap", self.softcap)):
            if value is not None and not (0 < value and math.isfinite(value)):
                none = ", or None for no cap" if name == "logit_softcap" else ""
                raise ValueError(f"{name} must be greater than 0 and finite{none}; got {value!r}")

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> "LogitTransform | None":
        """The transform of these values; None where it would change nothing."""
        transform = cls(scale, softcap)
        return None if scale == 1 and softcap is None else transform

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """z of x [...], in the dtype of x."""
        return logits_of(x, self.scale, self.softcap)

    def slopes(self, x: torch.Tensor) -> torch.Tensor:
        """dz/dx at x [...], in the dtype of x."""
        return slopes_of(x, self.scale, self.softcap)


def transformed(x: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
    """z of x; x itself without a transform."""
    return x if transform is None else transform.logits(x)


def logits_of(x: torch.Tensor, scale: Factor, softcap: Factor | None) -> torch.Tensor:
    """z of x; scale and softcap are numbers or tensors of one."""
    if softcap is None:
        return x * scale
    return torch.where(x == -math.inf, -math.inf, softcap * torch.tanh(x * (scale / softcap)))


def slopes_of(x: torch.Tensor, scale: Factor, softcap: Factor | None) -> torch.Tensor:
    """dz/dx at x; 0 where x is -inf and there is a cap.

    The hyperbolic cosine keeps digits where 1 - tanh² has none; it overflows to a slope of 0.
    """
    if softcap is None:
        return torch.ones_like(x) * scale
    return scale / torch.cosh(x * (scale / softcap)).square()
