"""The benchmark measures what it says: shapes, comparison, memory, processes, the table."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from warm import warm_python

from megatron_kd.cli import main
from megatron_kd.tools.benchmark import implementations, measure, sweep
from megatron_kd.tools.benchmark.cases import BenchmarkConfig, read_config
from megatron_kd.tools.benchmark.implementations import BARE, IMPLEMENTATIONS, REFERENCES
from megatron_kd.tools.benchmark.inputs import BLOCK_ROWS, Inputs
from megatron_kd.tools.benchmark.peak_memory import is_out_of_memory, peak_bytes
from megatron_kd.tools.benchmark.plot import figure_of
from megatron_kd.tools.benchmark.side_by_side import measure_side_by_side
from megatron_kd.tools.benchmark.table import COLUMNS, TableWriter, bare_times, read_table, row_of
from megatron_kd.tools.benchmark.worker import outcome_of

CONFIGS = Path(__file__).parents[3] / "configs" / "benchmark"
CPU = torch.device("cpu")
MEASURED_AT = {"commit": "abc", "device": "a CPU", "versions": "torch", "date_utc": "2026-01-01"}
# Megatron's import takes longer than the rest of this file.
LIGHT = [name for name in IMPLEMENTATIONS if name != "modelopt_logits_kl"]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    for name in ("TORCHDYNAMO_DISABLE",):
        monkeypatch.delenv(name, raising=False)


def config(**changes) -> BenchmarkConfig:
    base = dict(
        implementations=["in_forward"],
        seq_tokens=[40],
        chunk_tokens=[16],
        hidden=8,
        vocab=64,
        topk=4,
        warm_up_iterations=1,
        iterations=2,
    )
    return BenchmarkConfig(**(base | changes))


def case_of(name: str, **changes):
    cases = config(implementations=[name], **changes).cases(threads=1, memory_limit_bytes=None)
    return next(case for case in cases if case.implementation == name)


def small_inputs(**changes) -> Inputs:
    shape = dict(seq_tokens=40, hidden=8, vocab=64, topk=4, chunk_tokens=16)
    return Inputs(**(shape | changes), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", LIGHT)
def test_implementations_of_a_quantity_agree(name):
    reason = IMPLEMENTATIONS[name].missing(CPU)
    if reason:
        pytest.skip(reason)
    measure.check(IMPLEMENTATIONS[name], small_inputs())


@pytest.mark.parametrize("factor", [0.0, 0.999, 1.001])
def test_a_wrong_gradient_is_not_timed(monkeypatch, factor):
    true = IMPLEMENTATIONS["paper_text"]

    def wrong(inputs):
        loss = true.mean_loss(inputs)
        return loss.detach() + (loss - loss.detach()) * factor  # the value is right

    monkeypatch.setitem(
        implementations.IMPLEMENTATIONS,
        "paper_text",
        dataclasses.replace(true, mean_loss=wrong),
    )
    with pytest.raises(measure.WrongResult, match="dH of paper's fused"):
        measure.measure(case_of("paper_text"))
    outcomes = dict(measure_side_by_side([case_of(BARE), case_of("paper_text")], 16))
    statuses = {case.implementation: outcome["status"] for case, outcome in outcomes.items()}
    assert statuses == {BARE: "ok", "paper_text": "wrong_result"}


def test_inputs_differ_and_are_the_same_again():
    inputs, again = small_inputs(), small_inputs()
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    tensors = [getattr(inputs, name).detach() for name in names]
    for tensor, name in zip(tensors, names, strict=True):
        assert torch.equal(tensor, getattr(again, name))
    for i, one in enumerate(tensors):
        for other in tensors[i + 1 :]:
            assert not torch.equal(one.flatten()[:8], other.flatten()[:8])
    ids = inputs.target.ids.squeeze(1)
    assert all(len(set(row.tolist())) == 4 for row in ids)
    assert inputs.target.logprobs.exp().sum(-1).max() < 1
    assert measure.step(IMPLEMENTATIONS["dense_online"], inputs).item() > 0.1


def test_shards_are_rows_of_one_weight():
    rows = 3 * BLOCK_ROWS // 2
    whole = small_inputs(vocab=2 * rows).weight
    shard = small_inputs(vocab=2 * rows)
    shard.start, shard.stop = rows, 2 * rows
    assert torch.equal(shard.weight, whole[rows:])


class Products(TorchDispatchMode):
    """Sizes (rows, inner, columns) of the matrix products, and what each wrote."""

    def __init__(self):
        super().__init__()
        self.sizes, self.written = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.sizes.append((left.shape[0], left.shape[1], right.shape[1]))
            self.written[result.data_ptr()] = result
        return result


def test_bare_products_are_three_products_and_give_whole_gradients():
    """With dz = logits, dH = H W^T W and dW = (H W^T)^T H."""
    inputs = small_inputs()
    with Products() as products:
        implementations.bare_products(inputs)
    assert sum(2 * m * k * n for m, k, n in products.sizes) == 3 * 2 * 40 * 8 * 64
    assert len(products.sizes) == 3 * 3  # chunks of 16, 16 and 8
    h, w = inputs.hidden.detach().squeeze(1), inputs.weight.detach()
    (d_weight,) = (x for x in products.written.values() if x.shape == w.shape)
    torch.testing.assert_close(d_weight, (h @ w.T).T @ h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["in_forward", "recompute", "dense"])
def test_peak_memory_counts_gradients_and_transients(name):
    shape = dict(seq_tokens=256, hidden=16, vocab=4096, chunk_tokens=32)
    inputs = small_inputs(**shape)
    measure.step(IMPLEMENTATIONS[name], inputs)
    peak = measure.step_peak_bytes(IMPLEMENTATIONS[name], inputs)
    gradients = 4 * 16 * (256 + 4096) + 4 * 256
    assert measure.transient_bytes(peak, inputs) == peak - gradients
    rows = 256 if name == "dense" else 32
    assert rows * 4096 * 4 <= peak - gradients < 3.5 * rows * 4096 * 4


def test_narrow_weights_have_an_fp32_sum_that_is_not_transient():
    inputs = Inputs(
        seq_tokens=4, hidden=8, vocab=64, topk=4, chunk_tokens=4, dtype=torch.bfloat16, device=CPU
    )
    gradients = 2 * 8 * (4 + 64) + 4 * 4
    assert measure.transient_bytes(gradients + 4 * 64 * 8 + 7, inputs) == 7


def test_peak_is_of_what_is_alive_at_once():
    size = 1 << 20

    def twice_in_turn():
        for _ in range(2):
            torch.empty(size, dtype=torch.uint8)

    def both():
        return torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)

    assert size <= peak_bytes(twice_in_turn, CPU) < 1.5 * size
    assert 2 * size <= peak_bytes(both, CPU) < 2.5 * size


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_cases_cover_every_combination_once():
    cases = config(
        implementations=["dense", "in_forward", "dense"], seq_tokens=[8, 16], chunk_tokens=[4, 8]
    ).cases(1, None)
    got = [(c.seq_tokens, c.implementation, c.chunk_tokens) for c in cases]
    each = [(BARE, 4), (BARE, 8), ("dense", None), ("in_forward", 4), ("in_forward", 8)]
    assert got == [(length, *rest) for length in (8, 16) for rest in each]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(implementations=["fused"]), "unknown fused"),
        (dict(seq_tokens=[]), "seq_tokens must list"),
        (dict(iterations=0), "iterations must be positive"),
        (dict(chunk_tokens=[16, 0]), "chunk_tokens must be positive"),
        (dict(topk=65), "topk 65 exceeds"),
        (dict(tp=3), "divisible by tp 3"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    cases = read_config(path).cases(1, None)
    assert cases[0].implementation == BARE
    assert {c.implementation for c in cases} <= set(IMPLEMENTATIONS)


def test_references_exist_for_every_quantity():
    quantities = {implementation.quantity for implementation in IMPLEMENTATIONS.values()}
    assert quantities == set(REFERENCES) | {"products"}


def test_ratios_are_of_the_same_round_or_of_medians():
    case = case_of("in_forward")
    outcome = dict(status="ok", note="", peak_memory_bytes=5000, transient_memory_bytes=4096)
    outcome["times_ms"] = [2.0, 30.0, 4.0]
    bare_ms = [1.0, 10.0, 4.0]
    row = row_of(case, "side_by_side", outcome, bare_ms, MEASURED_AT)
    assert row["ratio_to_bare_products"] == 2.0  # median of 2, 3, 1
    assert row["ratio_to_bare_products_best"] == 2.0
    assert row_of(case, "sweep", outcome, bare_ms, MEASURED_AT)["ratio_to_bare_products"] == 1.0
    assert row["time_median_ms"] == 4.0 and row["iterations_per_s"] == 250.0
    assert row["chunk_logits_fp32_bytes"] == 16 * 64 * 4
    assert row["transient_per_chunk_logits"] == 1.0


def test_unchunked_cases_are_compared_with_the_fastest_bare_products():
    measured = {(40, 16): [3.0], (40, 32): [2.0], (80, 16): [1.0]}
    assert bare_times(case_of("dense"), measured) == [2.0]
    assert bare_times(case_of("in_forward"), measured) == [3.0]
    assert bare_times(case_of("in_forward", seq_tokens=[99]), measured) is None


def tables_rows():
    outcome = dict(status="ok", note="", peak_memory_bytes=1 << 20, transient_memory_bytes=1 << 18)
    lost = dict(status="out_of_memory", note="no")
    for length in (1024, 2048):
        for name in (BARE, "dense", "in_forward"):
            case = case_of(name, seq_tokens=[length])
            failed = name == "dense" and length == 2048
            yield row_of(
                case,
                "sweep",
                lost if failed else outcome | {"times_ms": [length / 1024]},
                [length / 2048],
                MEASURED_AT,
            )


def test_table_comes_back_as_it_was_written(tmp_path):
    with TableWriter(tmp_path / "new" / "table.csv") as table:
        for row in tables_rows():
            table.add(row)
            assert len(read_table(tmp_path / "new" / "table.csv")) == len(table.rows)
    rows = read_table(tmp_path / "new" / "table.csv")
    assert [tuple(row) for row in rows] == [COLUMNS] * 6
    for row, written in zip(rows, tables_rows(), strict=True):
        assert row == {name: None if v == "" else v for name, v in written.items()}


def test_foreign_and_empty_tables_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="lacks chunk_logits_fp32_bytes, chunk_tokens"):
        read_table(path)
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ValueError, match="no rows"):
        read_table(path)


def rows_as_read():
    return [{name: None if v == "" else v for name, v in row.items()} for row in tables_rows()]


def test_lines_of_the_figure():
    """Memory and speed of what ran over its lengths; what ran out of memory is a cross."""
    memory, speed = figure_of(rows_as_read()).axes
    lines = {line.get_label(): line for line in speed.get_lines()}
    assert {name: list(zip(*line.get_data(), strict=True)) for name, line in lines.items()} == {
        "three bare products": [(1024, 1000.0), (2048, 500.0)],
        "dense": [(1024, 1000.0)],
        "fused_chunked, in_forward": [(1024, 1000.0), (2048, 500.0)],
    }
    drawn = [line for line in memory.get_lines() if line.get_label() in lines]
    assert [list(line.get_ydata()) for line in drawn] == [[2**-10] * n for n in (2, 1, 2)]
    crosses = [
        line for line in memory.get_lines() if line.get_marker() == "x" and len(line.get_xdata())
    ]
    assert [list(line.get_xdata()) for line in crosses] == [[2048]]
    (legend,) = memory.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*lines, "out of memory"]


def test_bars_of_the_figure():
    rows = [dict(row, mode="side_by_side") for row in rows_as_read()]
    ratios, memory = figure_of(rows).axes
    good = [row for row in rows if row["status"] == "ok"]
    assert [bar.get_width() for bar in ratios.patches] == [
        row["ratio_to_bare_products"] for row in good
    ]
    assert [bar.get_width() for bar in memory.patches] == [1.0] * 5  # MiB
    names = [label.get_text() for label in ratios.get_yticklabels()]
    assert names[:2] == ["three bare products, 1K", "dense, 1K"]


def test_a_table_without_results_is_not_drawn():
    with pytest.raises(ValueError, match="nothing to draw"):
        figure_of([dict(row, status="failed") for row in rows_as_read()])


def test_side_by_side_measures_every_case_in_every_round():
    cases = config(implementations=["dense", "in_forward"], iterations=3).cases(1, None)
    outcomes = measure_side_by_side(cases, 16)
    assert [case for case, _ in outcomes] == cases
    assert all(len(outcome["times_ms"]) == 3 for _, outcome in outcomes)


def test_ratios_refuse_a_disabled_compiler_and_ranks(tmp_path, capsys):
    arguments = [
        "dev",
        "bench",
        str(CONFIGS / "ratios.yaml"),
        "--ratios",
        "--output",
        str(tmp_path / "x.csv"),
    ]
    assert main(arguments) == 1
    assert "TORCH_COMPILE_DISABLE is set" in capsys.readouterr().err
    assert main([*arguments, "--tp", "2"]) == 1
    assert "leave tp at 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without GPUs")
def test_cuda_without_a_gpu_is_refused(tmp_path, capsys):
    path = CONFIGS / "paper_gpu.yaml"
    assert main(["dev", "bench", str(path), "--output", str(tmp_path / "x.csv")]) == 1
    assert "this machine has 0" in capsys.readouterr().err


def write_config(path: Path, **values) -> Path:
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


@pytest.mark.extended
def test_fresh_processes_and_memory_that_runs_out(tmp_path, capsys, monkeypatch):
    """Dense logits of 128 MiB do not fit into the limit; the fused loss does."""
    path = write_config(
        tmp_path / "config.yaml",
        implementations=["dense", "in_forward"],
        seq_tokens=[4096],
        chunk_tokens=[64],
        hidden=2,
        vocab=8192,
        topk=4,
        warm_up_iterations=1,
        iterations=1,
        threads=1,
        memory_limit_gib=0.12,
    )
    monkeypatch.setattr(sys, "executable", warm_python("torch"))
    table = tmp_path / "table.csv"
    assert main(["dev", "bench", str(path), "--output", str(table)]) == 0
    rows = {row["implementation"]: row for row in read_table(table)}
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {BARE: "ok", "dense": "out_of_memory", "in_forward": "ok"}
    assert rows["in_forward"]["ratio_to_bare_products"] > 0
    assert main(["dev", "plot", str(table)]) == 0
    assert (tmp_path / "table.png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without GPUs")
def test_what_a_machine_lacks_is_a_row(tmp_path):
    outcome = outcome_of(case_of("liger_fused_jsd"), 0, tmp_path)
    assert outcome == {"status": "not_available", "note": "Liger's kernels are Triton: CUDA only"}


@pytest.mark.extended
def test_a_process_that_dies_or_hangs_is_a_row():
    case = dataclasses.replace(case_of("dense"), dtype="float13")
    outcome = sweep.run_case(case, timeout_s=120)
    assert outcome["status"] == "failed" and "float13" in outcome["note"]
    assert sweep.run_case(case_of("dense"), timeout_s=0.2)["status"] == "timed_out"


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (["failed", "out_of_memory"], "out_of_memory"),
        (["timed_out", "wrong_result"], "wrong_result"),
        (["failed", "timed_out"], "timed_out"),
        (["ok", "failed"], "failed"),
        (["timed_out", "not_available"], "not_available"),
        (["ok", "ok"], "ok"),
    ],
)
def test_the_rank_that_failed_first_stands_for_those_it_took_with_it(ranks, case):
    outcomes = [{"status": status, "rank": rank} for rank, status in enumerate(ranks)]
    assert sweep.worst(outcomes) == outcomes[ranks.index(case)]
