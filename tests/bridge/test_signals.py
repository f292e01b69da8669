"""Signals and faults: a run that is asked to stop saves and exits 0; a rank that fails takes the
job down with its own traceback; a loss that is not finite names its samples.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from failing_rank import FAULT
from launch import DISTILL, REPOSITORY, Curves, environment, start_ranks, torchrun
from transformers import LlamaForCausalLM
from warm import process_behind

from megatron_kd.cache import CacheReader
from megatron_kd.host.step.finite_loss import FILE_NAME

START_S = 300
FAILING = Path(__file__).with_name("failing_rank.py")


def command(world, output, *overrides, script=DISTILL) -> list[str]:
    """A run of many iterations that saves only when it is asked to stop."""
    return [
        script,
        "--config",
        world,
        f"output_dir={output}",
        f"bridge.checkpoint.save={output}/checkpoints",
        f"bridge.checkpoint.load={output}/checkpoints",
        "bridge.checkpoint.save_interval=100000",
        "bridge.train.train_iters=100000",
        "bridge.train.eval_iters=0",
        "bridge.optimizer.optimizer=adam",  # the host cannot load a checkpoint of SGD
        "bridge.optimizer.lr=1e-4",
        "bridge.optimizer.min_lr=1e-4",
        *overrides,
    ]


def start_torchrun(log: Path, *command) -> subprocess.Popen:
    """torchrun itself, with two ranks and its output in a file."""
    with log.open("w") as output:
        return subprocess.Popen(
            torchrun(2, *command),
            env=environment(),
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_iteration(run, output, iteration, said) -> None:
    """Wait until the metrics of an iteration are on disk.

    Args:
        run: Has `poll`.
        said: Returns what the run has written, for the message of a failure.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise AssertionError(f"it ended by itself:\n{said()[-4000:]}")
        metrics = output / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) > iteration:
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not get so far:\n{said()[-4000:]}")


def saved_iteration(output) -> int:
    return int((output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.extended
def test_a_signal_to_every_process_saves_and_exits_0(world, tmp_path):
    """What a scheduler does: it signals loader workers too."""
    ranks = start_ranks(2, *command(world, tmp_path, "data.num_workers=1"))
    wait_for_iteration(ranks, tmp_path, 3, ranks.output)
    for rank in map(psutil.Process, ranks.pids()):
        workers = rank.children(recursive=True)
        assert workers
        for victim in [*workers, rank]:
            victim.send_signal(signal.SIGTERM)
    assert ranks.wait(120) == 0, ranks.output()[-4000:]
    assert saved_iteration(tmp_path) == len(Curves(tmp_path).train()) >= 3


@pytest.mark.extended
def test_a_rank_that_fails_takes_the_job_down(world, tmp_path):
    log = tmp_path / "log"
    process = start_torchrun(log, *command(world, tmp_path / "run", script=FAILING))
    # A minute where the cores are free; a rank's exit alone takes longer under other tests.
    assert process.wait(START_S) != 0
    text = log.read_text()
    begun = re.search(r"iteration +1/", text).start()  # the host logs what it could not import
    first = text.index("Traceback (most recent call last)", begun)
    others = [text.find(words) for words in ("Connection closed by peer", "timed out", "Timeout")]
    assert FAULT in text[first : first + 8000]
    assert all(position < 0 or position > text.index(FAULT) for position in others)
    summary = text[text.index("Root Cause (first observed failure)") :]
    assert "(local_rank: 1)" in summary and FAULT in summary


def test_a_loss_that_is_not_finite_names_its_samples(world, tmp_path):
    """One token has an infinite embedding: just the samples that hold it are at fault."""
    cache = CacheReader(world.parent / "cache" / "train")
    token = int(cache[0].tokens[1])
    guilty = {i for i in range(len(cache)) if token in cache[i].tokens[:-1]}
    assert len(guilty) < len(cache)
    student = LlamaForCausalLM.from_pretrained(world.parent / "student")
    with torch.no_grad():
        student.model.embed_tokens.weight[token] = float("inf")
    student.save_pretrained(tmp_path / "student")
    output = tmp_path / "run"
    overrides = [f"student.hf_path={tmp_path}/student", "bridge.checkpoint.save=null"]
    ranks = start_ranks(1, *command(world, output, *overrides))
    assert ranks.wait(START_S) != 0
    (record,) = map(json.loads, (output / FILE_NAME).read_text().splitlines())
    assert record["loss"] == "nan" and record["samples"]
    assert set(record["samples"]) <= guilty
    assert f"its samples are {record['samples']}" in ranks.output()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_one_rank_may_speak_for_all(world, tmp_path, name):
    ranks = start_ranks(2, *command(world, tmp_path))
    wait_for_iteration(ranks, tmp_path, 3, ranks.output)
    os.kill(ranks.pids()[1], getattr(signal, name))
    assert ranks.wait(120) == 0, ranks.output()[-4000:]
    before = Curves(tmp_path).train()
    assert saved_iteration(tmp_path) == len(before)
    more = [f"bridge.train.train_iters={len(before) + 2}"]
    more.append("bridge.scheduler.override_opt_param_scheduler=true")  # it was planned longer
    start_ranks(2, *command(world, tmp_path, *more)).check()
    assert Curves(tmp_path).train()[:-2] == before


@pytest.mark.slow  # torchrun gives its ranks 30 seconds, which a loaded machine may not keep
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_launcher_passes_the_signal_on(world, tmp_path, name):
    """torchrun's own status after either signal is 1; its ranks have saved."""
    output, log = tmp_path / "run", tmp_path / "log"
    process = start_torchrun(log, *command(world, output))
    wait_for_iteration(process, output, 3, log.read_text)
    clients = psutil.Process(process_behind(process.pid)).children()
    ranks = [psutil.Process(process_behind(client.pid)) for client in clients]
    assert len(ranks) == 2
    os.kill(process.pid, getattr(signal, name))
    assert process.wait(120) == 1
    assert not any(rank.is_running() for rank in ranks)
    assert f"{name}: will save and stop after this step" in log.read_text()
    assert "KeyboardInterrupt" not in log.read_text()
    assert saved_iteration(output) == len(Curves(output).train())
