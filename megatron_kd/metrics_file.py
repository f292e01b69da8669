"""Read the `metrics.jsonl` that a run writes; needs neither the host nor PyTorch."""

import json
from pathlib import Path

FILE_NAME = "metrics.jsonl"
PEAK_MEMORY = "peak_memory.json"

# Names of what a run reports, means over supervised tokens. Losses are in nats.
KD_LOSS = "kd loss"
"""The divergence between teacher and student alone, offline and online, whatever is trained on."""
LM_LOSS = "lm loss"
"""Cross-entropy to the label."""
HIDDEN_LOSS = "hidden loss"
"""The loss between hidden states, unweighted, in its own unit."""
TOTAL_LOSS = "total loss"
"""What is trained on, where that is not the divergence alone."""
STUDENT_MASS, TEACHER_MASS = "student mass", "teacher mass"
"""Each model's probability on the teacher's support."""


def read_metrics(directory: str | Path) -> list[dict]:
    """The records of a run, in order; a last line cut short by a crash is left out.

    Raises:
        FileNotFoundError: The directory holds no run.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no {FILE_NAME} in {directory}; give a run's output_dir")
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def curve(records: list[dict], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one loss, of kind "train" or "validation"."""
    chosen = [r for r in records if r["kind"] == kind and name in r["losses"]]
    return [r["iteration"] for r in chosen], [r["losses"][name] for r in chosen]


def peak_bytes_by_rank(directory: str | Path) -> list[int]:
    """Peak memory of each rank of a finished run, in bytes; empty where the run has not ended."""
    path = Path(directory) / PEAK_MEMORY
    return json.loads(path.read_text())["peak_bytes_by_rank"] if path.is_file() else []
