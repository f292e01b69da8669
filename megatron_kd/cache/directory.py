"""A cache's directory while it is made: which shards are there, which are missing, and the steps
that begin, complete and reopen it.

Any number of processes may work on one directory. Nothing is shared but files that appear whole:
`spec.json` first, a shard and then its entry in `finished/`, the manifest last. Whoever finds every
shard finished publishes the manifest, and takes the entries away.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from megatron_kd.cache.format import (
    BACKUP_NAME,
    ENTRY_FOLDER,
    MANIFEST_NAME,
    SPEC_NAME,
    CacheError,
    CacheSpec,
    ShardEntry,
    build_manifest,
    check_contiguous,
    parse_manifest,
    read_json,
    read_text,
)
from megatron_kd.files import canonical_json, publish

ORIGIN_NAME = ".capture.json"


class CacheDirectory:
    """The directory of one cache, complete or not. Looking at it changes nothing on disk.

    A `plan` is what `plan_shards` gives: [shards + 1] integers, shard i holds the samples from
    plan[i] up to plan[i + 1].
    """

    def __init__(self, path: str | os.PathLike):
        self.folder = Path(path)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    @classmethod
    def begin(cls, path: str | os.PathLike, spec: CacheSpec) -> "CacheDirectory":
        """Makes the directory for a cache that is being written, or checks that what is there was
        begun with this spec.

        Raises:
            CacheError: It holds something else.
        """
        directory = cls(path)
        folder, spec_file = directory.folder, directory.folder / SPEC_NAME
        text = canonical_json(spec.as_dict())  # what is not plain JSON is refused before a trace
        if not spec_file.exists():
            if folder.exists() and any(
                name != ENTRY_FOLDER and not name.startswith(".") for name in os.listdir(folder)
            ):
                raise CacheError(
                    f"{folder} holds other files; choose an empty directory for the cache"
                )
            (folder / ENTRY_FOLDER).mkdir(parents=True, exist_ok=True)
            publish(spec_file, text)
        there = directory.spec()
        if there != spec:
            one, other = there.as_dict(), spec.as_dict()
            differing = {
                key: (one.get(key), other.get(key))
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            }
            raise CacheError(
                f"{folder} was begun with other settings (there, here): {differing}; "
                "use the same settings, or another directory"
            )
        (folder / ENTRY_FOLDER).mkdir(exist_ok=True)
        return directory

    @property
    def manifest_file(self) -> Path:
        return self.folder / MANIFEST_NAME

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there; shards may have been lost since it was written."""
        return self.manifest_file.exists()

    @property
    def is_begun(self) -> bool:
        """Whether the description that all shards share is there."""
        return (self.folder / SPEC_NAME).exists()

    def spec(self) -> CacheSpec:
        """The description that was published first."""
        return CacheSpec.from_dict(read_json(self.folder / SPEC_NAME))

    def manifest(self) -> tuple[dict, CacheSpec, list[ShardEntry]]:
        """The parsed manifest of a complete cache.

        Raises:
            FileNotFoundError: The cache is not complete.
            CacheError: The manifest was changed.
        """
        return parse_manifest(read_text(self.manifest_file), str(self.manifest_file))

    def finished(self) -> dict[int, ShardEntry]:
        """Shards that are whole on disk, by manifest or entry file and size; contents are not read.

        A shard whose entry file cannot be read, or is another's, does not count: it is made again.
        """
        if self.is_complete:
            found = self.manifest()[2]
        else:
            files = sorted((self.folder / ENTRY_FOLDER).glob("shard-*.json"))
            found = [entry for entry in map(_read_entry, files) if entry is not None]
        entries = {}
        for entry in found:
            shard = self.folder / entry.file
            if shard.exists() and shard.stat().st_size == entry.bytes:
                entries[entry.shard] = entry
        return entries

    def missing(self, plan: np.ndarray) -> list[int]:
        """The shards of the plan that are not whole on disk, ascending."""
        return sorted(set(range(len(plan) - 1)) - set(self.finished()))

    def origin(self) -> dict | None:
        """Where the cache comes from: what its manifest carries, or, before there is one, what
        `keep_origin` wrote. None where nothing says it.
        """
        if self.is_complete:
            return self.manifest()[0]["origin"]
        note = self.folder / ORIGIN_NAME
        return json.loads(read_text(note)) if note.exists() else None

    def keep_origin(self, origin: Mapping) -> None:
        """Writes down where the cache comes from, for `verify --repair`, until a manifest does."""
        publish(self.folder / ORIGIN_NAME, json.dumps(dict(origin), sort_keys=True))

    def publish_entry(self, entry: ShardEntry) -> None:
        """Makes a shard that is on disk count as finished."""
        publish(self._entry_file(entry), canonical_json(entry.as_dict()))

    def publish_manifest(self, *, samples: int, origin: Mapping | None = None) -> dict:
        """Completes the cache: binds all shards in manifest.json. Safe to call again, and from
        several workers.

        Args:
            samples: How many the cache must hold.
            origin: Where the cache came from (paths, for `verify --repair`); carried in the
                manifest, bound by nothing.

        Returns:
            The manifest.

        Raises:
            CacheError: Shards are missing; the message names the command that makes them.
        """
        spec, finished = self.spec(), self.finished()
        entries = [finished[shard] for shard in sorted(finished)]
        there = sum(entry.samples for entry in entries)
        if there != samples:
            raise CacheError(
                f"{self.folder} is not complete: {there} of {samples} samples in {len(entries)} "
                "finished shards; run the same command again to write the rest"
            )
        check_contiguous(entries, str(self.folder))
        manifest = build_manifest(spec, entries, origin)
        for name in (BACKUP_NAME, MANIFEST_NAME):
            publish(self.folder / name, canonical_json(manifest))
        for file in (self.folder / ENTRY_FOLDER).glob("shard-*.json"):
            file.unlink(missing_ok=True)
        for stale in self.folder.rglob(".*.tmp"):  # left by killed writers
            stale.unlink(missing_ok=True)
        return manifest

    def complete_if_whole(self, plan: np.ndarray, *, origin: Mapping | None = None) -> bool:
        """Publishes the manifest if every shard of the plan is there; so may any other worker that
        sees them all.

        Returns:
            Whether the cache is complete now; False where other workers have shards to make.
        """
        if not self.is_complete:
            try:
                if self.missing(plan):
                    return self.is_complete
                self.publish_manifest(samples=int(plan[-1]), origin=origin)
            except (FileNotFoundError, CacheError):
                # Another worker published between two looks at the directory and took the entry
                # files away.
                if not self.is_complete:
                    raise
        (self.folder / ORIGIN_NAME).unlink(missing_ok=True)
        return True

    def reopen(self, *, without: Collection[int] = ()) -> None:
        """Turns a complete cache back into one being written, without the given shards."""
        _, spec, entries = self.manifest()
        (self.folder / ENTRY_FOLDER).mkdir(exist_ok=True)
        publish(self.folder / SPEC_NAME, canonical_json(spec.as_dict()))
        for entry in entries:
            if entry.shard in without:  # one may be left of a writer killed after its manifest
                self._entry_file(entry).unlink(missing_ok=True)
            else:
                self.publish_entry(entry)
        (self.folder / BACKUP_NAME).unlink(missing_ok=True)
        self.manifest_file.unlink()

    def reopen_lost(self, plan: np.ndarray) -> list[int]:
        """Reopens a complete cache whose shards were lost or cut since its manifest was written.

        Returns:
            The lost shards, ascending; empty where none is, or where the cache is not complete.
        """
        try:
            lost = self.missing(plan) if self.is_complete else []
            if lost:
                self.reopen(without=lost)
            return lost
        except FileNotFoundError:  # another worker reopened it between two looks at the directory
            if self.is_complete:
                raise
            return []

    def _entry_file(self, entry: ShardEntry) -> Path:
        return self.folder / ENTRY_FOLDER / Path(entry.file).with_suffix(".json").name


def _read_entry(file: Path) -> ShardEntry | None:
    try:
        entry = ShardEntry.from_dict(read_json(file), str(file))
    except CacheError:
        return None
    return entry if Path(entry.file).stem == file.stem else None
