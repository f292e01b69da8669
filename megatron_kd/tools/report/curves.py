"""Loss curves of one or several runs as a PNG."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_kd.metrics_file import curve

PANELS = (("kd loss", "KD loss (nats/token)"), ("lm loss", "LM loss (nats/token)"))


def plot_losses(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw training and validation losses.

    Args:
        runs: Name → records of `read_metrics`.
        path: The PNG to write; its folder is made.
    """
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 4), constrained_layout=True)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
