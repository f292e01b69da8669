"""A run that an earlier version of this package left half-way resumes and exports today: its
checkpoint, its recipe and its records, as they were written then (`past/README.md`).
"""

import json
import shutil
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from launch import environment, host_python, run_cases
from safetensors.torch import load_file

pytestmark = pytest.mark.extended

PAST = Path(__file__).with_name("past")
STACK = ".".join(version("megatron-bridge").split(".")[:2])
INTERRUPTED_AT = 3


@pytest.fixture(scope="module")
def past(tmp_path_factory) -> Path:
    """The folder as the interrupted run left it."""
    folder = tmp_path_factory.mktemp("past")
    for name in ("world", f"run-{STACK}"):
        with tarfile.open(PAST / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    shutil.copy(PAST / "recipe.yaml", folder)
    return folder


def test_it_resumes_where_it_was_interrupted_and_learns_the_same(past):
    shutil.copytree(past / "run", past / "runs" / "resumed")
    here = [f"student.hf_path={past}/student", f"cache.path={past}/cache"]
    curves = run_cases(past / "recipe.yaml", 1, {"resumed": here})["resumed"]
    expected = [json.loads(line) for line in (PAST / "continued.jsonl").read_text().splitlines()]
    found = [record for record in curves.records if record["iteration"] > INTERRUPTED_AT]
    assert [(r["kind"], r["iteration"]) for r in found] == [
        (r["kind"], r["iteration"]) for r in expected
    ]
    for now, then in zip(found, expected, strict=True):
        assert now["losses"] == pytest.approx(then["losses"], rel=1e-6)
        for name in {"grad_norm", "learning_rate"} & then.keys():
            assert now[name] == pytest.approx(then[name], rel=1e-6)


READ_BACK = """
from megatron_kd.host.cpu import backend
backend.activate()
import yaml
from megatron.bridge.utils import instantiate_utils
if hasattr(instantiate_utils, "register_allowed_target_prefix"):  # Bridge 0.6 asks its caller
    instantiate_utils.register_allowed_target_prefix("megatron_kd.")
recorded = yaml.safe_load(open("run/checkpoints/iter_0000003/run_config.yaml"))
dataset = instantiate_utils.instantiate(recorded["dataset"])
print("DATASET", type(dataset).__module__, len(dataset.open("train")), dataset.samples)
"""


def test_the_host_makes_todays_dataset_of_what_its_checkpoint_recorded(past):
    done = subprocess.run(
        [host_python(), "-c", READ_BACK],
        cwd=past,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("DATASET")] or [done.stderr]
    assert line.startswith("DATASET megatron_kd.host.dataset_provider 12 ")
    assert "sequence_length=16, topk=None, temperature=2.0, source_temperatures=()," in line
    assert " hidden_states=False," in line


def test_it_is_exported_as_it_was(past):
    """Without its recipe: the student's directory comes from the run's own record."""
    command = [host_python(), "-m", "megatron_kd.cli", "export", "--run", "run"]
    done = subprocess.run(
        [*command, "--output", "exported"],
        cwd=past,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resolve target 'megatron_kd" not in done.stdout  # the host's warning of a lost class
    then, now = (
        load_file(past / "exported.safetensors"),
        load_file(past / "exported/model.safetensors"),
    )
    assert then.keys() == now.keys()
    for name, weight in then.items():
        assert weight.equal(now[name]), name
