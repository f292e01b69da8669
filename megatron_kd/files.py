"""Files that are whole or not there, and can be told apart: the ground floor, which imports no
package of ours.

Canonical JSON and its hash, checksums of files, files and directories that appear under their name
only when they are on disk, and the one reader of safetensors headers.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

HASH_BLOCK_BYTES = 1 << 22
MAX_HEADER_BYTES = 1 << 20
SAFETENSORS_DTYPES = {  # the names safetensors uses, little-endian
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # raw halves: numpy has no bfloat16
    "F32": np.dtype("<f4"),
}


def canonical_json(value: Any) -> str:
    """The one text that stands for a JSON value: sorted keys, no spaces, ASCII.

    Raises:
        ValueError: A number is infinite or NaN.
        TypeError: Something in it is no JSON value.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value's canonical text, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_checksum(path: str | os.PathLike) -> str:
    """The xxh3_128 of a file's content, as 32 hexadecimal digits."""
    with open(path, "rb", buffering=0) as file:
        return stream_checksum(file)


def stream_checksum(file: BinaryIO) -> str:
    """The xxh3_128 of what is left of a stream, read in blocks: it is never resident as a whole."""
    return _digest(file, xxhash.xxh3_128())


def file_sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's content, as 64 hexadecimal digits."""
    with open(path, "rb", buffering=0) as file:
        return _digest(file, hashlib.sha256())


def _digest(file: BinaryIO, digest) -> str:
    while block := file.read(HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def publish(path: str | os.PathLike, payload: str | bytes | memoryview) -> None:
    """Writes a file so that it is either whole and on disk under its name, or as it was before.

    Text is written as UTF-8.
    """
    with published_file(path) as file:
        file.write(payload.encode() if isinstance(payload, str) else payload)


@contextlib.contextmanager
def published_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write, which is whole and on disk under its name afterwards, or as it was before.

    The content is flushed under a temporary name that starts with a dot and ends in `.tmp`, then
    renamed, then the folder is flushed. After an exception nothing is left of it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:
        os.replace(temporary, path)
    except FileNotFoundError:  # swept by a worker that found everything finished, this file too
        if not path.exists():
            raise
    sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike) -> None:
    """Forces a folder's list of names onto the disk."""
    _sync(os.fspath(folder))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def published_directory(output: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `output` when the block ends without an error.

    Every file is flushed to disk before the rename, so after a power cut `output` is either absent,
    the old one, or the new one in full. On an error the unfinished folder is removed and an older
    `output` stays as it was.

    Args:
        output: The folder to make. Its parents are created.
        overwrite: Whether an existing `output` may be replaced.

    Raises:
        FileExistsError: `output` is there and `overwrite` is false.
    """
    target = Path(os.path.abspath(output))
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(
            f"{output} exists already; choose another --output or replace it with --overwrite"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    scratch.mkdir()
    try:
        yield scratch
        flush_tree(scratch)
        _replace_folder(scratch, target, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def flush_tree(folder: Path) -> None:
    """Forces every file and folder below `folder` onto the disk, readable as the umask allows."""
    allowed = folder.stat().st_mode & 0o666  # safetensors makes its files for the owner alone
    for base, _, files in os.walk(folder):
        for name in files:
            os.chmod(os.path.join(base, name), allowed)
        for name in [*files, "."]:
            _sync(os.path.join(base, name))


def _replace_folder(scratch: Path, target: Path, *, overwrite: bool) -> None:
    old = None
    if overwrite and os.path.lexists(target):
        old = scratch.with_suffix(".old")
        os.rename(target, old)
    try:
        # A rename replaces an empty folder only, so nobody else's finished output is lost here.
        os.rename(scratch, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    if old is not None:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()


class SafetensorsError(ValueError):
    """A file is no safetensors file, or not laid out as it must be. The message names no path."""


TensorLayout = tuple[str, tuple[int | str, ...]]
"""A tensor's dtype, by its safetensors name, and its shape; a string in a shape is a length that
the file itself gives, the same wherever the string occurs."""


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies in a safetensors file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SafetensorsHeader:
    """A safetensors file's header as it was read; `place` checks what it says of the tensors."""

    metadata: dict
    """The strings under `__metadata__`; empty where there are none."""
    entries: dict
    """Tensor name: what the header says of it, unchecked."""
    data_start: int
    """Offset of the first tensor's first byte."""
    file_bytes: int

    @classmethod
    def parse(cls, start: bytes, file_bytes: int) -> "SafetensorsHeader":
        """Reads a header without touching a tensor.

        Args:
            start: The file's leading bytes; 8 + MAX_HEADER_BYTES of them are always enough.
            file_bytes: The file's whole size.

        Raises:
            SafetensorsError: It is no header, or one that cannot belong to a file of this size.
        """
        length = int.from_bytes(start[:8], "little")
        if file_bytes < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise SafetensorsError(
                f"not a whole safetensors file ({file_bytes} bytes, header of {length})"
            )
        try:
            entries = json.loads(start[8 : 8 + length].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise SafetensorsError(f"its header cannot be read: {error}") from error
        metadata = entries.pop("__metadata__", {}) if isinstance(entries, dict) else None
        if not isinstance(metadata, dict):
            raise SafetensorsError("its header cannot be read: not an object of tensors")
        return cls(metadata, entries, 8 + length, file_bytes)

    def place(
        self,
        layout: Mapping[str, TensorLayout],
        lengths: Mapping[str, int] | None = None,
        optional: frozenset[str] = frozenset(),
    ) -> dict[str, TensorPlace]:
        """Where each tensor lies, once all of them are what they must be.

        Args:
            layout: Every tensor there must be, and no other may be.
            lengths: Lengths by name that are known already.
            optional: Tensors of the layout that may be left out.

        Raises:
            SafetensorsError: A tensor is missing, unknown, of another dtype or shape, or the
                tensors overlap, leave a gap or do not fill the file.
        """
        if set(self.entries) - optional != set(layout) - optional:
            differing = sorted((set(self.entries) ^ set(layout)) - optional)
            raise SafetensorsError(f"its tensors are not those expected; differing: {differing}")
        known = dict(lengths or {})
        data_bytes = self.file_bytes - self.data_start
        places, spans = {}, []
        for name, entry in self.entries.items():
            places[name] = self._place_one(name, entry, layout[name], known, data_bytes)
            begin = places[name].offset - self.data_start
            spans.append((begin, begin + places[name].bytes))
        at = 0
        for begin, end in sorted(spans):
            if begin != at:
                raise SafetensorsError(f"tensors overlap or leave a gap at byte {at}")
            at = end
        if at != data_bytes:
            raise SafetensorsError(f"{data_bytes - at} bytes belong to no tensor")
        return places

    def _place_one(
        self, name: str, entry: Any, layout: TensorLayout, known: dict[str, int], data_bytes: int
    ) -> TensorPlace:
        dtype_name, shape = layout
        try:
            got_dtype, got_shape = entry["dtype"], entry["shape"]
            begin, end = entry["data_offsets"]
            counts = all(type(x) is int and 0 <= x < 1 << 62 for x in [*got_shape, begin, end])
        except (TypeError, KeyError, ValueError) as error:
            raise SafetensorsError(f"the entry of tensor {name} is malformed") from error
        if not counts or got_dtype != dtype_name or len(got_shape) != len(shape):
            raise SafetensorsError(
                f"tensor {name} must be {dtype_name} {shape}, got {got_dtype} {got_shape}"
            )
        for want, size in zip(shape, got_shape, strict=True):
            want = known.setdefault(want, size) if isinstance(want, str) else want
            if size != want:
                raise SafetensorsError(f"tensor {name} must be {shape} ({known}), got {got_shape}")
        place = TensorPlace(
            SAFETENSORS_DTYPES[dtype_name], tuple(got_shape), self.data_start + begin
        )
        if end > data_bytes or end - begin != place.bytes:
            raise SafetensorsError(f"tensor {name} does not fit its place {begin} to {end}")
        return place


def map_tensors(
    file: BinaryIO, places: Mapping[str, TensorPlace]
) -> tuple[dict[str, np.ndarray], mmap.mmap]:
    """Maps an open safetensors file read-only.

    Returns:
        (tensor name: array of its dtype and shape over the map, the map, for `madvise`)
    """
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {
        name: np.ndarray(place.shape, place.dtype, mapped, place.offset)
        for name, place in places.items()
    }
    return tensors, mapped
