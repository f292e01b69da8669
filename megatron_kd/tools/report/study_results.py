"""What a study's runs came to: a row per student, as CSV and as Markdown tables over seeds."""

import csv
import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.metrics_file import KD_LOSS, LM_LOSS, curve, peak_bytes_by_rank, read_metrics
from megatron_kd.tools.report.held_out import Scores
from megatron_kd.tools.report.study_config import StudyConfig

SCORES_FILE = "held_out.json"
"""The file beside a trained student that has its held-out scores and how they were measured."""


@dataclass
class Row:
    """One trained student, which is one line of the table."""

    run: str
    seed: int
    iterations: int
    held_out_kl: float
    next_token_accuracy: float
    teacher_agreement: float
    final_kd_loss: float
    final_lm_loss: float
    seconds_per_iteration: float
    tokens_per_s: float
    model_tflops_per_s: float
    peak_mib: float


def collect(study: StudyConfig) -> list[Row]:
    """A row per scored run, in the study's order."""
    folders = [(name, seed) for name in study.runs for seed in study.seeds]
    return [
        _row(name, seed, folder)
        for name, seed in folders
        if (folder := study.folder(name, seed)).joinpath(SCORES_FILE).is_file()
    ]


def _row(name: str, seed: int, folder: Path) -> Row:
    records = read_metrics(folder)
    scores = Scores(**json.loads((folder / SCORES_FILE).read_text())["scores"])
    steps = [record for record in records if record["kind"] == "train"]
    warm = steps[1:] or steps  # the first iteration also warms up

    def median(key: str) -> float:
        return statistics.median(record[key] for record in warm)

    def last(loss: str) -> float:
        _, values = curve(records, "validation", loss)
        return values[-1] if values else float("nan")

    return Row(
        run=name,
        seed=seed,
        iterations=steps[-1]["iteration"],
        held_out_kl=scores.kl,
        next_token_accuracy=scores.accuracy,
        teacher_agreement=scores.agreement,
        final_kd_loss=last(KD_LOSS),
        final_lm_loss=last(LM_LOSS),
        seconds_per_iteration=median("seconds"),
        tokens_per_s=median("tokens_per_s"),
        model_tflops_per_s=median("model_tflops_per_s"),
        peak_mib=max(peak_bytes_by_rank(folder)) / (1 << 20),
    )


def write_table(rows: list[Row], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in dataclasses.fields(Row))
        for row in rows:
            values = dataclasses.astuple(row)
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)


def summary(study: StudyConfig, rows: list[Row]) -> str:
    """Markdown: a table per section, mean ± standard deviation over seeds. Only
    sections of kind `curves` have time and memory: runs of the others may have shared the machine.
    """
    parts = []
    for section in study.sections.values():
        headings = ["run", "seeds", "held-out KL (nats)", "next token", "teacher's first"]
        if section.kind == "curves":
            headings += ["s/iteration", "TFLOP/s", "peak (MiB)"]
        lines = [
            f"## {section.title}",
            "",
            f"| {' | '.join(headings)} |",
            f"|---{'|--:' * (len(headings) - 1)}|",
        ]
        for name in section.runs:
            runs = [row for row in rows if row.run == name]
            if not runs:
                continue
            cells = [
                _shown([row.held_out_kl for row in runs], "{:.3f}"),
                _shown([100 * row.next_token_accuracy for row in runs], "{:.1f}") + " %",
                _shown([100 * row.teacher_agreement for row in runs], "{:.1f}") + " %",
                _shown([row.seconds_per_iteration for row in runs], "{:.2f}"),
                _shown([row.model_tflops_per_s for row in runs], "{:.3f}"),
                _shown([row.peak_mib for row in runs], "{:,.0f}"),
            ][: len(headings) - 2]
            lines.append(f"| {study.title(name)} | {len(runs)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def mean_sd(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; the deviation of a single seed is 0."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _shown(values: list[float], form: str) -> str:
    mean, deviation = mean_sd(values)
    return form.format(mean) + (f" ± {form.format(deviation)}" if len(values) > 1 else "")
