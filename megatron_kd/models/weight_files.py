"""Whether a model directory's weight files are what their names say, from their first bytes."""

import json
import struct
from pathlib import Path

GIT_LFS = b"version https://git-lfs"
MAX_HEADER_BYTES = 100 << 20
"""What the safetensors format allows."""


def check_weight_files(directory: Path) -> None:
    """Refuse a directory whose download is incomplete. Reads the headers alone.

    Args:
        directory: A Hugging Face model directory; one without weights passes.

    Raises:
        ValueError: Names the file: a git-lfs pointer in its place, or cut short.
    """
    for path in sorted(Path(directory).iterdir()):
        if path.suffix in (".safetensors", ".bin") and path.is_file():
            with path.open("rb") as file:
                is_pointer = file.read(len(GIT_LFS)) == GIT_LFS
            if is_pointer:
                raise ValueError(
                    f"{path} is a git-lfs pointer, not weights: run `git lfs pull` in "
                    f"{path.parent}, or download the model again"
                )
            if path.suffix == ".safetensors":
                _check_length(path)


def _check_length(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        header = file.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    try:
        entries = json.loads(header)
        ends = [value["data_offsets"][1] for key, value in entries.items() if key != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} does not begin as a safetensors file does: download it again"
        ) from error
    if size < wanted:
        raise ValueError(
            f"{path} has {size:,} bytes of the {wanted:,} that its header names, so it was cut "
            "short: download it again"
        )
