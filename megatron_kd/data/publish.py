"""Directories that appear whole or not at all: written aside, flushed to disk, then renamed."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


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
        _replace(scratch, target, overwrite=overwrite)
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
            descriptor = os.open(os.path.join(base, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _replace(scratch: Path, target: Path, *, overwrite: bool) -> None:
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
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if old is not None:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
