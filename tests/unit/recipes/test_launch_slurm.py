"""scripts/launch_slurm.sh --dry-run: what it would submit, and what it refuses. tests/slow/slurm
runs the result on a real SLURM.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
RECIPE = "recipes/quickstart.yaml"  # says nothing of ranks
ONE_RANK, EIGHT_RANKS = "recipes/llama-8k-offline.yaml", "recipes/qwen3-8b-to-4b.yaml"


def launch(logs, *arguments):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "scripts/launch_slurm.sh", "--logs", str(logs), *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def dry_run(logs, *arguments) -> str:
    done = launch(logs, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    return done.stdout


def directives(script) -> list[str]:
    return [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_one_torchrun_per_node(tmp_path):
    script = dry_run(tmp_path, "--nodes", 4, "--time", "01:00:00", RECIPE, "loss.impl=dense")
    listed = directives(script)
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue"} <= set(listed)
    assert {"--time=01:00:00", "--signal=B:USR1@300", "--exclusive"} <= set(listed)
    assert "--nnodes=4 --nproc-per-node=8" in script
    assert "--rdzv-backend=c10d --rdzv-endpoint=$address:$port" in script
    assert f"-m megatron_kd distill '{RECIPE}' 'loss.impl=dense'" in script
    assert "export NCCL_IB_DISABLE=0" in script


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([RECIPE], 8),
        ([ONE_RANK], 1),
        (["--nodes", 2, ONE_RANK], 1),
        ([ONE_RANK, "launch.ranks_per_node=4"], 4),
        ([EIGHT_RANKS], 8),
        ([EIGHT_RANKS, "launch.ranks_per_node=2"], 2),
    ],
)
def test_a_job_asks_for_as_many_gpus_as_it_starts_ranks(tmp_path, arguments, ranks):
    script = dry_run(tmp_path, *arguments)
    assert f"--gpus-per-node={ranks}" in directives(script)
    assert f" --nproc-per-node={ranks} " in script


def test_an_override_fits_a_recipe_to_nodes_without_gpus(tmp_path):
    script = dry_run(tmp_path, "--cluster", "cpu", EIGHT_RANKS, "launch.ranks_per_node=2")
    assert " --nproc-per-node=2 " in script and "--gpus" not in script


def test_a_cluster_file_with_fewer_gpus_than_ranks_bounds_the_run(tmp_path):
    cluster = tmp_path / "small.env"
    cluster.write_text("gpus_per_node=4\nranks_per_node=8\n")
    done = launch(tmp_path / "logs", "--dry-run", "--cluster", cluster, EIGHT_RANKS)
    assert done.returncode == 2 and f"{cluster} has room for 4" in done.stderr


def test_options_reach_the_job(tmp_path):
    options = ["--cluster", "cpu", "--sbatch", "--partition=short", "--save-ahead", 60]
    script = dry_run(tmp_path, *options, "--job-name", "mine", RECIPE)
    listed = directives(script)
    assert {"--partition=short", "--signal=B:USR1@60", "--job-name=mine"} <= set(listed)
    assert not any(line.startswith("--gpus") for line in listed)
    assert "--nproc-per-node=2" in script and "MEGATRON_KD_BACKEND=cpu" in script


def test_a_container_sees_the_checkout_and_its_logs(tmp_path):
    script = dry_run(
        tmp_path / "logs", "--container", "image.sqsh", "--mounts", "/data:/data", RECIPE
    )
    mounts = f"{REPOSITORY}:{REPOSITORY},{tmp_path}/logs:{tmp_path}/logs,/data:/data"
    assert "'--container-image=image.sqsh'" in script and mounts in script
    assert not (tmp_path / "logs").exists()  # a dry run leaves nothing behind


def test_values_with_spaces_and_quotes_survive(tmp_path):
    arguments = ["--data", "my data", "--teacher", "it's", "--output", "x"]
    script = dry_run(tmp_path, "--capture", 3, "--", *arguments)
    (line,) = [line for line in script.splitlines() if line.startswith("megatron-kd capture")]
    shown = subprocess.run(
        ["bash", "-c", line.replace("megatron-kd", "printf '%s\\n'")],
        env=os.environ | {"SLURM_ARRAY_TASK_ID": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == ["capture", *arguments, "--worker", "2/3"]
    assert "--array=0-2" in directives(script)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "which recipe?"),
        (["--nodes", "two", RECIPE], "--nodes must be a whole number, not two"),
        (["--nodes", "0", RECIPE], "--nodes must be 1 or more"),
        (["--cluster", "nowhere", RECIPE], "no cluster nowhere; there are: cpu efa"),
        (["--mystery", RECIPE], "unknown option --mystery"),
        (["--mounts", "/a:/b", RECIPE], "--mounts needs --container"),
        ([RECIPE, "loss.imp=dense"], "did you mean loss.impl"),
        (
            ["--cluster", "cpu", EIGHT_RANKS],
            "wants 8 ranks on each node and configs/cluster/cpu.env has room for 2; choose another "
            "--cluster, or give launch.ranks_per_node=2",
        ),
        ([ONE_RANK, "launch.ranks_per_node=16"], "has room for 8"),
        (["recipes/none.yaml"], "no recipe at recipes/none.yaml"),
        (["--capture", "2", "--"], "needs the arguments of megatron-kd capture"),
        (["--capture", "2", "--", "--data", "d"], "needs --output"),
        (["--capture", "2", "--", "--output", "o", "--worker", "0/2"], "leave it out"),
    ],
)
def test_refusals(tmp_path, arguments, expected):
    done = launch(tmp_path / "logs", "--dry-run", *arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_fully_sharded_run_has_more_than_one_queue_on_a_gpu(tmp_path):
    """One queue would put the gathering of weights in line with the computation it hides behind."""
    setting = "CUDA_DEVICE_MAX_CONNECTIONS"
    plain = dry_run(tmp_path, RECIPE)
    sharded = dry_run(tmp_path, RECIPE, "bridge.ddp.use_megatron_fsdp=true")
    assert f"export {setting}=1" in plain and f"unset {setting}" not in plain
    assert sharded.index(f"export {setting}=1") < sharded.index(f"unset {setting}")
    assert "export MEGATRON_KD_BACKEND=cuda" in plain
