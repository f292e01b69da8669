"""The plan of a run as tables for the console, and the assumptions behind its numbers."""

from rich.table import Table

from megatron_kd.tools.planning.adapters import adapter_parameters
from megatron_kd.tools.planning.gpus import RESERVED_SHARE
from megatron_kd.tools.planning.run_plan import RunPlan
from megatron_kd.tools.planning.run_settings import Recompute
from megatron_kd.tools.planning.stage_memory import COMPONENTS

GIB = 1 << 30


def by_implementation(plan: RunPlan) -> Table:
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


def by_stage(plan: RunPlan) -> Table:
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


def by_recompute(plan: RunPlan) -> Table:
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


def assumptions(plan: RunPlan) -> list[str]:
    settings = plan.settings
    update = settings.value_bytes + settings.gradient_bytes + settings.state_bytes
    lines = [
        f"{update} bytes per parameter: weights {settings.value_bytes}, gradients "
        f"{settings.gradient_bytes}, optimizer {settings.state_bytes}"
        + (
            " over the data-parallel ranks (distributed optimizer)"
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
