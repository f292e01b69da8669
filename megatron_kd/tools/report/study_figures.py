"""The figures of a study: one PNG per section."""

import statistics

from matplotlib.figure import Figure

from megatron_kd.metrics_file import KD_LOSS, curve, read_metrics
from megatron_kd.tools import figures
from megatron_kd.tools.report.study_results import mean_sd


def figure_of(study, section, rows: list) -> Figure:
    """A section's figure, of kind bars, curves or lines; at least one row must be of its runs."""
    by_run = {name: [row for row in rows if row.run == name] for name in section.runs}
    by_run = {name: runs for name, runs in by_run.items() if runs}
    figure, axes = figures.panels(2, 11, 4.2)
    KINDS[section.kind](study, section, by_run, axes)
    figure.suptitle(section.title)
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


SCORES = (
    ("held_out_kl", "held-out KL(teacher ‖ student), nats"),
    ("next_token_accuracy", "next-token accuracy"),
)


def _bars(study, section, by_run, axes) -> None:
    places = range(len(by_run))
    for axis, (score, label) in zip(axes, SCORES, strict=True):
        means, spreads = zip(*(_mean_sd(runs, score) for runs in by_run.values()), strict=True)
        axis.barh(places, means, xerr=spreads, color=figures.OURS, capsize=3)
        axis.set_yticks(places, [study.title(name) for name in by_run])
        axis.invert_yaxis()
        axis.set_xlabel(label)


def _lines(study, section, by_run, axes) -> None:
    series: dict[str, list[str]] = {}
    for name in by_run:
        series.setdefault(study.runs[name].series or "", []).append(name)
    for axis, (score, label) in zip(axes, SCORES, strict=True):
        for title, names in series.items():
            points = sorted((study.runs[name].x, *_mean_sd(by_run[name], score)) for name in names)
            x, means, spreads = zip(*points, strict=True)
            axis.errorbar(x, means, yerr=spreads, marker="o", capsize=3, label=title)
        axis.set_xscale("log")
        axis.set_xlabel(section.x_label)
        axis.set_ylabel(label)
        if any(series):
            axis.legend()


def _curves(study, section, by_run, axes) -> None:
    """The mean over seeds of the KD loss in training, and the time of an iteration."""
    widths = [3.5, 2.5, 1.5, 1.0]  # equal curves stay visible below each other
    for number, (name, runs) in enumerate(by_run.items()):
        curves = [
            curve(read_metrics(study.folder(name, row.seed)), "train", KD_LOSS) for row in runs
        ]
        losses = zip(*(values for _, values in curves), strict=True)
        means = [statistics.mean(values) for values in losses]
        width = widths[min(number, len(widths) - 1)]
        axes[0].plot(curves[0][0], means, lw=width, label=study.title(name))
    axes[0].set_xlabel("iteration")
    axes[0].set_ylabel("KD loss in training, nats")
    axes[0].legend()
    places = range(len(by_run))
    means, spreads = zip(
        *(_mean_sd(runs, "seconds_per_iteration") for runs in by_run.values()), strict=True
    )
    axes[1].barh(places, means, xerr=spreads, color=figures.OURS, capsize=3)
    axes[1].set_yticks(places, [study.title(name) for name in by_run])
    axes[1].invert_yaxis()
    axes[1].set_xlabel("seconds per iteration")


def _mean_sd(rows: list, score: str) -> tuple[float, float]:
    return mean_sd([getattr(row, score) for row in rows])


KINDS = {"bars": _bars, "curves": _curves, "lines": _lines}
