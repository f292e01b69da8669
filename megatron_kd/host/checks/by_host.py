"""What the host itself refuses when it starts: asked beforehand, on a copy of its configuration."""

import copy
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.bridge.training.config import ConfigContainer, runtime_config_update

from megatron_kd.typed_mapping import ConfigError

# Field of the model → package that the host imports as soon as it finds the field set. A machine
# without it can still check all the rest.
NEEDED_PACKAGES = {
    "moe_permute_fusion": "transformer_engine",
    "apply_rope_fusion": "transformer_engine",
}


def check_by_host(container: ConfigContainer, ranks: int | None) -> None:
    """Run what `pretrain` runs before it makes a process group.

    Args:
        container: Stays as it is.
        ranks: How many there are; None takes what one replica of the model needs.

    Raises:
        ConfigError: In the host's own words.
    """
    try:
        as_started(container, ranks)
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"Megatron-Bridge refuses this run: {error}") from error


def as_started(container: ConfigContainer, ranks: int | None) -> ConfigContainer:
    """A copy of a configuration as the host makes it when it starts: mixed precision and
    overlapped communication applied, derived values filled in, everything validated.
    """
    rehearsed = copy.copy(container)
    for field in dataclasses.fields(container):
        setattr(rehearsed, field.name, copy.copy(getattr(container, field.name)))
    for name, package in NEEDED_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            setattr(rehearsed.model, name, False)
    with _world(ranks or fewest_ranks(container.model)):
        runtime_config_update(rehearsed)
    return rehearsed


def fewest_ranks(model) -> int:
    """The fewest ranks that hold whole replicas of a model, and its experts whole too."""
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    experts = (model.expert_model_parallel_size or 1) * (
        model.expert_tensor_parallel_size or tensor  # as the host fills it in
    )
    return pipeline * math.lcm(tensor * model.context_parallel_size, experts)


@contextmanager
def _world(ranks: int) -> Iterator[None]:
    """The host asks the environment for the number of ranks until there is a process group."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
