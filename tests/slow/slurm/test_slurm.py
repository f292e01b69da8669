"""scripts/launch_slurm.sh on a real SLURM: a node is lost, a task is killed, the time runs out, and
the result is that of an unbroken run.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Cluster, missing

REPOSITORY = Path(__file__).parents[3]
LAUNCH = REPOSITORY / "scripts" / "launch_slurm.sh"
sys.path.insert(0, str(REPOSITORY / "tests" / "bridge"))
import small_world  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
JOB_S = 900
ITERATIONS = 40
CHECKPOINTED = [
    f"bridge.train.train_iters={ITERATIONS}",
    "bridge.train.eval_interval=20",
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-3",
    "bridge.optimizer.min_lr=1e-4",
    "bridge.scheduler.lr_decay_style=cosine",
    "bridge.checkpoint.save_interval=4",
]
ENVIRONMENT = """
gpus_per_node=0
ranks_per_node=1
export MEGATRON_KD_BACKEND=cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return small_world.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def node_environment(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "cpu.env"
    path.write_text(ENVIRONMENT)
    return path


def launch(cluster, *arguments) -> str:
    """Submit, and return the job's number."""
    done = subprocess.run(
        ["bash", str(LAUNCH), *map(str, arguments)],
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1].rstrip(":")


def train(cluster, node_environment, world, output, *options, overrides=()) -> str:
    checkpoints = f"{output}/checkpoints"
    return launch(
        cluster,
        *("--cluster", node_environment, "--nodes", 2, *options, world, f"output_dir={output}"),
        *(f"bridge.checkpoint.{key}={checkpoints}" for key in ("save", "load")),
        *CHECKPOINTED,
        *overrides,
    )


def logs(output) -> str:
    files = sorted(output.glob("slurm/*.log"))
    return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files)


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def saved_iteration(output) -> int:
    latest = output / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text() or 0) if latest.exists() else 0  # it is not written at once


def curves(output) -> dict[str, list]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kinds = {
        kind: [(r["iteration"], r["losses"]) for r in records if r["kind"] == kind]
        for kind in ("train", "validation")
    }
    norms = [r["grad_norm"] for r in records if r["kind"] == "train"]
    return kinds | {"norms": norms}


@pytest.fixture(scope="module")
def unbroken(cluster, node_environment, world):
    output = world.parent / "unbroken"
    job = train(cluster, node_environment, world, output)
    assert cluster.wait_for_state(job, {"COMPLETED"}, JOB_S) == "COMPLETED", logs(output)
    made = curves(output)
    assert [iteration for iteration, _ in made["train"]] == list(range(1, ITERATIONS + 1))
    return made


def test_a_lost_node_costs_nothing_but_time(cluster, node_environment, world, unbroken):
    output = world.parent / "lost-node"
    job = train(cluster, node_environment, world, output)
    wait_for(lambda: saved_iteration(output) >= 8, JOB_S, lambda: logs(output))
    cluster.kill_node("n2")
    cluster.wait_for_state(job, {"PENDING"}, 180)
    assert len(curves(output)["train"]) < ITERATIONS
    cluster.start_node("n2")
    assert cluster.wait_for_state(job, {"COMPLETED"}, JOB_S) == "COMPLETED", logs(output)
    # SLURM may deliver what it meant to kill on the lost node to its successor: that is one more.
    assert int(cluster.field(job, "Restarts")) in (1, 2)
    assert "successfully loaded checkpoint" in logs(output)
    assert curves(output) == unbroken  # to the bit


def test_a_killed_launcher_is_requeued(cluster, node_environment, world, unbroken):
    output = world.parent / "killed-launcher"
    job = train(cluster, node_environment, world, output)
    wait_for(lambda: saved_iteration(output) >= 8, JOB_S, lambda: logs(output))
    victims = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "torch.distributed.run" in (process.info["cmdline"] or [])
        and f"output_dir={output}" in process.info["cmdline"]
    ]
    assert len(victims) == 2
    victims[1].kill()
    assert cluster.wait_for_state(job, {"COMPLETED"}, JOB_S) == "COMPLETED", logs(output)
    assert int(cluster.field(job, "Restarts")) == 1
    assert curves(output) == unbroken


def test_the_time_limit_saves_and_requeues(cluster, node_environment, world, unbroken):
    """SIGUSR1 by hand: a time limit is a minute at least. SLURM sends it the same way."""
    output = world.parent / "time-limit"
    job = train(
        cluster,
        node_environment,
        world,
        output,
        overrides=["bridge.checkpoint.save_interval=1000"],
    )
    metrics = output / "metrics.jsonl"
    wait_for(
        lambda: metrics.exists() and len(curves(output)["train"]) > 5, JOB_S, lambda: logs(output)
    )
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: saved_iteration(output) > 5, 120, lambda: logs(output))
    assert saved_iteration(output) < ITERATIONS
    assert cluster.wait_for_state(job, {"COMPLETED"}, JOB_S) == "COMPLETED", logs(output)
    assert int(cluster.field(job, "Restarts")) == 1
    assert "stopped ahead of the time limit" in logs(output)
    assert curves(output) == unbroken


def test_an_error_of_the_run_is_not_repeated(cluster, node_environment, world):
    output = world.parent / "error"
    job = train(
        cluster, node_environment, world, output, overrides=[f"student.hf_path={output}/nowhere"]
    )
    assert cluster.wait_for_state(job, {"FAILED"}, JOB_S) == "FAILED"
    assert int(cluster.field(job, "Restarts")) == 0
    assert "is not a Hugging Face model directory" in logs(output)


def test_a_capture_array_finishes_after_a_killed_task(cluster, node_environment, world, tmp_path):
    data, teacher = world.parent / "data", world.parent / "teacher"
    arguments = ["--data", data, "--teacher", teacher, "--topk", 8, "--shard-positions", 70]
    arguments += ["--dtype", "float32", "--batch-tokens", 40, "--output"]
    alone = [sys.executable, "-m", "megatron_kd.cli", "capture", *map(str, arguments)]
    subprocess.run([*alone, str(tmp_path / "alone")], check=True, cwd=REPOSITORY)
    output = tmp_path / "array"
    options = ["--cluster", node_environment, "--capture", 2]
    job = launch(cluster, *options, "--", *arguments, output)

    def captures():
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(output) in (process.info["cmdline"] or [])
            and "1/2" in (process.info["cmdline"] or [])
            and "capture" in (process.info["cmdline"] or [])
            and "bash" not in process.info["cmdline"][0]
        ]

    wait_for(captures, JOB_S, lambda: f"task 1 of {job} did not start")
    for process in captures():
        process.kill()
    for task in (f"{job}_0", f"{job}_1"):
        assert cluster.wait_for_state(task, {"COMPLETED"}, JOB_S) == "COMPLETED"
    assert int(cluster.field(f"{job}_1", "Restarts")) == 1
    assert files(output) == files(tmp_path / "alone")
    for split in ("train", "validation"):
        verify = ["verify", str(output / split)]
        subprocess.run([*alone[:3], *verify], check=True, cwd=REPOSITORY)


def files(cache: Path) -> dict[str, bytes]:
    """The shards; a manifest also says when it was made."""
    return {
        str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("shard-*"))
    }
