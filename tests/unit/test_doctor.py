"""What `megatron-kd doctor` says of packages that are wrong together, and when it needs the host.

A package's version is what its installed metadata says: a folder that comes first on the path says
another.
"""

import os
import subprocess
import sys

import pytest
from warm import warm_python

pytestmark = pytest.mark.extended

DOCTOR = (
    "import sys; from megatron_kd.cli import main; status = main(['doctor', *sys.argv[1:]]); "
    "print('host imported:', 'megatron.bridge' in sys.modules); sys.exit(status)"
)


@pytest.fixture
def doctor(tmp_path):
    """Runs the doctor beside packages of other versions; returns its exit status and its words."""

    def run(*arguments, requires=(), environment=None, python=sys.executable, **versions):
        for name, version in versions.items():
            package = name.replace("_", "-")
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
            lines += [f"Requires-Dist: {each}" for each in requires if package == "megatron-bridge"]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")
        path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [python, "-Wignore", "-c", DOCTOR, *arguments],
            env=os.environ | {"PYTHONPATH": path} | (environment or {}),
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


def put_engine(tmp_path, text: str) -> None:
    """A Transformer Engine whose PyTorch part is `text`."""
    package = tmp_path / "packages" / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text(text)


def test_a_transformer_engine_that_cannot_be_imported_is_a_fault(doctor, tmp_path):
    """As the meta wheel alone: it raises what import guards do not catch."""
    put_engine(tmp_path, "raise RuntimeError('no compiled part')")
    status, words = doctor(transformer_engine="2.9.0")
    assert status == 1
    assert "2.9.0 cannot be imported, which stops the host:" in words
    assert "RuntimeError: no compiled part" in words
    assert "without a GPU: pip uninstall transformer-engine" in words
    assert "host imported: False" in words


def test_nvidias_own_transformer_engine_is_never_to_be_removed(doctor, tmp_path):
    put_engine(tmp_path, "raise ImportError('undefined symbol')")
    image = {"NVIDIA_PYTORCH_VERSION": "26.02"}
    status, words = doctor(
        transformer_engine="2.12.0+5671fd36", environment=image, python=warm_python("torch")
    )
    assert status == 1
    assert "pip changed what NVIDIA's image brought" in words and "uninstall" not in words


def test_a_transformer_engine_built_from_source_is_right(doctor, tmp_path):
    """NVIDIA's images have one distribution, without pip's transformer-engine-torch."""
    put_engine(tmp_path, "")
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("{output_dir: run}")  # the host, which would take long, is left out
    _, words = doctor(
        str(recipe), transformer_engine="2.12.0+5671fd36", python=warm_python("torch")
    )
    assert "Transformer Engine │ 2.12.0+5671fd36 │" in words


def test_a_transformer_engine_older_than_the_bridge_wants_is_told(doctor, tmp_path):
    put_engine(tmp_path, "")
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("{output_dir: run}")
    needs = "transformer-engine[pytorch]<2.13.0,>=2.10.0a0"
    _, words = doctor(
        str(recipe),
        transformer_engine="2.9.0+70f53666",
        megatron_bridge="0.3.1",
        requires=[needs],
        python=warm_python("torch"),
    )
    assert "2.9.0+70f53666 beside megatron-bridge 0.3.1, which" in words
    assert "<2.13.0,>=2.10.0a0" in words


def test_a_gpu_that_pytorch_cannot_use_is_a_fault(doctor, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("{output_dir: run}")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGATRON_KD_BACKEND": "auto"}
    _, words = doctor(str(recipe), environment=path, python=warm_python("torch"))
    assert "nvidia-smi lists GPU 0: NVIDIA H200, but PyTorch" in words
    asked = path | {"MEGATRON_KD_BACKEND": "cpu"}
    _, words = doctor(str(recipe), environment=asked, python=warm_python("torch"))
    assert "PyTorch sees no GPU" not in words and "runs use the CPU backend" in words


def test_a_wrong_recipe_is_told_before_the_host_is_imported(doctor, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{output_dir: run, student: {hf_pth: student}}")
    status, words = doctor(str(recipe))
    assert status == 1
    assert "did you mean" in words and "hf_path" in words
    assert "host imported: False" in words
