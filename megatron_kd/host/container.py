"""Build Megatron-Bridge's ConfigContainer from a DistillConfig.

Order: defaults that suit distillation, then the recipe's `bridge` section (checked field by field
against the host's own dataclasses), then what distillation requires, which a recipe may not
contradict.
"""

import os
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from megatron_kd.config import DistillConfig
from megatron_kd.host import versions
from megatron_kd.host.checks import data_sequence_length
from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.dataset_provider import DistillDatasetProvider
from megatron_kd.host.parameters import complete as weights_complete
from megatron_kd.host.parameters import sharded
from megatron_kd.typed_mapping import ConfigError, update

# key → (required value, why). A recipe that sets another value is refused.
REQUIRED = {
    "model.calculate_per_token_loss": (
        True,
        "the loss is divided by the global number of supervised tokens",
    ),
    "ddp.average_in_collective": (False, "gradients are divided by tokens, not by ranks"),
    "model.defer_embedding_wgrad_compute": (
        False,
        "the loss computes the output layer's weight gradient itself",
    ),
    "model.overlap_moe_expert_parallel_comm": (
        False,
        "it runs the model in pieces that the distillation loss cannot follow",
    ),
    "dist.use_torch_fsdp2": (
        False,
        "the loss needs the output layer's whole weight; use the distributed optimizer or "
        "bridge.ddp.use_megatron_fsdp",
    ),
}


def model_provider(hf_path: str, load_weights: bool):
    """The host's model provider for a Hugging Face directory, set up for this machine's backend."""
    directory = Path(hf_path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{hf_path} is not a Hugging Face model directory (no config.json); make a student "
            "with `megatron-kd init-student`, or give the path of a downloaded model"
        )
    provider = AutoBridge.from_hf_pretrained(str(directory)).to_megatron_provider(
        load_weights=load_weights
    )
    if cpu_backend.is_active():
        for name, value in cpu_backend.provider_settings().items():
            setattr(provider, name, value)
    if load_weights:
        weights_complete.check_loading(provider, str(directory))
    # After the weights' own hook, before anything of ours.
    for hook in (*versions.current().model_hooks, sharded.refuse_unmarked):
        provider.register_pre_wrap_hook(hook)
    return provider


def build_container(config: DistillConfig) -> ConfigContainer:
    """The complete host configuration of a run; nothing is started.

    Raises:
        ConfigError: An unknown or contradictory key of the `bridge` section, or a directory that is
            not there.
    """
    provider = model_provider(config.student.hf_path, config.student.load_weights)
    container = _defaults(config, provider)
    if "dataset" in config.bridge:
        raise ConfigError("bridge.dataset is set from the cache, data and loss sections; remove it")
    container.dataset = DistillDatasetProvider(
        mode=config.mode,
        caches=config.cache.sources() if config.mode == "offline" else [],
        topk=config.cache.topk,
        temperature=config.loss.divergence.temperature,
        hidden_states=config.mode == "offline" and bool(config.hidden_states.pairs),
        data_path=config.data.path,
        check_checksums=config.cache.check_checksums,
        shuffle=config.data.shuffle,
        seed=config.data.seed,
        dataloader_type=config.data.dataloader,
        num_workers=config.data.num_workers,
        persistent_workers=config.data.num_workers > 0,
        data_sharding=True,
        pin_memory=not cpu_backend.is_active(),
    )
    prepared_length = data_sequence_length(container.dataset.open("train"))
    if prepared_length is not None:
        provider.seq_length = prepared_length
    elif "seq_length" not in config.bridge.get("model", {}):
        raise ConfigError(
            "bridge.model.seq_length is required: the samples do not say what they were prepared "
            "for"
        )
    update(container, config.bridge, "bridge")
    _require(container, config.bridge)
    _fit_to_machine(container)
    _share_weight_decay(container)
    _lay_out_documents(container)
    container.dataset.sequence_length = container.model.seq_length
    container.dataset.evaluation_samples = (
        container.train.eval_iters * container.train.global_batch_size
    )
    return container


def _defaults(config: DistillConfig, provider) -> ConfigContainer:
    output = Path(config.output_dir)
    return ConfigContainer(
        model=provider,
        train=TrainingConfig(
            micro_batch_size=1,
            global_batch_size=1,
            train_iters=0,
            eval_interval=None,
            eval_iters=0,
            exit_signal_handler_for_dataloader=True,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=2e-6,
            min_lr=2e-7,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            weight_decay=0.1,
            clip_grad=1.0,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=10,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=True),
        dataset=None,
        logger=LoggerConfig(log_interval=1, tensorboard_dir=str(output / "tensorboard")),
        tokenizer=TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=config.student.hf_path
        ),
        checkpoint=CheckpointConfig(
            save=str(output / "checkpoints"),
            load=str(output / "checkpoints"),
            save_interval=100,
            ckpt_format="torch_dist",
        ),
        dist=DistributedInitConfig(),
        rng=RNGConfig(seed=1234),
    )


def _require(container: ConfigContainer, recipe: dict) -> None:
    for key, (value, reason) in REQUIRED.items():
        section, name = key.split(".")
        asked = (recipe.get(section) or {}).get(name, value)
        if asked != value:
            raise ConfigError(f"bridge.{key} must be {str(value).lower()}: {reason}")
        if hasattr(getattr(container, section), name):
            setattr(getattr(container, section), name, value)


def _share_weight_decay(container: ConfigContainer) -> None:
    """What the scheduler is not told it takes from the optimizer; without either the host would
    stop, and with its own it would overrule the optimizer's.
    """
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(container.scheduler, name) is None:
            setattr(container.scheduler, name, container.optimizer.weight_decay)


def _lay_out_documents(container: ConfigContainer) -> None:
    dataset, ranks = container.dataset, container.model.context_parallel_size
    dataset.documents_apart = dataset.open("train").manifest.get("packing") == "block"
    if dataset.documents_apart and ranks > 1:  # every rank holds two parts of every document
        dataset.document_multiple = 2 * ranks


def _fit_to_machine(container: ConfigContainer) -> None:
    train = container.train
    for name in ("train_iters", "micro_batch_size", "global_batch_size"):
        if not (getattr(train, name) or 0) > 0:
            raise ConfigError(f"bridge.train.{name} must be set and greater than 0")
    if not train.eval_iters or not train.eval_interval:
        # The host divides by the interval even when it evaluates nothing.
        train.eval_iters, train.eval_interval = (
            train.eval_iters or 0,
            train.eval_interval or train.train_iters,
        )
    if cpu_backend.is_active():
        container.dist.distributed_backend = "gloo"
        container.dist.use_gloo_process_groups = True
        if container.mixed_precision is None:
            container.model.params_dtype = container.optimizer.params_dtype = torch.float32
            container.model.bf16 = container.optimizer.bf16 = False
            container.model.pipeline_dtype = torch.float32
            container.model.autocast_dtype = torch.float32
    model = container.model
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    per_replica = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    if ranks % per_replica and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"{ranks} ranks cannot hold replicas of {per_replica} ranks (tensor "
            f"{model.tensor_model_parallel_size} × pipeline {model.pipeline_model_parallel_size} × "
            f"context {model.context_parallel_size}); start a multiple of that with torchrun "
            "--nproc-per-node"
        )
    replicas = max(1, ranks // per_replica)
    if train.global_batch_size % (train.micro_batch_size * replicas):
        raise ConfigError(
            f"bridge.train.global_batch_size={train.global_batch_size} is not a multiple of "
            f"micro_batch_size {train.micro_batch_size} × {replicas} data-parallel replicas"
        )
