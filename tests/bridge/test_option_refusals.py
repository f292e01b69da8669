"""Options that contradict a run are refused before it starts; what profiling sets up."""

import json
import subprocess
import sys

import pytest
from launch import REPOSITORY, environment
from small_world import online
from test_refusals import CHECK_ALL

SAVES = "bridge.checkpoint.save=checkpoints"
LAST = "[final_norm,final_norm]"

PROFILED = """
import json, sys
from types import SimpleNamespace
from megatron_kd.host import cpu_backend
cpu_backend.activate()
import torch
from megatron_kd.host import profiling
calls = []
def record(**options):
    calls.append("off" if options.get("enabled", 1) is None else "on")
torch.cuda.memory._record_memory_history = record
torch.cuda.memory._dump_snapshot = lambda path: calls.append(path.rsplit("/", 1)[1])
torch.distributed.get_rank = lambda: 0
history = profiling.MemoryHistory(sys.argv[1])
for step in range(15):
    context = SimpleNamespace(state=SimpleNamespace(train_state=SimpleNamespace(step=step)))
    history.on_train_step_start(context)
    history.on_train_step_end(context)
container = SimpleNamespace(
    train=SimpleNamespace(train_iters=100, eval_iters=3),
    checkpoint=SimpleNamespace(save="a", load="a"),
    profiling=None,
)
profiling.configure("nsys", container, on_cpu=False)
host = container.profiling
print("ANSWER " + json.dumps({
    "calls": calls,
    "window": [host.profile_step_start, host.profile_step_end, host.use_nsys_profiler],
    "run": [container.train.train_iters, container.train.eval_iters, container.checkpoint.save],
}))
"""


def answers_of(code: str, *arguments: str, stdin: str = "") -> list:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=stdin,
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    return list(map(json.loads, lines))


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
        "fine": [*resident, f"hidden_states.pairs=[[-1,3],{LAST}]"],
    }
    replies = answers_of(CHECK_ALL, str(world), stdin=json.dumps(list(cases.values())))
    return dict(zip(cases, replies, strict=True))


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
        ("fine", "accepted"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(answers, case, said):
    assert said in answers[case]


def test_iterations_10_to_13_are_profiled(tmp_path):
    (answer,) = answers_of(PROFILED, str(tmp_path))
    expected = []
    for iteration in (10, 11, 12, 13):
        expected += ["on", f"iteration_{iteration:03d}_rank_0.pickle", "off"]
    assert answer["calls"] == expected
    assert answer["window"] == [9, 13, True]  # the host counts from 0 and stops before the end
    assert answer["run"] == [15, 0, None]
