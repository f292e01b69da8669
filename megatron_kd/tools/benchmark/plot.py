"""Draw a table of `megatron-kd dev bench`: memory and speed against sequence length, or the ratios.

A sweep gives the paper's Figure 3, a line per implementation on logarithmic axes, what ran out of
memory as a cross on the upper edge. A table of --ratios gives bars.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from megatron_kd.tools import figures
from megatron_kd.tools.benchmark.implementations import BARE, IMPLEMENTATIONS
from megatron_kd.tools.benchmark.table import read_table

MARKERS = "osD^vP*X<>hd"


def add_arguments(parser) -> None:
    parser.add_argument("table", metavar="CSV", help="written by megatron-kd dev bench")
    parser.add_argument("--png", metavar="FILE", help="default: the table's name with .png")


def run(args) -> int:
    png = Path(args.png or Path(args.table).with_suffix(".png"))
    figures.save(figure_of(read_table(args.table)), png)
    print(f"figure: {png}")
    return 0


def figure_of(rows: list[dict]) -> Figure:
    """The figure of a table's rows: bars for --ratios, else lines.

    Raises:
        ValueError: No case was measured, so there is nothing to draw.
    """
    if not any(row["status"] == "ok" for row in rows):
        raise ValueError("no row has status ok: there is nothing to draw")
    modes = {row["mode"] for row in rows}
    return _bars(rows) if modes == {"side_by_side"} else _lines(rows)


def _shape(row: dict) -> str:
    ranks = f", {row['tp']} ranks" if row["tp"] > 1 else ""
    return (
        f"h {row['hidden']}, v {row['vocab']}, k {row['topk']}, {row['dtype']}{ranks}; "
        f"{row['device']}"
    )


def series_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Name → rows by length; the chunk size is in the name where there are several."""
    chunks = {row["chunk_tokens"] for row in rows} - {None}
    series: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["seq_tokens"]):
        name = row["title"]
        if len(chunks) > 1 and row["chunk_tokens"] is not None:
            name += f", chunk {row['chunk_tokens']}"
        series.setdefault(name, []).append(row)
    drawn = ("ok", "out_of_memory", "timed_out")
    return {
        name: kept
        for name, all_rows in series.items()
        if (kept := [row for row in all_rows if row["status"] in drawn])
    }


def _lines(rows: list[dict]):
    figure, panels = figures.panels(2, 13, 5.5)
    panels[0].set(title="Peak memory above inputs", ylabel="GiB")
    panels[1].set(title="Speed, forward and backward", ylabel="iterations/s")
    columns = (("peak_memory_bytes", 2**30), ("iterations_per_s", 1))
    series = series_of(rows)
    lost = False
    for i, (name, all_rows) in enumerate(series.items()):
        bare = all_rows[0]["implementation"] == BARE
        look = {
            "color": figures.BASELINE if bare else f"C{i % 10}",
            "linestyle": ":" if bare else "-",
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 6,
            "alpha": 0.85,
        }
        good = [row for row in all_rows if row["status"] == "ok"]
        for axes, (column, unit) in zip(panels, columns, strict=True):
            lengths = [row["seq_tokens"] for row in good]
            axes.plot(lengths, [row[column] / unit for row in good], label=name, **look)
        failed = [row["seq_tokens"] for row in all_rows if row["status"] == "out_of_memory"]
        lost = lost or bool(failed)
        (crosses,) = panels[0].plot(
            failed,
            [1 - 0.035 * i] * len(failed),  # one below the other: they share their lengths
            transform=panels[0].get_xaxis_transform(),
            linestyle="",
            marker="x",
            color=look["color"],
            markersize=8,
            markeredgewidth=2,
            clip_on=False,
        )
        crosses.set_in_layout(False)  # unclipped, they would push the axes away from the legend
    lengths = sorted({row["seq_tokens"] for row in rows})
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(lengths, [_tokens(length) for length in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("sequence length (tokens)")
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    if lost:
        (cross,) = panels[0].plot([], [], "x", color=figures.FAINT, markeredgewidth=2)
        handles, labels = [*handles, cross], [*labels, "out of memory"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(_shape(rows[0]), fontsize=10)
    return figure


def _bars(rows: list[dict]):
    good = [row for row in rows if row["status"] == "ok"]
    names = [_bar_name(row, good) for row in good]
    figure, panels = figures.panels(2, 13, 1.6 + 0.36 * len(good), sharey=True)
    panels[0].set(title="Time, as a ratio to three bare products", xlabel="ratio (median)")
    panels[1].set(title="Peak memory above inputs", xlabel="MiB")
    columns = (("ratio_to_bare_products", 1, "%.2f"), ("peak_memory_bytes", 2**20, "%.0f"))
    colors = [_bar_color(row["implementation"]) for row in good]
    for axes, (column, unit, form) in zip(panels, columns, strict=True):
        bars = axes.barh(names, [row[column] / unit for row in good], color=colors)
        axes.bar_label(bars, fmt=form, padding=3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    panels[0].axvline(1, color=figures.BASELINE, linewidth=1, linestyle=":")
    panels[0].invert_yaxis()
    figure.suptitle(f"{_shape(rows[0])} (blue: this package, grey: others)", fontsize=10)
    return figure


def _bar_color(name: str) -> str:
    if name == BARE:
        return figures.BASELINE
    return (
        figures.OURS if name in IMPLEMENTATIONS and IMPLEMENTATIONS[name].ours else figures.OTHERS
    )


def _bar_name(row: dict, rows: list[dict]) -> str:
    name = row["title"]
    if len({other["seq_tokens"] for other in rows}) > 1:
        name += f", {_tokens(row['seq_tokens'])}"
    if len({other["chunk_tokens"] for other in rows} - {None}) > 1 and row["chunk_tokens"]:
        name += f", chunk {row['chunk_tokens']}"
    return name


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)
