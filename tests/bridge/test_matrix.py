"""The whole matrix of layouts and implementations: more than 200 runs, written to a CSV.

pytest tests/bridge/test_matrix.py --full-matrix matrix.csv
"""

import csv
from pathlib import Path

import comparison
import pytest
from backend import TOLERANCE
from launch import Launch, Launches
from layouts import Run, by_ranks, matrix

COLUMNS = ("student", "data", "implementation", "layout", "loss", "grad_norm", "weights")


@pytest.fixture(scope="module")
def runs(world) -> Launches:
    launches = []
    for ranks, group in by_ranks(matrix()).items():
        cases = {run.name: run.overrides(world.parent) for run in group}
        launches.append(Launch(ranks, cases, export=[run.name for run in group if run.exports]))
    return Launches(world, launches)


def relative(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(a) == len(b)
    return max((abs(x - y) / max(abs(x), 1e-9) for x, y in zip(a, b, strict=True)), default=0.0)


@pytest.fixture(autouse=True, scope="module")
def only_when_asked(request):
    if not request.config.getoption("--full-matrix"):
        pytest.skip("more than 200 runs; --full-matrix CSV starts them")


def test_the_whole_matrix_is_equal(request, world, runs):
    worst, failed = {}, []
    for run in matrix():
        reference = runs[run.reference.name]
        found, directory = runs[run.name], world.parent
        loss = relative(reference.train(), found.train())
        if found.validation():
            loss = max(loss, relative(reference.validation(), found.validation()))
        norm = relative(reference.grad_norms(), found.grad_norms())
        weight = 0.0
        if run.exports:
            start = comparison.weights(directory / run.student)
            weight = comparison.worst_weight_departure(start, reference.weights(), found.weights())
        worst[run] = loss, norm, weight
        if loss > TOLERANCE.loss or norm > TOLERANCE.norm or weight > TOLERANCE.weight:
            failed.append((run.name, *worst[run]))
    write_csv(Path(request.config.getoption("--full-matrix")), worst)
    assert not failed


def write_csv(path: Path, worst: dict[Run, tuple[float, float, float]]) -> None:
    """One row per run: the largest relative departures of its losses, gradient norms and trained
    weights from the run that it must equal.
    """
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for run, departures in worst.items():
            numbers = (f"{departure:.1e}" for departure in departures)
            rows.writerow([run.student, run.data, run.impl, run.layout, *numbers])
