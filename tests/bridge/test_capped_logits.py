"""Students (and teachers) that cap their logits, through the host's real loop: every implementation
of the loss trains alike, on several ranks too, and begins with the value of plain PyTorch.
"""

from pathlib import Path
from types import SimpleNamespace

import comparison
import pytest
import torch
from backend import PRECISION, TOLERANCE
from launch import Curves, start_ranks
from layouts import Run
from small_world import online

RUN_CAPPED = Path(__file__).with_name("run_capped.py")
CAP = 2.0  # of logits that reach ±4
TP2 = ["bridge.model.tensor_model_parallel_size=2", "bridge.model.sequence_parallel=true"]
SMALL_CHUNKS = ["loss.chunk_size=5"]


@pytest.fixture(scope="module")
def runs(world):
    """Curves of a run by its overrides, each started when it is first asked for."""
    found = {}

    def run(name: str, *overrides: str, ranks: int = 1) -> Curves:
        if name not in found:
            folder = world.parent / "capped" / name
            own = [*PRECISION, f"output_dir={folder}", *overrides]
            start_ranks(ranks, RUN_CAPPED, CAP, world, *own).check()
            found[name] = Curves(folder)
        return found[name]

    return run


def assert_alike(a: Curves, b: Curves) -> None:
    assert len(a.train()) == 6
    assert b.train() == pytest.approx(a.train(), rel=TOLERANCE.loss)
    assert b.train("lm loss") == pytest.approx(a.train("lm loss"), rel=TOLERANCE.loss)
    assert b.grad_norms() == pytest.approx(a.grad_norms(), rel=TOLERANCE.norm)
    assert b.validation() == pytest.approx(a.validation(), rel=TOLERANCE.loss)


IN_FORWARD = ["loss.impl=fused_chunked", "loss.gradient=in_forward", *SMALL_CHUNKS]
OFFLINE = {
    "sparse": (1, ["loss.impl=sparse_chunked", *SMALL_CHUNKS]),
    "fused": (1, IN_FORWARD),
    "fused recompute": (1, ["loss.impl=fused_chunked", "loss.gradient=recompute", *SMALL_CHUNKS]),
    "fused TP 2": (2, [*IN_FORWARD, *TP2]),
}


@pytest.mark.parametrize("name", [*OFFLINE][:2])
def test_offline_implementations_are_equal(runs, name):
    ranks, overrides = OFFLINE[name]
    assert_alike(runs("dense", "loss.impl=dense"), runs(name, *overrides, ranks=ranks))


@pytest.mark.extended
@pytest.mark.parametrize("name", [*OFFLINE][2:])
def test_further_offline_runs_are_equal(runs, name):
    ranks, overrides = OFFLINE[name]
    assert_alike(runs("dense", "loss.impl=dense"), runs(name, *overrides, ranks=ranks))


@pytest.mark.extended
def test_online_implementations_are_equal(world, runs):
    """Both models cap theirs."""
    dense = runs("online dense", *online(world.parent, "dense"))
    fused = online(world.parent, "fused_online")
    assert_alike(dense, runs("online fused", *fused, *SMALL_CHUNKS))
    assert_alike(dense, runs("online fused TP 2", *fused, *SMALL_CHUNKS, *TP2, ranks=2))


def test_the_first_validation_losses_are_those_of_plain_pytorch(world, runs):
    student = comparison.student(world.parent / "student")

    def capped(tokens):
        logits = student(tokens).logits
        assert logits.abs().max() > CAP
        return SimpleNamespace(logits=CAP * torch.tanh(logits / CAP))

    with torch.no_grad():
        kd, lm = comparison.plain_losses(world.parent, Run(), "validation", range(8), capped)
    curves = runs("fused", *IN_FORWARD)
    assert curves.validation()[0] == pytest.approx(kd.item(), rel=TOLERANCE.loss)
    assert curves.validation("lm loss")[0] == pytest.approx(lm.item(), rel=TOLERANCE.loss)
