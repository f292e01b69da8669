"""Check every byte of a cache against its manifest; with --repair, capture what is broken again."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from megatron_kd.cache.format import (
    BACKUP_NAME,
    MANIFEST_NAME,
    SHARD_PATTERN,
    SPEC_NAME,
    CacheError,
    CacheSpec,
    ShardEntry,
    parse_manifest,
)
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.shard import parse_header
from megatron_kd.cache.storage import Directory, Remote, is_remote, open_storage
from megatron_kd.files import MAX_HEADER_BYTES, canonical_json, publish, stream_checksum

BROKEN_SUFFIX = ".broken"


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the manifest says."""

    file: str
    what: str
    entry: ShardEntry | None = None
    """The shard that must be captured again; None where no capture is needed."""

    def __str__(self) -> str:
        samples = ""
        if self.entry is not None:
            first = self.entry.first_sample
            samples = f" (samples {first} to {first + self.entry.samples - 1})"
        return f"{self.file}{samples}: {self.what}"


def find_caches(path: str | os.PathLike) -> list[Path] | list[str]:
    """The cache at a path or an fsspec URL, or those of its splits.

    Raises:
        CacheError: There is none.
    """
    where = os.fspath(path)
    remote = is_remote(where)
    top = where.rstrip("/") if remote else Path(where.removeprefix("file://"))
    inside = open_storage(os.fspath(top)).names()
    caches = [
        candidate
        for candidate in (top, *((f"{top}/{name}" if remote else top / name) for name in inside))
        if _holds_cache(os.fspath(candidate))
    ]
    if not caches:
        raise CacheError(f"{path} holds no cache, finished or not")
    return caches


def _holds_cache(path: str) -> bool:
    storage = open_storage(path)
    return any(storage.size(name) is not None for name in (MANIFEST_NAME, BACKUP_NAME, SPEC_NAME))


def verify_cache(
    path: str | os.PathLike,
    *,
    decode: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Problem]:
    """Everything that is wrong with a cache.

    Args:
        decode: Also decode every sample of the sound shards and compare token hashes.
        on_bytes: Called with the size of each shard after it was checked.
    """
    storage = open_storage(os.fspath(path))
    problems = []
    found, trouble = _read_manifest(storage, MANIFEST_NAME)
    if found is None:
        found, backup_trouble = _read_manifest(storage, BACKUP_NAME)
        problems.append(Problem(MANIFEST_NAME, trouble))
        if found is None:
            if storage.size(MANIFEST_NAME) is None and storage.size(SPEC_NAME) is not None:
                count = sum(bool(SHARD_PATTERN.fullmatch(name)) for name in storage.names())
                return [Problem(MANIFEST_NAME, f"not there: unfinished, {count} shards so far")]
            return [*problems, Problem(BACKUP_NAME, backup_trouble)]
    elif _text(storage, BACKUP_NAME) != canonical_json(found[0]):
        problems.append(Problem(BACKUP_NAME, f"differs from {MANIFEST_NAME}"))
    _, spec, entries = found
    if _text(storage, SPEC_NAME) != canonical_json(spec.as_dict()):
        problems.append(Problem(SPEC_NAME, f"differs from {MANIFEST_NAME}"))
    sound = []
    for entry in entries:
        what = _check_shard(storage, entry, spec)
        if what:
            problems.append(Problem(entry.file, what, entry))
        else:
            sound.append(entry)
        on_bytes(entry.bytes)
    listed = {entry.file for entry in entries}
    for name in storage.names():
        if SHARD_PATTERN.fullmatch(name) and name not in listed:
            problems.append(Problem(name, "not in the manifest"))
    if decode and not any(problem.file == MANIFEST_NAME for problem in problems):
        problems += _decode_all(path, sound)
    return problems


def _read_manifest(storage: Directory | Remote, name: str):
    try:
        text = storage.read_text(name)
        return (None, "missing") if text is None else (parse_manifest(text, name), "")
    except (CacheError, OSError) as error:
        return None, f"damaged: {error}"


def _text(storage: Directory | Remote, name: str) -> str | None:
    try:
        return storage.read_text(name)
    except (CacheError, OSError):
        return None


def _same_text(file: Path, text: str) -> bool:
    return _text(Directory(os.fspath(file.parent)), file.name) == text


def _check_shard(storage: Directory | Remote, entry: ShardEntry, spec: CacheSpec) -> str:
    """What is wrong with a shard's file; empty when nothing is."""
    try:
        size = storage.size(entry.file)
        if size is None:
            return "missing"
        with storage.open(entry.file) as file:
            if size == entry.bytes and stream_checksum(file) == entry.xxh3_128:
                return ""
        with storage.open(entry.file) as file:
            start = file.read(8 + MAX_HEADER_BYTES)
    except OSError as error:  # a failing disk takes a shard, not the check of the others
        return f"cannot be read: {error}"
    try:
        head, _ = parse_header(Path(entry.file), start, size, spec)
    except CacheError as error:
        if size != entry.bytes:
            return f"{size} bytes instead of {entry.bytes}: truncated or replaced"
        return f"damaged: {error}"
    if head.shard != entry.shard:
        return f"holds shard {head.shard}: swapped or duplicated"
    if size != entry.bytes:
        return f"{size} bytes instead of {entry.bytes}: truncated or replaced"
    return "damaged: its checksum is not the manifest's"


def _decode_all(path: str | os.PathLike, entries: list[ShardEntry]) -> list[Problem]:
    problems = []
    reader = CacheReader(path, check_checksums=False)
    for entry in entries:
        for sample in range(entry.first_sample, entry.first_sample + entry.samples):
            try:
                reader[sample]
            except CacheError as error:
                problems.append(Problem(entry.file, str(error), entry))
                break
    return problems


Recapture = Callable[[Path, Sequence[int] | None], dict]
"""What makes shards of a cache again: called with its directory and the shards, ascending, or None
for those that are missing from an unfinished cache. It returns the manifest of the complete cache.
"""


def no_recapture(folder: Path, shards: Sequence[int] | None) -> dict:
    """Refuses, where nothing was handed over that could ask the teacher again."""
    lost = "missing shards" if shards is None else f"shards {', '.join(map(str, shards))}"
    raise CacheError(
        f"{folder}: {lost} can only be captured again with the teacher; use `megatron-kd verify "
        "--repair`, or hand repair_cache a recapture"
    )


def repair_cache(
    path: str | os.PathLike, problems: list[Problem], recapture: Recapture = no_recapture
) -> list[str]:
    """Puts right what `verify_cache` found; only broken and missing shards are captured again.

    Args:
        recapture: Makes those shards; called only where there are any.

    Returns:
        What was done, a sentence each.

    Raises:
        CacheError: The manifest and its copy are both lost, or shards are and there is nothing to
            capture them again with.
    """
    if is_remote(os.fspath(path)):
        raise CacheError(
            f"{path}: repair works on a local directory; copy the cache there, repair it, and copy "
            "what changed back"
        )
    storage = open_storage(os.fspath(path))
    folder, done = storage.folder, []
    manifest, _ = _read_manifest(storage, MANIFEST_NAME)
    if manifest is None:
        manifest, _ = _read_manifest(storage, BACKUP_NAME)
        unfinished = not (folder / MANIFEST_NAME).exists() and (folder / SPEC_NAME).exists()
        if manifest is None and not unfinished:
            raise CacheError(
                f"{folder}: the manifest and its copy are both lost, so nothing says which shards "
                "are sound; capture into another directory"
            )
    if manifest is not None:
        text = canonical_json(manifest[0]).encode()
        for name in (BACKUP_NAME, MANIFEST_NAME):
            if not _same_text(folder / name, text.decode()):
                publish(folder / name, text)
                done.append(f"{name} restored")
        spec_text = canonical_json(manifest[1].as_dict())
        if not _same_text(folder / SPEC_NAME, spec_text):
            publish(folder / SPEC_NAME, spec_text.encode())
            done.append(f"{SPEC_NAME} restored")
    for problem in problems:
        file = folder / problem.file
        if SHARD_PATTERN.fullmatch(problem.file) and file.exists():
            file.rename(file.with_name(file.name + BROKEN_SUFFIX))
    shards = sorted({problem.entry.shard for problem in problems if problem.entry is not None})
    if shards or manifest is None:
        made = recapture(folder, shards if manifest is not None else None)
        names = ", ".join(str(shard) for shard in shards) or "the missing ones"
        done.append(f"shards captured again: {names}")
        if manifest is not None and made["fingerprint"] != manifest[0]["fingerprint"]:
            done.append(
                "the engine's rows are not the same to the bit: the cache has a new fingerprint"
            )
    for file in sorted(folder.glob(f"shard-*{BROKEN_SUFFIX}")):  # also those of an earlier repair
        if file.with_suffix("").exists():
            file.unlink()
        else:
            done.append(f"{file.name} set aside: no part of the cache")
    return done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cache",
        help="a cache, the folder of a capture with all its splits, or an fsspec URL of either",
    )
    parser.add_argument(
        "--repair", action="store_true", help="capture broken and missing shards again, only those"
    )
    parser.add_argument(
        "--decode", action="store_true", help="also decode every sample (slower than checksums)"
    )


def run(args: argparse.Namespace, recapture: Recapture = no_recapture) -> int:
    broken = False
    for folder in find_caches(args.cache):
        problems = _verify_with_progress(folder, args.decode)
        for problem in problems:
            print(f"{folder}: {problem}")
        if problems and args.repair:
            for sentence in repair_cache(folder, problems, recapture):
                print(f"{folder}: {sentence}")
            problems = _verify_with_progress(folder, args.decode)
            for problem in problems:
                print(f"{folder}: still: {problem}")
        if problems:
            broken = True
        else:
            manifest = CacheReader(folder).manifest
            print(
                f"{folder}: sound; {manifest['samples']} samples, "
                f"{manifest['positions']} positions, {len(manifest['shards'])} shards, "
                f"fingerprint {manifest['fingerprint']}"
            )
    return 1 if broken else 0


def _verify_with_progress(cache: Path | str, decode: bool) -> list[Problem]:
    manifest, _ = _read_manifest(open_storage(os.fspath(cache)), MANIFEST_NAME)
    total = sum(entry.bytes for entry in manifest[2]) if manifest else None
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(os.path.basename(cache), total=total)
        return verify_cache(
            cache, decode=decode, on_bytes=lambda count: progress.advance(task, count)
        )
