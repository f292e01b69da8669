"""What docs/memory.md says of the plan beside published runs is what the plan computes."""

import re
from pathlib import Path

import pytest
from published_runs import GIB, RUNS, planned_gib, planned_step

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"


def documented_rows() -> dict[tuple[str, int], list[float]]:
    """(run, tokens) → published peak, this plan's with full and with no recomputation, in GiB."""
    text = PAGE.read_text().split("## Beside published figures")[1].split("\n## ")[0]
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[\d,]+", cells[1]):
            rows[cells[0], int(cells[1].replace(",", ""))] = [float(cell) for cell in cells[2:]]
    return rows


def test_the_documented_table_is_what_the_plan_computes(published_shapes):
    rows = documented_rows()
    assert set(rows) == {(run.label, run.sequence_length) for run in RUNS}
    for run in RUNS:
        planned = [round(planned_gib(run, *published_shapes, mode), 1) for mode in ("full", "none")]
        assert rows[run.label, run.sequence_length] == [run.peak_gib, *planned], run.label


@pytest.mark.parametrize("impl", ["sparse_chunked", "fused_chunked"])
def test_own_implementations_at_8k_are_within_a_tenth(impl, published_shapes):
    """The two published losses that this library has too; nothing is fitted."""
    run = next(run for run in RUNS if (run.impl, run.sequence_length) == (impl, 8192))
    assert planned_gib(run, *published_shapes, "full") == pytest.approx(run.peak_gib, rel=0.1)


def test_the_states_alone_say_that_layers_were_recomputed_at_8k(student, published_shapes):
    states_gib = 18 * student.parameters / GIB
    run = next(run for run in RUNS if (run.impl, run.sequence_length) == ("fused_chunked", 8192))
    kept_gib = planned_gib(run, *published_shapes, "none") - states_gib
    assert states_gib < run.peak_gib < states_gib + kept_gib / 4


def test_shapes_have_the_published_sizes(published_shapes):
    student, teacher = published_shapes
    assert teacher.parameters == 8_030_261_248
    assert round(student.parameters / 1e9, 2) == 3.23


@pytest.mark.parametrize(("impl", "tflops"), [("online_dense", 237), ("dense", 331)])
def test_step_time_and_model_flops(impl, tflops, published_shapes):
    run = next(run for run in RUNS if run.impl == impl and run.step_s)
    step = planned_step(run, *published_shapes)
    assert step.total_s == pytest.approx(run.step_s, rel=0.1)
    assert step.model_flops / run.step_s / 1e12 == pytest.approx(tflops, rel=0.05)
