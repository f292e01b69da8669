"""Where and with what a row was measured: commit, device, versions, elementwise kernels."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from megatron_kd.losses import kernels

PACKAGES = ("torch", "triton", "nvidia-modelopt", "megatron-core", "liger-kernel", "veomni")


def describe(device: torch.device, threads: int) -> dict[str, str]:
    """Columns that say where a row was measured."""
    return {
        "commit": commit(),
        "device": device_name(device, threads),
        "versions": "; ".join([f"python {platform.python_version()}", *_versions()]),
        "elementwise": kernels.describe(device),
    }


def commit() -> str:
    """The checkout's commit, with "+" where what is measured differs from it."""
    root = Path(__file__).parents[3]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return f"megatron-kd {importlib.metadata.version('megatron-kd')}"
    changes = _git(
        root, "status", "--porcelain", "megatron_kd/losses", "megatron_kd/tools/benchmark"
    )
    return head + ("+" if changes else "")


def device_name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:  # no Linux: the architecture has to do
        return f"{model}, {threads} threads"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {threads} threads"


def free_memory_bytes() -> int:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return pages
    named = [line for line in lines if line.startswith("MemAvailable")]
    return int(named[0].split()[1]) * 1024 if named else pages


def _versions():
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
