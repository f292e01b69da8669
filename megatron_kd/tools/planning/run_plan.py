"""A recipe's sizes, and what follows from them for every implementation of the loss."""

from dataclasses import dataclass, replace

from megatron_kd.tools.planning.gpus import GPU
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.run_settings import Recompute, RunSettings
from megatron_kd.tools.planning.stage_memory import (
    OFFLINE,
    ONLINE,
    StageMemory,
    implementation,
    longest_sequence,
    plan_memory,
    trained_parameters,
)
from megatron_kd.tools.planning.time_cost import StepTime, step_time


@dataclass(frozen=True)
class RunPlan:
    """A recipe's sizes, and what follows from them for any loss."""

    student: ModelShape
    teacher: ModelShape | None
    settings: RunSettings
    gpu: GPU
    efficiency: float

    @property
    def impl(self) -> str:
        return implementation(self.settings)

    @property
    def impls(self) -> tuple[str, ...]:
        return OFFLINE + (ONLINE if self.teacher is not None else ())

    def stages(self, impl: str) -> list[StageMemory]:
        return plan_memory(
            self.student,
            self.settings,
            impl=impl,
            gpu_bytes=self.gpu.memory_bytes,
            teacher=self.teacher,
        )

    def fullest(self, impl: str) -> StageMemory:
        return max(self.stages(impl), key=lambda stage: stage.total)

    def longest(self, impl: str) -> int:
        return longest_sequence(
            self.student,
            self.settings,
            impl=impl,
            gpu_bytes=self.gpu.memory_bytes,
            usable_bytes=self.gpu.usable_bytes,
            teacher=self.teacher,
        )

    def step(self, impl: str) -> StepTime:
        stages = range(self.settings.pipeline_parallel)
        parameters = max(sum(trained_parameters(self.student, self.settings, s)) for s in stages)
        return step_time(
            self.student,
            self.settings,
            impl=impl,
            gpu=self.gpu,
            trained_parameters=parameters,
            teacher=self.teacher if impl in ONLINE else None,
            efficiency=self.efficiency,
        )

    def with_recompute(self, recompute: Recompute) -> "RunPlan":
        return replace(self, settings=replace(self.settings, recompute=recompute))
