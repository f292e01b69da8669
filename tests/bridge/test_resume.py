"""A run that is killed goes on from its last checkpoint and ends with the same losses, to the
bit.
"""

import json
import re
import subprocess
import sys
import time

import psutil
import pytest
import small_world
import yaml
from launch import DISTILL, Curves, Ranks, environment, run, start_ranks, torchrun
from transformers import LlamaForCausalLM

ITERATIONS = 12
START_S = 600
CHECKPOINTED = [
    f"bridge.train.train_iters={ITERATIONS}",
    "bridge.train.eval_interval=4",
    "bridge.model.tensor_model_parallel_size=2",
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-3",
    "bridge.optimizer.min_lr=1e-4",
    "bridge.scheduler.lr_decay_style=cosine",
    "bridge.checkpoint.save_interval=4",
    "data.num_workers=2",
]


def command(world, output, *overrides) -> list[str]:
    checkpoints = f"{output}/checkpoints"
    return [
        DISTILL,
        "--config",
        world,
        f"output_dir={output}",
        f"bridge.checkpoint.save={checkpoints}",
        f"bridge.checkpoint.load={checkpoints}",
        *CHECKPOINTED,
        *overrides,
    ]


def kill_after_iteration(ranks: Ranks, output, iteration: int) -> None:
    """SIGKILL the ranks and their loader workers once an iteration's metrics are on disk."""
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if ranks.poll() is not None:
            raise AssertionError(f"the run ended by itself: {ranks.output()[-4000:]}")
        if metrics.exists():
            done = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()[:-1]]
            if done and max(done) >= iteration:
                for rank in map(psutil.Process, ranks.pids()):
                    for victim in [*rank.children(recursive=True), rank]:
                        victim.kill()
                ranks.kill()
                return
        time.sleep(0.02)
    raise AssertionError(f"the run did not get so far: {ranks.output()[-4000:]}")


@pytest.fixture(scope="module")
def unbroken(world) -> Curves:
    """Twelve iterations in one go. It is read, never run again."""
    output = world.parent / "unbroken"
    start_ranks(2, *command(world, output)).check()
    curves = Curves(output)
    assert len(curves.records) > ITERATIONS
    return curves


@pytest.fixture(scope="module")
def resumed(world) -> tuple[Curves, str]:
    """Killed after the sixth iteration and started again, by torchrun; and what that said."""
    output = world.parent / "killed"
    ranks = start_ranks(2, *command(world, output))
    kill_after_iteration(ranks, output, iteration=6)
    assert len(Curves(output).train()) < ITERATIONS
    text = run(torchrun(2, *command(world, output)))
    return Curves(output), text


def test_a_killed_run_ends_with_the_same_losses(unbroken, resumed):
    after, text = resumed
    assert "successfully loaded checkpoint" in text
    assert after.train() == unbroken.train()  # to the bit
    assert after.train("lm loss") == unbroken.train("lm loss")
    assert after.grad_norms() == unbroken.grad_norms()
    assert after.validation() == unbroken.validation()


@pytest.mark.extended
def test_a_finished_run_may_be_started_again(world, resumed):
    before, _ = resumed
    losses, last = before.train(), before.validation()[-1]
    start_ranks(2, *command(world, before.directory)).check()
    after = Curves(before.directory)
    assert after.train() == losses
    assert after.validation()[-1] == last


def test_the_resolved_configuration_lies_beside_the_checkpoints(unbroken):
    resolved = yaml.safe_load((unbroken.directory / "resolved_config.yaml").read_text())
    assert resolved["loss"]["impl"] == "fused_chunked"
    assert resolved["bridge"]["train"]["train_iters"] == ITERATIONS
    assert resolved["bridge"]["model"]["hidden_size"] == 32  # the host's own fields too
    peaks = json.loads((unbroken.directory / "peak_memory.json").read_text())["peak_bytes_by_rank"]
    assert len(peaks) == 2 and min(peaks) > 1 << 26


def test_a_checkpoint_of_another_cache_is_refused(world, unbroken):
    other = world.parent / "other-cache"
    teacher = LlamaForCausalLM.from_pretrained(world.parent / "teacher").eval()
    for split, seed in (("train", 31), ("validation", 32)):
        small_world.write_cache(other / split, teacher, small_world.documents(12, seed=seed))
    ranks = start_ranks(2, *command(world, unbroken.directory, f"cache.path={other}"))
    assert ranks.wait() == 2
    assert "holds a checkpoint of another run: the cache" in ranks.output()
    assert "Choose another output_dir" in ranks.output()


@pytest.mark.extended
def test_a_log_has_no_warnings_but_those_the_user_can_act_on(world, tmp_path):
    """In a fresh interpreter, as the host warns most while it is imported."""
    values = environment()
    del values["PYTHONWARNINGS"]
    overrides = ["bridge.train.train_iters=2", "bridge.model.tensor_model_parallel_size=1"]
    overrides += ["bridge.checkpoint.save_interval=2", "bridge.scheduler.lr_warmup_iters=2"]
    script, *words = command(world, tmp_path / "run", *overrides)
    done = subprocess.run(
        [sys.executable, *map(str, (script, *words))], env=values, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # PyTorch is imported before any code of ours: the launcher's environment can hide this one.
    said = done.stdout + re.sub(".*The pynvml package is dep.*\n.*\n", "", done.stderr)
    suspicious = re.compile(
        r"warning:|deprecated|disabled\b|failed|not (installed|available)", re.I
    )
    lines = [
        line
        for line in said.splitlines()
        if suspicious.search(line) and not re.match(r"  \w+: ", line)  # a key of the configuration
    ]
    assert len(lines) == 1 and "capping lr_warmup_steps" in lines[0], lines
