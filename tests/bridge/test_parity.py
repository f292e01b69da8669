"""Whether the host computes what transformers computes: on shrunken copies of published
configurations, and as every run, dry run and doctor compares it.
"""

import json
import time
from pathlib import Path

import converted_students
import published
import pytest
import small_world
from failing_parity import FAULT
from launch import DISTILL, answers_of, call_all, run, run_cases, start_ranks, torchrun

from megatron_kd.host import versions
from megatron_kd.host.parity import record

ON_0_6 = versions.current().bridge.startswith("0.6")
ROUNDING = 2e-5
"""Measured 6e-6 at most; a wrong window or position departs by more than 1."""
LAYER_BY_LAYER = {"llama": 1, "qwen2, window": 2, "qwen3_moe, window": 1}
"""Name → the first layer that a window of another width reaches."""
SHORT = ["bridge.train.train_iters=2", "bridge.train.eval_iters=0", "data.shuffle=false"]
FAILING = Path(__file__).with_name("failing_parity.py")
ENDS_WITHIN_S = 120


def compared(asked: dict) -> dict:
    """(name, how) → the proof, or the refusal."""
    return dict(zip(asked, answers_of("compare_all.py", asked=list(asked.values())), strict=True))


@pytest.fixture(scope="module")
def answers():
    """As a run compares."""
    configurations = published.PLAIN | published.MENDED
    asked = {(name, ""): [configurations[name], {}] for name in configurations}
    for name, (configuration, _) in published.REFUSED.items():
        asked[name, ""] = [configuration, {}]
    wrong = {
        "wrong base": {"rotary_base": 500},
        "wrong epsilon": {"layernorm_epsilon": 0.3},
        "one key too many": {"window_size": [8, 0]},
    }
    for how, settings in wrong.items():
        asked["qwen2, window", how] = [configurations["qwen2, window"], {"settings": settings}]
    return compared(asked)


@pytest.fixture(scope="module")
def other_answers():
    """Without the corrections, and as GPUs compare experts."""
    configurations = published.PLAIN | published.MENDED
    asked = {}
    for name in published.MENDED:
        asked[name, "unmended"] = [configurations[name], {"unmended": True}]
    for name in LAYER_BY_LAYER:
        asked[name, "layer by layer"] = [configurations[name], {"layer_by_layer": True}]
        faulty = {"layer_by_layer": True, "settings": {"window_size": [9, 0]}}
        asked[name, "layer by layer, wrong"] = [configurations[name], faulty]
    return compared(asked)


@pytest.mark.parametrize("name", [*published.PLAIN, *published.MENDED])
def test_a_shrunken_copy_agrees(answers, name):
    proof = answers[name, ""]
    assert isinstance(proof, dict), proof
    assert proof["largest"] < ROUNDING


@pytest.mark.extended
@pytest.mark.parametrize("name", published.MENDED)
def test_without_the_mend_it_does_not(other_answers, name):
    answer = other_answers[name, "unmended"]
    if ON_0_6 and name in published.RIGHT_ON_0_6:
        assert answer["largest"] < ROUNDING
    else:
        assert "the host" in answer and "they part in layer" in answer or "cannot convert" in answer


@pytest.mark.parametrize("name", published.REFUSED)
def test_what_the_host_cannot_do_is_refused_in_one_sentence(answers, name):
    answer = answers[name, ""]
    assert published.REFUSED[name][1] in answer
    assert "\n" not in answer


@pytest.mark.extended
@pytest.mark.parametrize("name", LAYER_BY_LAYER)
def test_layer_by_layer_finds_the_same(other_answers, name):
    assert other_answers[name, "layer by layer"]["largest"] < ROUNDING
    place = f"they part in layer {LAYER_BY_LAYER[name]} of 2"
    assert place in other_answers[name, "layer by layer, wrong"]


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("wrong base", "layer 1 of 2 (full_attention)"),
        ("wrong epsilon", "layer 1 of 2 (full_attention)"),
        ("one key too many", "layer 2 of 2 (sliding_attention)"),
    ],
)
def test_the_layer_where_they_part_is_named(answers, how, place):
    answer = answers["qwen2, window", how]
    assert f"they part in {place}" in answer
    assert "student.check_parity=false trains it all the same" in answer


@pytest.fixture(scope="module")
def windowed(world):
    """A recipe's override for a student whose layers have a window."""
    directory = world.parent / "converted-mistral"
    converted_students.write("mistral, window", directory)
    return f"student.hf_path={directory}"


def proofs(directory) -> list[dict]:
    return list(json.loads((directory / record.RECORD).read_text()).values())


@pytest.fixture
def nothing_proven(tmp_path, monkeypatch):
    """A cache folder without proofs."""
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(tmp_path / "proofs"))
    return tmp_path


def test_a_run_compares_once_and_goes_on_as_if_it_had_not(world, nothing_proven):
    folder = world.parent / "runs"
    tensor = "bridge.model.tensor_model_parallel_size=2"
    compared = run_cases(world, 2, {"compared": [*SHORT, tensor]})["compared"]
    (proof,) = proofs(folder / "compared")
    assert proof["of"] == "a shrunken copy" and proof["largest"] < ROUNDING
    assert proof["layout"] == {"tensor_model_parallel_size": 2}
    assert proof["seconds"] < 20  # measured 0.3; the machine may be busy

    known = run_cases(world, 2, {"known": [*SHORT, tensor]})["known"]
    assert proofs(folder / "known") == [proof]  # not compared again: the time it took is the same
    off = [*SHORT, tensor, "student.check_parity=false"]
    unchecked = run_cases(world, 2, {"unchecked": off})["unchecked"]
    assert not (folder / "unchecked" / record.RECORD).exists()
    assert compared.train() == known.train() == unchecked.train()
    assert compared.grad_norms() == unchecked.grad_norms()


def test_a_resume_reads_the_record_beside_the_run(world, nothing_proven, monkeypatch):
    folder = world.parent / "runs" / "resumed"
    run_cases(world, 1, {"resumed": SHORT})
    before = proofs(folder)
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(nothing_proven / "another machine"))
    run_cases(world, 1, {"resumed": SHORT})
    assert proofs(folder) == before


@pytest.mark.extended
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": "true"}, 2),
        ({"context_parallel_size": 2}, 2),
        ({"pipeline_model_parallel_size": 2}, 2),
        ({"expert_model_parallel_size": 2}, 2),
    ],
    ids=str,
)
def test_a_run_compares_in_its_own_layout(world, nothing_proven, layout, ranks):
    name = "parity-" + next(iter(layout))
    student = "moe" if "expert_model_parallel_size" in layout else "student"
    overrides = [f"bridge.model.{key}={value}" for key, value in layout.items()]
    overrides += [*SHORT, f"student.hf_path={world.parent}/{student}"]
    run_cases(world, ranks, {name: overrides})
    (proof,) = proofs(world.parent / "runs" / name)
    sizes = {key: value for key, value in layout.items() if key.endswith("_size")}
    assert proof["layout"] == sizes
    assert proof["largest"] < ROUNDING


@pytest.mark.extended
def test_a_virtual_pipeline_and_a_resident_teacher_are_compared_too(world, nothing_proven):
    virtual = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": "true",
        "batch_p2p_comm": "false",
    }
    overrides = [f"bridge.model.{key}={value}" for key, value in virtual.items()]
    overrides += [*SHORT, f"student.hf_path={world.parent}/deep"]
    online = [*small_world.online(world.parent, "fused_online"), *SHORT]
    run_cases(world, 2, {"parity-virtual": overrides})
    run_cases(world, 1, {"parity-online": online})
    assert proofs(world.parent / "runs/parity-virtual")[0]["largest"] < ROUNDING
    models = {Path(proof["model"]).name for proof in proofs(world.parent / "runs/parity-online")}
    assert models == {"student", "teacher"}


def test_a_run_whose_student_is_another_model_on_the_host_is_refused(world, windowed):
    output = world.parent / "runs" / "refused"
    wrong = [windowed, "bridge.model.window_size=[8,0]", f"output_dir={output}", *SHORT]
    tensor = "bridge.model.tensor_model_parallel_size=2"
    ranks = start_ranks(2, DISTILL, "--config", world, tensor, *wrong)
    assert ranks.wait(ENDS_WITHIN_S) == 2
    assert "the host computes another model than transformers for" in ranks.output()
    assert "they part in layer 1 of 2" in ranks.output()
    assert not (output / record.RECORD).exists()
    assert not (output / "metrics.jsonl").exists()

    unchecked = start_ranks(1, DISTILL, "--config", world, *wrong, "--no-parity")
    assert unchecked.wait(ENDS_WITHIN_S) == 0
    assert "student.check_parity=false: whether the host computes" in unchecked.output()


@pytest.mark.extended
def test_a_rank_that_cannot_compare_takes_the_others_down(world, nothing_proven):
    started = time.monotonic()
    output = f"output_dir={world.parent}/runs/failing"
    tensor = "bridge.model.tensor_model_parallel_size=2"
    said = run(torchrun(2, FAILING, "--config", world, tensor, output, *SHORT), succeeds=False)
    assert FAULT in said
    assert time.monotonic() - started < ENDS_WITHIN_S


@pytest.mark.extended
def test_commands_compare_what_a_start_would(world, windowed, nothing_proven):
    output = f"output_dir={world.parent}/runs/commands"
    wrong = [windowed, "bridge.model.window_size=[8,0]", output]
    said = call_all(
        {
            "doctor": ["doctor", str(world), output],
            "doctor, wrong": ["doctor", str(world), *wrong],
            "doctor, off": ["doctor", str(world), *wrong, "student.check_parity=false"],
            "dry run": ["distill", str(world), "--dry-run", output],
            "dry run, wrong": ["distill", str(world), "--dry-run", *wrong],
            "parity": ["parity", str(world), output],
            "parity, wrong": ["parity", str(world), *wrong],
        }
    )
    for name in ("doctor", "dry run", "parity", "doctor, off"):
        assert said[name][0] == 0, said[name][1]
    for name, status in (("doctor, wrong", 1), ("dry run, wrong", 2), ("parity, wrong", 1)):
        assert said[name][0] == status, said[name][1]
        assert "they part in layer 1 of 2" in said[name][1]
    assert "agree on a shrunken" in said["doctor"][1]  # cells of a table are folded
    assert "student.check_parity=false:" in said["doctor, off"][1]
    assert "agree on the weights of the student" in said["parity"][1]
    assert {proof["of"] for proof in proofs(world.parent / "runs/commands")} == {
        "a shrunken copy",
        "the weights",
    }
