"""Check every byte of a cache against its manifest; with --repair, capture what is broken again."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
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
    canonical_json,
    file_checksum,
    parse_manifest,
    publish,
    read_text,
)
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.shard import MAX_HEADER_BYTES, parse_header
from megatron_kd.cache.writer import finished_shards

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


def find_caches(path: str | os.PathLike) -> list[Path]:
    """The cache at a path, or those of its splits.

    Raises:
        CacheError: There is none.
    """
    if "://" in os.fspath(path):
        raise CacheError(
            f"{path}: verify where the files lie; a URL's shards are checked when read"
        )
    folder = Path(path)
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    caches = [
        candidate
        for candidate in (folder, *inside)
        if any((candidate / name).is_file() for name in (MANIFEST_NAME, BACKUP_NAME, SPEC_NAME))
    ]
    if not caches:
        raise CacheError(f"{folder} holds no cache, finished or not")
    return caches


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
    folder = Path(path)
    problems = []
    found, trouble = _read_manifest(folder / MANIFEST_NAME)
    if found is None:
        found, backup_trouble = _read_manifest(folder / BACKUP_NAME)
        problems.append(Problem(MANIFEST_NAME, trouble))
        if found is None:
            if not (folder / MANIFEST_NAME).exists() and (folder / SPEC_NAME).exists():
                count = len(finished_shards(folder))
                return [Problem(MANIFEST_NAME, f"not there: unfinished, {count} shards so far")]
            return [*problems, Problem(BACKUP_NAME, backup_trouble)]
    elif not _same_text(folder / BACKUP_NAME, canonical_json(found[0])):
        problems.append(Problem(BACKUP_NAME, f"differs from {MANIFEST_NAME}"))
    _, spec, entries = found
    if not _same_text(folder / SPEC_NAME, canonical_json(spec.as_dict())):
        problems.append(Problem(SPEC_NAME, f"differs from {MANIFEST_NAME}"))
    sound = []
    for entry in entries:
        what = _check_shard(folder / entry.file, entry, spec)
        if what:
            problems.append(Problem(entry.file, what, entry))
        else:
            sound.append(entry)
        on_bytes(entry.bytes)
    listed = {entry.file for entry in entries}
    for file in sorted(folder.iterdir()):
        if SHARD_PATTERN.fullmatch(file.name) and file.name not in listed:
            problems.append(Problem(file.name, "not in the manifest"))
    if decode and not any(problem.file == MANIFEST_NAME for problem in problems):
        problems += _decode_all(folder, sound)
    return problems


def _read_manifest(file: Path):
    try:
        return parse_manifest(read_text(file), str(file)), ""
    except FileNotFoundError:
        return None, "missing"
    except CacheError as error:
        return None, f"damaged: {error}"


def _same_text(file: Path, text: str) -> bool:
    return file.is_file() and read_text(file) == text


def _check_shard(file: Path, entry: ShardEntry, spec: CacheSpec) -> str:
    """What is wrong with a shard's file; empty when nothing is."""
    if not file.is_file():
        return "missing"
    size = file.stat().st_size
    if size == entry.bytes and file_checksum(file) == entry.xxh3_128:
        return ""
    try:
        with open(file, "rb") as stream:
            head, _ = parse_header(file, stream.read(8 + MAX_HEADER_BYTES), size, spec)
    except CacheError as error:
        if size != entry.bytes:
            return f"{size} bytes instead of {entry.bytes}: truncated or replaced"
        return f"damaged: {error}"
    if head.shard != entry.shard:
        return f"holds shard {head.shard}: swapped or duplicated"
    if size != entry.bytes:
        return f"{size} bytes instead of {entry.bytes}: truncated or replaced"
    return "damaged: its checksum is not the manifest's"


def _decode_all(folder: Path, entries: list[ShardEntry]) -> list[Problem]:
    problems = []
    reader = CacheReader(folder, check_checksums=False)
    for entry in entries:
        for sample in range(entry.first_sample, entry.first_sample + entry.samples):
            try:
                reader[sample]
            except CacheError as error:
                problems.append(Problem(entry.file, str(error), entry))
                break
    return problems


def repair_cache(path: str | os.PathLike, problems: list[Problem]) -> list[str]:
    """Puts right what `verify_cache` found; only broken and missing shards are captured again.

    Returns:
        What was done, a sentence each.

    Raises:
        CacheError: The manifest and its copy are both lost.
    """
    folder, done = Path(path), []
    manifest, _ = _read_manifest(folder / MANIFEST_NAME)
    if manifest is None:
        manifest, _ = _read_manifest(folder / BACKUP_NAME)
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
        resume = importlib.import_module("megatron_kd.teacher.capture").resume
        made = resume(folder, shards if manifest is not None else None)
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
    parser.add_argument("cache", help="a cache, or the folder of a capture with all its splits")
    parser.add_argument(
        "--repair", action="store_true", help="capture broken and missing shards again, only those"
    )
    parser.add_argument(
        "--decode", action="store_true", help="also decode every sample (slower than checksums)"
    )


def run(args: argparse.Namespace) -> int:
    broken = False
    for folder in find_caches(args.cache):
        problems = _verify_with_progress(folder, args.decode)
        for problem in problems:
            print(f"{folder}: {problem}")
        if problems and args.repair:
            for sentence in repair_cache(folder, problems):
                print(f"{folder}: {sentence}")
            problems = _verify_with_progress(folder, args.decode)
            for problem in problems:
                print(f"{folder}: still: {problem}")
        if problems:
            broken = True
        else:
            manifest = parse_manifest(read_text(folder / MANIFEST_NAME), str(folder))[0]
            print(
                f"{folder}: sound; {manifest['samples']} samples, "
                f"{manifest['positions']} positions, {len(manifest['shards'])} shards, "
                f"fingerprint {manifest['fingerprint']}"
            )
    return 1 if broken else 0


def _verify_with_progress(folder: Path, decode: bool) -> list[Problem]:
    console = Console(stderr=True)
    total = sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(folder.name, total=total)
        return verify_cache(
            folder, decode=decode, on_bytes=lambda count: progress.advance(task, count)
        )
