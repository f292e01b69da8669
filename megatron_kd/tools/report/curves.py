"""Loss curves of one or several runs as a PNG."""

from pathlib import Path

from megatron_kd.metrics_file import KD_LOSS, LM_LOSS, curve
from megatron_kd.tools import figures

PANELS = ((KD_LOSS, "KD loss (nats/token)"), (LM_LOSS, "LM loss (nats/token)"))


def plot_losses(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw training and validation losses.

    Args:
        runs: Name → records of `read_metrics`.
        path: The PNG to write; its folder is made.
    """
    figure, axes = figures.panels(len(PANELS), 11, 4)
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for color, (run, records) in enumerate(runs.items()):
            axis.plot(
                *curve(records, "train", name), color=f"C{color}", lw=1.2, label=f"{run}, training"
            )
            axis.plot(
                *curve(records, "validation", name),
                color=f"C{color}",
                marker="o",
                ls="--",
                label=f"{run}, validation",
            )
        axis.set_xlabel("iteration")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figures.save(figure, path, dpi=110)
