"""Peak memory of every pipeline stage, by component.

    peak = weights + gradients + optimizer + teacher + cache buffers + activations
           + the larger of: logits and loss (last stage)  |  what one layer's backward pass adds

All bytes are what the allocator gives out (`max_memory_allocated`).
"""

from dataclasses import dataclass, replace

from megatron_kd.tools.planning.activations import kept_by_layers
from megatron_kd.tools.planning.adapters import adapter_parameters
from megatron_kd.tools.planning.loss_memory import LOSSES, LossMemory, loss_memory, rank_vocab
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.run_settings import RunSettings

COMPONENTS = (
    "weights",
    "gradients",
    "optimizer",
    "teacher",
    "activations",
    "logits",
    "loss",
    "backward",
    "cache buffers",
)
OFFLINE = tuple(name for name, loss in LOSSES.items() if not loss.online)
ONLINE = tuple(name for name, loss in LOSSES.items() if loss.online)
LONGEST_TOKENS = 1 << 23


@dataclass(frozen=True)
class StageMemory:
    """Bytes by component on each rank of one pipeline stage."""

    stage: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def implementation(settings: RunSettings) -> str:
    """The recipe's loss, told apart by mode."""
    online = f"online_{settings.loss.impl}"
    return online if settings.mode == "online" and online in LOSSES else settings.loss.impl


def plan_memory(
    student: ModelShape,
    settings: RunSettings,
    *,
    impl: str,
    gpu_bytes: int,
    teacher: ModelShape | None = None,
    loss: LossMemory | None = None,
) -> list[StageMemory]:
    """Peak memory of every pipeline stage, in the stages' order.

    Args:
        loss: What logits and loss take, in place of what this library's implementation takes.

    Raises:
        ValueError: An online loss without the teacher's shape, or layers that do not divide.
    """
    if impl in ONLINE and teacher is None:
        raise ValueError(f"{impl} keeps the teacher in memory; its shape is needed")
    if loss is None:
        loss = loss_memory(impl, student, settings, gpu_bytes, teacher)
    return [
        _stage(student, settings, stage, impl, teacher, loss)
        for stage in range(settings.pipeline_parallel)
    ]


def peak_bytes(student, settings, **keywords) -> float:
    """Peak of the fullest pipeline stage; keywords are those of `plan_memory`."""
    return max(stage.total for stage in plan_memory(student, settings, **keywords))


def longest_sequence(
    student: ModelShape,
    settings: RunSettings,
    *,
    impl: str,
    gpu_bytes: int,
    usable_bytes: int,
    teacher: ModelShape | None = None,
) -> int:
    """Most tokens per sequence, all else equal, whose peak lies within usable_bytes; 0 if none."""
    step = 128 * settings.tensor_parallel * settings.context_parallel

    def fits(steps: int) -> bool:
        longer = replace(settings, sequence_length=steps * step)
        peak = peak_bytes(student, longer, impl=impl, gpu_bytes=gpu_bytes, teacher=teacher)
        return peak <= usable_bytes

    low, high = 0, LONGEST_TOKENS // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * step


def stage_layers(shape: ModelShape, settings: RunSettings, stage: int):
    count, stages = len(shape.layers), settings.pipeline_parallel
    if count % (stages * settings.virtual_pipeline):
        raise ValueError(
            f"{shape.name}'s {count} layers cannot be divided evenly over "
            f"pipeline_model_parallel_size={stages} × virtual {settings.virtual_pipeline}; the "
            "plan covers even divisions"
        )
    each = count // stages
    return shape.layers[stage * each : (stage + 1) * each]


def rank_parameters(shape: ModelShape, settings: RunSettings, stage: int) -> tuple[float, float]:
    """(parameters outside the experts, parameters of experts) on a rank of this stage."""
    layers = stage_layers(shape, settings, stage)
    last = stage == settings.pipeline_parallel - 1
    matrix = rank_vocab(shape, settings) * shape.hidden_size
    matrices = (stage == 0) + (last and not (shape.tied and settings.pipeline_parallel == 1))
    common = matrix * matrices + shape.final * last
    common += sum(x.sharded / settings.tensor_parallel + x.replicated for x in layers)
    over = settings.expert_parallel * settings.expert_tensor_parallel
    return common, sum(x.experts for x in layers) / over


def trained_parameters(shape: ModelShape, settings: RunSettings, stage: int) -> tuple[float, float]:
    """Parameters that have gradients on a rank of this stage: (outside the experts, of experts)."""
    if settings.lora is None:
        return rank_parameters(shape, settings, stage)
    each = len(shape.layers) // settings.pipeline_parallel
    layers = range(stage * each, (stage + 1) * each)
    return adapter_parameters(shape, settings.lora, layers) / settings.tensor_parallel, 0.0


def micro_batches_in_flight(settings: RunSettings, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once under (interleaved) 1F1B."""
    stages, chunks = settings.pipeline_parallel, settings.virtual_pipeline
    if chunks == 1:
        return min(settings.micro_batches, stages - stage)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(settings.micro_batches * chunks, warm_up + 1) / chunks


def _stage(student, settings: RunSettings, stage, impl, teacher, loss: LossMemory) -> StageMemory:
    trained = trained_parameters(student, settings, stage)
    held = sum(rank_parameters(student, settings, stage))
    if settings.lora is not None:
        held += sum(trained)
    parts = dict.fromkeys(COMPONENTS, 0.0)
    parts["weights"] = held * settings.value_bytes
    parts["gradients"] = sum(trained) * settings.gradient_bytes
    parts["optimizer"] = settings.state_bytes * _optimizer_parameters(settings, *trained)
    if impl in ONLINE:
        parts["teacher"] = sum(rank_parameters(teacher, settings, stage)) * settings.value_bytes
    layers = stage_layers(student, settings, stage)
    kept, backward = kept_by_layers(student, layers, settings)
    positions = settings.positions
    parts["activations"] = kept * positions * micro_batches_in_flight(settings, stage)
    parts["backward"] = backward * positions
    if stage < settings.pipeline_parallel - 1:
        return StageMemory(stage, parts)
    if impl in OFFLINE:  # ids int32 and log-probabilities fp32
        parts["cache buffers"] = 8 * settings.topk * positions
    if loss.total > parts["backward"]:
        parts["logits"], parts["loss"] = loss.logits_bytes, loss.loss_bytes
        parts["teacher"] += loss.teacher_bytes
        parts["backward"] = 0.0
    return StageMemory(stage, parts)


def _optimizer_parameters(settings: RunSettings, common: float, experts: float) -> float:
    if not settings.distributed_optimizer:
        return common + experts
    replicas = settings.data_parallel * settings.context_parallel
    expert_replicas = settings.ranks // (
        settings.expert_parallel * settings.expert_tensor_parallel * settings.pipeline_parallel
    )
    return common / replicas + experts / expert_replicas
