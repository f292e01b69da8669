"""A plan as tables."""

from dataclasses import dataclass, replace

from rich.table import Table

from megatron_kd.tools.planning import published
from megatron_kd.tools.planning.adapters import adapter_parameters
from megatron_kd.tools.planning.gpus import GPU, RESERVED_SHARE
from megatron_kd.tools.planning.memory import (
    COMPONENTS,
    OFFLINE,
    ONLINE,
    StageMemory,
    implementation,
    longest_sequence,
    plan_memory,
    trained_parameters,
)
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.settings import Recompute, Settings
from megatron_kd.tools.planning.time_cost import StepTime, step_time

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """A recipe's sizes, and what follows from them for any loss."""

    student: ModelShape
    teacher: ModelShape | None
    settings: Settings
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

    def with_recompute(self, recompute: Recompute) -> "Plan":
        return replace(self, settings=replace(self.settings, recompute=recompute))


def by_implementation(plan: Plan) -> Table:
    table = _table(
        f"Peak memory of the fullest rank, GiB, by loss ({plan.settings.sequence_length} tokens, "
        f"recompute {plan.settings.recompute.mode})",
        "",
        *(f"[bold]{x} ◂[/bold]" if x == plan.impl else x for x in plan.impls),
    )
    stages = [plan.fullest(impl) for impl in plan.impls]
    for component in COMPONENTS:
        if any(stage.parts[component] for stage in stages):
            table.add_row(component, *(f"{s.parts[component] / GIB:.2f}" for s in stages))
    table.add_section()
    table.add_row("peak", *(f"[bold]{s.total / GIB:.2f}[/bold]" for s in stages))
    usable = plan.gpu.usable_bytes
    table.add_row(
        f"fits in {usable / GIB:.1f}",
        *("yes" if s.total <= usable else "[red]no[/red]" for s in stages),
    )
    table.add_row("longest sequence", *(_tokens(plan.longest(impl)) for impl in plan.impls))
    table.add_row("step, s", *(_seconds(plan.step(impl).total_s) for impl in plan.impls))
    return table


def by_stage(plan: Plan) -> Table:
    stages = plan.stages(plan.impl)
    table = _table(
        f"Each pipeline stage with {plan.impl}, GiB per rank",
        "",
        *(f"stage {stage.stage}" for stage in stages),
    )
    for component in COMPONENTS:
        if any(stage.parts[component] for stage in stages):
            table.add_row(component, *(f"{s.parts[component] / GIB:.2f}" for s in stages))
    table.add_section()
    table.add_row("peak", *(f"[bold]{s.total / GIB:.2f}[/bold]" for s in stages))
    return table


def by_recompute(plan: Plan) -> Table:
    table = _table(
        f"By recompute mode, with {plan.impl}",
        "bridge.model.recompute_…",
        "activations, GiB",
        "peak, GiB",
        "longest sequence",
        "step, s",
    )
    now = plan.settings.recompute
    cases = [Recompute(), Recompute(mode="selective", modules=("mlp",)), Recompute(mode="full")]
    if plan.student.experts:
        cases[1] = Recompute(mode="selective", modules=("moe",))
    if now not in cases and not (now.mode == "none"):
        cases.append(now)
    for case in cases:
        other = plan.with_recompute(case)
        stage = other.fullest(plan.impl)
        name = _recompute_name(case)
        same = case == now or case.mode == now.mode == "none"
        table.add_row(
            f"[bold]{name} ◂[/bold]" if same else name,
            f"{stage.parts['activations'] / GIB:.2f}",
            f"{stage.total / GIB:.2f}",
            _tokens(other.longest(plan.impl)),
            _seconds(other.step(plan.impl).total_s),
        )
    return table


def beside_published(student: ModelShape, teacher: ModelShape) -> Table:
    table = _table(
        "This plan beside published peaks (one H200, 3.23B student of Llama-3.1-8B), GiB",
        "run",
        "tokens",
        "published",
        "estimate",
        "error",
        "if full",
        "if none",
        "step: published",
        "estimate",
    )
    for point in published.POINTS:
        peak = published.estimate(point, student, teacher).total / GIB
        others = [
            published.estimate(point, student, teacher, recompute=mode).total / GIB
            for mode in ("full", "none")
        ]
        step = published.estimated_step(point, student, teacher).total_s if point.step_s else None
        table.add_row(
            point.label,
            str(point.sequence_length),
            f"{point.published_gib:g}",
            f"{peak:.1f} ({point.recompute})",
            f"{peak / point.published_gib - 1:+.1%}",
            *(f"{x / point.published_gib - 1:+.0%}" for x in others),
            f"{point.step_s} s" if step else "",
            f"{step:.1f} s ({step / point.step_s - 1:+.0%})" if step else "",
        )
    return table


def assumptions(plan: Plan) -> list[str]:
    settings = plan.settings
    update = settings.value_bytes + settings.gradient_bytes + settings.state_bytes
    lines = [
        f"{update} bytes per parameter: weights {settings.value_bytes}, gradients "
        f"{settings.gradient_bytes}, optimiser {settings.state_bytes}"
        + (
            " over the data-parallel ranks (distributed optimiser)"
            if settings.distributed_optimizer
            else ""
        ),
        "activations of Transformer Engine layers with flash attention, no dropout, every position "
        "supervised, experts evenly loaded; gradient accumulation fused into the products",
        f"peaks are what the allocator gives out; {RESERVED_SHARE:.0%} of the GPU stay free for "
        "CUDA context, communication workspaces and fragmentation",
        f"time: products, attention at {plan.efficiency:.0%} of {plan.gpu.bf16_tflops} TFLOP/s; "
        "data- and context-parallel messages hidden behind them; no waiting for data",
        f"{settings.ranks} rank(s): tensor {settings.tensor_parallel}, pipeline "
        f"{settings.pipeline_parallel}, context {settings.context_parallel}, data "
        f"{settings.data_parallel}; {settings.micro_batches} micro-batch(es) of "
        f"{settings.micro_batch} per step",
        "published runs: GB read as GiB; their recompute mode is assumed (in brackets), full at 8K "
        "and none at 32K: no single mode explains both. One fitted constant: the published dense "
        f"loss holds {published.DENSE_FP32_COPIES} fp32 copies of the logits (ours holds one)",
    ]
    if settings.lora is not None:
        adapters = adapter_parameters(plan.student, settings.lora, range(len(plan.student.layers)))
        lines.insert(
            1,
            f"trained: {adapters / 1e6:.3g}M parameters of adapters (student.lora); weights are "
            "frozen and have neither gradients nor states; activations as without adapters",
        )
    if settings.uncounted_freeze:
        lines.insert(
            1,
            f"every parameter is counted as trained, though {settings.uncounted_freeze} freezes a "
            "part: memory and time are upper bounds",
        )
    return lines


def _recompute_name(recompute: Recompute) -> str:
    if recompute.mode == "selective":
        return f"selective ({', '.join(recompute.modules)})"
    if recompute.mode == "full" and (recompute.method, recompute.layers) != ("uniform", 1):
        return f"full ({recompute.method}, {recompute.layers})"
    return recompute.mode


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, style="bold" if not first else None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "[red]none[/red]"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"
