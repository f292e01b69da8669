"""Whether this machine has a GPU, asked of the machine and not of PyTorch."""

import shutil
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
NVIDIA_SMI_S = 30
"""How long `nvidia-smi` may take; with a cold driver it is seconds."""


def visible_gpu() -> str | None:
    """How a GPU of NVIDIA shows itself beside PyTorch, in words; None where none does."""
    devices = sorted(DEVICES.glob("nvidia[0-9]*"))
    if devices:
        return f"this machine has {devices[0]}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        listed = subprocess.run(
            [tool, "--list-gpus"], capture_output=True, text=True, timeout=NVIDIA_SMI_S
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs is a driver that is there
        return f"{tool} does not answer"
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return f"nvidia-smi lists {gpus[0].split(' (UUID')[0]}" if gpus else None
