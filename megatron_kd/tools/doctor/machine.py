"""Checks of the machine and its packages; no recipe needed."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator

from megatron_kd.tools.doctor.finding import Finding

PYTHONS = ((3, 11), (3, 12))
GIB = 1 << 30


def check_machine(*, with_host: bool = True) -> Iterator[Finding]:
    """Findings on Python, GPUs, communication, packages and the host's import, in this order.

    Args:
        with_host: Import the host, which takes most of the time; it is left out all the same where
            the versions of its packages already say that it cannot work.
    """
    yield _python()
    yield from _torch()
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
    if shutil.which("nvidia-smi"):
        yield Finding(
            "fault",
            "GPU",
            "nvidia-smi is there, but PyTorch sees no GPU",
            "install PyTorch's CUDA build for this driver, or check CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding("ok", "GPU", "none: runs use the CPU backend")
    if dist.is_gloo_available():
        yield Finding("ok", "communication", "gloo")
    else:
        yield Finding("fault", "communication", "PyTorch without gloo", "install an official build")


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
    import torch

    meta = _version("transformer-engine")
    compiled = _version("transformer-engine-torch")
    if meta and not compiled:
        yield Finding(
            "fault",
            "Transformer Engine",
            f"{meta} without its compiled part: importing it raises an error that stops the host",
            "pip uninstall transformer-engine, or install transformer-engine[pytorch]",
        )
    elif torch.cuda.is_available() and not compiled:
        yield Finding(
            "warning",
            "Transformer Engine",
            "missing: the host falls back to slower layers",
            "use the NGC PyTorch container, or pip install transformer-engine[pytorch]",
        )
    elif compiled:
        yield Finding("ok", "Transformer Engine", compiled)


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
            "bash scripts/setup.sh makes a working environment; on GPUs use the NGC container and "
            "pip install -e .[bridge]",
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
