"""The table of what a student retains, from the harness's result files."""

import json

import pytest

from megatron_kd.tools.report.evaluation import compare, read_results


def write(directory, results, groups=None):
    directory.mkdir(parents=True)
    content = {"results": results, "group_subtasks": groups or {}}
    (directory / "results_2026-01-01.json").write_text(json.dumps(content))


def test_a_group_speaks_for_its_subtasks(tmp_path):
    write(
        tmp_path / "a" / "model",
        {"mmlu": {"acc,none": 0.6, "acc_stderr,none": 0.1}, "mmlu_law": {"acc,none": 0.1}},
        {"mmlu": ["mmlu_law"]},
    )
    assert read_results(tmp_path / "a") == {("mmlu", "acc,none"): 0.6}


def test_the_reported_metric_is_the_usual_one(tmp_path):
    write(
        tmp_path / "a",
        {
            "gsm8k": {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 0.7},
            "hellaswag": {"acc,none": 0.3, "acc_norm,none": 0.4},
            "niah_single_1": {"4096,none": 0.9, "8192,none": 0.8, "16384,none": -1},
        },
    )
    assert read_results(tmp_path / "a") == {
        ("gsm8k", "exact_match,strict-match"): 0.5,
        ("hellaswag", "acc_norm,none"): 0.4,
        ("niah_single_1", "4096,none"): 0.9,
        ("niah_single_1", "8192,none"): 0.8,
    }


def test_retained_is_relative_to_the_teacher():
    student = {("boolq", "acc,none"): 0.6, ("wikitext", "word_perplexity,none"): 20.0}
    teacher = {("boolq", "acc,none"): 0.8, ("wikitext", "word_perplexity,none"): 10.0}
    retained = {row["task"]: row["retained_percent"] for row in compare(student, teacher)}
    assert retained == pytest.approx({"boolq": 75.0, "wikitext": 50.0})


def test_a_teacher_of_zero_retains_nothing_measurable():
    (row,) = compare({("a", "acc,none"): 0.5}, {("a", "acc,none"): 0.0})
    assert row["retained_percent"] is None


def test_results_without_a_common_task_are_refused():
    with pytest.raises(ValueError, match="share no task.*same --tasks"):
        compare({("a", "acc,none"): 0.5}, {("b", "acc,none"): 0.5})


def test_missing_results_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="evaluate.sh"):
        read_results(tmp_path)
