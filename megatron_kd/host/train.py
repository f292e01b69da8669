"""Run a distillation in Megatron-Bridge: from a checked configuration to a trained, exported
student.
"""

import dataclasses
import enum
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import yaml
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain
from megatron.core.utils import unwrap_model

from megatron_kd import typed_mapping
from megatron_kd.config import DistillConfig
from megatron_kd.files import publish
from megatron_kd.host import checks, versions
from megatron_kd.host import container as host_config
from megatron_kd.host.callbacks import best_checkpoint as selection
from megatron_kd.host.callbacks import profiling, stage_start, stop_signals
from megatron_kd.host.callbacks.balance import BalanceWeights
from megatron_kd.host.callbacks.first_evaluation import FirstEvaluation
from megatron_kd.host.callbacks.metrics import RunMetrics
from megatron_kd.host.checks.identity import record_identity
from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.export import RESOLVED_CONFIG, save_hugging_face
from megatron_kd.host.online import modelopt
from megatron_kd.host.parameters import freezing as trainable
from megatron_kd.host.parameters import lora as adapters
from megatron_kd.host.parity import proof
from megatron_kd.host.step import hidden_states, offline
from megatron_kd.host.step.forward_step import DistillationStep
from megatron_kd.stages import Stage


def distill(container: ConfigContainer, kd: DistillConfig) -> None:
    """Distil with a configuration of the host that the user made; call it on every rank.

    The recipe's way is `prepare` and `run`: there the section `bridge` becomes the container. Here
    the container is the user's, with everything that is the host's business: the student's model
    provider, training, optimizer, scheduler, parallelism, checkpoints, logging. On the CPU backend
    call `megatron_kd.host.cpu.backend.activate` before importing anything named megatron.

    Args:
        container: Its `model` is the student's provider, as `AutoBridge.to_megatron_provider`
            returns it for `kd.student.hf_path`; its `dataset` is replaced. Changed in place: a
            setting that distillation requires is set where it held the host's default.
        kd: The run without its section `bridge`.

    Raises:
        ConfigError: A setting or combination is wrong, or the container asks for what distillation
            cannot work with.
        ValueError: Cache, data, checkpoint and model do not fit together; the message names the
            remedy.
    """
    versions.check()
    asked = host_config.adapt(container, kd)
    _check(kd, container, asked, starts=True)
    run(kd, container)


def prepare(
    config: DistillConfig, *, starts: bool = True, stage: Stage | None = None
) -> ConfigContainer:
    """The host configuration of a recipe, with every check that needs no process group.

    Args:
        config: The recipe.
        starts: Whether `run` comes next, on the ranks that are there (`checks.world_size`).
        stage: Which stage of a run in several it is; None in a run of one.

    Raises:
        ConfigError: A key, type, value or combination is wrong.
        ValueError: Cache, data, checkpoint and model do not fit together; the message names the
            remedy.
    """
    versions.check()
    container = host_config.build_container(config)
    _check(config, container, config.bridge, starts=starts, stage=stage)
    return container


def rehearse(config: DistillConfig, stage: Stage | None = None) -> None:
    """Check a recipe as it would be checked on the GPUs it is for, whatever machine this is.

    What a CPU cannot tell: whether Transformer Engine, NCCL and the kernels of the named GPUs are
    there and do what the host asks of them, and whether the model fits into their memory.

    Raises:
        ConfigError: As for `prepare`.
    """
    container = host_config.build_container(config, on_cpu=False)
    checks.check(config, container, on_cpu=False, starts=False, stage=stage)


def dry_run(config: DistillConfig, stage: Stage | None = None) -> dict:
    """The resolved configuration of a run that could start; nothing is started.

    A recipe that names its ranks (`launch`) is also rehearsed for GPUs where this machine has none.

    Raises:
        ConfigError: As for `prepare`.
    """
    container = prepare(config, starts=False, stage=stage)
    if cpu_backend.is_active() and config.launch.ranks is not None:
        rehearse(config, stage)
    proof.compare_alone(config, container)
    return resolved(config, container)


def _check(
    config: DistillConfig,
    container: ConfigContainer,
    asked: dict,
    *,
    starts: bool,
    stage: Stage | None = None,
) -> None:
    profiling.configure(config.profile, container)
    on_cpu = cpu_backend.is_active()
    checks.check(config, container, on_cpu=on_cpu, starts=starts, asked=asked, stage=stage)


def run(config: DistillConfig, container: ConfigContainer, stage: Stage | None = None) -> None:
    """Train, evaluate, checkpoint, resume, export. Call it on every rank.

    Args:
        config: The whole run.
        container: What `prepare` returned for it, or `adapt` made of the user's own.
        stage: Which stage of a run in several it is; None in a run of one.
    """
    versions.apply_patches()
    proof.compare_when_built(config, container)
    if int(os.environ.get("RANK", "0")) == 0:
        save_resolved(config, container)
        record_identity(config, container, stage)
    step = DistillationStep(config.output_dir, tuple(filter(None, config.cache.names())))
    metrics = RunMetrics(config.output_dir, step.data_wait, progress=config.progress)
    callbacks = []
    if stage is not None:
        stage_start.take_over(container, stage)
        callbacks.append(stage_start.StageStart(stage))
    callbacks += [metrics, stop_signals.StopOnSignal().listen()]
    if config.export.hf_path:
        callbacks.append(Export(config.student.hf_path, config.export.hf_path))
    if config.student.train_only:
        hook = partial(trainable.train_only, patterns=config.student.train_only)
        container.model.register_pre_wrap_hook(hook)
    if config.student.lora is not None:
        container.model.register_pre_wrap_hook(partial(adapters.add, config=config.student.lora))
    weights = hidden_states.LossWeights(config.hidden_states)
    if config.hidden_states.balance:
        callbacks.append(BalanceWeights(weights, config.output_dir))
    teacher = modelopt if config.mode == "online" else offline
    teacher.attach_when_built(config, container, weights)
    callbacks.append(FirstEvaluation(step, metrics))
    if config.selection.keep_best:
        callbacks.append(selection.SelectBest(config.selection, config.output_dir))
    callbacks += profiling.callbacks(config.profile, config.output_dir)
    pretrain(container, step, callbacks=callbacks)


def resolved(config: DistillConfig, container: ConfigContainer) -> dict:
    """The fully resolved configuration as plain values: ours, and the host's under `bridge`."""
    ours = typed_mapping.plain(config)
    return ours | {"bridge": _plain(container)}


def save_resolved(config: DistillConfig, container: ConfigContainer) -> Path:
    """Write the resolved configuration beside the checkpoints, by rename."""
    path = Path(config.output_dir) / RESOLVED_CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, yaml.safe_dump(resolved(config, container), sort_keys=False))
    return path


class Export(Callback):
    """Write the trained student as a Hugging Face directory when training ends."""

    def __init__(self, student_path: str, hf_path: str):
        self.student_path = student_path
        self.hf_path = Path(hf_path)

    def on_train_end(self, context: CallbackContext) -> None:
        from megatron.bridge import AutoBridge

        bridge = AutoBridge.from_hf_pretrained(self.student_path)
        with student_alone(context.model):
            save_hugging_face(bridge, context.model, self.student_path, self.hf_path)


@contextmanager
def student_alone(model: list) -> Iterator[None]:
    """Hide what a run keeps inside the student's model: the host's converter to Hugging Face stops
    at a module that it does not map.
    """
    with ExitStack() as stack:
        for chunk in map(unwrap_model, model):
            if hasattr(chunk, "hide_teacher_model"):
                stack.enter_context(chunk.hide_teacher_model())
            projection = chunk._modules.pop(hidden_states.PROJECTION, None)
            if projection is not None:
                stack.callback(chunk.add_module, hidden_states.PROJECTION, projection)
        yield


def _plain(value):
    """Dataclasses, enums, dtypes, functions and paths as YAML can hold them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
        return {name: _plain(getattr(value, name)) for name in fields if hasattr(value, name)}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(entry) for entry in value]
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
