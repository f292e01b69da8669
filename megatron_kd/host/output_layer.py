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

CAPPING_FORWARDS = {
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2OutputLayer.forward": (
        "final_logit_softcapping"
    ),
    "megatron.bridge.models.gemma.modeling_gemma4.Gemma4OutputLayer.forward": (
        "final_logit_softcapping"
    ),
}
"""The `forward` of mix-ins that make c * tanh(logits / c) of what the layer below them returns →
the field of the layer's configuration that holds c; None and 0 cap nothing. By name, as only Bridge
0.6 has the second, which needs a later transformers."""

LATER_MULTIPLIERS = {"mup_output_mult": "use_mup", "lm_head_multiplier": None}
"""Field of a model's configuration by which the model multiplies what its output layer returned →
the field that switches this on; None where it always does."""

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

    def logit_options(self) -> dict[str, float | None]:
        """What the layer does to its product, as keywords of the losses that project hidden states.

        Raises:
            ValueError: The layer's class has a `forward` that is not known here; whoever projects
                hidden states itself would leave out what that does.
        """
        caps = []
        for kind in type(self.layer).__mro__:
            forward = vars(kind).get("forward")
            if forward in PLAIN_FORWARDS:
                return {"logit_softcap": (caps[0] or None) if caps else None}
            if forward is None:
                continue
            name = f"{forward.__module__}.{forward.__qualname__}"
            if caps or name not in CAPPING_FORWARDS:
                break
            caps.append(getattr(self.layer.config, CAPPING_FORWARDS[name]))
        raise ValueError(
            f"the output layer calls {name}, which does more than multiply by its weight, in a way "
            "not known here; what projects hidden states itself would leave that out: set "
            "loss.impl=dense (or sparse_chunked offline), and capture with another engine than "
            "megatron"
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


def later_multiplier(config) -> tuple[str, float] | None:
    """The field by which a model multiplies what its output layer returned, and its value; None
    where it does not.

    Offline this needs no care: logits are multiplied by the host, and hidden states handed through
    in their place give the same product. A teacher beside the student is compared by what the two
    output layers return, before any multiplication.
    """
    for name, switch in LATER_MULTIPLIERS.items():
        is_on = switch is None or getattr(config, switch, False)
        factor = getattr(config, name, 1.0) if is_on else 1.0
        if factor != 1:
            return name, factor
    return None


def hands_input_through(layer: torch.nn.Module) -> bool:
    """Whether a call of this output layer returns hidden states and not logits."""
    tap = OutputLayerTap.of(layer)
    return tap is not None and tap.hands_input_through
