"""What names a Hugging Face model directory: hashes over its configuration, its weights' bytes and
its tokenizer, and the license that its card states."""

import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron_kd.files import file_checksum
from megatron_kd.models.weight_files import check_weight_files

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Not part of what a model computes, and rewritten by tools that only load and save it.
_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def model_directory(teacher: str | os.PathLike) -> Path:
    """The folder of a local Hugging Face model.

    Raises:
        ValueError: It is not one, or its weight files are incomplete.
    """
    path = Path(teacher)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{teacher} is not a Hugging Face model directory (no config.json); only local "
            "directories are read"
        )
    check_weight_files(path)
    return path


def model_fingerprint(path: str | os.PathLike) -> dict[str, str]:
    """Hashes of a Hugging Face model directory: {"name", "config_sha256", "weights_xxh3_128"}.

    The weights' hash runs over name, size and content of each weight file in order of name;
    config.json is hashed without the keys that say nothing about the model.

    Raises:
        ValueError: There are no weight files.
    """
    path = Path(path)
    canonical = json.dumps(configuration_of(path), sort_keys=True, separators=(",", ":"))
    files = sorted(f for f in path.iterdir() if f.suffix in _WEIGHT_SUFFIXES and f.is_file())
    if any(f.suffix == ".safetensors" for f in files):  # a .bin twin beside them is not read
        files = [f for f in files if f.suffix == ".safetensors"]
    if not files:
        raise ValueError(f"{path} holds no weight files ({', '.join(_WEIGHT_SUFFIXES)})")
    with ThreadPoolExecutor(max_workers=4) as pool:  # xxhash lets go of the GIL
        digests = list(pool.map(_file_digest, files, (f.stat().st_mtime_ns for f in files)))
    whole = xxhash.xxh3_128()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name} {file.stat().st_size} {digest}\n".encode())
    return {
        "name": path.resolve().name,
        "config_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights_xxh3_128": whole.hexdigest(),
    }


def configuration_of(path: str | os.PathLike) -> dict:
    """A directory's config.json without the keys that say nothing about the model."""
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}


def has_tokenizer(path: str | os.PathLike) -> bool:
    """Whether a model directory holds a tokenizer's files."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_of(path: str | os.PathLike) -> str | None:
    """The hash of a model directory's tokenizer; None where it holds none."""
    from transformers import AutoTokenizer

    from megatron_kd.data.prepare.documents import tokenizer_hash

    if not has_tokenizer(path):
        return None
    return tokenizer_hash(AutoTokenizer.from_pretrained(path, use_fast=True))


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of a model directory's tokenizer stand for."""

    size: int
    """Largest id plus one."""

    hash: str
    """Over the token of each id and the merges, as prepared data and caches name it."""


def vocabulary_of(path: str | os.PathLike) -> Vocabulary | None:
    """The vocabulary of a model directory's tokenizer; None where it holds none.

    Raises:
        ValueError: The tokenizer's files cannot be read.
    """
    from megatron_kd.data.prepare.documents import load_tokenizer, vocabulary_hash, vocabulary_size

    if not has_tokenizer(path):
        return None
    tokenizer = load_tokenizer(path)
    return Vocabulary(vocabulary_size(tokenizer), vocabulary_hash(tokenizer))


def license_of(path: str | os.PathLike) -> str | None:
    """The license that a model directory's card states; None where it says nothing."""
    from huggingface_hub.repocard import metadata_load

    card = Path(path) / "README.md"
    if not card.is_file():
        return None
    metadata = metadata_load(card) or {}
    value = metadata.get("license_name") or metadata.get("license")
    return str(value) if value else None


@functools.lru_cache(maxsize=4096)  # the splits of one capture share a teacher
def _file_digest(path: Path, mtime_ns: int) -> str:
    return file_checksum(path)
