"""ModelOpt criteria and balancer of online distillation: full-vocabulary loss, hidden-state loss,
their weighted sum.

s: sequence positions on this rank, s': the part of them this tensor-parallel rank holds,
b: micro-batch.
"""

import weakref

import megatron.core.parallel_state as parallel_state
import modelopt.torch.distill as mtd
import torch
from modelopt.torch.distill.plugins.megatron import BaseLoss

from megatron_kd.config import LossConfig
from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.host.step import hidden_states
from megatron_kd.losses import dense_online_kd_loss, fused_online_kd_loss


class FullVocabularyLogitsKLLoss(BaseLoss):
    """ModelOpt criterion between the two output layers: our losses over the full vocabulary.

    The loss balancers find the logits loss by "Logits" in the class's name. With `fused_online` the
    output layers hand through their hidden states, and the criterion projects both, chunk by chunk.
    """

    def __init__(self, model_config, loss: LossConfig, vocab_size: int):
        super().__init__(model_config)
        self.loss = loss
        self.vocab_size = vocab_size
        self._student = self._teacher = None
        self._batch = None
        self.metrics = {}

    def attach(self, student: torch.nn.Module, teacher: torch.nn.Module) -> None:
        """Remember both output layers; with `fused_online`, make them hand their input through."""
        self._student, self._teacher = map(OutputLayerTap.install, (student, teacher))
        fused = self.loss.impl == "fused_online"
        self._student.hands_input_through = self._teacher.hands_input_through = fused

    def begin(self, labels, loss_mask, index) -> None:
        """Give the micro-batch: labels and loss_mask [b, s], index [rows] of the supervised
        positions.
        """
        self._batch = labels, loss_mask, index

    def forward(self, predictions, targets):
        """What both output layers returned → (loss [b, s] fp32, False, False): it is already
        reduced over TP.
        """
        predictions, targets = self.pre_forward(predictions, targets)
        labels, loss_mask, index = self._batch
        group = parallel_state.get_tensor_model_parallel_group()
        common = dict(
            divergence=self.loss.divergence,
            labels=labels.transpose(0, 1),
            vocab_size=self.vocab_size,
            tp_group=group if group.size() > 1 else None,
            return_metrics=True,
        )
        if self.loss.impl == "fused_online":
            loss, metrics = fused_online_kd_loss(
                predictions,
                self._student.weight,
                targets,
                self._teacher.weight,
                bias=self._student.bias,
                teacher_bias=self._teacher.bias,
                chunk_size=self.loss.chunk_size,
                supervised_index=index,
                sequence_parallel=self._student.sequence_parallel,
                **common,
            )
        else:
            loss, metrics = dense_online_kd_loss(predictions, targets, **common)
        self.metrics = {"kd loss": metrics.divergence.transpose(0, 1)}
        if self.loss.divergence.ce_weight:
            self.metrics[hidden_states.TOTAL_LOSS] = loss.detach().transpose(0, 1)
        if metrics.lm_loss is not None:
            self.metrics["lm loss"] = metrics.lm_loss.transpose(0, 1)
        return self.post_forward(loss, tp_reduce=False, is_sequence_parallel=False)


class HiddenStateLoss(BaseLoss):
    """ModelOpt criterion between one layer of each model."""

    def __init__(self, model_config, kind: str):
        super().__init__(model_config)
        self.kind = kind
        self._student = None
        self.metrics = {}

    def attach(self, student: torch.nn.Module) -> None:
        """Remember the model, whose projection is used."""
        self._student = weakref.ref(student)

    def forward(self, predictions, targets):
        """Both layers' outputs [s', b, ·] → (loss [b, s] fp32, False, False): the same on every
        tensor-parallel rank.
        """
        predictions, targets = self.pre_forward(predictions, targets)
        group = parallel_state.get_tensor_model_parallel_group()
        loss = hidden_states.hidden_state_loss(
            predictions,
            targets,
            model=self._student(),
            kind=self.kind,
            sequence_parallel=self._config.sequence_parallel,
            tp_group=group if group.size() > 1 else None,
        )
        self.metrics = {hidden_states.HIDDEN_LOSS: loss.detach().transpose(0, 1)}
        return self.post_forward(loss, tp_reduce=False, is_sequence_parallel=False)


class WeightedBalancer(mtd.DistillationLossBalancer):
    """Weighted sum of the logits loss and the mean of the hidden-state losses.

    ModelOpt's own balancer multiplies hidden-state losses by logits loss / hidden-state loss of the
    same micro-batch: that depends on the layout, and where the logits loss is negative it would
    maximise them. Ours takes its weights from `hidden_states.Weights`.
    """

    def __init__(self, weights: hidden_states.Weights):
        super().__init__()
        self.weights = weights

    def forward(self, loss_dict):
        loss_dict.pop(mtd.loss_balancers.STUDENT_LOSS_KEY, None)
        logits = next(value for key, value in loss_dict.items() if "Logits" in key)
        others = [value for key, value in loss_dict.items() if "Logits" not in key]
        hidden = torch.stack(others).mean() if others else torch.zeros_like(logits)
        total = self.weights.logits * logits
        return {
            "kd_loss": total + self.weights.hidden * hidden if others else total,
            "logits_loss": logits,
            "intermediate_loss": hidden,
        }
