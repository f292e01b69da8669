"""A run that is killed goes on from its last checkpoint and ends with the same losses, to the
bit.
"""

import json
import subprocess
import time

import psutil
import pytest
import yaml
from launch import DISTILL, REPOSITORY, Curves, environment, run, torchrun

ITERATIONS = 12
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


def command(world, output, *overrides):
    checkpoints = f"{output}/checkpoints"
    return torchrun(
        2,
        DISTILL,
        "--config",
        world,
        f"output_dir={output}",
        f"bridge.checkpoint.save={checkpoints}",
        f"bridge.checkpoint.load={checkpoints}",
        *CHECKPOINTED,
        *overrides,
    )


def kill_after_iteration(process, output, iteration):
    """SIGKILL the launcher and its ranks once an iteration's metrics are on disk."""
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the run ended by itself: {process.stdout.read()[-4000:]}")
        if metrics.exists():
            done = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()[:-1]]
            if done and max(done) >= iteration:
                # torchrun gives its ranks sessions of their own: a signal to the group misses them.
                launcher = psutil.Process(process.pid)
                for victim in [*launcher.children(recursive=True), launcher]:
                    victim.kill()
                process.wait()
                return
        time.sleep(0.02)
    raise AssertionError("the run did not get so far")


@pytest.fixture(scope="module")
def unbroken(world):
    output = world.parent / "unbroken"
    run(command(world, output))
    return Curves(output)


def test_a_killed_run_ends_with_the_same_losses(world, unbroken):
    output = world.parent / "killed"
    process = subprocess.Popen(
        command(world, output),
        env=environment(),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    kill_after_iteration(process, output, iteration=6)
    before = Curves(output)
    assert len(before.train()) < ITERATIONS
    text = run(command(world, output))
    assert "successfully loaded checkpoint" in text
    after = Curves(output)
    assert after.train() == unbroken.train()  # to the bit
    assert after.train("lm loss") == unbroken.train("lm loss")
    assert after.grad_norms() == unbroken.grad_norms()
    assert after.validation() == unbroken.validation()


def test_a_finished_run_may_be_started_again(world, unbroken):
    before = unbroken.train()
    run(command(world, unbroken.directory))
    after = Curves(unbroken.directory)
    assert after.train() == before
    assert after.validation()[-1] == unbroken.validation()[-1]


def test_the_resolved_configuration_lies_beside_the_checkpoints(unbroken):
    resolved = yaml.safe_load((unbroken.directory / "resolved_config.yaml").read_text())
    assert resolved["loss"]["impl"] == "fused_chunked"
    assert resolved["bridge"]["train"]["train_iters"] == ITERATIONS
    assert resolved["bridge"]["model"]["hidden_size"] == 32  # the host's own fields too
    peaks = json.loads((unbroken.directory / "peak_memory.json").read_text())["peak_bytes_by_rank"]
    assert len(peaks) == 2 and min(peaks) > 1 << 26


def test_a_checkpoint_of_another_cache_is_refused(world, unbroken):
    import small_world
    from transformers import LlamaForCausalLM

    other = world.parent / "other-cache"
    if not other.exists():
        teacher = LlamaForCausalLM.from_pretrained(world.parent / "teacher").eval()
        for split, seed in (("train", 31), ("validation", 32)):
            small_world.write_cache(other / split, teacher, small_world.documents(12, seed=seed))
    text = run(command(world, unbroken.directory, f"cache.path={other}"), succeeds=False)
    assert "holds a checkpoint of another run: the cache" in text
    assert "Choose another output_dir" in text
