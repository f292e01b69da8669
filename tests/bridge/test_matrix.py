"""The whole matrix of layouts and implementations: pytest tests/bridge/test_matrix.py --full-matrix

It takes half an hour on two cores, and writes its result into docs/parallelism.md.
"""

import comparison
import pytest
from launch import REPOSITORY, Curves, run_cases
from layouts import LAYOUTS, OFFLINE, ONLINE, Run, by_ranks, matrix

PAGE = REPOSITORY / "docs" / "parallelism.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
RUNS_PER_LAUNCH = 40
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4, 1e-4
TITLES = {
    ("student", "plain"): "Plain data",
    ("tied", "plain"): "Tied embeddings",
    ("moe", "plain"): "Mixture of experts with auxiliary loss",
    ("student", "masked"): "Masked data",
    ("student", "block"): "Block-packed data, against the same documents unpacked",
    ("student", "naive"): "Naively packed data",
}


@pytest.fixture(scope="module")
def runs(world) -> dict[str, Curves]:
    found = {}
    for ranks, group in by_ranks(matrix()).items():
        for first in range(0, len(group), RUNS_PER_LAUNCH):
            part = group[first : first + RUNS_PER_LAUNCH]
            cases = {run.name: run.overrides(world.parent) for run in part}
            export = [run.name for run in part if run.exports]
            found |= run_cases(world, ranks, cases, export=export)
    return found


def relative(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(a) == len(b)
    return max((abs(x - y) / max(abs(x), 1e-9) for x, y in zip(a, b, strict=True)), default=0.0)


@pytest.fixture(autouse=True, scope="module")
def only_when_asked(request):
    if not request.config.getoption("--full-matrix"):
        pytest.skip("half an hour; --full-matrix runs it")


def test_the_whole_matrix_is_equal(world, runs):
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
        if loss > LOSS_TOLERANCE or norm > NORM_TOLERANCE or weight > WEIGHT_TOLERANCE:
            failed.append((run.name, *worst[run]))
    write_tables(worst)
    assert not failed


def write_tables(worst: dict[Run, tuple]) -> None:
    """Between the page's marks: for each student and data one table of layouts × implementations,
    with the largest relative departures of losses and of gradient norms.
    """
    lines = []
    for (student, data), title in TITLES.items():
        tried = {run.impl for run in worst if (run.student, run.data) == (student, data)}
        impls = [impl for impl in (*OFFLINE, *ONLINE) if impl in tried]
        lines += [f"**{title}**", "", f"| layout | {' | '.join(impls)} |"]
        lines.append("|---" * (len(impls) + 1) + "|")
        for layout in LAYOUTS:
            cells = [worst.get(Run(impl, layout, student, data)) for impl in impls]
            if any(cells):
                texts = [f"{c[0]:.0e}, {c[1]:.0e}" if c else "–" for c in cells]
                lines.append(f"| {layout} | {' | '.join(texts)} |")
        lines.append("")
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}")
