"""The directory of a generation: parts while it is made, one file of responses once it is whole.

Any number of processes may work on one directory. Nothing is shared but files that appear whole:
`spec.json` first, then a part and its entry, in `parts/`; `responses.jsonl` and the manifest last.
Whoever finds every part there joins them, and takes them away.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from megatron_kd.files import HASH_BLOCK_BYTES, canonical_json, publish, published_file
from megatron_kd.teacher.engines.base import EngineError
from megatron_kd.teacher.generators.base import ENDED

FORMAT, VERSION = "megatron-kd answers", 1
SPEC_NAME, MANIFEST_NAME, RESPONSES_NAME = "spec.json", "manifest.json", "responses.jsonl"
CACHE_FOLDER = "cache"
_PARTS = "parts"
_OWN = (_PARTS, CACHE_FOLDER)


class AnswerDirectory:
    """The directory of one generation, complete or not. Looking at it changes nothing on disk."""

    def __init__(self, path: str | os.PathLike):
        self.folder = Path(path)

    @classmethod
    def begin(cls, path: str | os.PathLike, spec: Mapping) -> "AnswerDirectory":
        """Makes the directory, or checks that what is there was begun with this spec.

        Raises:
            EngineError: It holds something else.
        """
        directory, folder = cls(path), Path(path)
        spec = json.loads(canonical_json({"format": FORMAT, "version": VERSION, **spec}))
        spec_file = folder / SPEC_NAME
        if not spec_file.exists():
            if folder.exists() and any(
                name not in _OWN and not name.startswith(".") for name in os.listdir(folder)
            ):
                raise EngineError(
                    f"{folder} holds other files; choose an empty directory for the responses"
                )
            (folder / _PARTS).mkdir(parents=True, exist_ok=True)
            publish(spec_file, canonical_json(spec))
        there = json.loads(spec_file.read_text(encoding="utf-8"))
        if there != spec:
            differing = {
                key: (there.get(key), spec.get(key))
                for key in sorted(there.keys() | spec.keys())
                if there.get(key) != spec.get(key)
            }
            raise EngineError(
                f"{folder} was begun with other settings (there, here): {differing}; use the same "
                "settings, or another directory"
            )
        return directory

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there, and the responses that it speaks of."""
        if not (self.folder / MANIFEST_NAME).exists():
            return False
        responses = self.folder / RESPONSES_NAME
        return responses.exists() and responses.stat().st_size == self.manifest()["bytes"]

    def manifest(self) -> dict:
        return json.loads((self.folder / MANIFEST_NAME).read_text(encoding="utf-8"))

    def missing(self, count: int) -> list[int]:
        """The parts of `count` that are not whole on disk, ascending."""
        return [part for part in range(count) if self._entry(part) is None]

    def publish_part(self, part: int, records: Sequence[Mapping]) -> None:
        """Writes a part, then its entry, which makes it count as finished.

        Args:
            records: The part's responses, as `responses.jsonl` gets them.
        """
        (self.folder / _PARTS).mkdir(exist_ok=True)
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        payload = lines.encode()
        publish(self._part(part), payload)
        publish(
            self._part(part).with_suffix(".json"),
            canonical_json({"bytes": len(payload), **counted(records)}),
        )

    def complete_if_whole(self, count: int) -> bool:
        """Joins the parts if all of them are there; so may any other worker that sees them all.

        Returns:
            Whether the responses are complete now; False where other workers have parts to make.
        """
        if self.is_complete:
            return True
        try:
            entries = [self._entry(part) for part in range(count)]
            if None in entries:
                return self.is_complete
            self._join(entries)
        except FileNotFoundError:
            # Another worker was done between two looks at the directory and took the parts away.
            if not self.is_complete:
                raise
        return True

    def _join(self, entries: list[dict]) -> None:
        digest, size = xxhash.xxh3_128(), 0
        with published_file(self.folder / RESPONSES_NAME) as joined:
            for part in range(len(entries)):
                with open(self._part(part), "rb") as file:
                    while block := file.read(HASH_BLOCK_BYTES):
                        joined.write(block)
                        digest.update(block)
                        size += len(block)
        counts = Counter()
        reasons = Counter()
        for entry in entries:
            reasons.update(entry["stop_reasons"])
            counts.update({name: n for name, n in entry.items() if name != "stop_reasons"})
        spec = json.loads((self.folder / SPEC_NAME).read_text(encoding="utf-8"))
        manifest = {
            **spec,
            **counts,
            "bytes": size,
            "stop_reasons": reasons,
            "xxh3_128": digest.hexdigest(),
        }
        publish(self.folder / MANIFEST_NAME, canonical_json(manifest) + "\n")
        shutil.rmtree(self.folder / _PARTS, ignore_errors=True)

    def _part(self, part: int) -> Path:
        return self.folder / _PARTS / f"part-{part:06d}.jsonl"

    def _entry(self, part: int) -> dict | None:
        """What a finished part's entry says; None where it is not whole on disk."""
        file = self._part(part)
        try:
            entry = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            return entry if file.stat().st_size == entry["bytes"] else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def counted(records: Sequence[Mapping]) -> dict:
    """What a manifest says of responses."""
    return {
        "responses": len(records),
        "response_tokens": sum(sum(record["loss_mask"]) for record in records),
        "truncated": sum(record["truncated"] for record in records),
        "empty": sum(record["empty"] for record in records),
        "stop_reasons": Counter(record["stop_reason"] for record in records),
    }


def is_cut(stop_reason: str) -> bool:
    """Whether a response ended before the model ended it."""
    return stop_reason not in ENDED
