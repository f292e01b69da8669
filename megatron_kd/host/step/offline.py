"""The loss against the teacher's cached top-K rows.

s: sequence positions on this rank (s / tp under sequence parallelism for hidden states),
b: micro-batch, h: hidden size, k: support, vp: vocabulary / tp.
"""

from collections.abc import Sequence
from functools import partial

import torch

from megatron_kd.config import DistillConfig, LossConfig
from megatron_kd.host.step import hidden_states
from megatron_kd.host.step.distillation_loss import DistillationLoss, Losses
from megatron_kd.losses import (
    TopKTarget,
    dense_kd_loss,
    fused_chunked_kd_loss,
    sparse_chunked_kd_loss,
)
from megatron_kd.losses.divergence import Divergence

FROM_HIDDEN_STATES = "fused_chunked"
"""The implementation that projects the hidden states itself; the others read logits."""


class OfflineLoss(DistillationLoss):
    """The loss of a student whose teacher is in a cache."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: LossConfig,
        vocab_size: int,
        weights,
        divergences: Sequence[Divergence] = (),
    ):
        """As `DistillationLoss`, and:

        Args:
            divergences: Of each cache of a mixture, where they have losses of their own; micro-
                batches are then of one sample.
        """
        super().__init__(model, config, vocab_size, weights)
        self._divergences = divergences
        self._last_hidden_state = None
        if weights.config.pairs:
            self._last_hidden_state = hidden_states.LastHiddenState(
                model, self.tap.layer, weights.config.loss, self.tp_group
            )

    @property
    def reads_hidden_states(self) -> bool:
        return self.config.impl == FROM_HIDDEN_STATES

    def losses(self, labels: torch.Tensor, output: torch.Tensor) -> Losses:
        inputs, divergence = self.inputs, self.config.divergence
        if self._divergences:
            divergence = self._divergences[int(inputs.source)]
        target = TopKTarget(
            ids=inputs.topk_ids.transpose(0, 1),  # [s, b, k]
            logprobs=inputs.topk_logprobs.transpose(0, 1),
            log_z_tau=None if inputs.log_z_tau is None else inputs.log_z_tau.transpose(0, 1),
        )
        logits, metrics = IMPLEMENTATIONS[self.config.impl](
            self,
            output,
            target,
            divergence=divergence,
            labels=labels,
            return_metrics=True,
            **self.parallel,
        )
        if self._last_hidden_state is None:
            return Losses(logits, metrics)
        hidden = self._last_hidden_state.loss(inputs.teacher_hidden.transpose(0, 1))
        return Losses(logits, metrics, hidden)


def _dense(loss: OfflineLoss, logits, target, **common):
    return dense_kd_loss(logits, target, **common)


def _sparse_chunked(loss: OfflineLoss, logits, target, **common):
    if loss.config.chunk_size != "auto":
        common["chunk_size"] = loss.config.chunk_size
    return sparse_chunked_kd_loss(logits, target, reuse_logits=True, **common)


def _fused_chunked(loss: OfflineLoss, hidden, target, **common):
    return fused_chunked_kd_loss(
        hidden,
        loss.tap.weight,
        target,
        bias=loss.tap.bias,
        gradient=loss.config.gradient,
        token_weights=loss.inputs.loss_mask.transpose(0, 1),
        supervised_index=loss.inputs.supervised_index,
        **loss.fused,
        **common,
    )


IMPLEMENTATIONS = {
    "dense": _dense,
    "sparse_chunked": _sparse_chunked,
    "fused_chunked": _fused_chunked,
}
"""loss.impl → (loss, output layer's output, target, keywords all share) → ([s, b], KDMetrics)."""


def attach_when_built(config: DistillConfig, container, weights: hidden_states.LossWeights) -> None:
    """Attach the loss to every chunk with an output layer when the host builds the model.

    Call it after the hook that loads the weights: hooks run in order.
    """
    width = None
    if config.hidden_states.pairs:
        width = container.dataset.open("train").manifest["hidden_size"]
    container.model.register_pre_wrap_hook(
        partial(
            _attach,
            config=config.loss,
            # Ids that the cache does not know are padding rows of the student (`checks.data`).
            vocab_size=container.dataset.open("train").manifest["vocab_size"],
            weights=weights,
            divergences=config.divergences() if config.cache.differ else (),
            teacher_width=width,
        )
    )


def _attach(model: list, *, config, vocab_size, weights, divergences, teacher_width) -> list:
    for chunk in model:
        if getattr(chunk, "post_process", False):
            if teacher_width is not None:
                hidden_states.add_projection(chunk, chunk.config.hidden_size, teacher_width)
            OfflineLoss(chunk, config, vocab_size, weights, divergences)
    return model
