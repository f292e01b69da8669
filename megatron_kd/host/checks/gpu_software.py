"""What a run on GPUs cannot have with the software and the environment that are there."""

import importlib.metadata
import os

from packaging.version import Version

from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.versions import every_version
from megatron_kd.typed_mapping import ConfigError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

NAN_ENGINES = (Version("2.9"), Version("2.11"))
"""The first version of Transformer Engine whose packed attention gives NaN with grouped queries
under context parallelism, and the first later one that does not."""


def check_gpu_software(container) -> None:
    """Refuse what would fail, or be wrong, on this machine's GPUs.

    Args:
        container: The host's configuration of a run that is not for the CPU backend.

    Raises:
        ConfigError: Names the setting and what it meets, and the remedy.
    """
    _check_connections(container)
    _check_packed_attention(container, transformer_engine())
    if not cpu_backend.is_active():  # a rehearsal elsewhere knows nothing of the GPUs' machine
        _check_fusion(container.model)


def transformer_engine() -> Version | None:
    """The installed version of Transformer Engine; None where there is none."""
    try:
        return Version(importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_connections(container) -> None:
    """One hardware queue puts the gathering of weights in line with the products it should hide
    behind; newer hosts refuse it in words that name no remedy.
    """
    sharded = container.ddp.use_megatron_fsdp or container.dist.use_megatron_fsdp
    if sharded and os.environ.get(CONNECTIONS) == "1":
        raise ConfigError(
            f"Megatron-FSDP gathers weights beside the computation, and {CONNECTIONS}=1 allows one "
            f"queue for both: unset {CONNECTIONS} (scripts/launch_slurm.sh does), or use "
            "bridge.ddp.use_distributed_optimizer=true in place of Megatron-FSDP"
        )


def _check_packed_attention(container, engine: Version | None) -> None:
    model = container.model
    grouped = model.num_query_groups not in (None, model.num_attention_heads)
    apart = container.dataset.documents_apart
    if engine is None or not (grouped and apart and model.context_parallel_size > 1):
        return
    first, mended = NAN_ENGINES
    if first <= Version(engine.base_version) < mended:
        raise ConfigError(
            f"Transformer Engine {engine} gives NaN for block-packed documents with grouped "
            f"queries under bridge.model.context_parallel_size={model.context_parallel_size}: use "
            f"Transformer Engine {mended} or later (container/Dockerfile brings one), one context-"
            "parallel rank, or data prepared with --packing naive or none"
        )


def _check_fusion(model) -> None:
    if model.gradient_accumulation_fusion and not every_version.has_fusion_kernel():
        raise ConfigError(
            "bridge.model.gradient_accumulation_fusion=true needs APEX's kernel "
            f"{every_version.FUSION_KERNEL}, which is not installed: install APEX with its CUDA "
            "extensions (NVIDIA's PyTorch images bring it), or leave the setting out"
        )
