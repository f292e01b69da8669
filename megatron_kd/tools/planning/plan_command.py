"""Plan a recipe before running it: memory per rank, longest sequences, time, cache size.

Reads the recipe and the models' config.json; needs neither weights nor a GPU. Example:
  megatron-kd plan recipes/quickstart.yaml bridge.model.seq_length=8192 --gpu h200
"""

import argparse
from dataclasses import dataclass, replace
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal

from megatron_kd.cache.codecs import CODECS, bytes_per_position
from megatron_kd.config import DistillConfig, from_recipe
from megatron_kd.data.sequence_format import SPLITS
from megatron_kd.stages import Stage, stages_of
from megatron_kd.tools.console import table_console
from megatron_kd.tools.planning import plan_tables
from megatron_kd.tools.planning.gpus import GPUS, gpu
from megatron_kd.tools.planning.model_shape import shape_of_directory
from megatron_kd.tools.planning.run_plan import RunPlan
from megatron_kd.tools.planning.run_settings import from_config, split_manifest
from megatron_kd.tools.planning.stage_memory import ONLINE
from megatron_kd.tools.planning.time_cost import EFFICIENCY, capture_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")
    parser.add_argument("--gpu", default="h200", help=f"{', '.join(GPUS)} (default h200)")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="GPUs (default: the recipe's launch, or one model replica)",
    )
    parser.add_argument(
        "--teacher", metavar="DIR", help="Hugging Face directory (default: teacher.hf_path)"
    )
    parser.add_argument("--topk", type=int, metavar="K", help="default: the cache's, or 100")
    parser.add_argument("--codec", default="compact", help=f"{', '.join(CODECS)} (default compact)")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=EFFICIENCY,
        help="share of the GPU's peak (default 0.45)",
    )
    parser.add_argument("--png", metavar="FILE", help="also draw the memory as stacked bars")


def run(args: argparse.Namespace) -> int:
    stages, console = stages_of(args.recipe, args.overrides), table_console()
    plans = [_plan_of(args, stage) for stage in stages]  # fails before it prints
    seconds = 0.0
    for stage, (plan, config) in zip(stages, plans, strict=True):
        if stage.count > 1:
            console.rule(f"{stage.name}: iterations {stage.first + 1} to {stage.last}")
        seconds += plan.step(plan.impl).total_s * plan.settings.train_iters
        _print_plan(console, plan, config, args)
    if len(stages) > 1:
        console.print(
            f"[bold]All stages:[/bold] {stages[-1].last} steps take {_duration(seconds)}",
            highlight=False,
        )
    if args.png:
        from megatron_kd.tools import figures

        fullest = max((plan for plan, _ in plans), key=lambda plan: plan.fullest(plan.impl).total)
        figures.save(plan_figure(fullest), args.png)
        console.print(f"figure: {args.png}", highlight=False, soft_wrap=True)
    return 0


def _plan_of(args: argparse.Namespace, stage: Stage) -> tuple[RunPlan, DistillConfig]:
    plan, config = make_plan(args, stage.config)
    if stage.count == 1:
        return plan, config
    settings = replace(plan.settings, train_iters=stage.last - stage.first)
    return replace(plan, settings=settings), config


def _print_plan(console: Console, plan: RunPlan, config: DistillConfig, args) -> None:
    _print_models(console, plan)
    console.print(plan_tables.by_implementation(plan))
    if plan.settings.pipeline_parallel > 1:
        console.print(plan_tables.by_stage(plan))
    console.print(plan_tables.by_recompute(plan))
    for line in data_lines(plan, config, args):
        console.print(line, highlight=False)
    console.print("[bold]Assumptions[/bold]")
    for line in plan_tables.assumptions(plan):
        console.print(f"  • {line}", highlight=False)


def make_plan(
    args: argparse.Namespace, config: DistillConfig | None = None
) -> tuple[RunPlan, DistillConfig]:
    """The plan of a recipe, or of one stage of it, which `config` gives."""
    for name in ("ranks", "topk"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be 1 or more, not {value}")
    if not 0 < args.efficiency <= 1:
        raise ValueError(f"--efficiency must lie in (0, 1], not {args.efficiency}")
    chosen = gpu(args.gpu)
    if config is None:
        config = from_recipe(args.recipe, args.overrides)
    student = shape_of_directory(config.student.hf_path, "student")
    directory = args.teacher or config.teacher.hf_path
    teacher = shape_of_directory(directory, "teacher") if directory else None
    settings = from_config(config, student, ranks=args.ranks, topk=args.topk)
    plan = RunPlan(student, teacher, settings, chosen, args.efficiency)
    # Fails here, with its reason, if layers or the codec do not fit.
    plan.stages(plan.impl)
    bytes_per_position(args.codec, student.vocab_size, settings.topk)
    return plan, config


@dataclass(frozen=True)
class DataSize:
    samples: int
    positions: int
    """Supervised positions, for each of which the cache has a row."""

    source: str


def data_size(plan: RunPlan, config: DistillConfig) -> DataSize:
    """The size of the prepared data or cache where it exists, else the most training would read."""
    length = plan.settings.sequence_length
    found = [m for split in SPLITS if (m := split_manifest(config, split)) is not None]
    if found:
        samples = sum(m["samples"] for m in found)
        positions = sum(m.get("positions", m.get("supervised_tokens", 0)) for m in found)
        return DataSize(samples, positions, "the data on disk")
    samples = plan.settings.train_iters * plan.settings.global_batch
    return DataSize(samples, samples * length, "train_iters × global_batch_size, all supervised")


def data_lines(plan: RunPlan, config: DistillConfig, args) -> list[str]:
    size, settings = data_size(plan, config), plan.settings
    tokens = size.samples * settings.sequence_length
    each = bytes_per_position(args.codec, plan.student.vocab_size, settings.topk)
    step = plan.step(plan.impl)
    lines = [
        f"[bold]Training:[/bold] {step.total_s:.3g} s per step, "
        f"{settings.sequence_length * settings.global_batch / step.total_s:,.0f} tokens/s, "
        f"{step.model_flops / step.total_s / settings.ranks / 1e12:.0f} model TFLOP/s per GPU; "
        f"{settings.train_iters} steps take {_duration(step.total_s * settings.train_iters)}",
        f"[bold]Data:[/bold] {size.samples:,} sequences, {tokens:,} tokens ({size.source})",
        f"[bold]Cache:[/bold] {size.positions:,} rows × {each:.0f} bytes (top {settings.topk} of "
        f"{plan.student.vocab_size:,}, {args.codec}) = {decimal(round(size.positions * each))}",
    ]
    if plan.teacher is None:
        lines.append("[bold]Capture:[/bold] give --teacher DIR to have its cost, and online losses")
    else:
        seconds = capture_seconds(
            plan.teacher, tokens, settings.sequence_length, plan.gpu, plan.efficiency
        )
        lines.append(
            f"[bold]Capture:[/bold] {_duration(seconds)} of one {plan.gpu.name} "
            f"({plan.teacher.parameters / 1e9:.2f}B teacher, one forward pass)"
        )
    return lines


def _print_models(console: Console, plan: RunPlan) -> None:
    for role, shape in (("student", plan.student), ("teacher", plan.teacher)):
        if shape is not None:
            console.print(
                f"[bold]{role}[/bold] {shape.name}: {shape.parameters / 1e9:.3f}B parameters, "
                f"{len(shape.layers)} layers, hidden {shape.hidden_size}, vocabulary "
                f"{shape.vocab_size}" + (f", {shape.experts} experts" if shape.experts else ""),
                highlight=False,
            )


def plan_figure(plan: RunPlan):
    """The figure of a plan: the fullest rank's memory with every loss, those online first."""
    from megatron_kd.tools.planning.memory_figure import figure_of

    bars = {impl: plan.fullest(impl) for impl in plan.impls}
    order = [impl for impl in ONLINE if impl in bars] + [x for x in bars if x not in ONLINE]
    settings = plan.settings
    return figure_of(
        {impl.replace("_", "\n", 1): bars[impl] for impl in order},
        title=f"{plan.student.name}, {settings.sequence_length} tokens × {settings.micro_batch}, "
        f"recompute {settings.recompute.mode}",
        limit_gib=plan.gpu.memory_gib,
        limit_name=plan.gpu.name,
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))  # "4:05:06", "2 days, 3:00:00"
