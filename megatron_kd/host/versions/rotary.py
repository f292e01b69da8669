"""Rotary positions as a model's directory has them, where the host's converter drops settings.

What both tested hosts do, measured against transformers on tiny models: scaled positions of type
llama3 are scaled for an original length of 8,192 and factors of 1 and 4 whatever the directory
says (Core takes no others); type linear is dropped by Bridge 0.3; type yarn is reset to plain
positions by the converters of Llama, Qwen2 and Qwen3, but for its factor on the attention
(Mistral's ends in a TypeError of its own); gpt_oss's yarn is written out with its published values.
Here the frequencies that transformers computes are compared with the host's, and put in their place
where they differ.
"""

import importlib
import inspect
import math
from functools import partial

import torch

from megatron_kd.typed_mapping import ConfigError

DEPENDS_ON_LENGTH = ("dynamic", "longrope")
"""Frequencies that change with the length of each sequence; the host has one set for all."""

FREQUENCIES_DIFFER = 1e-6
"""Relative; both sides compute them in fp32."""


def correct(provider, config) -> None:
    """Give a model provider the positions of a directory's configuration.

    Families with a rotary embedding of their own (Gemma 3, multi-latent attention) keep what their
    converter made of it.

    Args:
        provider: The host's, not yet finalized.
        config: transformers' configuration of the directory.

    Raises:
        ConfigError: The host has no such positions.
    """
    rope = _settings(config)
    kind = rope.get("rope_type") or rope.get("type")
    if kind is None or _has_its_own(provider):
        return
    if kind in DEPENDS_ON_LENGTH:
        raise ConfigError(
            f"the student's rotary positions are of type {kind}, whose frequencies depend on the "
            "length of each sequence; the host has one set of frequencies for all. Take a model "
            "with another rope_scaling"
        )
    if kind == "default":
        return
    embedding = _rotary_embedding(config)
    if embedding is None:
        raise ConfigError(
            f"the student's rotary positions are of type {kind}, and transformers has no rotary "
            f"embedding for model type {config.model_type} to take their frequencies from"
        )
    if kind == "yarn":
        _set_yarn(provider, config, rope, float(embedding.attention_scaling))
        return
    if not math.isclose(float(embedding.attention_scaling), 1.0):
        raise ConfigError(
            f"rotary positions of type {kind} with a factor on the attention of "
            f"{float(embedding.attention_scaling):.4f} are not known to the host"
        )
    provider.register_pre_wrap_hook(partial(_set_frequencies, frequencies=embedding.inv_freq))


def _settings(config) -> dict:
    """The rotary settings under the name that either major version of transformers has for them."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return rope if isinstance(rope, dict) else {}


def _has_its_own(provider) -> bool:
    return (
        getattr(provider, "multi_latent_attention", False)
        or isinstance(getattr(provider, "rotary_base", None), (tuple, list))  # local and global
        or provider.position_embedding_type not in ("rope", "yarn")
    )


def _rotary_embedding(config) -> torch.nn.Module | None:
    """transformers' own rotary embedding of a configuration: a module with `inv_freq` and
    `attention_scaling`."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    model = AutoModelForCausalLM._model_mapping[type(config)]
    module = importlib.import_module(model.__module__)
    for name, member in vars(module).items():
        if name.endswith("RotaryEmbedding") and inspect.isclass(member):
            return member(config)
    return None


def _set_yarn(provider, config, rope: dict, attention_factor: float) -> None:
    factor = float(rope["factor"])
    provider.position_embedding_type = "yarn"
    provider.yarn_rotary_scaling_factor = factor
    provider.yarn_original_max_position_embeddings = (
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
    )
    provider.yarn_beta_fast = float(rope.get("beta_fast") or 32)
    provider.yarn_beta_slow = float(rope.get("beta_slow") or 1)
    provider.yarn_correction_range_round_to_int = bool(rope.get("truncate", True))
    # Core's factor on the attention without either is 0.1 ln(factor) + 1.
    plain = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    provider.yarn_mscale = provider.yarn_mscale_all_dim = None
    if not math.isclose(attention_factor, plain, rel_tol=1e-6):
        if factor <= 1:
            raise ConfigError(
                f"rotary positions of type yarn with factor {factor:g} and a factor on the "
                f"attention of {attention_factor:.4f} are not known to the host"
            )
        provider.yarn_mscale = (attention_factor - 1.0) / (0.1 * math.log(factor))
        provider.yarn_mscale_all_dim = 0.0


def _set_frequencies(model: list, *, frequencies: torch.Tensor) -> list:
    """Pre-wrap hook: every stage's rotary embedding turns by these frequencies [channels / 2]."""
    for chunk in model:
        embedding = getattr(chunk, "rotary_pos_emb", None)
        if embedding is None:
            continue
        own = embedding.inv_freq
        if embedding.seq_len_interpolation_factor is not None:
            own = own / embedding.seq_len_interpolation_factor
        expected = frequencies.to(own)
        if own.shape != expected.shape:
            raise ConfigError(
                f"the host rotates {2 * own.shape[-1]} channels of a head, transformers "
                f"{2 * expected.shape[-1]}"
            )
        if not torch.allclose(own, expected, rtol=FREQUENCIES_DIFFER, atol=0.0):
            embedding.seq_len_interpolation_factor = None
            embedding.inv_freq = expected.clone()
    return model
