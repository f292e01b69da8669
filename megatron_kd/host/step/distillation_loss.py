"""Where the distillation loss enters Megatron-Core: the output layer and the language-model loss of
the last stage.

The output layer's `forward` hands its input through instead of projecting it, and the model's
`compute_language_model_loss` runs our loss on what it is handed: hidden states for `fused_chunked`,
logits for the others. The output layer is still *called* as a module, so the hooks of DDP,
distributed optimizer and FSDP fire.

s: sequence positions on this rank (s/tp under sequence parallelism, where hidden states are
    concerned),
b: micro-batch, h: hidden size, K: support, Vp: vocabulary / tp.
"""

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.utils import unwrap_model

from megatron_kd.config import LossConfig
from megatron_kd.host.callbacks import profiling
from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.host.step import hidden_states
from megatron_kd.losses import (
    TopKTarget,
    dense_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
    sparse_chunked_kd_loss,
)

ATTRIBUTE = "distillation_loss"


@dataclass
class LossBatch:
    """What the last stage needs of one micro-batch, in the data loader's layout."""

    topk_ids: torch.Tensor  # [b, s, K] int32, −1 unused
    topk_logprobs: torch.Tensor  # [b, s, K] fp32 nats, −inf unused
    log_z_tau: (
        torch.Tensor | None
    )  # [b, s] fp32, the teacher's normaliser at the loss's temperature
    teacher_hidden: torch.Tensor | None  # [b, s, H], the teacher's last hidden state
    loss_mask: torch.Tensor  # [b, s] fp32
    supervised_index: torch.Tensor  # [rows] int64, into the flattened [s · b]


class DistillationLoss:
    """The loss of one model chunk that owns an output layer.

    Between `begin` and `end` the model's forward computes the distillation loss; outside, the model
    is as the host built it, for generation and export.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: LossConfig,
        vocab_size: int,
        weights: hidden_states.Weights,
    ):
        self.config = config
        self.weights = weights
        self.vocab_size = vocab_size
        self.tap = OutputLayerTap.install(model)
        self.mtp_heads = getattr(model.config, "mtp_num_layers", None) or 0
        self.sequence_parallel = self.tap.sequence_parallel
        self.gradient_accumulation_fusion = bool(
            getattr(model.config, "gradient_accumulation_fusion", False)
        )
        self.tp_group = model.pg_collection.tp if model.pg_collection.tp.size() > 1 else None
        self._model = model
        self._host_loss = model.compute_language_model_loss
        self._batch: LossBatch | None = None
        self._hidden = None
        self._metrics = {}
        self._calls = 0
        self._check(model.config)
        if weights.config.pairs:
            self.tap.layer.register_forward_pre_hook(self._keep_hidden, with_kwargs=True)
        model.compute_language_model_loss = self._compute
        setattr(model, ATTRIBUTE, self)

    @staticmethod
    def of(model: torch.nn.Module) -> "DistillationLoss | None":
        """The loss attached to a (wrapped) model chunk; None on stages without an output layer."""
        return getattr(unwrap_model(model), ATTRIBUTE, None)

    def begin(self, batch: LossBatch) -> None:
        self._batch, self._calls, self._metrics = batch, 0, {}
        self.tap.hands_input_through = self.config.impl == "fused_chunked"

    def end(self) -> dict[str, torch.Tensor]:
        """Metrics of the forward pass since `begin`: name → [b, s] fp32, detached."""
        metrics, self._metrics = self._metrics, {}
        self._batch = self._hidden = None
        self.tap.hands_input_through = False
        return metrics

    def _check(self, model_config) -> None:
        if getattr(model_config, "defer_embedding_wgrad_compute", False):
            raise ValueError(
                "defer_embedding_wgrad_compute postpones the weight gradient that the distillation "
                "loss computes itself; set bridge.model.defer_embedding_wgrad_compute=false"
            )

    def _keep_hidden(self, module, arguments, keywords) -> None:
        """Forward pre-hook of the output layer: what it reads is the student's last hidden
        state.
        """
        self._hidden = arguments[0] if arguments else keywords["input_"]

    def _compute(self, labels: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """labels [b, s] and what the output layer returned → per-token loss [b, s] fp32."""
        if self._batch is None:
            return self._host_loss(labels, output)
        self._calls += 1
        if (
            self._calls <= self.mtp_heads
        ):  # the extra heads come first, with rolled labels and no teacher rows
            return self._next_token_loss(labels, output)
        with profiling.stage("loss"):
            return self._distillation_loss(labels, output)

    def _distillation_loss(self, labels, output) -> torch.Tensor:
        batch, config = self._batch, self.config
        target = TopKTarget(
            ids=batch.topk_ids.transpose(0, 1),  # [s, b, K]
            logprobs=batch.topk_logprobs.transpose(0, 1),
            log_z_tau=None if batch.log_z_tau is None else batch.log_z_tau.transpose(0, 1),
        )
        common = dict(
            divergence=config.divergence,
            labels=labels.transpose(0, 1),
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
            return_metrics=True,
        )
        if config.impl == "fused_chunked":
            loss, metrics = fused_chunked_kd_loss(
                output,
                self.tap.weight,
                target,
                bias=self.tap.bias,
                chunk_size=config.chunk_size,
                gradient=config.gradient,
                token_weights=batch.loss_mask.transpose(0, 1),
                supervised_index=batch.supervised_index,
                sequence_parallel=self.sequence_parallel,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
                **common,
            )
        elif config.impl == "sparse_chunked":
            if config.chunk_size != "auto":
                common["chunk_size"] = config.chunk_size
            loss, metrics = sparse_chunked_kd_loss(output, target, reuse_logits=True, **common)
        else:
            loss, metrics = dense_kd_loss(output, target, **common)
        self._record(loss, metrics)
        if self.weights.config.pairs:
            loss = self._with_hidden_states(loss, batch.teacher_hidden)
        return loss.transpose(0, 1).contiguous()

    def _with_hidden_states(self, logits_loss, teacher_hidden) -> torch.Tensor:
        """[s, b] and the teacher's states [b, s, H] → the weighted sum of both losses [s, b]."""
        parallel = dict(sequence_parallel=self.sequence_parallel, tp_group=self.tp_group)
        hidden_loss = hidden_states.hidden_state_loss(
            self._hidden,
            hidden_states.own_part(teacher_hidden.transpose(0, 1), **parallel),
            model=self._model,
            kind=self.weights.config.loss,
            **parallel,
        )
        total = self.weights.logits * logits_loss + self.weights.hidden * hidden_loss
        self._metrics[hidden_states.HIDDEN_LOSS] = hidden_loss.detach().transpose(0, 1)
        self._metrics[hidden_states.TOTAL_LOSS] = total.detach().transpose(0, 1)
        return total

    def _record(self, loss, metrics) -> None:
        reported = {"kd loss": metrics.divergence, "lm loss": metrics.lm_loss}
        if self.config.divergence.ce_weight:
            reported[hidden_states.TOTAL_LOSS] = loss.detach()
        reported |= {"student mass": metrics.student_mass, "teacher mass": metrics.teacher_mass}
        self._metrics = {
            name: value.transpose(0, 1) for name, value in reported.items() if value is not None
        }

    def _next_token_loss(self, labels, output) -> torch.Tensor:
        if self.config.impl != "fused_chunked":
            return self._host_loss(labels, output)
        loss = fused_cross_entropy(
            output,
            self.tap.weight,
            labels.transpose(0, 1),
            bias=self.tap.bias,
            chunk_size=self.config.chunk_size,
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        return loss.transpose(0, 1).contiguous()


def register(provider, config: LossConfig, weights: hidden_states.Weights, teacher_width) -> None:
    """Attach the loss to every chunk with an output layer when `provider` builds the model.

    Call it after the hook that loads the weights: hooks run in order.

    Args:
        provider: The student's model provider.
        config: The loss between logits.
        weights: Of it and of the loss between hidden states.
        teacher_width: Hidden size of the cached teacher states; None without that loss.
    """
    provider.register_pre_wrap_hook(
        partial(
            _attach,
            config=config,
            vocab_size=provider.vocab_size,
            weights=weights,
            teacher_width=teacher_width,
        )
    )


def _attach(model: list, *, config, vocab_size, weights, teacher_width) -> list:
    for chunk in model:
        if getattr(chunk, "post_process", False):
            if teacher_width is not None:
                hidden_states.add_projection(chunk, chunk.config.hidden_size, teacher_width)
            DistillationLoss(chunk, config, vocab_size, weights)
    return model
