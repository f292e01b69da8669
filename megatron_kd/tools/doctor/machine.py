"""Checks of the machine and its packages; no recipe needed."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_kd.tools.doctor.finding import Finding

PYTHONS = ((3, 11), (3, 12))
GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = GIB
"""A container gets 64 MiB unless told otherwise; a cached sample of 32,768 tokens takes 26."""
IN_NVIDIA_IMAGE = "NVIDIA_PYTORCH_VERSION"
"""A variable that NVIDIA's PyTorch images set."""


def check_machine(*, with_host: bool = True) -> Iterator[Finding]:
    """Findings on Python, GPUs, communication, shared memory, packages and the host's import, in
    this order.

    Args:
        with_host: Import the host, which takes most of the time; it is left out all the same where
            the versions of its packages already say that it cannot work.
    """
    yield _python()
    yield from _torch()
    yield from _shared_memory()
    packages = [_transformers(), *_transformer_engine()]
    yield from packages
    if with_host and all(package.level != "fault" for package in packages):
        yield from _host()


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] in PYTHONS:
        return Finding("ok", "Python", version)
    return Finding("warning", "Python", version, "tested on 3.11; 3.12 is expected to work")


def _torch() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from megatron_kd.host.cpu import backend as cpu_backend
    from megatron_kd.host.cpu.visible_gpu import visible_gpu

    yield Finding("ok", "PyTorch", f"{torch.__version__}, {os.cpu_count()} cores")
    # Once the CPU backend is on, it answers for the GPU it stands in for.
    has_gpu = torch.cuda.is_available() and not cpu_backend.is_active()
    if has_gpu:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            detail = f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
            busy = free < 0.9 * total
            remedy = "another process holds memory: stop it, or choose with CUDA_VISIBLE_DEVICES"
            yield Finding("warning" if busy else "ok", f"GPU {index}", detail, remedy * busy)
        if dist.is_nccl_available():
            version = ".".join(map(str, torch.cuda.nccl.version()))
            yield Finding("ok", "communication", f"NCCL {version}")
        else:
            yield Finding(
                "fault", "communication", "PyTorch without NCCL", "install PyTorch's CUDA build"
            )
        return
    asked = os.environ.get(cpu_backend.SWITCH, "auto")
    seen = visible_gpu()
    if asked == "cpu":
        yield Finding("ok", "GPU", f"{cpu_backend.SWITCH}=cpu: runs use the CPU backend")
    elif seen is not None or asked == "cuda":
        yield Finding(
            "fault",
            "GPU",
            f"{seen or f'{cpu_backend.SWITCH}=cuda'}, but PyTorch sees no GPU",
            "install PyTorch's CUDA build for this driver, look at CUDA_VISIBLE_DEVICES, or set "
            f"{cpu_backend.SWITCH}=cpu",
        )
    else:
        yield Finding("ok", "GPU", "none: runs use the CPU backend")
    if dist.is_gloo_available():
        yield Finding("ok", "communication", "gloo")
    else:
        yield Finding("fault", "communication", "PyTorch without gloo", "install an official build")


def _shared_memory() -> Iterator[Finding]:
    """Loader workers hand samples over in /dev/shm; a full one ends a worker with a bus error."""
    if not SHARED_MEMORY.is_dir():
        return
    total = shutil.disk_usage(SHARED_MEMORY).total
    if total < LEAST_SHARED_BYTES:
        yield Finding(
            "warning",
            "shared memory",
            f"{SHARED_MEMORY} holds {total >> 20} MiB, which loader workers may fill",
            "start the container with --ipc=host or --shm-size=8g",
        )
    else:
        yield Finding("ok", "shared memory", f"{total / GIB:.0f} GiB")


def _transformers() -> Finding:
    from megatron_kd.host import versions

    version = _version("transformers")
    if version is None:
        return Finding("fault", "transformers", "missing", "pip install transformers")
    unmet = versions.unmet_requirement("transformers")
    if unmet is not None:
        return Finding(
            "fault",
            "transformers",
            f"{version} beside megatron-bridge {_version('megatron-bridge')}, which needs {unmet}",
            f"pip install '{unmet}'",
        )
    return Finding("ok", "transformers", version)


def _transformer_engine() -> Iterator[Finding]:
    """Whether it imports, tried in a process of its own: what a package's metadata lists differs
    between NVIDIA's images, which build it from source, and pip's wheels.
    """
    import torch

    if importlib.util.find_spec("transformer_engine") is None:
        if torch.cuda.is_available():
            yield Finding(
                "warning",
                "Transformer Engine",
                "missing: the host falls back to slower layers",
                "use an image made by container/Dockerfile",
            )
        return
    version = _version("transformer-engine") or "of an unknown version"
    failure = _import_failure("transformer_engine.pytorch")
    if failure is not None:
        remedy = (
            "pip changed what NVIDIA's image brought: start from a fresh one (container/Dockerfile)"
            if IN_NVIDIA_IMAGE in os.environ
            else "without a GPU: pip uninstall transformer-engine; with one: an image made by "
            "container/Dockerfile"
        )
        detail = f"{version} cannot be imported, which stops the host: {failure}"
        yield Finding("fault", "Transformer Engine", detail, remedy)
        return
    from megatron_kd.host import versions

    unmet = versions.unmet_requirement("transformer-engine")
    if unmet is not None:
        yield Finding(
            "warning",
            "Transformer Engine",
            f"{version} beside megatron-bridge {_version('megatron-bridge')}, which needs {unmet}",
            "use an image made by container/Dockerfile, or its base",
        )
    else:
        yield Finding("ok", "Transformer Engine", version)


def _import_failure(module: str) -> str | None:
    """The last line that importing a module in a new process ends with; None where it works."""
    done = subprocess.run(
        [sys.executable, "-Wignore", "-c", f"import {module}"], capture_output=True, text=True
    )
    lines = done.stderr.split("\n")
    said = [line.strip() for line in lines if line.strip()] or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else None


def _host() -> Iterator[Finding]:
    from megatron_kd.host import versions
    from megatron_kd.host.cpu import backend as cpu_backend
    from megatron_kd.host.versions import every_version

    try:
        cpu_backend.activate()
        importlib.import_module("megatron_kd.host.container")
    except Exception as error:  # whatever a broken host raises on import is the finding
        yield Finding(
            "fault",
            "host",
            f"Megatron-Bridge cannot be imported: {type(error).__name__}: {error}",
            "bash scripts/setup.sh makes a working environment; container/Dockerfile, one for GPUs",
        )
        return
    for name, tested in versions.tested().items():
        version = _version(name)
        if version in tested:
            yield Finding("ok", name, version)
        else:
            yield Finding("warning", name, f"{version}, not tested", f"tested: {', '.join(tested)}")
    yield Finding("ok", "nvidia-modelopt", str(_version("nvidia-modelopt")))
    fault = every_version.compiled_helpers_fault()
    if fault is not None:
        yield Finding(
            "fault",
            "megatron-core helper",
            f"the compiled dataset helper does not import: {fault}",
            "reinstall the megatron-core wheel of this Python version",
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
