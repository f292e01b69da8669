"""Peak memory by component as stacked bars, one per implementation of the loss."""

from matplotlib.figure import Figure

from megatron_kd.tools import figures
from megatron_kd.tools.planning.stage_memory import COMPONENTS, StageMemory

COLORS = {
    "weights": "#1e3a8a",
    "gradients": "#2563eb",
    "optimizer": "#93c5fd",
    "teacher": "#7c3aed",
    "activations": "#059669",
    "logits": "#f59e0b",
    "loss": "#dc2626",
    "backward": "#a7f3d0",
    "cache buffers": "#6b7280",
}
GIB = 1 << 30


def figure_of(
    bars: dict[str, StageMemory], *, title: str, limit_gib: float, limit_name: str
) -> Figure:
    """A bar for every name, with its peak above it; components that no bar shows are left out.

    Args:
        bars: Name of a bar to its memory.
        limit_gib: Drawn as a line where the bars come near it.
    """
    figure, (axes,) = figures.panels(1, max(7.5, 2.6 + 1.5 * len(bars)), 5.6)
    names = list(bars)
    base = [0.0] * len(names)
    for component in COMPONENTS:
        heights = [bars[name].parts[component] / GIB for name in names]
        if max(heights) < 0.005 * max(bar.total for bar in bars.values()) / GIB:
            continue
        axes.bar(names, heights, 0.62, bottom=base, color=COLORS[component], label=component)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    tallest = max(*base, limit_gib) if limit_gib < 2.5 * max(base) else max(base)
    for position, name in enumerate(names):
        total = bars[name].total / GIB
        axes.text(
            position,
            total + 0.012 * tallest,
            f"{total:.3g}",
            ha="center",
            color=figures.INK,
            weight="bold",
        )
    if tallest >= limit_gib:
        axes.axhline(limit_gib, color=figures.INK, linestyle="--", linewidth=1)
        axes.text(
            len(names) - 0.5,
            limit_gib,
            f" {limit_name}",
            color=figures.INK,
            va="bottom",
            ha="right",
        )
    axes.set(title=title, ylabel="peak memory per rank, GiB", ylim=(0, 1.12 * tallest))
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    return figure
