"""Options that contradict a run are refused before it starts; what profiling sets up."""

import json
from pathlib import Path

import pytest
from launch import Curves, prepare_all, start_ranks
from small_world import online

SAVES = "bridge.checkpoint.save=checkpoints"
LAST = "[final_norm,final_norm]"
PROFILED_RUN = Path(__file__).with_name("profiled_run.py")


@pytest.fixture(scope="module")
def answers(world):
    resident = online(world.parent, "fused_online")
    cases = {
        "profile on a CPU": ["profile=memory"],
        "no hidden states": [f"hidden_states.pairs=[{LAST}]"],
        "a layer that is not there": [*resident, "hidden_states.pairs=[[2,0]]"],
        "full recomputation": [
            *resident,
            "hidden_states.pairs=[[1,1]]",
            "bridge.model.recompute_granularity=full",
            "bridge.model.recompute_method=uniform",
            "bridge.model.recompute_num_layers=1",
        ],
        "nothing to select by": [SAVES, "selection.keep_best=true", "bridge.train.eval_iters=0"],
        "no checkpoint at evaluations": [
            SAVES,
            "selection.keep_best=true",
            "bridge.checkpoint.save_interval=2",
        ],
        "the best would be deleted": [
            SAVES,
            "selection.keep_best=true",
            "bridge.checkpoint.save_interval=3",
            "bridge.checkpoint.most_recent_k=1",
        ],
        "checkpoints between evaluations": [
            SAVES,
            "selection.keep_best=true",
            "bridge.train.eval_interval=6",
            "bridge.checkpoint.save_interval=3",
        ],
        "fine": [*resident, f"hidden_states.pairs=[[-1,3],{LAST}]"],
    }
    return prepare_all(world, cases)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("profile on a CPU", "leave profile unset"),
        ("no hidden states", "Capture again with --hidden-dtype"),
        ("a layer that is not there", "2 layers (0 … 1"),
        ("full recomputation", "would have no gradient"),
        ("nothing to select by", "set bridge.train.eval_iters"),
        ("no checkpoint at evaluations", "eval_interval=3 is not a multiple"),
        ("the best would be deleted", "most_recent_k would delete"),
        ("checkpoints between evaluations", "accepted"),
        ("fine", "accepted"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(answers, case, said):
    assert said in answers[case]


def profiled(world, output, profile) -> list:
    """[what was called, how many iterations had been finished] of a run with this profile."""
    start_ranks(
        1,
        PROFILED_RUN,
        world,
        f"output_dir={output}",
        f"profile={profile}",
        "bridge.train.train_iters=100",
        f"bridge.checkpoint.save={output}/checkpoints",
        "bridge.checkpoint.save_interval=5",
    ).check()
    curves = Curves(output)
    assert (len(curves.train()), curves.validation()) == (15, [])
    assert not (output / "checkpoints").exists()
    return [json.loads(line) for line in (output / "calls.jsonl").read_text().splitlines()]


@pytest.mark.extended
def test_memory_of_iterations_10_to_13_is_recorded(world, tmp_path):
    calls = profiled(world, tmp_path, "memory")
    assert [finished for what, finished in calls if what == "start"] == [9, 10, 11, 12]
    assert [what for what, _ in calls] == ["start", "dump", "stop"] * 4
    names = {path.name for path in (tmp_path / "memory").iterdir()}
    assert names == {f"iteration_{n:03d}_rank_0.pickle" for n in (10, 11, 12, 13)}


def test_nsys_sees_iterations_10_to_13_with_named_stages(world, tmp_path):
    calls = profiled(world, tmp_path, "nsys")
    marks = [call for call in calls if call[0] in ("start", "stop")]
    assert marks == [["start", 9], ["stop", 13]]
    stages = {what for what, _ in calls if what.startswith("megatron_kd ")}
    assert stages == {f"megatron_kd {name}" for name in ("wait for data", "forward", "loss")}
