"""Show what a run achieved: losses before and after, speed, memory, a generated sentence, the loss
curves as a PNG.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from megatron_kd.metrics_file import (
    KD_LOSS,
    LM_LOSS,
    STUDENT_MASS,
    curve,
    peak_bytes_by_rank,
    read_metrics,
)
from megatron_kd.tools.console import table_console
from megatron_kd.tools.report.curves import plot_losses

PROMPTS = ("A list in Python is", "Python is a programming language that")
MIB = 1 << 20


def add_arguments(parser) -> None:
    parser.add_argument("--run", required=True, metavar="DIR", help="the run's output_dir")
    parser.add_argument("--cache", metavar="DIR", help="the teacher cache it read")
    parser.add_argument(
        "--before", metavar="DIR", help="Hugging Face directory of the initial student"
    )
    parser.add_argument(
        "--after", metavar="DIR", help="Hugging Face directory of the trained student"
    )
    parser.add_argument(
        "--prompt", nargs="+", default=PROMPTS, help="what both students continue, greedily"
    )
    parser.add_argument(
        "--png", metavar="FILE", help="default: loss_curves.png in the run's folder"
    )


def run(args) -> int:
    console = table_console()
    records = read_metrics(args.run)
    table = Table(title=f"distillation in {args.run}")
    table.add_column("quantity")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for kind, name in (
        ("validation", KD_LOSS),
        ("validation", LM_LOSS),
        ("validation", STUDENT_MASS),
        ("train", KD_LOSS),
        ("train", LM_LOSS),
    ):
        _, values = curve(records, kind, name)
        if values:
            unit = "" if "mass" in name else " (nats)"
            table.add_row(f"{kind} {name}{unit}", f"{values[0]:.3f}", f"{values[-1]:.3f}")
    _add_speed_and_memory(table, args.run, records)
    if args.cache:
        _add_cache(table, args.cache)
    console.print(table)
    for title, directory in (("before", args.before), ("after", args.after)):
        if directory:
            for text in continuations(directory, args.prompt):
                console.print(f"[bold]{title}:[/bold] {text}", highlight=False)
    png = Path(args.png or Path(args.run) / "loss_curves.png")
    plot_losses({Path(args.run).name: records}, png)
    console.print(f"loss curves: {png}", highlight=False, soft_wrap=True)
    return 0


def continuations(directory: str, prompts: Sequence[str], tokens: int = 24) -> list[str]:
    """Each prompt with its greedy continuation by the model in a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(
                **inputs,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
        text = tokenizer.decode(output[0], skip_special_tokens=True)
        texts.append(text.replace("\n", " ⏎ "))
    return texts


def _add_speed_and_memory(table: Table, run: str, records: list[dict]) -> None:
    train = [record for record in records if record["kind"] == "train"]
    warm = train[1:] or train  # the first iteration also warms up
    if warm:
        speed = statistics.median(record["tokens_per_s"] for record in warm)
        table.add_row("training tokens/s (median)", "", f"{speed:,.0f}")
        table.add_row("iterations", "", f"{train[-1]['iteration']}")
    for rank, peak_bytes in enumerate(peak_bytes_by_rank(run)):
        table.add_row(f"peak memory of rank {rank} (MiB)", "", f"{peak_bytes / MIB:,.0f}")


def _add_cache(table: Table, directory: str) -> None:
    from megatron_kd.cache import CacheReader

    total_bytes = positions = 0
    for split in sorted(Path(directory).iterdir()):
        if (split / "manifest.json").is_file():
            reader = CacheReader(split)
            total_bytes += sum(path.stat().st_size for path in split.glob("*.safetensors"))
            positions += reader.manifest["positions"]
    table.add_row("cache size (MB)", "", f"{total_bytes / 1e6:,.2f}")
    table.add_row("cached positions", "", f"{positions:,}")
    table.add_row("bytes per cached position", "", f"{total_bytes / max(positions, 1):.1f}")
