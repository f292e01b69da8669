"""ModelOpt's criteria, which pair a student's layer with a teacher's, and the loss they form.

ModelOpt captures what both layers of a pair return; the loss is formed when the student's forward
reaches its language-model loss, so that a step sees the same per-token loss as offline.

s: sequence positions on this rank, s': those of them that this tensor-parallel rank holds,
b: micro-batch, h and h_t: hidden sizes of student and teacher, vp: vocabulary / tp.
"""

import torch
from modelopt.torch.distill.plugins.megatron import BaseLoss

from megatron_kd.config import LossConfig
from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.host.step import hidden_states
from megatron_kd.host.step.distillation_loss import DistillationLoss, Losses
from megatron_kd.losses import dense_online_kd_loss, fused_online_kd_loss

FROM_HIDDEN_STATES = "fused_online"
"""The implementation that projects both models' hidden states; the other reads logits."""


class OutputLayerCriterion(BaseLoss):
    """Compares what both output layers return."""

    def forward(self, predictions, targets, *, loss: "OnlineLoss"):
        return loss.between_outputs(*self.pre_forward(predictions, targets))


class HiddenStateCriterion(BaseLoss):
    """Compares what one layer of each model returns."""

    def forward(self, predictions, targets, *, loss: "OnlineLoss"):
        return loss.between_hidden_states(*self.pre_forward(predictions, targets))


class OnlineLoss(DistillationLoss):
    """The loss of a student whose teacher runs beside it in ModelOpt's DistillationModel.

    Args:
        model: The distillation model: a student's chunk with an output layer, which holds its
            teacher's.
        config: The loss between logits.
        vocab_size: Tokens that both models share; rows beyond are padding.
        weights: Of that loss and of the one between hidden states.
    """

    reports_masses = False

    def __init__(
        self,
        model: torch.nn.Module,
        config: LossConfig,
        vocab_size: int,
        weights: hidden_states.LossWeights,
    ):
        super().__init__(model, config, vocab_size, weights)
        self.teacher_tap = OutputLayerTap.install(model.teacher_model)
        if self.reads_hidden_states:
            options = self.teacher_tap.logit_options()
            self.fused |= {f"teacher_{name}": value for name, value in options.items()}
        self._labels = None

    @property
    def reads_hidden_states(self) -> bool:
        return self.config.impl == FROM_HIDDEN_STATES

    def losses(self, labels: torch.Tensor, output: torch.Tensor) -> Losses:
        self._labels = labels
        found = self.model.compute_kd_loss(skip_balancer=True, loss=self).values()
        self._labels = None
        (between_outputs,) = (value for value in found if isinstance(value, tuple))
        hidden = [value for value in found if not isinstance(value, tuple)]
        return Losses(*between_outputs, torch.stack(hidden).mean(dim=0) if hidden else None)

    def between_outputs(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple:
        """Logits [s, b, vp], or hidden states [s', b, h] and [s', b, h_t] → (loss [s, b] fp32,
        KDMetrics), equal on all tensor-parallel ranks.
        """
        common = {
            "divergence": self.config.divergence,
            "labels": self._labels,
            "return_metrics": True,
            **self.parallel,
        }
        if not self.reads_hidden_states:
            return dense_online_kd_loss(student, teacher, **common)
        return fused_online_kd_loss(
            student,
            self.tap.weight,
            teacher,
            self.teacher_tap.weight,
            bias=self.tap.bias,
            teacher_bias=self.teacher_tap.bias,
            gradient=self.config.gradient,
            token_weights=self.inputs.loss_mask.transpose(0, 1),
            supervised_index=self.inputs.supervised_index,
            **self.fused,
            **common,
        )

    def between_hidden_states(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """[s', b, h] and [s', b, h_t] → [s, b] fp32, equal on all tensor-parallel ranks."""
        return hidden_states.hidden_state_loss(
            student,
            teacher,
            model=self.model,
            kind=self.weights.config.loss,
            sequence_parallel=self.tap.sequence_parallel,
            tp_group=self.tp_group,
        )

    def _hand_hidden_states_through(self, on: bool) -> None:
        super()._hand_hidden_states_through(on)
        self.teacher_tap.hands_input_through = on
