"""One shard: a safetensors file with a fixed set of named tensors over a range of samples.

Letters: S samples, T tokens, R stored rows, all of this shard; n tokens and K candidates of one
sample.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.codecs.base import wide_ids
from megatron_kd.cache.format import FORMAT, CacheError, CacheSpec
from megatron_kd.files import (
    SafetensorsError,
    SafetensorsHeader,
    TensorLayout,
    TensorPlace,
    canonical_json,
)

METADATA_KEY = "megatron_kd"
OPTIONAL = frozenset({"counts"})  # left out where every row has K candidates
HIDDEN_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def layout(spec: CacheSpec) -> dict[str, TensorLayout]:
    """Every tensor a shard of this cache has, those of its codec among them.

    Lengths by name: S samples, T tokens, R rows, and others that occur in one tensor alone or
    belong to the codec. `counts` is left out where every row has K candidates.
    """
    tensors: dict[str, TensorLayout] = {
        "token_hash": ("U64", ("S",)),
        "token_offsets": ("U64", ("S+1",)),
        "row_offsets": ("U64", ("S+1",)),
        "document_offsets": ("U64", ("S+1",)),
        "cu_seqlens": ("I32", ("documents",)),
        "tokens": ("U8", ("T", 3)) if wide_ids(spec.vocab_size) else ("U16", ("T",)),
        "loss_mask": ("U8", ("mask_bytes",)),
        "counts": ("U32", ("R",)),
    }
    for index in range(len(spec.temperatures)):
        tensors[f"log_z.{index}"] = ("F32", ("R",))
    if spec.label_logprob:
        tensors["label_logprob"] = ("F32", ("R",))
    if spec.hidden_size:
        tensors["hidden"] = (HIDDEN_NAMES[spec.hidden_dtype], ("R", spec.hidden_size))
    codec = CODECS[spec.codec]
    own = codec.tensors(spec) | {name: ("U64", ("S+1",)) for name in codec.pointers}
    assert not set(own) & set(tensors), f"the codec {spec.codec} uses a name of the format"
    return tensors | own


@dataclass(frozen=True)
class ShardHead:
    """What a shard says of itself."""

    shard: int
    first_sample: int
    samples: int
    spec: str
    """Fingerprint of the cache's spec: a shard of another cache is found out."""

    def as_text(self, version: int) -> str:
        return canonical_json({"format": FORMAT, "version": version, **self.__dict__})


def serialize(spec: CacheSpec, head: ShardHead, tensors: dict[str, np.ndarray]) -> bytes:
    """The bytes of a shard. BF16 halves come as uint16 and are renamed in the header."""
    expected = layout(spec)
    assert set(tensors) - OPTIONAL == set(expected) - OPTIONAL, "the codec's tensors differ"
    payload = safetensors.numpy.save(tensors, {METADATA_KEY: head.as_text(spec.version)})
    if "hidden" in tensors and expected["hidden"][0] == "BF16":
        payload = _rename_dtype(payload, "hidden", "BF16")
    return payload


def _rename_dtype(payload: bytes, name: str, dtype: str) -> bytes:
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    header[name]["dtype"] = dtype
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload[8 + length :]


def parse_header(
    path: Path, start: bytes, file_bytes: int, spec: CacheSpec
) -> tuple[ShardHead, dict[str, TensorPlace]]:
    """Checks a shard's header against its cache and its size before any tensor is touched.

    Args:
        start: The file's leading bytes; 8 + MAX_HEADER_BYTES of them are always enough.

    Raises:
        CacheError: It is not a shard of this cache; the message names the path.
    """
    try:
        header = SafetensorsHeader.parse(start, file_bytes)
        head = json.loads(header.metadata[METADATA_KEY])
    except SafetensorsError as error:
        raise CacheError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(f"{path}: not a shard of a {FORMAT}: its header cannot be read") from error
    names = {"format", "version", "shard", "first_sample", "samples", "spec"}
    if not isinstance(head, dict) or set(head) != names or head["format"] != FORMAT:
        raise CacheError(f"{path}: not a shard of a {FORMAT}")
    if head["version"] != spec.version:
        raise CacheError(
            f"{path}: format version {head['version']!r} in a cache of version {spec.version}"
        )
    counts = (head["shard"], head["first_sample"], head["samples"])
    if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
        raise CacheError(f"{path}: shard and sample numbers must be counts, got {counts}")
    if head["spec"] != spec.fingerprint:
        raise CacheError(f"{path} belongs to another cache: teacher, data or settings differ")
    samples = head["samples"]
    try:
        places = header.place(layout(spec), {"S": samples, "S+1": samples + 1}, OPTIONAL)
    except SafetensorsError as error:
        raise CacheError(f"{path}: {error}") from error
    return ShardHead(head["shard"], head["first_sample"], samples, head["spec"]), places


def pack_tokens(tokens: np.ndarray, spec: CacheSpec) -> np.ndarray:
    """[T] integer tokens to the stored form."""
    if not wide_ids(spec.vocab_size):
        return tokens.astype("<u2")
    return tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].copy()


def unpack_tokens(stored: np.ndarray) -> np.ndarray:
    """The stored form to [n] int32."""
    if stored.ndim == 1:
        return stored.astype(np.int32)
    wide = np.zeros((stored.shape[0], 4), np.uint8)
    wide[:, :3] = stored
    return wide.view("<i4")[:, 0].astype(np.int32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """fp32 to raw bfloat16 halves, round to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)
