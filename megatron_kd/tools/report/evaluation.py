"""What a student retains of its teacher: a table from lm-evaluation-harness's result files.

`scripts/evaluate.sh` runs the harness and calls this. Example:
  megatron-kd retained --student runs/evaluation/student --teacher runs/evaluation/teacher
"""

import csv
import json
from pathlib import Path

from rich.table import Table

from megatron_kd.tools.console import table_console

HEADLINE = {
    # task: the metric papers report. Other tasks: the first of METRICS that they have.
    "gsm8k": "exact_match,strict-match",
    "hellaswag": "acc_norm,none",
}
METRICS = ("acc,none", "acc_norm,none", "exact_match,none", "f1,none", "word_perplexity,none")
LOWER_IS_BETTER = ("perplexity", "bits_per_byte")


def add_arguments(parser) -> None:
    parser.add_argument("--student", required=True, metavar="DIR", help="the harness's results")
    parser.add_argument("--teacher", required=True, metavar="DIR", help="the harness's results")
    parser.add_argument(
        "--csv", metavar="FILE", help="default: evaluation.csv beside the student's"
    )


def run(args) -> int:
    rows = compare(read_results(args.student), read_results(args.teacher))
    table = Table(title="student beside teacher")
    table.add_column("task")
    table.add_column("metric")
    for column in ("student", "teacher", "retained %"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["task"],
            row["metric"],
            f"{row['student']:.4f}",
            f"{row['teacher']:.4f}",
            "–" if row["retained_percent"] is None else f"{row['retained_percent']:.1f}",
        )
    console = table_console()
    console.print(table)
    path = Path(args.csv or Path(args.student).parent / "evaluation.csv")
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    console.print(f"table: {path}", highlight=False, soft_wrap=True)
    return 0


def read_results(directory: str | Path) -> dict[tuple[str, str], float]:
    """(task, metric) → value, from every results_*.json below a directory; the newest file of a
    task counts.

    Raises:
        FileNotFoundError: There is none.
    """
    files = sorted(Path(directory).rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no results_*.json below {directory}; run scripts/evaluate.sh")
    found = {}
    for path in files:
        content = json.loads(path.read_text())
        subtasks = {name for group in content.get("group_subtasks", {}).values() for name in group}
        for task, values in content["results"].items():
            if task in subtasks and task not in HEADLINE:
                continue  # its group speaks for it
            for metric in _metrics(task, values):
                found[task, metric] = float(values[metric])
    return found


def compare(student: dict, teacher: dict) -> list[dict]:
    """One row per task and metric that both models have, in the student's order.

    `retained_percent` is 100 · student / teacher, for perplexities 100 · teacher / student; None
    where the divisor is 0.

    Raises:
        ValueError: They have no task in common.
    """
    rows = []
    for task, metric in student:
        if (task, metric) not in teacher:
            continue
        scores = student[task, metric], teacher[task, metric]
        lower_is_better = any(name in metric for name in LOWER_IS_BETTER)
        part, whole = reversed(scores) if lower_is_better else scores
        rows.append(
            {
                "task": task,
                "metric": metric.removesuffix(",none"),
                "student": student[task, metric],
                "teacher": teacher[task, metric],
                "retained_percent": 100 * part / whole if whole else None,
            }
        )
    if not rows:
        raise ValueError(
            f"the two results share no task: student {sorted({t for t, _ in student})}, teacher "
            f"{sorted({t for t, _ in teacher})}; evaluate both with the same --tasks"
        )
    return rows


def _metrics(task: str, values: dict) -> list[str]:
    """The metrics to report of a task: its headline metric, or, for RULER, each length's score."""
    lengths = [name for name in values if name.split(",")[0].isdigit() and values[name] != -1]
    if lengths:
        return lengths
    for metric in (HEADLINE.get(task), *METRICS):
        if metric in values:
            return [metric]
    numbers = [n for n, v in values.items() if isinstance(v, float) and "stderr" not in n]
    return numbers[:1]
