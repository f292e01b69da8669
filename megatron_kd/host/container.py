"""Build Megatron-Bridge's ConfigContainer from a DistillConfig.

Order: defaults that suit distillation, then the recipe's `bridge` section (checked field by field
against the host's own dataclasses), then what distillation requires, which a recipe may not
contradict. `adapt` does the last to a configuration that a user made with the host's own classes.
Whether the parts belong together is for `checks` to say.
"""

import dataclasses
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
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from transformers import AutoConfig

from megatron_kd.config import NO_PEFT, DistillConfig
from megatron_kd.host import sharded_weights, versions
from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.dataset_provider import DistillDatasetProvider
from megatron_kd.host.parameters import complete as weights_complete
from megatron_kd.host.versions import every_version, rotary, windows
from megatron_kd.models.weight_files import check_weight_files
from megatron_kd.typed_mapping import ConfigError, update

# key → (required value, why). `checks` refuses a user who asks for another value.
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

LEARNING_RATES = {"lr": 2e-6, "min_lr": 2e-7}
"""Where a recipe does not say."""


def model_provider(hf_path: str, load_weights: bool, *, on_cpu: bool | None = None):
    """The host's model provider for a Hugging Face directory, set up for a backend.

    Args:
        hf_path: The directory.
        load_weights: Whether the model starts from its weights.
        on_cpu: Whether it is for the CPU backend; None asks whether that is active.
    """
    directory = _model_directory(hf_path)
    if load_weights:
        try:
            check_weight_files(directory)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    bridge = AutoBridge.from_hf_pretrained(str(directory))
    try:
        provider = bridge.to_megatron_provider(load_weights=load_weights)
    except (AttributeError, KeyError, TypeError) as error:  # of a converter that expects others
        raise ConfigError(
            f"Megatron-Bridge cannot convert {hf_path}: {type(error).__name__}: {error}"
        ) from error
    _adapt_provider(provider, hf_path, load_weights, _on_cpu(on_cpu))
    correct_conversion(provider, bridge.hf_pretrained.config)
    return provider


def build_container(config: DistillConfig, *, on_cpu: bool | None = None) -> ConfigContainer:
    """The complete host configuration of a recipe; nothing is started.

    Args:
        config: The recipe.
        on_cpu: Whether it is for the CPU backend; None asks whether that is active.

    Raises:
        ConfigError: An unknown or contradictory key of the `bridge` section, or a directory that is
            not there.
    """
    on_cpu = _on_cpu(on_cpu)
    if "dataset" in config.bridge:
        raise ConfigError("bridge.dataset is set from the cache, data and loss sections; remove it")
    student = config.student
    provider = model_provider(student.hf_path, student.load_weights, on_cpu=on_cpu)
    container = _defaults(config, provider)
    container.dataset = DistillDatasetProvider.of(config, pin_memory=not on_cpu)
    prepared_length = container.dataset.prepared_length()
    if prepared_length is not None:
        provider.seq_length = prepared_length
    elif "seq_length" not in config.bridge.get("model", {}):
        raise ConfigError(
            "bridge.model.seq_length is required: the samples do not say what they were prepared "
            "for"
        )
    update(container, config.bridge, "bridge")
    _adapt_settings(container, config.bridge, on_cpu)
    return container


def adapt(container: ConfigContainer, config: DistillConfig) -> dict:
    """Make a configuration that a user built with the host's own classes that of a distillation.

    Its dataset is replaced by ours; fields that still hold the host's default get the value that
    distillation requires; hooks are registered on its model provider. What the host's converter
    drops of the student's windows and positions is set, as a recipe's student has it.

    Args:
        container: Changed in place. Its model is the provider of the student, as the host's
            converter returned it.
        config: Everything else of the run. Its section `bridge` must be empty.

    Returns:
        Section → field → value of what the user set by hand, for `checks.check`.

    Raises:
        ConfigError: config has a section `bridge`, or the container asks for the host's adapters.
    """
    if config.bridge:
        raise ConfigError(
            f"bridge.{next(iter(config.bridge))}: the host's configuration was handed over as a "
            "ConfigContainer; set it there"
        )
    if container.peft is not None:
        raise ConfigError(f"the container's {NO_PEFT}")
    asked = _set_by_hand(container)
    on_cpu, student = cpu_backend.is_active(), config.student
    _adapt_provider(container.model, student.hf_path, student.load_weights, on_cpu)
    configuration = AutoConfig.from_pretrained(_model_directory(student.hf_path))
    correct_conversion(container.model, configuration)
    container.dataset = DistillDatasetProvider.of(config, pin_memory=not on_cpu)
    _adapt_settings(container, asked, on_cpu)
    return asked


def correct_conversion(provider, config) -> None:
    """Mend what the host's converter drops or gets wrong of a directory's configuration.

    Args:
        provider: The host's model provider of the directory, not yet finalized.
        config: transformers' configuration of the directory.

    Raises:
        ConfigError: The host has no setting for what the directory asks.
    """
    windows.correct(provider, config)
    rotary.correct(provider, config)


def _model_directory(hf_path: str) -> Path:
    directory = Path(hf_path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{hf_path} is not a Hugging Face model directory (no config.json); make a student "
            "with `megatron-kd init-student`, or give the path of a downloaded model"
        )
    return directory


def _on_cpu(choice: bool | None) -> bool:
    return cpu_backend.is_active() if choice is None else choice


def _set_by_hand(container: ConfigContainer) -> dict:
    """Section → field → value of every setting that distillation has a say in and that differs from
    the default of the host's class.
    """
    asked = {}
    for section in ("model", "ddp", "dist", "optimizer"):
        own = getattr(container, section)
        for field in dataclasses.fields(own):
            value = getattr(own, field.name, field.default)
            if field.default is not dataclasses.MISSING and value != field.default:
                asked.setdefault(section, {})[field.name] = value
    return asked


def _adapt_provider(provider, hf_path: str, load_weights: bool, on_cpu: bool) -> None:
    if on_cpu:
        for name, value in cpu_backend.provider_settings().items():
            setattr(provider, name, value)
    elif provider.gradient_accumulation_fusion and not every_version.has_fusion_kernel():
        provider.gradient_accumulation_fusion = False  # a default that the output layer refuses
    if load_weights:
        weights_complete.check_loading(provider, str(hf_path))
    # After the weights' own hook, before anything of ours.
    for hook in (*versions.current().model_hooks, sharded_weights.refuse_unmarked):
        provider.register_pre_wrap_hook(hook)


def _adapt_settings(container: ConfigContainer, asked: dict, on_cpu: bool) -> None:
    for key, (value, _) in REQUIRED.items():
        section, name = key.split(".")
        if hasattr(getattr(container, section), name):
            setattr(getattr(container, section), name, value)
    _choose_precision(container, asked.get("optimizer") or {}, on_cpu)
    if on_cpu:
        container.dist.distributed_backend = "gloo"
        container.dist.use_gloo_process_groups = True
    train = container.train
    if not train.eval_iters or not train.eval_interval:
        # The host divides by the interval even when it evaluates nothing.
        train.eval_iters, train.eval_interval = (
            train.eval_iters or 0,
            train.eval_interval or train.train_iters,
        )
    # What the scheduler is not told it takes from the optimizer; without either the host would
    # stop, and with its own it would overrule the optimizer's.
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(container.scheduler, name) is None:
            setattr(container.scheduler, name, container.optimizer.weight_decay)
    dataset, ranks = container.dataset, container.model.context_parallel_size
    dataset.evaluation_samples = (train.eval_iters or 0) * (train.global_batch_size or 0)
    samples = dataset.samples
    samples.sequence_length = container.model.seq_length
    samples.documents_apart = dataset.packing() == "block"
    if samples.documents_apart and ranks > 1:  # every rank holds two parts of every document
        samples.document_multiple = 2 * ranks


def _choose_precision(container: ConfigContainer, asked: dict, on_cpu: bool) -> None:
    """Where nobody chose, the CPU backend computes in fp32, and a GPU as the student's directory
    says: 16-bit weights need an optimizer that keeps fp32 ones beside them.
    """
    model, optimizer = container.model, container.optimizer
    if container.mixed_precision is not None:
        return
    if on_cpu:
        model.params_dtype = optimizer.params_dtype = torch.float32
        model.bf16 = optimizer.bf16 = False
        model.pipeline_dtype = torch.float32
        model.autocast_dtype = torch.float32
        return
    name = "bf16_mixed" if model.bf16 else "fp16_mixed" if model.fp16 else None
    if name is not None and not {"bf16", "fp16"} & asked.keys():
        precision = get_mixed_precision_config(name)
        precision.grad_reduce_in_fp32 = container.ddp.grad_reduce_in_fp32
        container.mixed_precision = precision


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
            **LEARNING_RATES,
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
