"""Where a cache's files lie: a directory, or an fsspec URL with bounded local copies."""

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from megatron_kd.cache.format import MAX_JSON_BYTES, CacheError, read_text

REMOTE_BLOCK_BYTES = 8 << 20
DEFAULT_LOCAL_BYTES = 16 << 30


def open_storage(
    path: str, local_folder=None, max_local_bytes: int = DEFAULT_LOCAL_BYTES
) -> "Directory | Remote":
    """`file://` URLs and plain paths are read in place."""
    if is_remote(path):
        return Remote(path, local_folder, max_local_bytes)
    return Directory(path.removeprefix("file://"))


def is_remote(path: str) -> bool:
    return not path.startswith("file://") and ("://" in path or "::" in path)


class Directory:
    """Files read in place."""

    def __init__(self, path: str):
        self.folder, self.name_space = Path(path), ""

    def read_text(self, name: str) -> str | None:
        file = self.folder / name
        if not file.is_file():
            return None
        return read_text(file)

    def local_path(self, name: str, expected_bytes: int) -> Path:
        return self.folder / name

    def discard(self, name: str) -> bool:
        """Whether there was a copy that may be worse than its original: here never."""
        return False

    def names(self) -> list[str]:
        """What lies in the directory, sorted."""
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is missing."""
        file = self.folder / name
        return file.stat().st_size if file.is_file() else None

    def open(self, name: str) -> BinaryIO:
        return open(self.folder / name, "rb", buffering=0)


_KEPT = ("url", "max_local_bytes", "name_space", "_given")  # what a pickled Remote takes along


class Remote:
    """Files copied here when first used; the oldest copies go when there are too many bytes.

    A copy that is mapped stays readable after it was removed. With a given folder several processes
    share the copies: one appears under its name only when it is whole.
    """

    def __init__(self, url: str, local_folder, max_local_bytes: int):
        self.url, self.max_local_bytes = url.rstrip("/"), max_local_bytes
        # Set by the reader, so that copies of other caches are not taken for this one's.
        self.name_space = ""
        self._given = None if local_folder is None else Path(local_folder)
        self._forget()

    def _forget(self) -> None:
        self._folder: Path | None = None
        self._owner: int | None = None

    def __getstate__(self) -> dict:
        return {name: getattr(self, name) for name in _KEPT}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def read_text(self, name: str) -> str | None:
        filesystem, path = _filesystem(f"{self.url}/{name}")
        try:
            size = filesystem.size(path)
            if size is not None and size > MAX_JSON_BYTES:
                raise CacheError(
                    f"{self.url}/{name} has {size} bytes; at most {MAX_JSON_BYTES} are read"
                )
            return filesystem.cat_file(path).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def _local_folder(self) -> Path:
        if self._folder is None or self._owner != os.getpid():
            self._owner = os.getpid()
            if self._given is not None:
                self._given.mkdir(parents=True, exist_ok=True)
                self._folder = self._given
            else:
                self._folder = Path(tempfile.mkdtemp(prefix="megatron-kd-"))
                weakref.finalize(self, _remove_own, self._folder, self._owner)
        return self._folder

    def local_path(self, name: str, expected_bytes: int) -> Path:
        """The local copy of a file, made if need be."""
        if expected_bytes > self.max_local_bytes:
            raise CacheError(
                f"{self.url}/{name} has {expected_bytes} bytes, local copies may take "
                f"{self.max_local_bytes}; raise max_local_bytes"
            )
        folder = self._local_folder()
        copy = folder / f"{self.name_space}{name}"
        if copy.exists() and copy.stat().st_size == expected_bytes:
            os.utime(copy)
            return copy
        self._make_room(folder, expected_bytes)
        filesystem, path = _filesystem(f"{self.url}/{name}")
        partial = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            size = filesystem.size(path)
            if size is not None and size != expected_bytes:
                raise CacheError(
                    f"{self.url}/{name} has {size} bytes, the manifest says {expected_bytes}: "
                    "truncated or replaced"
                )
            filesystem.get_file(path, str(partial))
            os.replace(partial, copy)
        except FileNotFoundError as error:
            raise CacheError(f"{self.url}/{name} is missing") from error
        finally:
            partial.unlink(missing_ok=True)
        return copy

    def discard(self, name: str) -> bool:
        """Removes the local copy of a file, so that it is copied again. False if there is none."""
        copy = self._local_folder() / f"{self.name_space}{name}"
        there = copy.exists()
        copy.unlink(missing_ok=True)
        return there

    def names(self) -> list[str]:
        """What lies under the URL, sorted."""
        filesystem, path = _filesystem(self.url)
        try:
            listed = filesystem.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in listed)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is missing."""
        filesystem, path = _filesystem(f"{self.url}/{name}")
        try:
            return filesystem.info(path)["size"] if filesystem.isfile(path) else None
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        """Read block by block, never copied here as a whole."""
        filesystem, path = _filesystem(f"{self.url}/{name}")
        return filesystem.open(path, "rb", block_size=REMOTE_BLOCK_BYTES)

    def _make_room(self, folder: Path, needed_bytes: int) -> None:
        copies = []
        for file in folder.glob("*shard-*.safetensors"):
            try:
                status = file.stat()
            except FileNotFoundError:  # another process made room
                continue
            copies.append((status.st_mtime_ns, status.st_size, file))
        taken = sum(size for _, size, _ in copies)
        for _, size, file in sorted(copies):
            if taken + needed_bytes <= self.max_local_bytes:
                break
            file.unlink(missing_ok=True)
            taken -= size


def _filesystem(url: str):
    """(the file system behind a URL, the path in it)"""
    from fsspec.core import url_to_fs  # slow to import, and directories need none of it

    return url_to_fs(url)


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take its parent's copies away
        shutil.rmtree(folder, ignore_errors=True)
