"""Attention windows as a model's directory has them, where the host's converter has others.

transformers' `sliding_window` counts the keys that a query sees, its own included; the host's
window counts those before it. Measured against transformers on tiny models: Bridge 0.3 gives
Mistral, Gemma 2 and Gemma 3 one key too many and gpt_oss 129 keys whatever its directory says;
Qwen2 and Qwen3 get none; Gemma 2 has its window in every other layer, counted from the second,
where transformers counts from the first, and applies it only to a mask that nobody passes.
"""

from megatron_kd.host import versions
from megatron_kd.typed_mapping import ConfigError

WINDOWED, WHOLE = "sliding_attention", "full_attention"
KNOWN = {WINDOWED, WHOLE, "linear_attention"}


def windows(config) -> list[int | None]:
    """Keys that a query of each layer sees, None for all before it.

    Args:
        config: transformers' configuration of the directory.

    Raises:
        ConfigError: A layer attends in a way that the host does not know.
    """
    count = config.num_hidden_layers
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [width] * count
    unknown = sorted(set(kinds) - KNOWN)
    if unknown:
        raise ConfigError(
            f"the student has layers of type {', '.join(unknown)}, which the host does not know; "
            f"known: {', '.join(sorted(KNOWN))}"
        )
    return [width if kind == WINDOWED else None for kind in kinds]


def correct(provider, config) -> None:
    """Give a model provider the attention windows of a directory's configuration.

    Args:
        provider: The host's, not yet finalized.
        config: transformers' configuration of the directory.

    Raises:
        ConfigError: A layer attends in a way that the host does not know.
    """
    asked = windows(config)
    widths = {width for width in asked if width}
    if not widths:
        provider.window_size = None
        return
    (width,) = widths
    if hasattr(provider, "interleaved_attn_pattern"):  # Gemma 3 makes its layers' windows itself
        counts_query = versions.current().gemma3_window_counts_query
        provider.window_size = width if counts_query else width - 1
        return
    provider.window_size = (width - 1, 0)
    if hasattr(provider, "attn_logit_softcapping"):  # Gemma 2 chooses its layers itself
        return
    provider.window_attn_skip_freq = None if all(asked) else [int(bool(own)) for own in asked]
    if getattr(provider, "cp_comm_type", None) is None:
        provider.cp_comm_type = "a2a"  # the only one that Transformer Engine windows allow
