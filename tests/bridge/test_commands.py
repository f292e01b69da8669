"""`megatron-kd doctor` and `megatron-kd export` on the small world."""

import pytest
import small_world
import torch
from comparison import weights, worst_weight_departure
from launch import DISTILL, call_all, run_cases, start_ranks
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A TP-2 run of four iterations with a checkpoint after each two; and its recipe."""
    recipe = small_world.build(tmp_path_factory.mktemp("commands"))
    folder = recipe.parent / "run"
    start_ranks(
        2,
        DISTILL,
        "--config",
        recipe,
        "bridge.train.train_iters=4",
        "bridge.train.eval_iters=0",
        "bridge.model.tensor_model_parallel_size=2",
        f"bridge.checkpoint.save={folder}/checkpoints",
        f"bridge.checkpoint.load={folder}/checkpoints",
        "bridge.checkpoint.save_interval=2",
        f"export.hf_path={folder}/hf",
    ).check()
    return recipe


@pytest.fixture(scope="module")
def resident(finished):
    """Runs with the teacher resident and a loss between hidden states of two widths: on
    tensor-parallel ranks, and on pipeline stages, out of which the host cannot export at the end.
    """
    folder = finished.parent
    common = [*small_world.online(folder, "fused_online"), "bridge.train.eval_iters=0"]
    common.append("hidden_states.pairs=[[final_norm,final_norm]]")
    layouts = {"online-tp2": "tensor", "online-pp2": "pipeline"}
    cases = {
        name: [
            *common,
            f"bridge.model.{kind}_model_parallel_size=2",
            f"bridge.checkpoint.save={folder}/runs/{name}/checkpoints",
        ]
        for name, kind in layouts.items()
    }
    return run_cases(finished, 2, cases, export=["online-tp2"])


@pytest.fixture(scope="module")
def answers(finished, resident):
    folder = finished.parent
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher").eval()
    for split in ("train", "validation"):
        small_world.write_cache(
            folder / "other-vocabulary" / split,
            teacher,
            small_world.documents(6, seed=9),
            vocab_size=small_world.VOCAB_SIZE + 12,
        )
    doctor = ["doctor", str(finished), f"output_dir={folder}/new"]
    saves = f"bridge.checkpoint.save={folder}/new/checkpoints"
    export = ["export", "--run", f"{folder}/run"]
    return call_all(
        {
            "fine": [*doctor, saves, "bridge.model.tensor_model_parallel_size=2"],
            "machine": ["doctor"],
            "cache": [*doctor, f"cache.path={folder}/other-vocabulary"],
            "key": [*doctor, "loss.imp=dense"],
            "disk": [*doctor, saves, "bridge.checkpoint.save_interval=1"]
            + ["bridge.train.train_iters=1000000000"],
            "online-tp2": ["export", "--run", f"{folder}/runs/online-tp2"]
            + ["--output", f"{folder}/online-tp2"],
            "online-pp2": ["export", "--run", f"{folder}/runs/online-pp2"]
            + ["--output", f"{folder}/online-pp2"],
            "last": [*export, "--output", f"{folder}/last"],
            "second": [*export, "--output", f"{folder}/second", "--iteration", "2"],
            "none": [*export, "--output", f"{folder}/none", "--iteration", "3"],
        }
    )


def test_doctor_finds_nothing_wrong(answers):
    for name in ("fine", "machine"):
        status, output = answers[name]
        assert (status, "0 faults" in output) == (0, True), output
    assert "500 output rows, 250 on each" in answers["fine"][1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cache", "captured over 512 ids"),
        ("key", "loss.imp"),
        ("disk", "bridge.checkpoint.most_recent_k"),
    ],
)
def test_doctor_names_the_fault(answers, name, said):
    status, output = answers[name]
    assert status == 1
    assert said in output and "1 faults" in output


def test_the_exported_checkpoint_is_the_trained_student(finished, answers):
    folder = finished.parent
    assert answers["last"][0] == answers["second"][0] == 0, answers["last"][1]
    trained, last, second = (
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("run/hf", "last", "second")
    )
    assert trained.keys() == last.keys()
    assert all(torch.equal(trained[name], last[name]) for name in trained)
    assert any(not torch.equal(trained[name], second[name]) for name in trained)


def test_a_student_trained_beside_its_teacher_is_exported_alone(finished, resident, answers):
    folder = finished.parent
    for name in ("online-tp2", "online-pp2"):
        assert answers[name][0] == 0, answers[name][1]
    first, trained = weights(folder / "student"), resident["online-tp2"].weights()
    exported, staged = weights(folder / "online-tp2"), weights(folder / "online-pp2")
    assert first.keys() == trained.keys() == exported.keys() == staged.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert worst_weight_departure(first, exported, staged) < 1e-4


def test_a_missing_checkpoint_is_named(answers):
    status, output = answers["none"]
    assert status == 1
    assert "no checkpoint of iteration 3" in output and "[2, 4]" in output
