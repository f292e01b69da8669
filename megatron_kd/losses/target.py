"""What the losses are given: the teacher's truncated distribution, and which divergence to take.

Letters: S sequence, B micro-batch, K support, n = S * B rows.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

Objective: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
Tail: TypeAlias = Literal["none", "renormalise", "bucket"]
OBJECTIVES, TAILS = get_args(Objective), get_args(Tail)


@dataclass(frozen=True)
class TopKTarget:
    """The teacher's K most likely next tokens at every position.

    Args:
        ids: [S, B, K] int32 or int64, global vocabulary ids, distinct along K; -1 marks an unused
            slot.
        logprobs: [S, B, K] floating, nats, under the full-vocabulary normaliser at temperature 1
            (not renormalised over the support); -inf in an unused slot.
        log_z_tau: [S, B] floating or None. The teacher's normaliser at the temperature of the loss,
            log sum_v exp(logprob_v / temperature) over the whole vocabulary, where it was captured.

    Raises:
        ValueError: The shapes or dtypes do not agree.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    log_z_tau: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.dim() != 3 or self.ids.shape != self.logprobs.shape:
            raise ValueError(
                "TopKTarget wants ids and logprobs of one shape [S, B, K]; got "
                f"{list(self.ids.shape)} and {list(self.logprobs.shape)}"
            )
        if self.ids.shape[-1] == 0:
            raise ValueError(
                "TopKTarget wants at least one slot (K >= 1); mark it -1 if it is unused"
            )
        if self.ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"TopKTarget.ids wants int32 or int64, got {self.ids.dtype}: narrower integers "
                "cannot hold every vocabulary and the -1 that marks an unused slot"
            )
        if not self.logprobs.is_floating_point():
            raise ValueError(
                f"TopKTarget.logprobs wants a floating dtype, got {self.logprobs.dtype}"
            )
        if self.log_z_tau is not None and self.log_z_tau.shape != self.ids.shape[:2]:
            raise ValueError(
                f"TopKTarget.log_z_tau wants [S, B] = {list(self.ids.shape[:2])}, got "
                f"{list(self.log_z_tau.shape)}"
            )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Which loss to form: the keywords that every function of this package shares, checked."""

    objective: Objective = "forward_kl"
    """forward_kl, reverse_kl or jsd."""
    tail: Tail = "none"
    """What happens to the teacher mass off the support: none, renormalise or bucket."""
    temperature: float = 1.0
    """Divides both models' logits."""
    temperature_squared: bool = False
    """Multiply the divergence (not the cross-entropy) by temperature squared."""
    beta: float = 0.5
    """The teacher's share of the JSD mixture, in (0, 1)."""
    ce_weight: float = 0.0
    """alpha in (1 - alpha) * divergence + alpha * cross-entropy."""

    def __post_init__(self) -> None:
        for name, allowed in (("objective", OBJECTIVES), ("tail", TAILS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite; got {self.temperature}")
        if self.objective == "jsd" and not 0 < self.beta < 1:
            raise ValueError(
                f"beta must lie strictly between 0 and 1; got {self.beta}. At the ends JSD is "
                "zero: use objective forward_kl or reverse_kl"
            )
        if not 0 <= self.ce_weight <= 1:
            raise ValueError(f"ce_weight must lie in [0, 1]; got {self.ce_weight}")

    def check_target(self, target: TopKTarget, labels: torch.Tensor | None) -> None:
        """Refuse what the target cannot give."""
        if self.tail == "bucket" and self.temperature != 1 and target.log_z_tau is None:
            raise ValueError(
                f"tail bucket at temperature {self.temperature} needs the teacher's normaliser at "
                "that temperature (TopKTarget.log_z_tau): capture it with the cache, or use tail "
                "none or renormalise"
            )
        if self.ce_weight and labels is None:
            raise ValueError(f"ce_weight {self.ce_weight} needs labels [S, B]; got None")


class KDMetrics(NamedTuple):
    """Detached values per position that come with the loss, at no further product.

    Args:
        lm_loss: [S, B] fp32, nats: hard-label cross-entropy at temperature 1; None without labels.
        student_mass: [S, B] fp32: the student's probability on the teacher's support, at the loss's
            temperature.
        teacher_mass: [S, B] fp32: the teacher's, as the target has it before any renormalisation.
    """

    lm_loss: torch.Tensor | None
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


LossResult: TypeAlias = torch.Tensor | tuple[torch.Tensor, KDMetrics]
"""What every loss returns: [S, B], or a pair with return_metrics."""
