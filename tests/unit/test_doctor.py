"""What `megatron-kd doctor` says of packages that are wrong together, and when it needs the host.

A package's version is what its installed metadata says: a folder that comes first on the path says
another.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extended

DOCTOR = (
    "import sys; from megatron_kd.cli import main; status = main(['doctor', *sys.argv[1:]]); "
    "print('host imported:', 'megatron.bridge' in sys.modules); sys.exit(status)"
)


@pytest.fixture
def doctor(tmp_path):
    """Runs the doctor beside packages of other versions; returns its exit status and its words."""

    def run(*arguments, requires=(), **versions):
        for name, version in versions.items():
            package = name.replace("_", "-")
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
            lines += [f"Requires-Dist: {each}" for each in requires if package == "megatron-bridge"]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")
        path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DOCTOR, *arguments],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        return done.returncode, " ".join(done.stdout.split())

    return run


def test_a_transformers_that_the_bridge_does_not_take_is_a_fault(doctor):
    status, words = doctor(
        transformers="5.8.0", megatron_bridge="0.3.1", requires=["transformers<5.0.0"]
    )
    assert status == 1
    assert "5.8.0 beside megatron-bridge 0.3.1, which needs transformers<5.0.0" in words
    assert "pip install 'transformers<5.0.0'" in words
    assert "host imported: False" in words


def test_the_meta_wheel_of_transformer_engine_alone_is_a_fault(doctor):
    status, words = doctor(transformer_engine="2.9.0")
    assert status == 1
    assert "2.9.0 without its compiled part" in words
    assert "pip uninstall transformer-engine" in words
    assert "host imported: False" in words


def test_a_wrong_recipe_is_told_before_the_host_is_imported(doctor, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{output_dir: run, student: {hf_pth: student}}")
    status, words = doctor(str(recipe))
    assert status == 1
    assert "did you mean" in words and "hf_path" in words
    assert "host imported: False" in words
