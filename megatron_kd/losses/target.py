"""What the losses are given, the teacher's truncated distribution, and what they return with it.

s sequence, b micro-batch, k support.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch


@dataclass(frozen=True)
class TopKTarget:
    """The teacher's k most likely next tokens at every position.

    Args:
        ids: [s, b, k] int32 or int64, global vocabulary ids, distinct along k; -1 marks an unused
            slot.
        logprobs: [s, b, k] floating, nats, under the full-vocabulary normalizer at temperature 1
            (not renormalized over the support); -inf in an unused slot.
        log_z_tau: [s, b] floating or None. The teacher's normalizer at the temperature of the loss,
            log sum_v exp(logprob_v / temperature) over the whole vocabulary, where it was captured.

    Raises:
        ValueError: The shapes or dtypes do not agree, or they are not tensors.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    log_z_tau: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "logprobs", "log_z_tau"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) and (name != "log_z_tau" or value is not None):
                raise ValueError(
                    f"TopKTarget.{name} wants a torch.Tensor, got {type(value).__name__}: "
                    "torch.from_numpy makes one of an array"
                )
        if self.ids.dim() != 3 or self.ids.shape != self.logprobs.shape:
            raise ValueError(
                "TopKTarget wants ids and logprobs of one shape [s, b, k]; got "
                f"{list(self.ids.shape)} and {list(self.logprobs.shape)}"
            )
        if self.ids.shape[-1] == 0:
            raise ValueError(
                "TopKTarget wants at least one slot (k >= 1); mark it -1 if it is unused"
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
                f"TopKTarget.log_z_tau wants [s, b] = {list(self.ids.shape[:2])}, got "
                f"{list(self.log_z_tau.shape)}"
            )


class KDMetrics(NamedTuple):
    """Detached values per position that come with the loss, at no further product.

    Args:
        divergence: [s, b] fp32, nats: the divergence alone, whatever the share of cross-entropy in
            the loss, with the factor temperature² where the loss has it.
        lm_loss: [s, b] fp32, nats: hard-label cross-entropy at temperature 1; None without labels.
        student_mass: [s, b] fp32: the student's probability on the teacher's support, at the loss's
            temperature.
        teacher_mass: [s, b] fp32: the teacher's, as the target has it before any renormalization.
    """

    divergence: torch.Tensor
    lm_loss: torch.Tensor | None
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


LossResult: TypeAlias = torch.Tensor | tuple[torch.Tensor, KDMetrics]
"""What every loss returns: [s, b], or a pair with return_metrics."""
