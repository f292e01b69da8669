"""Time and memory of the losses: the paper's shapes beside the goals, and other packages' losses.

One rank of two of arXiv 2608.03796: h 4,096, 65,536 rows of the output layer, K 100, bf16.
"""

import csv
import subprocess
import sys
from pathlib import Path

from megatron_kd.tools.gpu_check.part import FAILED, MISSED, Outcome, Settings, table

GOALS = {32768: (3.0, 11.0), 262144: (7.0, 1.4)}
"""Tokens → (most GiB, fewest iterations per second) on one H200."""
HELD = ("in_forward", "auto")
"""What has to meet them."""
OURS = ("in_forward", "auto", "recompute", "sparse_chunked", "dense")
PEERS = (
    "dense",
    "in_forward",
    "recompute",
    "plain_kl_div",
    "paper_text",
    "paper_algorithm_1",
    "torch_linear_cross_entropy",
    "megatron_lm_cached",
    "veomni_chunked_topk",
    "dense_online",
    "fused_online",
    "modelopt_logits_kl",
    "liger_fused_jsd",
)
SMALL = {"hidden": 32, "vocab": 512, "topk": 8, "chunk_tokens": "[64]", "iterations": 1}


def paper(tokens: int):
    """The part that measures the paper's shape of one length."""

    def run(settings: Settings) -> Outcome:
        names = [name for name in OURS if name != "dense" or tokens <= 32768]
        rows, outcome = _bench(settings, f"paper_{tokens}", tokens, names)
        most_gib, fewest = GOALS[tokens]
        for row in rows:
            if row["implementation"] in HELD and not settings.small and row["status"] == "ok":
                peak, speed = _gib(row), float(row["iterations_per_s"])
                if peak > most_gib or speed < fewest:
                    outcome.worsen(MISSED)
        outcome.lines.append("")
        outcome.lines.append(f"Goals: at most {most_gib:g} GiB, at least {fewest:g} it/s.")
        return outcome

    return run


def peers(settings: Settings) -> Outcome:
    """Other packages' losses and ours in turn in one warm process."""
    _, outcome = _bench(settings, "peers", 8192, PEERS, "--ratios")
    return outcome


def tensor_parallel(settings: Settings) -> Outcome:
    """The paper's shape on both its ranks."""
    _, outcome = _bench(
        settings, "tensor_parallel", 32768, ("in_forward", "recompute", "dense"), "--tp", "2"
    )
    return outcome


def _bench(settings: Settings, name: str, tokens: int, implementations, *options):
    """Run the benchmark into a CSV of the part's own; returns its rows and an outcome."""
    path = settings.place(name) / "table.csv"
    overrides = {
        "implementations": f"[{','.join(implementations)}]",
        "seq_tokens": f"[{min(tokens, 128) if settings.small else tokens}]",
        "device": settings.device,
    }
    if "--tp" in options:
        overrides["vocab"] = 131072
    if settings.small:
        overrides |= SMALL
    command = [sys.executable, "-m", "megatron_kd", "dev", "bench"]
    command += ["configs/benchmark/paper_gpu.yaml", "--output", str(path), *options]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in overrides.items())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    outcome = Outcome()
    rows = list(csv.DictReader(Path(path).open())) if path.is_file() else []
    outcome.lines = table(
        ["loss", "tokens", "GiB", "it/s", "× bare products", "status"],
        [
            [
                row["title"],
                row["seq_tokens"],
                f"{_gib(row):.2f}" if row["status"] == "ok" else "",
                row["iterations_per_s"],
                row["ratio_to_bare_products"],
                row["status"] if row["status"] == "ok" else f"{row['status']}: {row['note']}",
            ]
            for row in rows
        ],
    )
    if done.returncode or not rows:
        outcome.worsen(FAILED)
        outcome.lines += ["", "```", *done.stdout.splitlines()[-15:], "```"]
    return rows, outcome


def _gib(row: dict) -> float:
    return int(row["peak_memory_bytes"]) / 2**30
