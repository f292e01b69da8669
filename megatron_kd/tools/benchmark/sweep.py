"""Measure loss implementations over sequence lengths and chunk sizes, into one CSV.

Every case runs in a fresh process (with --tp N: N of them), warm-up first, then a fixed number of
iterations of which each is the maximum over ranks. What runs out of memory is a row, not an end.
With --ratios all implementations take turns in one warm process instead, which is how to compare
their speed on a busy machine.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megatron_kd.tools.benchmark import environment
from megatron_kd.tools.benchmark.cases import BenchmarkConfig, Case, read_config
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.benchmark.side_by_side import measure_side_by_side
from megatron_kd.tools.benchmark.table import TableWriter, bare_key, bare_times, is_bare, row_of

FREE_SHARE = 0.8
POLL_S = 0.05
# The worst status of a case's ranks is the case's: others fail because of the first.
SEVERITY = ("ok", "failed", "timed_out", "not_available", "wrong_result", "out_of_memory")
COMPILER_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def add_arguments(parser) -> None:
    parser.add_argument("config", help="YAML, for example configs/benchmark/laptop.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. seq_tokens=[1024]")
    parser.add_argument("--output", required=True, metavar="CSV", help="the table to write")
    parser.add_argument("--tp", type=int, help="ranks that share the vocabulary (gloo or NCCL)")
    parser.add_argument(
        "--ratios", action="store_true", help="all implementations in turn in one warm process"
    )


def run(args) -> int:
    config = read_config(args.config, args.overrides)
    if args.tp is not None:
        config = dataclasses.replace(config, tp=args.tp)
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.tp)
    check_machine(config)
    limit_bytes = memory_limit_bytes(config)
    cases = config.cases(threads, limit_bytes // config.tp if limit_bytes else None)
    measured_at = {"date_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    measured_at |= environment.describe(torch.device(config.device), threads)
    console = Console()
    with TableWriter(Path(args.output)) as table:
        if args.ratios:
            for row in _side_by_side_rows(config, cases, threads, measured_at):
                table.add(row)
        else:
            _sweep(config, cases, measured_at, table, console)
    console.print(summary(table.rows))
    console.print(f"table: {args.output}", highlight=False, soft_wrap=True)
    return 1 if any(row["status"] in ("failed", "wrong_result") for row in table.rows) else 0


def check_machine(config: BenchmarkConfig) -> None:
    if config.device == "cuda":
        devices = torch.cuda.device_count()
        if devices < config.tp:
            raise ValueError(
                f"device cuda with tp {config.tp} needs as many GPUs, this machine has {devices}: "
                "lower tp, or measure on the CPU with device=cpu"
            )


def memory_limit_bytes(config: BenchmarkConfig) -> int | None:
    if config.device == "cuda":
        return None
    if config.memory_limit_gib is not None:
        return int(config.memory_limit_gib * 2**30)
    return int(environment.free_memory_bytes() * FREE_SHARE)


def run_case(case: Case, timeout_s: float) -> dict:
    """The worst outcome of a fresh group of processes, one per rank; rank 0's among equals."""
    variables = {k: v for k, v in os.environ.items() if k not in COMPILER_SWITCHES}
    variables["OMP_NUM_THREADS"] = str(case.threads)
    if case.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "megatron_kd.tools.benchmark.worker"]
        command.append(json.dumps(dataclasses.asdict(case)))
        ranks = []
        for rank in range(case.tp):
            with (folder / f"log-{rank}").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), name], env=variables, stdout=log, stderr=log
                    )
                )
        try:
            late = _wait_for(ranks, folder, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        outcomes = [_outcome(rank, process, folder, late) for rank, process in enumerate(ranks)]
    return worst(outcomes)


def worst(outcomes: list[dict]) -> dict:
    """The outcome that stands for all ranks: the first of the most severe status."""
    return max(outcomes, key=lambda outcome: SEVERITY.index(outcome["status"]))


def _wait_for(ranks, folder: Path, deadline: float) -> bool:
    """Wait until all are done or one has failed, for which the rest would wait; returns whether the
    deadline passed first.
    """
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        ended = [i for i, code in enumerate(codes) if code is not None]
        if any(codes[i] != 0 or _read(folder, i).get("status") != "ok" for i in ended):
            return False
        if len(ended) == len(ranks):
            return False
        time.sleep(POLL_S)
    return True


def _read(folder: Path, rank: int) -> dict:
    path = folder / f"result-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _outcome(rank: int, process, folder: Path, late: bool) -> dict:
    outcome = _read(folder, rank)
    if outcome:
        return outcome
    if late:
        return {"status": "timed_out", "note": "ended at timeout_s"}
    log = (folder / f"log-{rank}").read_text(errors="replace").strip()
    last = log.splitlines()[-1][:300] if log else "no output"
    if "bad_alloc" in log or "CUDA out of memory" in log:
        return {"status": "out_of_memory", "note": last}
    return {"status": "failed", "note": f"rank {rank} ended with {process.returncode}: {last}"}


def _sweep(config: BenchmarkConfig, cases: list[Case], measured_at: dict, table, console) -> None:
    bare: dict[tuple, list[float]] = {}
    for case in cases:
        outcome = _unsharded(case) or run_case(case, config.timeout_s)
        if is_bare(case) and outcome["status"] == "ok":
            bare[bare_key(case)] = outcome["times_ms"]
        row = row_of(case, "sweep", outcome, bare_times(case, bare), measured_at)
        table.add(row)
        chunk = "" if case.chunk_tokens is None else f", chunk {case.chunk_tokens}"
        shown = f"{row['time_median_ms']} ms" if row["status"] == "ok" else row["status"]
        console.print(
            f"{case.implementation}, {case.seq_tokens} tokens{chunk}: {shown}", highlight=False
        )


def _unsharded(case: Case) -> dict | None:
    if case.tp == 1 or IMPLEMENTATIONS[case.implementation].shards:
        return None
    return {"status": "not_available", "note": "it has no vocabulary parallelism"}


def _side_by_side_rows(config: BenchmarkConfig, cases: list[Case], threads: int, measured_at: dict):
    if config.tp > 1:
        raise ValueError("--ratios measures in one process: leave tp at 1, or sweep without it")
    disabled = [name for name in COMPILER_SWITCHES if os.environ.get(name, "0") not in ("", "0")]
    if disabled:
        raise ValueError(
            f"{disabled[0]} is set, which would hide the compiled elementwise work: unset it"
        )
    torch.set_num_threads(threads)
    for length in config.seq_tokens:
        for chunk in config.chunk_tokens:
            group = [
                dataclasses.replace(case, chunk_tokens=case.chunk_tokens and chunk)
                for case in cases
                if case.seq_tokens == length and case.chunk_tokens in (None, chunk)
            ]
            outcomes = measure_side_by_side(group, chunk)
            bare = next(outcome for case, outcome in outcomes if is_bare(case))
            times = bare.get("times_ms"), measured_at, bare.get("cpu_times_ms")
            for case, outcome in outcomes:
                yield row_of(case, "side_by_side", outcome, *times)


def summary(rows: list[dict]) -> Table:
    table = Table(title="ratios are to the three bare products of the same shape")
    names = (
        "implementation",
        "tokens",
        "chunk",
        "time (ms)",
        "ratio",
        "CPU",
        "peak (MiB)",
        "status",
    )
    for name in names:
        justify = "left" if name in ("implementation", "status") else "right"
        table.add_column(name, justify=justify)
    for row in rows:
        peak = row["peak_memory_bytes"]
        table.add_row(
            row["title"],
            str(row["seq_tokens"]),
            str(row["chunk_tokens"]),
            str(row["time_median_ms"]),
            str(row["ratio_to_bare_products"]),
            str(row["cpu_ratio_to_bare_products"]),
            f"{peak / 2**20:.1f}" if peak != "" else "",
            row["status"] if row["status"] == "ok" else f"{row['status']}: {row['note']}",
        )
    return table
