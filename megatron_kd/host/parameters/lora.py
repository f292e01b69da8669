"""Low-rank adapters (LoRA) on a frozen student: the host's own layers, put in where the student is
built.

The host's `peft` section wants the base model as a Megatron checkpoint of its own. Here the student
comes from its Hugging Face directory as always; checkpoints hold base and adapters, so a run
resumes and is exported from them alone. The host's converter merges the adapters into the weights
it writes.
"""

import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_kd.config import LoraConfig
from megatron_kd.host import versions
from megatron_kd.host.parameters import freezing as trainable
from megatron_kd.typed_mapping import ConfigError

logger = logging.getLogger(__name__)


def add(model: list, *, config: LoraConfig) -> list:
    """Pre-wrap hook, after the weights: freeze the model and give the named layers adapters.

    Args:
        model: Chunks of this pipeline stage.
        config: Which layers, and how large.

    Raises:
        ConfigError: No layer of this stage has a configured name, or the output layer has.
    """
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from megatron.bridge.peft.lora import LoRA

    versions.apply_patches()
    model = LoRA(
        target_modules=list(config.target_modules),
        dim=config.dim,
        alpha=config.alpha,
        dropout=config.dropout,
    )(model, training=True)
    wrapped = [
        name
        for chunk in model
        for name, module in chunk.named_modules()
        if isinstance(module, AdapterWrapper)
    ]
    if any(name.endswith("output_layer") for name in wrapped):
        raise ConfigError(
            "student.lora.target_modules names the output layer, whose weight the loss reads "
            "directly; leave it out"
        )
    if not wrapped:
        raise ConfigError(
            f"student.lora.target_modules: {', '.join(config.target_modules)} names no layer of "
            "this pipeline stage; use linear_qkv, linear_proj, linear_fc1, linear_fc2, or patterns "
            "such as *.layers.0.*.linear_qkv"
        )
    for chunk in model:
        for name, module in chunk.named_modules():
            if isinstance(module, AdapterWrapper):
                module.register_load_state_dict_pre_hook(_wrapped_names)
                if not module.adapter.is_expert:
                    _start(module.adapter.linear_in.weight, _whole_name(chunk, name))
    trainable.reach_recomputed_layers(model)
    logger.info("adapters on %d layers of this stage, %s first", len(wrapped), wrapped[0])
    return model


@torch.no_grad()
def _start(weight: torch.nn.Parameter, name: str) -> None:
    """This rank's part of an adapter's first matrix, whose start is a function of its name and
    whole shape, so that every layout begins alike. (The second matrix is zero.)
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shape, dim = list(weight.shape), weight.partition_dim
    shape[dim] *= ranks
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * (2 / sum(shape)) ** 0.5
    weight.copy_(whole.chunk(ranks, dim)[rank])


def _whole_name(chunk: torch.nn.Module, name: str) -> str:
    """A module's name with its layer's number in the whole model."""
    found = re.match(r"(.*\.layers\.)\d+", name)
    if not found:
        return name
    number = chunk.get_submodule(found[0]).layer_number
    return f"{found[1]}{number}{name[found.end() :]}"


def _wrapped_names(module, state_dict, prefix, *_) -> None:
    """The host saves a wrapped layer's weights under the layer's own name, and would not find them
    again when it loads them.
    """
    inner = (f"{prefix}adapter.", f"{prefix}to_wrap.")
    for name in [n for n in state_dict if n.startswith(prefix) and not n.startswith(inner)]:
        state_dict[f"{prefix}to_wrap.{name[len(prefix) :]}"] = state_dict.pop(name)


@contextmanager
def in_loaded_models(config: LoraConfig | None) -> Iterator[None]:
    """Models that the host builds for a checkpoint get adapters too: its own record of the run does
    not mention them.
    """
    from megatron.bridge.training import model_load_save

    load_config = model_load_save.load_model_config

    def with_adapters(checkpoint):
        provider, arguments = load_config(checkpoint)
        provider.register_pre_wrap_hook(partial(add, config=config))
        return provider, arguments

    if config is not None:
        model_load_save.load_model_config = with_adapters
    try:
        yield
    finally:
        model_load_save.load_model_config = load_config


def are_in(checkpoint: str | Path) -> bool:
    """Whether a checkpoint holds adapters."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(str(checkpoint)).read_metadata()
    return any(".adapter." in name for name in metadata.state_dict_metadata)
