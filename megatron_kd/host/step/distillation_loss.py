"""Where the distillation loss enters Megatron-Core: the output layer and the language-model loss of
the last stage.

The model's `compute_language_model_loss` runs our loss on what the output layer returned: hidden
states where the loss projects them itself (`OutputLayerTap`), logits otherwise.

s: sequence positions on this rank (s / tp under sequence parallelism for hidden states),
b: micro-batch, h: hidden size, vp: vocabulary / tp.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.utils import unwrap_model

from megatron_kd.config import LossConfig
from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.host.step.hidden_states import LossWeights
from megatron_kd.host.step.micro_batch import LossInputs
from megatron_kd.host.step.multi_token_prediction import MultiTokenPrediction
from megatron_kd.host.step.nvtx_ranges import stage
from megatron_kd.losses import KDMetrics
from megatron_kd.metrics_file import (
    HIDDEN_LOSS,
    KD_LOSS,
    LM_LOSS,
    STUDENT_MASS,
    TEACHER_MASS,
    TOTAL_LOSS,
)

ATTRIBUTE = "megatron_kd_loss"


@dataclass(frozen=True)
class Losses:
    """What one micro-batch of the last stage gives.

    Attributes:
        logits: [s, b] fp32, the loss between logits, cross-entropy mixed in as configured.
        metrics: Its parts.
        hidden: [s, b] fp32, the loss between hidden states; None without one.
    """

    logits: torch.Tensor
    metrics: KDMetrics
    hidden: torch.Tensor | None = None


class DistillationLoss(ABC):
    """The loss of one model chunk that owns an output layer.

    Between `begin` and `end` the model's forward computes the distillation loss; outside, the model
    is as the host built it, for generation and export. A subclass says where the teacher is:
    `OfflineLoss` in a cache, `OnlineLoss` in the process.

    Args:
        model: The chunk, not yet wrapped.
        config: The loss between logits.
        vocab_size: Tokens of the vocabulary; rows of the output layer beyond are padding.
        weights: Of that loss and of the one between hidden states.
    """

    reports_masses = True
    """Whether the support is a part of the vocabulary, so that its mass is worth reporting."""

    def __init__(
        self, model: torch.nn.Module, config: LossConfig, vocab_size: int, weights: LossWeights
    ):
        self.model = model
        self.config = config
        self.weights = weights
        self.tap = OutputLayerTap.install(model)
        tp_group = model.pg_collection.tp
        self.tp_group = tp_group if tp_group.size() > 1 else None
        self.parallel = {"vocab_size": vocab_size, "tp_group": self.tp_group}
        self.fused = {
            "chunk_size": config.chunk_size,
            "sequence_parallel": self.tap.sequence_parallel,
            "gradient_accumulation_fusion": bool(
                getattr(model.config, "gradient_accumulation_fusion", False)
            ),
        }
        if self.reads_hidden_states:
            self.fused |= self.tap.logit_options()
        self.multi_token = MultiTokenPrediction(model, self.tap, self.fused | self.parallel)
        self.inputs: LossInputs | None = None
        self._report = {}
        self._host_loss = model.compute_language_model_loss
        model.compute_language_model_loss = self._compute
        setattr(model, ATTRIBUTE, self)

    @staticmethod
    def of(model: torch.nn.Module) -> "DistillationLoss | None":
        """The loss attached to a (wrapped) model chunk; None on stages without an output layer."""
        return getattr(unwrap_model(model), ATTRIBUTE, None)

    def begin(self, inputs: LossInputs) -> None:
        """Take up the loss's share of the micro-batch that the model is about to run."""
        self.inputs = inputs
        self._report = {}
        self.multi_token.begin()
        self._hand_hidden_states_through(self.reads_hidden_states)

    def end(self) -> dict[str, torch.Tensor]:
        """Let the micro-batch go. Returns what to report of it: name → [b, s] fp32, detached."""
        report, self._report = self._report, {}
        self.inputs = None
        self._hand_hidden_states_through(False)
        return report

    @property
    @abstractmethod
    def reads_hidden_states(self) -> bool:
        """Whether the loss projects hidden states itself."""

    @abstractmethod
    def losses(self, labels: torch.Tensor, output: torch.Tensor) -> Losses:
        """Compare the student with its teacher.

        Args:
            labels: [s, b] int64.
            output: What the output layer returned: hidden states [s, b, h] or logits [s, b, vp].
        """

    def _hand_hidden_states_through(self, on: bool) -> None:
        self.tap.hands_input_through = on

    def _compute(self, labels: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """labels [b, s] and what the output layer returned → per-token loss [b, s] fp32."""
        if self.inputs is None:
            return self._host_loss(labels, output)
        if self.multi_token.is_next():
            return self.multi_token.loss(labels, output)
        with stage("loss"):
            losses = self.losses(labels.transpose(0, 1), output)
            total = self.weights.mix(losses.logits, losses.hidden)
        self._report = self._reported(losses, total)
        return total.transpose(0, 1).contiguous()

    def _reported(self, losses: Losses, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """The run's names → [b, s]. "kd loss" is the divergence alone, whatever is trained on."""
        metrics = losses.metrics
        named = {KD_LOSS: metrics.divergence, LM_LOSS: metrics.lm_loss, HIDDEN_LOSS: losses.hidden}
        if self.config.divergence.ce_weight or total is not losses.logits:
            named[TOTAL_LOSS] = total
        if self.reports_masses:
            named |= {STUDENT_MASS: metrics.student_mass, TEACHER_MASS: metrics.teacher_mass}
        return {
            name: value.detach().transpose(0, 1)
            for name, value in named.items()
            if value is not None
        }
