"""Where the layers are whose hidden states a resident teacher is compared on."""

from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_kd.config import FINAL_NORM
from megatron_kd.typed_mapping import ConfigError


def layer_name(layer: int | str, provider, *, stage: int | None = None) -> str:
    """A configured layer as a module name of the model chunk on the last pipeline stage.

    Args:
        layer: As in `hidden_states.pairs`.
        provider: The host's provider of the model, with the run's layout.
        stage: The last stage's number; None takes this rank's, which is on the last one.

    Raises:
        ConfigError: The layer is on an earlier stage.
    """
    if layer == FINAL_NORM:
        return "decoder.final_layernorm"
    index = layer if layer >= 0 else provider.num_layers + layer
    local = index - get_transformer_layer_offset(provider, pp_rank=stage)
    if local < 0:
        raise ConfigError(
            f"hidden_states.pairs names layer {layer}, which is not on the last pipeline stage; "
            "ModelOpt compares layers of the last stage only: choose later layers, or fewer stages"
        )
    return f"decoder.layers.{local}"
