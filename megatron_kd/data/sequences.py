"""Prepared sequences, by index: memory-mapped reading and the writer's side of the same files.

Letters: n tokens of one sequence. Row t (and loss_mask[t]) concerns the prediction of tokens[t + 1]
from tokens up to t, so loss_mask[n - 1] is always 0.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from megatron_kd.data.sequence_format import (
    FORMAT,
    MANIFEST_NAME,
    TENSORS,
    VERSION,
    SequencesError,
    Shard,
    map_shard,
    read_manifest,
    shard_name,
    with_fingerprint,
)
from megatron_kd.files import SAFETENSORS_DTYPES, canonical_json, file_checksum


@dataclass(frozen=True)
class Sequence:
    """One training sequence."""

    tokens: np.ndarray
    """[n] int32."""
    loss_mask: np.ndarray
    """[n] bool; row t says whether predicting tokens[t + 1] is trained."""
    cu_seqlens: np.ndarray
    """[documents + 1] int32, from 0 to n: where the documents in it begin and end."""


class SequenceReader:
    """One split of prepared data, such as DIR/train.

    Shards are mapped when first touched and stay mapped; nothing is copied before it is asked for.
    A reader can be pickled and works in forked and spawned DataLoader workers.

    Args:
        path: The split's folder.
        check_checksums: Compare each shard with its checksum when it is first touched.

    Raises:
        FileNotFoundError: There is no manifest.
        SequencesError: Manifest or shards are damaged or of another version.
    """

    def __init__(self, path: str | os.PathLike, *, check_checksums: bool = True):
        self.check_checksums = check_checksums
        self.path = Path(path)
        self.manifest, self._shards = read_manifest(self.path)
        self._first = np.cumsum([0] + [shard.samples for shard in self._shards])
        self._mapped: dict[int, dict[str, np.ndarray]] = {}

    @property
    def fingerprint(self) -> str:
        """Hash over the manifest, and through its checksums over every byte of the split."""
        return self.manifest["fingerprint"]

    def __len__(self) -> int:
        return int(self._first[-1])

    def __iter__(self) -> Iterator[Sequence]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: int) -> Sequence:
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        tensors = self._shard(number)
        local = index - int(self._first[number])
        begin, end = tensors["token_offsets"][local : local + 2]
        first, last = tensors["bound_offsets"][local : local + 2]
        return Sequence(
            tokens=np.asarray(tensors["tokens"][begin:end]),
            loss_mask=tensors["loss_mask"][begin:end] != 0,
            cu_seqlens=np.asarray(tensors["document_bounds"][first:last]),
        )

    def cu_seqlens(self, index: int) -> np.ndarray:
        """[documents + 1] int32 of one sequence."""
        return self[index].cu_seqlens

    def check(self) -> None:
        """Compares every shard with its checksum.

        Raises:
            SequencesError: A shard's bytes are not those that were written.
        """
        for shard in self._shards:
            self._map(shard, check_checksum=True)

    def _shard(self, number: int) -> dict[str, np.ndarray]:
        if number not in self._mapped:
            shard = self._shards[number]
            self._mapped[number] = self._map(shard, check_checksum=self.check_checksums)
        return self._mapped[number]

    def _map(self, shard: Shard, *, check_checksum: bool) -> dict[str, np.ndarray]:
        file = self.path / shard.file
        tensors = map_shard(file, shard)
        if check_checksum and file_checksum(file) != shard.xxh3_128:
            raise SequencesError(f"{file} does not match its checksum; prepare the data again")
        return tensors

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_mapped": {}}  # a worker maps the files itself


class SequenceWriter:
    """Writes one split into an empty folder: shards as they fill up, the manifest last.

    Args:
        folder: An existing, empty folder.
        shard_tokens: A shard is closed once it holds this many tokens.
    """

    def __init__(self, folder: Path, *, shard_tokens: int = 1 << 24):
        self.folder = folder
        self.shard_tokens = shard_tokens
        self.samples = self.tokens = self.supervised_tokens = 0
        self._shards: list[dict] = []
        self._clear()

    def append(self, tokens: np.ndarray, loss_mask: np.ndarray, cu_seqlens: np.ndarray) -> None:
        """Adds a sequence: tokens [n], loss_mask [n] (last row 0), cu_seqlens [documents + 1]."""
        self._parts["tokens"].append(np.asarray(tokens, np.int32))
        self._parts["loss_mask"].append(np.asarray(loss_mask, np.uint8))
        self._parts["document_bounds"].append(np.asarray(cu_seqlens, np.int32))
        self.samples += 1
        self.tokens += len(tokens)
        self.supervised_tokens += int(np.count_nonzero(loss_mask))
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self.shard_tokens:
            self._flush()

    def close(self, **description) -> dict:
        """Writes the last shard and the manifest with `description` in it; returns the manifest."""
        self._flush()
        manifest = with_fingerprint(
            {
                "format": FORMAT,
                "version": VERSION,
                **description,
                "samples": self.samples,
                "tokens": self.tokens,
                "supervised_tokens": self.supervised_tokens,
                "shards": self._shards,
            }
        )
        (self.folder / MANIFEST_NAME).write_text(canonical_json(manifest) + "\n")
        return manifest

    def _clear(self) -> None:
        self._parts = {"tokens": [], "loss_mask": [], "document_bounds": []}
        self._pending_tokens = 0

    def _flush(self) -> None:
        parts = self._parts
        if not parts["tokens"]:
            return
        arrays = {name: np.concatenate(values) for name, values in parts.items()}
        arrays["token_offsets"] = _offsets(parts["tokens"])
        arrays["bound_offsets"] = _offsets(parts["document_bounds"])
        name = shard_name(len(self._shards))
        path = self.folder / name
        typed = {
            key: arrays[key].astype(SAFETENSORS_DTYPES[dtype])
            for key, (dtype, _) in TENSORS.items()
        }
        safetensors.numpy.save_file(typed, path)
        self._shards.append(
            {
                "file": name,
                "samples": len(parts["tokens"]),
                "bytes": path.stat().st_size,
                "xxh3_128": file_checksum(path),
            }
        )
        self._clear()


def _offsets(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])])
