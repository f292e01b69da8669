"""A sweep with --tp 2: fresh groups of gloo ranks, comparison under TP, one rank that fails."""

import sys

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from warm import warm_python

from megatron_kd.tools.benchmark import measure
from megatron_kd.tools.benchmark.cases import BenchmarkConfig
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.benchmark.inputs import Inputs
from megatron_kd.tools.benchmark.table import read_table
from megatron_kd.cli import main

SHARDED = ("dense", "sparse_chunked", "recompute", "in_forward", "paper_text", "paper_algorithm_1")
SHAPE = dict(seq_tokens=40, hidden=8, vocab=64, topk=4, chunk_tokens=16)


def make_inputs(group=None) -> Inputs:
    return Inputs(**SHAPE, dtype=torch.float32, device=torch.device("cpu"), group=group)


def gradients(rank: int, name: str):
    inputs = make_inputs(dist.group.WORLD)
    measure.check(IMPLEMENTATIONS[name], inputs)
    loss = measure.step(IMPLEMENTATIONS[name], inputs)
    return loss.item(), inputs.hidden.grad.tolist(), inputs.weight.grad.tolist()


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_compute_what_one_does(name):
    inputs = make_inputs()
    loss = measure.step(IMPLEMENTATIONS[name], inputs).item()
    (loss_0, hidden_0, weight_0), (loss_1, hidden_1, weight_1) = run_ranks(2, gradients, name)
    assert loss_0 == pytest.approx(loss, rel=1e-5) and loss_1 == loss_0
    for hidden in (hidden_0, hidden_1):
        torch.testing.assert_close(torch.tensor(hidden), inputs.hidden.grad)
    torch.testing.assert_close(torch.tensor(weight_0 + weight_1), inputs.weight.grad)


def peak_of_rank_1(rank: int, case):
    """Rank 1 takes the same step, whose collectives rank 0 waits for, and reports 1 TiB more."""
    counted = measure.step_peak_bytes
    measure.step_peak_bytes = lambda *step: counted(*step) + (rank << 40)
    return measure.measure(case, dist.group.WORLD)


def test_a_measurement_is_the_maximum_over_ranks():
    (case,) = [
        case
        for case in BenchmarkConfig(
            implementations=["in_forward"],
            seq_tokens=[40],
            chunk_tokens=[16],
            hidden=2,
            vocab=64,
            topk=4,
            tp=2,
            warm_up_iterations=1,
            iterations=3,
        ).cases(1, None)
        if case.implementation == "in_forward"
    ]
    zero, one = run_ranks(2, peak_of_rank_1, case)
    assert zero == one and len(zero["times_ms"]) == 3
    assert zero["peak_memory_bytes"] > 1 << 40


def test_sweep_over_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(sys, "executable", warm_python("torch"))
    path, table = tmp_path / "config.yaml", tmp_path / "table.csv"
    path.write_text(
        "{implementations: [in_forward, dense, plain_kl_div], seq_tokens: [4096], "
        "chunk_tokens: [64], hidden: 2, vocab: 32768, topk: 4, warm_up_iterations: 1, "
        "iterations: 1, threads: 1, memory_limit_gib: 0.5}"
    )
    assert main(["dev", "bench", str(path), "--output", str(table), "--tp", "2"]) == 0
    rows = {row["implementation"]: row for row in read_table(table)}
    assert {row["tp"] for row in rows.values()} == {2}
    assert rows["in_forward"]["status"] == rows["bare_products"]["status"] == "ok"
    assert rows["dense"]["status"] == "out_of_memory"
    assert "no vocabulary parallelism" in rows["plain_kl_div"]["note"]
