"""The host's settings can carry a distillation on the ranks that are there."""

from megatron_kd.config import DistillConfig
from megatron_kd.host.container import REQUIRED
from megatron_kd.typed_mapping import ConfigError


def check_required(asked: dict) -> None:
    """Refuse a setting that distillation cannot work with.

    Args:
        asked: Section → field → value, what the user set by hand.

    Raises:
        ConfigError: Names the setting, the value it must have, and why.
    """
    for key, (value, reason) in REQUIRED.items():
        section, name = key.split(".")
        if (asked.get(section) or {}).get(name, value) != value:
            raise ConfigError(f"bridge.{key} must be {str(value).lower()}: {reason}")


def check_layout(config: DistillConfig, container, ranks: int | None) -> None:
    """Check sizes, parallel layout and precision.

    Args:
        config: The run.
        container: The host's configuration of it.
        ranks: How many there are; None where nothing says it.

    Raises:
        ConfigError: Names the settings that contradict each other, and the remedy.
    """
    _check_sizes(container, ranks)
    _check_precision(container)
    _check_virtual_pipeline(config, container.model)
    _check_fully_sharded(container)
    _check_shares(container.model)
    _check_vocabulary(container)
    _check_experts(container.model)


def _check_sizes(container, ranks: int | None) -> None:
    train, model = container.train, container.model
    for name in ("train_iters", "micro_batch_size", "global_batch_size"):
        if not (getattr(train, name) or 0) > 0:
            raise ConfigError(f"bridge.train.{name} must be set and greater than 0")
    per_replica = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    if ranks is not None and ranks % per_replica:
        raise ConfigError(
            f"a replica of the model takes {per_replica} ranks (tensor "
            f"{model.tensor_model_parallel_size} × pipeline {model.pipeline_model_parallel_size} × "
            f"context {model.context_parallel_size}), and the run has {ranks}; start a multiple of "
            "that with torchrun --nproc-per-node"
        )
    replicas = 1 if ranks is None else ranks // per_replica
    if train.global_batch_size % (train.micro_batch_size * replicas):
        raise ConfigError(
            f"bridge.train.global_batch_size={train.global_batch_size} is not a multiple of "
            f"micro_batch_size {train.micro_batch_size} × {replicas} data-parallel replicas"
        )


def _check_precision(container) -> None:
    """Without the host's mixed precision, model and optimizer are told separately; where they
    differ the optimizer hands gradients in fp32 to weights in 16 bits, and the first step fails.
    """
    if container.mixed_precision is not None:  # it sets both
        return
    model, optimizer = container.model, container.optimizer
    for name in ("bf16", "fp16"):
        if bool(getattr(model, name)) != bool(getattr(optimizer, name)):
            raise ConfigError(
                f"bridge.model.{name} is {str(bool(getattr(model, name))).lower()}, but "
                f"bridge.optimizer.{name} is {str(bool(getattr(optimizer, name))).lower()}: set "
                "bridge.mixed_precision (bf16_mixed, fp16_mixed), which sets both, or remove both"
            )


def _check_virtual_pipeline(config: DistillConfig, model) -> None:
    if not model.virtual_pipeline_model_parallel_size:
        return
    if config.data.dataloader == "batch":
        raise ConfigError(
            "a virtual pipeline reads every batch once for each chunk of the model, which the host "
            "does not provide for with data.dataloader=batch; use single or cyclic"
        )
    if model.pipeline_model_parallel_size == 2 and not model.overlap_p2p_comm:
        # Both neighbours are one rank then, and the host's batched messages reach the wrong chunk.
        raise ConfigError(
            "with two pipeline stages the host exchanges the chunks of a virtual pipeline wrongly "
            "unless bridge.model.overlap_p2p_comm=true and bridge.model.batch_p2p_comm=false; set "
            "both, or use more stages"
        )


def _check_fully_sharded(container) -> None:
    sharded = container.ddp.use_megatron_fsdp or container.dist.use_megatron_fsdp
    checkpoint = container.checkpoint
    if (
        sharded
        and (checkpoint.save or checkpoint.load)
        and checkpoint.ckpt_format != "fsdp_dtensor"
    ):
        raise ConfigError(
            "Megatron-FSDP has a checkpoint format of its own: set "
            f"bridge.checkpoint.ckpt_format=fsdp_dtensor, not {checkpoint.ckpt_format}"
        )


def _check_shares(model) -> None:
    """Ranks that share a sequence hold equal parts of it."""
    shares = 2 * model.context_parallel_size if model.context_parallel_size > 1 else 1
    if model.sequence_parallel:
        shares *= model.tensor_model_parallel_size
    if model.seq_length % shares:
        raise ConfigError(
            f"bridge.model.seq_length={model.seq_length} cannot be shared out equally under "
            f"context_parallel_size={model.context_parallel_size} and sequence_parallel="
            f"{str(bool(model.sequence_parallel)).lower()}; use a multiple of {shares}"
        )


def _check_vocabulary(container) -> None:
    """The host pads a vocabulary that it takes from a tokenizer, and splits as it stands one that
    the model names, as every student's directory does.
    """
    model, ranks = container.model, container.model.tensor_model_parallel_size
    if getattr(container.tokenizer, "use_tokenizer_vocab_size", False):  # Bridge 0.6
        return
    if model.vocab_size % ranks:
        fitting = -(-model.vocab_size // ranks) * ranks
        raise ConfigError(
            f"the student's {model.vocab_size:,} output rows cannot be split over "
            f"bridge.model.tensor_model_parallel_size={ranks}, and the host does not pad them; use "
            f"a size that divides them, or give the student {fitting:,} rows (transformers: "
            f"model.resize_token_embeddings({fitting}))"
        )


def _check_experts(model) -> None:
    """The host says this in the first training step, after the first evaluation."""
    if (
        model.num_moe_experts
        and model.tensor_model_parallel_size > 1
        and not model.sequence_parallel
    ):
        raise ConfigError(
            "beside tensor parallelism the host trains experts only with sequence parallelism: set "
            "bridge.model.sequence_parallel=true"
        )
