"""One shard: a safetensors file with a fixed set of named tensors over a range of samples.

Letters: S samples, T tokens, R stored rows, E stored entries, D hidden size, all of this shard; n
    and K of one sample.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from megatron_kd.cache.format import FORMAT, VERSION, CacheError, CacheSpec, canonical_json

METADATA_KEY = "megatron_kd"
MAX_HEADER_BYTES = 1 << 20
DTYPES = {  # the names safetensors uses, little-endian
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # raw halves: numpy has no bfloat16
    "F32": np.dtype("<f4"),
}
HIDDEN_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


def wide_tokens(spec: CacheSpec) -> bool:
    """Whether an id needs a third byte."""
    return spec.vocab_size > 1 << 16


def layout(spec: CacheSpec) -> dict[str, tuple[str, tuple]]:
    """Every tensor a shard of this cache has: name → (dtype, shape); a string in a shape is a
    length to be found.

    `counts` is left out where every row has K entries.
    """
    tensors: dict[str, tuple[str, tuple]] = {
        "token_hash": ("U64", ("S",)),
        "token_offsets": ("U64", ("S+1",)),
        "row_offsets": ("U64", ("S+1",)),
        "document_offsets": ("U64", ("S+1",)),
        "cu_seqlens": ("I32", ("documents",)),
        "tokens": ("U8", ("T", 3)) if wide_tokens(spec) else ("U16", ("T",)),
        "loss_mask": ("U8", ("mask_bytes",)),
        "counts": ("U32", ("R",)),
    }
    if spec.codec == "compact":
        tensors |= {
            "mass": ("F16", ("R",)),
            "bottom": ("U16", ("R",)),
            "layout": ("U8", ("R",)),
            "high_bytes": ("U32", ("S",)),
            "stream_offsets": ("U64", ("S+1",)),
            "stream": ("U8", ("stream_bytes",)),
        }
    else:
        tensors |= {
            "mass": ("F32", ("R",)),
            "entry_offsets": ("U64", ("S+1",)),
            "ids": ("U16", ("E",)),
            "logprobs": ("F16", ("E",)),
        }
        if wide_tokens(spec):
            tensors["ids_high"] = ("U8", ("high_bytes",))
    for index in range(len(spec.temperatures)):
        tensors[f"log_z.{index}"] = ("F32", ("R",))
    if spec.hidden_size:
        tensors["hidden"] = (HIDDEN_NAMES[spec.hidden_dtype], ("R", spec.hidden_size))
    return tensors


@dataclass(frozen=True)
class ShardHead:
    """What a shard says of itself."""

    shard: int
    first_sample: int
    samples: int
    spec: str
    """Fingerprint of the cache's spec: a shard of another cache is found out."""

    def as_text(self) -> str:
        return canonical_json({"format": FORMAT, "version": VERSION, **self.__dict__})


def serialize(spec: CacheSpec, head: ShardHead, tensors: dict[str, np.ndarray]) -> bytes:
    """The bytes of a shard. BF16 halves come as uint16 and are renamed in the header."""
    expected = layout(spec)
    payload = safetensors.numpy.save(tensors, {METADATA_KEY: head.as_text()})
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


def parse_header(path: Path, start: bytes, file_bytes: int, spec: CacheSpec):
    """Checks a shard's header against its cache and its size before any tensor is touched.

    Args:
        start: The file's leading bytes; 8 + MAX_HEADER_BYTES of them are always enough.

    Returns:
        (ShardHead, {name: (numpy dtype, shape, offset in the file)})
    """
    length = int.from_bytes(start[:8], "little")
    if file_bytes < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CacheError(
            f"{path}: not a whole safetensors file ({file_bytes} bytes, header of {length})"
        )
    try:
        header = json.loads(start[8 : 8 + length].decode("utf-8"))
        text = header.pop("__metadata__")[METADATA_KEY]
        head = json.loads(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path}: not a shard of a {FORMAT}: its header cannot be read") from error
    names = {"format", "version", "shard", "first_sample", "samples", "spec"}
    if not isinstance(head, dict) or set(head) != names or head["format"] != FORMAT:
        raise CacheError(f"{path}: not a shard of a {FORMAT}")
    if head["version"] != VERSION:
        raise CacheError(f"{path}: format version {head['version']!r}; this reader knows {VERSION}")
    counts = (head["shard"], head["first_sample"], head["samples"])
    if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
        raise CacheError(f"{path}: shard and sample numbers must be counts, got {counts}")
    if head["spec"] != spec.fingerprint:
        raise CacheError(f"{path} belongs to another cache: teacher, data or settings differ")
    tensors = _check_tensors(path, header, file_bytes - 8 - length, spec, head["samples"])
    placed = {name: (dtype, shape, 8 + length + at) for name, (dtype, shape, at) in tensors.items()}
    return ShardHead(head["shard"], head["first_sample"], head["samples"], head["spec"]), placed


def _check_tensors(
    path: Path, header: dict, data_bytes: int, spec: CacheSpec, samples: int
) -> dict:
    expected = layout(spec)
    if set(header) - {"counts"} != set(expected) - {"counts"}:
        odd = sorted(set(header) ^ set(expected) - {"counts"})
        raise CacheError(f"{path}: its tensors are not those of this cache; differing: {odd}")
    lengths: dict[str, int] = {"S": samples, "S+1": samples + 1}
    placed, spans = {}, []
    for name, values in header.items():
        dtype_name, shape = expected[name]
        try:
            got_dtype, got_shape, (begin, end) = (
                values["dtype"],
                values["shape"],
                values["data_offsets"],
            )
            sizes_ok = all(type(x) is int and 0 <= x < 1 << 62 for x in [*got_shape, begin, end])
        except (TypeError, KeyError, ValueError) as error:
            raise CacheError(f"{path}: the entry of tensor {name} is malformed") from error
        if not sizes_ok or got_dtype != dtype_name or len(got_shape) != len(shape):
            raise CacheError(
                f"{path}: tensor {name} must be {dtype_name} {shape}, got {got_dtype} {got_shape}"
            )
        for want, size in zip(shape, got_shape, strict=True):
            want = lengths.setdefault(want, size) if isinstance(want, str) else want
            if size != want:
                raise CacheError(
                    f"{path}: tensor {name} must be {shape} ({lengths}), got {got_shape}"
                )
        dtype = DTYPES[dtype_name]
        if end > data_bytes or end - begin != math.prod(got_shape) * dtype.itemsize:
            raise CacheError(f"{path}: tensor {name} does not fit its place {begin} to {end}")
        placed[name] = (dtype, tuple(got_shape), begin)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise CacheError(f"{path}: tensors overlap or leave a gap at byte {at}")
        at = end
    if at != data_bytes:
        raise CacheError(f"{path}: {data_bytes - at} bytes belong to no tensor")
    return placed


def pack_tokens(tokens: np.ndarray, spec: CacheSpec) -> np.ndarray:
    """[T] integer tokens to the stored form."""
    if not wide_tokens(spec):
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
