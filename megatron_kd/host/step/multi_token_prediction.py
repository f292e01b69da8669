"""Layers that predict further tokens (MTP) keep the host's loss: cross-entropy to the label.

The host runs the output layer and the language-model loss once for each of them, with labels and
mask shifted, before it does so for the next token. The teacher has no rows for them.

s: sequence positions on this rank (s / tp under sequence parallelism for hidden states),
b: micro-batch, h: hidden size, vp: vocabulary / tp.
"""

import torch

from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.losses import fused_cross_entropy


class MultiTokenPrediction:
    """The MTP layers of one model chunk that owns an output layer; there may be none.

    Args:
        model: The chunk.
        tap: On its output layer.
        options: Keywords of `fused_cross_entropy` beside the tensors.
    """

    def __init__(self, model: torch.nn.Module, tap: OutputLayerTap, options: dict):
        self.layers = getattr(model.config, "mtp_num_layers", None) or 0
        self.tap = tap
        self.options = options
        self._host_loss = model.compute_language_model_loss
        self._losses_formed = 0

    def begin(self) -> None:
        """Call before each forward pass of the model."""
        self._losses_formed = 0

    def is_next(self) -> bool:
        """Whether the loss that the host asks for is an MTP layer's; call it once for each loss."""
        self._losses_formed += 1
        return self._losses_formed <= self.layers

    def loss(self, labels: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Per-token cross-entropy [b, s] fp32.

        Args:
            labels: [b, s], shifted by the host.
            output: What the output layer returned: logits [s, b, vp], or the hidden states
                [s, b, h] that it handed through.
        """
        if not self.tap.hands_input_through:
            return self._host_loss(labels, output)
        loss = fused_cross_entropy(
            output,
            self.tap.weight,
            labels.transpose(0, 1),
            bias=self.tap.bias,
            **self.options,
        )
        return loss.transpose(0, 1).contiguous()
