"""What a cache directory is: its names, what binds its parts together, and the manifest that
completes it.

The bytes are described in docs/cache-format.md. A directory holds `spec.json` (what every shard
must agree on), the shards, and while it is being written one small entry file per finished shard;
`manifest.json` comes last and makes it a cache.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.codecs.base import ID_BITS
from megatron_kd.files import canonical_json, sha256_json

FORMAT = "megatron-kd cache"
VERSION, LABEL_VERSION = 1, 2
"""Of the format; the later one, with the label's log-probability in each row, where a cache has it.
A reader of the first release knows the first alone, and refuses the other."""
HIDDEN_DTYPES = ("float16", "bfloat16", "float32")
SAMPLINGS = ("topk", "random")
MAX_VOCAB_SIZE = 1 << ID_BITS
MANIFEST_NAME = "manifest.json"
BACKUP_NAME = "manifest.backup.json"
SPEC_NAME = "spec.json"
ENTRY_FOLDER = "finished"
SHARD_PATTERN = re.compile(r"shard-(\d{6,9})\.safetensors")
UNBOUND = ("fingerprint", "origin", "checksum")  # keys of the manifest that its fingerprint omits
MAX_JSON_BYTES = 1 << 28
MAX_SAMPLE_SLOTS = 1 << 30  # tokens × K of one sample, which is what a reader allocates


class CacheError(ValueError):
    """A cache, or what was to go into one, is not what it must be; the message says what to do."""


def token_hash(tokens_bytes: bytes) -> int:
    """64-bit XXH3 of a sample's tokens as little-endian int32."""
    return xxhash.xxh3_64_intdigest(tokens_bytes)


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Everything that all shards of one cache share."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1 (teacher's vocabulary without padding rows)."""
    topk: int
    """Candidates kept per position at most."""
    teacher: str | Mapping
    """Fingerprint: config and weights hash, or the model id that a server reported."""
    tokenizer: str | Mapping
    """Fingerprint of the tokenizer; caches with another one cannot be mixed or trained on."""
    codec: str = "compact"
    engine: str | Mapping | None = None
    """Engine and its version."""
    sampling: str | Mapping = "topk"
    """"topk", "random", or a mapping with `method` one of these (and draws, seed, top_p)."""
    template: str | None = None
    """Hash of the prompt template the tokens were made with."""
    packing: str | None = None
    """How documents share a sequence: none, naive or block."""
    data: str | Mapping | None = None
    """Fingerprint of the prepared data."""
    temperatures: tuple[float, ...] = ()
    """Further temperatures whose log normalizer is kept per position."""
    hidden_size: int = 0
    """Width of the teacher's hidden state kept per position; 0 keeps none."""
    hidden_dtype: str = "float16"
    licence: str | None = None
    """The teacher's licence, where known."""
    parameters: Mapping | None = None
    """Creation parameters that can change the result."""
    label_logprob: bool = False
    """Whether each row holds the teacher's log-probability of the token that follows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(float(tau) for tau in self.temperatures))
        if type(self.label_logprob) is not bool:
            raise CacheError(f"label_logprob must be true or false, got {self.label_logprob!r}")
        for name in ("vocab_size", "topk", "hidden_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise CacheError(f"{name} must be an integer, got {value!r}")
            object.__setattr__(self, name, value.__index__())
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise CacheError(
                f"vocab_size must lie between 1 and {MAX_VOCAB_SIZE}, got {self.vocab_size}"
            )
        if not 1 <= self.topk <= self.vocab_size:
            raise CacheError(f"topk must lie between 1 and {self.vocab_size}, got {self.topk}")
        for name in ("teacher", "tokenizer"):
            value = getattr(self, name)
            if not isinstance(value, (str, Mapping)) or not value:
                raise CacheError(
                    f"{name} must be a fingerprint, a string or a mapping, got {value!r}; without "
                    "it nothing says whose distributions these are"
                )
        if self.codec not in CODECS:
            raise CacheError(f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")
        if self.sampling_method not in SAMPLINGS:
            raise CacheError(f"sampling must be topk or random, got {self.sampling!r}")
        if not 0 <= self.hidden_size <= 1 << 20:
            raise CacheError(
                f"hidden_size must lie between 0 and {1 << 20}, got {self.hidden_size}"
            )
        if self.hidden_dtype not in HIDDEN_DTYPES:
            raise CacheError(
                f"hidden_dtype must be one of {', '.join(HIDDEN_DTYPES)}, got {self.hidden_dtype!r}"
            )
        if len(self.temperatures) > 64 or len(set(self.temperatures)) != len(self.temperatures):
            raise CacheError(
                f"temperatures must be at most 64 and distinct, got {self.temperatures}"
            )
        if not all(0.0 < tau < float("inf") for tau in self.temperatures):
            raise CacheError(f"temperatures must be positive numbers, got {self.temperatures}")

    @property
    def sampling_method(self) -> str | None:
        return self.sampling if isinstance(self.sampling, str) else self.sampling.get("method")

    def as_dict(self) -> dict:
        """Plain JSON values. What version 1 lacks is left out where it is not used, so that the
        description of such a cache, and all that is bound to it, stays as it was."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.label_logprob:
            del values["label_logprob"]
        try:
            return json.loads(canonical_json(values))
        except (TypeError, ValueError) as error:
            raise CacheError(
                f"the cache's description must be plain JSON values: {error}"
            ) from error

    @property
    def version(self) -> int:
        """Of the format that a cache of this description has."""
        return LABEL_VERSION if self.label_logprob else VERSION

    @property
    def fingerprint(self) -> str:
        return sha256_json(self.as_dict())

    @classmethod
    def from_dict(cls, values: Mapping) -> "CacheSpec":
        known = {f.name for f in fields(cls)}
        missing = {"vocab_size", "topk", "teacher", "tokenizer"} - set(values)
        if missing or set(values) - known:
            raise CacheError(
                f"description of a cache: missing {sorted(missing)}, "
                f"unknown {sorted(set(values) - known)}"
            )
        try:
            return cls(**values)
        except CacheError:
            raise
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise CacheError(
                f"description of a cache has a value of the wrong type: {error}"
            ) from error


@dataclass(frozen=True)
class ShardEntry:
    """One finished shard, as the manifest lists it."""

    shard: int
    first_sample: int
    samples: int
    positions: int
    bytes: int
    xxh3_128: str

    @property
    def file(self) -> str:
        return shard_name(self.shard)

    def as_dict(self) -> dict:
        return {"file": self.file, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @classmethod
    def from_dict(cls, values: Any, where: str) -> "ShardEntry":
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or set(values) != {"file", *names}:
            raise CacheError(
                f"{where}: a shard entry must have exactly the keys file, {', '.join(names)}"
            )
        for name in names[:-1]:
            if type(values[name]) is not int or not 0 <= values[name] < 1 << 62:
                raise CacheError(f"{where}: {name} must be a count, got {values[name]!r}")
        digest = values["xxh3_128"]
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise CacheError(f"{where}: xxh3_128 must be 32 hexadecimal digits, got {digest!r}")
        entry = cls(**{name: values[name] for name in names})
        if values["file"] != entry.file:  # also keeps any other path out of the directory listing
            raise CacheError(
                f"{where}: shard {entry.shard} must be {entry.file}, got {values['file']!r}"
            )
        return entry


def shard_name(shard: int) -> str:
    return f"shard-{shard:06d}.safetensors"


def build_manifest(spec: CacheSpec, entries: list[ShardEntry], origin: Mapping | None) -> dict:
    """The complete manifest. `origin` (paths and the like, for repair) is bound by nothing."""
    bound = {
        "format": FORMAT,
        "version": spec.version,
        **spec.as_dict(),
        "samples": sum(entry.samples for entry in entries),
        "positions": sum(entry.positions for entry in entries),
        "shards": [entry.as_dict() for entry in entries],
    }
    check_contiguous(entries, "manifest")
    return seal({**bound, "fingerprint": sha256_json(bound), "origin": dict(origin or {})})


def seal(manifest: dict) -> dict:
    """The manifest with the checksum over all of it, origin included."""
    manifest = {name: value for name, value in manifest.items() if name != "checksum"}
    return {**manifest, "checksum": sha256_json(manifest)}


def check_contiguous(entries: list[ShardEntry], where: str) -> None:
    expected = 0
    for index, entry in enumerate(entries):
        if entry.shard != index or entry.first_sample != expected or entry.samples < 1:
            raise CacheError(
                f"{where}: shard {index} must start at sample {expected}, got shard {entry.shard} "
                f"with samples {entry.first_sample} to {entry.first_sample + entry.samples - 1}"
            )
        expected += entry.samples


def parse_manifest(text: str, where: str) -> tuple[dict, CacheSpec, list[ShardEntry]]:
    """Checks a manifest completely before anything it says is acted on."""
    manifest = parse_json(text, where)
    if manifest.get("format") != FORMAT:
        raise CacheError(f"{where} is not the manifest of a {FORMAT}")
    if manifest.get("version") not in (VERSION, LABEL_VERSION):
        raise CacheError(
            f"{where}: format version {manifest.get('version')!r}; this reader knows {VERSION} and "
            f"{LABEL_VERSION}. "
            "Use the release of megatron-kd that wrote it, or capture again"
        )
    own = set(UNBOUND) | {"format", "version", "samples", "positions", "shards"}
    if not isinstance(manifest.get("shards"), list) or own - set(manifest):
        raise CacheError(f"{where}: keys are missing: {sorted(own - set(manifest)) or 'shards'}")
    bound = {k: v for k, v in manifest.items() if k not in UNBOUND}
    if (
        seal(manifest)["checksum"] != manifest["checksum"]
        or sha256_json(bound) != manifest["fingerprint"]
        or canonical_json(manifest) != text
    ):
        raise CacheError(
            f"{where} was changed after it was written: its checksum does not match; "
            "`megatron-kd verify --repair` restores it"
        )
    spec = CacheSpec.from_dict({k: v for k, v in manifest.items() if k not in own})
    if spec.version != manifest["version"]:
        raise CacheError(
            f"{where}: a cache as it describes has version {spec.version}, not "
            f"{manifest['version']}"
        )
    entries = [ShardEntry.from_dict(values, where) for values in manifest["shards"]]
    check_contiguous(entries, where)
    for name in ("samples", "positions"):
        if manifest[name] != sum(getattr(entry, name) for entry in entries):
            raise CacheError(f"{where}: {name} is {manifest[name]!r}, the shards' sum is another")
    return manifest, spec, entries


def parse_json(text: str, where: str) -> dict:
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CacheError(f"{where} must hold a JSON object")
    return value


def read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CacheError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
    return path.read_text(encoding="utf-8", errors="replace")


def read_json(path: Path) -> dict:
    return parse_json(read_text(path), str(path))


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not a finite number")
    return value
