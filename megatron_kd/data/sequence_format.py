"""The bytes of prepared sequences: what a split holds, and the checks before it is used.

A split is `manifest.json` and the shards `sequences-000000.safetensors` and so on, each with the
tensors of `TENSORS` over a run of sequences. Letters: S sequences, T tokens and B document bounds,
all of one shard.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.files import (
    MAX_HEADER_BYTES,
    SafetensorsError,
    SafetensorsHeader,
    TensorLayout,
    map_tensors,
    sha256_json,
)

FORMAT = "megatron-kd sequences"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION, "test")
"""The folders that prepared data, and a cache captured from it, are divided into."""
PACKINGS = ("none", "naive", "block")
MAX_MANIFEST_BYTES = 1 << 26

TENSORS: dict[str, TensorLayout] = {
    "tokens": ("I32", ("T",)),
    "loss_mask": ("U8", ("T",)),
    "token_offsets": ("I64", ("S+1",)),
    "document_bounds": ("I32", ("B",)),
    "bound_offsets": ("I64", ("S+1",)),
}
_BOUND = (  # manifest keys and their types; everything else in a manifest is for people
    ("split", str),
    ("seq_length", int),
    ("packing", str),
    ("vocab_size", int),
    ("tokenizer", str),
    ("samples", int),
    ("tokens", int),
    ("supervised_tokens", int),
    ("shards", list),
)


class SequencesError(ValueError):
    """Prepared sequences are incomplete, damaged, or of an unknown version."""


@dataclass(frozen=True)
class Shard:
    """One file of a split, as its manifest lists it."""

    file: str
    samples: int
    bytes: int
    xxh3_128: str


def shard_name(number: int) -> str:
    return f"sequences-{number:06d}.safetensors"


def with_fingerprint(manifest: dict) -> dict:
    """The manifest with the hash over all its other keys."""
    return {**manifest, "fingerprint": sha256_json(manifest)}


def read_manifest(folder: Path) -> tuple[dict, list[Shard]]:
    """Reads and checks a split's manifest.

    Raises:
        FileNotFoundError: There is none.
        SequencesError: It is none of ours, was changed, or names impossible shards.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no prepared sequences (no {MANIFEST_NAME}); give a split's folder, "
            "such as DIR/train, or make it with megatron-kd prepare"
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise SequencesError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: not a manifest")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SequencesError(f"{path} is not valid JSON; prepare the data again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SequencesError(f"{path} is not a manifest of {FORMAT}")
    if manifest.get("version") != VERSION:
        raise SequencesError(
            f"{path} has version {manifest.get('version')!r}, this release reads {VERSION}; "
            "prepare the data again, or use the release that wrote it"
        )
    bound = {key: value for key, value in manifest.items() if key != "fingerprint"}
    if manifest.get("fingerprint") != sha256_json(bound):
        raise SequencesError(f"{path} was changed after it was written; prepare the data again")
    for key, kind in _BOUND:
        if type(manifest.get(key)) is not kind:
            raise SequencesError(f"{path}: {key} must be a {kind.__name__}")
    if manifest["packing"] not in PACKINGS:
        raise SequencesError(f"{path}: packing must be one of {', '.join(PACKINGS)}")
    shards = [_shard(entry, number, path) for number, entry in enumerate(manifest["shards"])]
    if sum(shard.samples for shard in shards) != manifest["samples"]:
        raise SequencesError(f"{path}: its shards do not add up to {manifest['samples']} sequences")
    return manifest, shards


def _shard(entry: Any, number: int, path: Path) -> Shard:
    expected = {"file": str, "samples": int, "bytes": int, "xxh3_128": str}
    if not isinstance(entry, dict) or set(entry) != set(expected):
        raise SequencesError(f"{path}: shard {number} must have the keys {', '.join(expected)}")
    for key, kind in expected.items():
        if type(entry[key]) is not kind:
            raise SequencesError(f"{path}: shard {number}: {key} must be a {kind.__name__}")
    if entry["file"] != shard_name(number):  # so no manifest can point outside its folder
        raise SequencesError(
            f"{path}: shard {number} must be {shard_name(number)}, got {entry['file']!r}"
        )
    if entry["samples"] < 1 or entry["bytes"] < 1:
        raise SequencesError(f"{path}: shard {number} must hold something")
    if not re.fullmatch(r"[0-9a-f]{32}", entry["xxh3_128"]):
        raise SequencesError(f"{path}: shard {number}: xxh3_128 must be 32 hexadecimal digits")
    return Shard(**entry)


def map_shard(path: Path, shard: Shard) -> dict[str, np.ndarray]:
    """Maps a shard's tensors into memory after checking its header against its size.

    Raises:
        SequencesError: The file is missing, truncated, or laid out otherwise than it must be.
    """
    if not path.is_file():
        raise SequencesError(f"{path} is missing; prepare the data again")
    if path.stat().st_size != shard.bytes:
        raise SequencesError(
            f"{path} has {path.stat().st_size} bytes, its manifest says {shard.bytes}; "
            "prepare the data again"
        )
    lengths = {"S": shard.samples, "S+1": shard.samples + 1}
    with open(path, "rb") as file:
        try:
            header = SafetensorsHeader.parse(file.read(8 + MAX_HEADER_BYTES), shard.bytes)
            tensors, _ = map_tensors(file, header.place(TENSORS, lengths))
        except SafetensorsError as error:
            raise SequencesError(f"{path}: {error}; prepare the data again") from error
    tokens, bounds = tensors["tokens"].size, tensors["document_bounds"].size
    _check_offsets(path, tensors["token_offsets"], tokens)
    _check_offsets(path, tensors["bound_offsets"], bounds)
    _check_bounds(path, tensors)
    return tensors


def _check_offsets(path: Path, offsets: np.ndarray, length: int) -> None:
    if offsets[0] != 0 or offsets[-1] != length or np.any(np.diff(offsets) < 1):
        raise SequencesError(f"{path}: offsets must rise from 0 to {length}")


def _check_bounds(path: Path, tensors: dict[str, np.ndarray]) -> None:
    bounds, offsets = tensors["document_bounds"], tensors["bound_offsets"]
    rises = np.diff(bounds) > 0
    rises[offsets[1:-1] - 1] = True  # from one sequence to the next the bounds start again
    starts, ends = bounds[offsets[:-1]], bounds[offsets[1:] - 1]
    if np.any(starts) or np.any(ends != np.diff(tensors["token_offsets"])) or not np.all(rises):
        raise SequencesError(f"{path}: document bounds must rise from 0 to their sequence's length")
