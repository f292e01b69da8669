"""The benchmark's CSV: one row per case, units in the column names."""

import csv
import statistics
from pathlib import Path

from megatron_kd.tools.benchmark.cases import Case
from megatron_kd.tools.benchmark.implementations import BARE, IMPLEMENTATIONS
from megatron_kd.tools.benchmark.peak_memory import MEASURES

COLUMNS = (
    "date_utc",
    "commit",
    "device",
    "versions",
    "elementwise",
    "mode",
    "implementation",
    "title",
    "quantity",
    "products",
    "dtype",
    "tp",
    "seq_tokens",
    "chunk_tokens",
    "hidden",
    "vocab",
    "topk",
    "warm_up_iterations",
    "iterations",
    "status",
    "note",
    "time_median_ms",
    "time_min_ms",
    "iterations_per_s",
    "ratio_to_bare_products",
    "ratio_to_bare_products_best",
    "cpu_ratio_to_bare_products",
    "peak_memory_bytes",
    "transient_memory_bytes",
    "chunk_logits_fp32_bytes",
    "transient_per_chunk_logits",
    "memory_measure",
)
NUMBERS = {
    **dict.fromkeys(("products", "tp", "seq_tokens", "chunk_tokens", "hidden", "vocab"), int),
    **dict.fromkeys(("topk", "iterations", "warm_up_iterations"), int),
    **dict.fromkeys(("peak_memory_bytes", "transient_memory_bytes"), int),
    **dict.fromkeys(("chunk_logits_fp32_bytes",), int),
    **dict.fromkeys(("time_median_ms", "time_min_ms", "iterations_per_s"), float),
    **dict.fromkeys(("ratio_to_bare_products", "ratio_to_bare_products_best"), float),
    "cpu_ratio_to_bare_products": float,
    "transient_per_chunk_logits": float,
}


def row_of(
    case: Case,
    mode: str,
    outcome: dict,
    bare_ms: list[float] | None,
    measured_at: dict,
    bare_cpu_ms: list[float] | None = None,
) -> dict:
    """A row from the outcome of `measure` (or only its status and note).

    Args:
        mode: `sweep`, or `side_by_side` where all cases took turns in one process.
        bare_ms: The bare products' times at the same shape; side by side, of the same rounds.
        measured_at: The columns of `environment.describe`, and the date.
        bare_cpu_ms: Processor times of the bare products, measured side by side only.
    """
    implementation = IMPLEMENTATIONS[case.implementation]
    row = dict.fromkeys(COLUMNS, "")
    row |= measured_at | {key: outcome[key] for key in ("status", "note")}
    shared = ("implementation", "seq_tokens", "hidden", "vocab", "topk", "dtype", "tp")
    row |= {name: getattr(case, name) for name in shared}
    row |= {
        "mode": mode,
        "title": implementation.title,
        "quantity": implementation.quantity,
        "products": implementation.products,
        "warm_up_iterations": case.warm_up_iterations,
        "iterations": case.iterations,
        "chunk_tokens": "" if case.chunk_tokens is None else case.chunk_tokens,
        "memory_measure": MEASURES[case.device],
    }
    if outcome["status"] != "ok":
        return row
    times = outcome["times_ms"]
    median = statistics.median(times)
    row |= {
        "time_median_ms": round(median, 4),
        "time_min_ms": round(min(times), 4),
        "iterations_per_s": round(1e3 / median, 5),
        "peak_memory_bytes": outcome["peak_memory_bytes"],
        "transient_memory_bytes": outcome["transient_memory_bytes"],
    }
    if bare_ms:
        ratio = median / statistics.median(bare_ms)
        if mode == "side_by_side":
            ratio = statistics.median(t / b for t, b in zip(times, bare_ms, strict=True))
        row["ratio_to_bare_products"] = round(ratio, 4)
        row["ratio_to_bare_products_best"] = round(min(times) / min(bare_ms), 4)
    if bare_cpu_ms:
        ratios = [t / b for t, b in zip(outcome["cpu_times_ms"], bare_cpu_ms, strict=True)]
        row["cpu_ratio_to_bare_products"] = round(statistics.median(ratios), 4)
    if case.chunk_tokens is not None:
        logits = 4 * min(case.chunk_tokens, case.seq_tokens) * case.vocab // case.tp
        row["chunk_logits_fp32_bytes"] = logits
        row["transient_per_chunk_logits"] = round(outcome["transient_memory_bytes"] / logits, 4)
    return row


class TableWriter:
    """Writes a CSV whose rows are on disk as soon as they are measured."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS, lineterminator="\n")
        self.writer.writeheader()
        self.rows: list[dict] = []

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.writer.writerow(row)
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def read_table(path: str | Path) -> list[dict]:
    """Rows with numbers as numbers, None where a cell is empty.

    Raises:
        ValueError: The file is no table of `megatron-kd dev bench`, or has no rows.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        lacking = set(COLUMNS) - set(reader.fieldnames or ())
        if lacking:
            raise ValueError(
                f"{path} is no table of megatron-kd dev bench: it lacks "
                f"{', '.join(sorted(lacking))}"
            )
        rows = list(reader)
    if not rows:
        raise ValueError(f"{path} has no rows: the benchmark ended before its first case")
    for row in rows:
        for name, value in row.items():
            if value == "":
                row[name] = None
            elif name in NUMBERS:
                row[name] = NUMBERS[name](value)
    return rows


def bare_key(case: Case) -> tuple:
    return case.seq_tokens, case.chunk_tokens


def bare_times(case: Case, measured: dict[tuple, list[float]]) -> list[float] | None:
    """Times of the bare products at a case's length and chunk size; a case without a chunk size is
    compared with the fastest chunk.
    """
    if case.chunk_tokens is not None:
        return measured.get(bare_key(case))
    same = [times for (length, _), times in measured.items() if length == case.seq_tokens]
    return min(same, key=statistics.median, default=None)


def is_bare(case: Case) -> bool:
    return case.implementation == BARE
