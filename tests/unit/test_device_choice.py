"""Which machine a run takes for its own: a GPU that PyTorch cannot use stops it, unless the CPU was
asked for.
"""

import subprocess

import pytest
import torch

from megatron_kd.host.cpu import backend, visible_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has a GPU here")

LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-1)"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without GPUs; `machine(listed)` has an nvidia-smi that prints that, or hangs."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(visible_gpu, "DEVICES", tmp_path / "dev")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv(backend.SWITCH, raising=False)
    monkeypatch.setattr(backend, "_active", False)

    def with_tool(script: str):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    return with_tool


def test_a_machine_without_a_gpu_shows_none(machine):
    assert visible_gpu.visible_gpu() is None
    machine("echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9")
    assert visible_gpu.visible_gpu() is None


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_gpu_that_pytorch_cannot_use_stops_a_run(machine, monkeypatch, choice):
    machine(f'[ "$1" = --list-gpus ] && echo "{LISTED}"')
    if choice:
        monkeypatch.setenv(backend.SWITCH, choice)
    with pytest.raises(ValueError, match="nvidia-smi lists GPU 0: NVIDIA H200, but PyTorch finds"):
        backend.activate()


def test_a_device_file_is_enough(machine, tmp_path):
    (tmp_path / "dev" / "nvidiactl").touch()  # there without a GPU too
    assert visible_gpu.visible_gpu() is None
    (tmp_path / "dev" / "nvidia3").touch()
    with pytest.raises(ValueError, match="dev/nvidia3, but PyTorch finds no CUDA device"):
        backend.activate()


def test_a_driver_that_hangs_is_a_gpu(machine, monkeypatch):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    machine("")
    monkeypatch.setattr(subprocess, "run", hangs)
    assert "does not answer" in visible_gpu.visible_gpu()


def test_cuda_without_a_device_is_refused(machine, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, "cuda")
    with pytest.raises(ValueError, match="=cuda, but PyTorch finds no CUDA device"):
        backend.activate()
