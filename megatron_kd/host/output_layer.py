"""Let the host's output layer hand its input through, so that a loss or a teacher engine projects
the hidden states itself, a chunk at a time.

The layer is still called as a module: the hooks of DDP, of the distributed optimizer and of FSDP
fire before its weight is read.

s: sequence positions on this rank (s / tp under sequence parallelism), b: micro-batch, h: hidden
size, v: vocabulary, vp = v / tp.
"""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import unwrap_model

PLAIN_FORWARDS = {ColumnParallelLinear.forward}
"""The `forward` of output layers that multiply by their weight, add their bias, and do no more."""

_ATTRIBUTE = "megatron_kd_tap"


class OutputLayerTap:
    """Installed on the output layer of one model chunk, in place of its `forward`.

    While `hands_input_through` is true the layer returns the hidden states [s, b, h] that it was
    given; otherwise it projects as the host built it. There is one tap for each layer: installing a
    second one returns the first.

    Attributes:
        layer: The host's output layer.
        hands_input_through: Whether calls return their input. Set by whoever installed the tap.
    """

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer
        self.hands_input_through = False
        self._project = layer.forward
        self._weight = None
        layer.forward = self._forward
        setattr(layer, _ATTRIBUTE, self)

    @classmethod
    def install(cls, model: torch.nn.Module) -> "OutputLayerTap":
        """The tap on the output layer of a (wrapped) model chunk, installed now if it has none."""
        layer = unwrap_model(model).output_layer
        return cls.of(layer) or cls(layer)

    @classmethod
    def of(cls, layer: torch.nn.Module) -> "OutputLayerTap | None":
        """The tap on an output layer; None where the layer is as the host built it."""
        return getattr(layer, _ATTRIBUTE, None)

    def check_is_plain(self) -> None:
        """Refuse to do without an output layer that does more than its product.

        Raises:
            ValueError: The layer's class has a `forward` of its own, such as one that caps logits:
                a loss that projects hidden states itself would leave that out.
        """
        kind = type(self.layer)
        if kind.forward not in PLAIN_FORWARDS:
            raise ValueError(
                f"the output layer is a {kind.__module__}.{kind.__qualname__}, whose forward does "
                "more than multiply by its weight; a loss that projects hidden states itself "
                "(fused_chunked, fused_online) would leave that out: set loss.impl=dense, or "
                "sparse_chunked offline"
            )

    @property
    def weight(self) -> torch.Tensor:
        """[vp, h], what the last call would have multiplied by: the layer's own weight, or the one
        that was passed, as the host does where embedding and output layer are tied.
        """
        return self.layer.weight if self._weight is None else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """[vp], or None."""
        return self.layer.bias

    @property
    def sequence_parallel(self) -> bool:
        """Whether each tensor-parallel rank calls the layer with its own part of the sequence."""
        return bool(getattr(self.layer, "sequence_parallel", False))

    def _forward(self, input_, weight=None, runtime_gather_output=None):
        self._weight = weight
        if self.hands_input_through:
            return input_, None
        return self._project(input_, weight=weight, runtime_gather_output=runtime_gather_output)


def hands_input_through(layer: torch.nn.Module) -> bool:
    """Whether a call of this output layer returns hidden states and not logits."""
    tap = OutputLayerTap.of(layer)
    return tap is not None and tap.hands_input_through
