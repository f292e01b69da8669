"""What the tools' figures share: colors, and writing one without a window system."""

from pathlib import Path

from matplotlib.figure import Figure

INK = "#1f2937"
OURS = "#2563eb"
"""Color of what this package computes, and of its students' scores."""

OTHERS = "#9ca3af"
"""Color of what other packages compute."""

BASELINE = "#111827"
"""Color of what everything else is measured against."""

FAINT = "#6b7280"


def panels(count: int, width_inches: float, height_inches: float, **options) -> tuple[Figure, list]:
    """A figure of `count` panels side by side. The options go to matplotlib's `subplots`."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def save(figure: Figure, path: str | Path, dpi: int = 130) -> None:
    """Write a figure in the format that the file's ending names; its folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
