"""Layers whose hidden states a resident teacher is compared on: whether they exist, and where."""

from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_kd.config import FINAL_NORM, HiddenStatesConfig
from megatron_kd.typed_mapping import ConfigError


def layer_name(layer: int | str, provider) -> str:
    """A configured layer as a module name of the model chunk on this (last) pipeline stage.

    Raises:
        ConfigError: The layer is on an earlier stage.
    """
    if layer == FINAL_NORM:
        return "decoder.final_layernorm"
    index = layer if layer >= 0 else provider.num_layers + layer
    local = index - get_transformer_layer_offset(provider)
    if local < 0:
        raise ConfigError(
            f"hidden_states.pairs names layer {layer}, which is not on the last pipeline stage; "
            "ModelOpt compares layers of the last stage only: choose later layers, or fewer stages"
        )
    return f"decoder.layers.{local}"


def check_layers(config: HiddenStatesConfig, student, teacher) -> None:
    """Refuse layers that do not exist, and recomputation that would detach them.

    Raises:
        ConfigError: Names the pair.
    """
    for pair in config.pairs:
        for layer, provider, whose in zip(
            pair, (student, teacher), ("student", "teacher"), strict=True
        ):
            count = provider.num_layers
            if layer != FINAL_NORM and not -count <= layer < count:
                raise ConfigError(
                    f"hidden_states.pairs: {list(pair)} names layer {layer} of the {whose}, which "
                    f"has {count} layers (0 … {count - 1}, or -1 for the last)"
                )
        if pair[0] != FINAL_NORM and student.recompute_granularity == "full":
            raise ConfigError(
                "bridge.model.recompute_granularity=full runs the student's layers without a "
                f"graph, so a loss on layer {pair[0]} would have no gradient; use {FINAL_NORM}, or "
                "recompute_granularity=selective"
            )
