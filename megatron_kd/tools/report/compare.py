"""Compare runs on the same data and seed: the largest relative difference of their loss curves from
the first run's.
"""

from pathlib import Path

from rich.table import Table

from megatron_kd.metrics_file import KD_LOSS, curve, read_metrics
from megatron_kd.tools.console import table_console
from megatron_kd.tools.report.curves import plot_losses


def add_arguments(parser) -> None:
    parser.add_argument(
        "--runs",
        nargs="+",
        required=True,
        metavar="DIR",
        help="output_dirs; the first is the reference",
    )
    parser.add_argument("--loss", default=KD_LOSS, help="which loss to compare")
    parser.add_argument(
        "--png", metavar="FILE", help="default: comparison.png beside the first run"
    )


def run(args) -> int:
    runs = {Path(directory).name: read_metrics(directory) for directory in args.runs}
    reference = curve(next(iter(runs.values())), "train", args.loss)
    table = Table(title=f"training {args.loss} against {next(iter(runs))}")
    for column in ("run", "iterations", "first", "last", "largest relative difference"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, records in runs.items():
        iterations, values = curve(records, "train", args.loss)
        difference = relative_difference(reference, (iterations, values))
        table.add_row(
            name, str(len(values)), f"{values[0]:.5f}", f"{values[-1]:.5f}", f"{difference:.1e}"
        )
    console = table_console()
    console.print(table)
    png = Path(args.png or Path(args.runs[0]).parent / "comparison.png")
    plot_losses(runs, png)
    console.print(f"loss curves: {png}", highlight=False, soft_wrap=True)
    return 0


def relative_difference(reference: tuple, other: tuple) -> float:
    """Largest |a − b| / |a| over the iterations both curves have.

    Raises:
        ValueError: They have no iteration in common.
    """
    values = dict(zip(*reference, strict=True))
    pairs = [(values[i], v) for i, v in zip(*other, strict=True) if i in values]
    if not pairs:
        raise ValueError(
            "the runs have no iteration in common; compare runs with metrics of the same iterations"
        )
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)
