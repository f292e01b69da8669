"""A cache's statistics as one figure of four panels."""

import os

import numpy as np
from matplotlib.figure import Figure

from megatron_kd.cache.statistics import CacheStatistics

INK, FILL, FAINT = "#1f2937", "#2563eb", "#93c5fd"


def draw(statistics: CacheStatistics, title: str, path: str | os.PathLike) -> None:
    """Writes the figure; the file's ending says in which format."""
    figure_of(statistics, title).savefig(path, dpi=130)


def figure_of(statistics: CacheStatistics, title: str) -> Figure:
    """Four panels: mass and entropy over the positions, log-probability by rank, and bytes."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    panels = figure.subplots(2, 2)
    _mass(panels[0, 0], statistics)
    _entropy(panels[0, 1], statistics)
    _ranks(panels[1, 0], statistics)
    _bytes(panels[1, 1], statistics)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _mass(axes, statistics: CacheStatistics) -> None:
    values = statistics.mass
    axes.hist(values, bins=np.linspace(0, 1, 51), color=FILL)
    axes.axvline(values.mean(), color=INK, linestyle="--", linewidth=1)
    axes.set(
        title=f"Mass kept (mean {values.mean():.4f}, 5 % below {np.quantile(values, 0.05):.3f})",
        xlabel="Σ p over the kept candidates",
        ylabel="positions",
        xlim=(0, 1),
    )


def _entropy(axes, statistics: CacheStatistics) -> None:
    values = statistics.entropy_nats
    axes.hist(values, bins=50, color=FILL)
    axes.axvline(values.mean(), color=INK, linestyle="--", linewidth=1)
    axes.set(
        title=f"Teacher entropy (mean {values.mean():.3f} nats)",
        xlabel="nats, the rest of the vocabulary as one outcome",
        ylabel="positions",
        xlim=(0, None),
    )


def _ranks(axes, statistics: CacheStatistics) -> None:
    low, middle, high = statistics.rank_quantiles_nats
    ranks = np.arange(1, middle.size + 1)
    axes.fill_between(ranks, low, high, color=FAINT, linewidth=0, label="10 to 90 %")
    axes.plot(ranks, middle, color=FILL, label="median")
    if ranks.size > 1:
        axes.set_xscale("log")
    axes.set(title="Log-probability by rank", xlabel="rank", ylabel="nats")
    axes.legend(frameon=False, loc="lower left")


def _bytes(axes, statistics: CacheStatistics) -> None:
    groups = sorted(statistics.bytes_per_position.items(), key=lambda item: item[1])
    names, values = [name for name, _ in groups], [value for _, value in groups]
    bars = axes.barh(names, values, color=FILL)
    axes.bar_label(bars, fmt="%.1f", padding=3, color=INK)
    axes.set(
        title=f"Bytes per position ({statistics.total_bytes_per_position:.1f} in all)",
        xlabel="bytes",
        xlim=(0, max(values) * 1.15),
    )
