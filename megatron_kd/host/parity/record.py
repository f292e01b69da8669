"""What was compared and agreed, kept so that a resumed or repeated run does not compare again.

One JSON file for each proof, named by a hash over all that it depends on, in the cache folder of
this machine's user; a run's own proofs are also written beside it.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
from pathlib import Path

import xxhash

from megatron_kd.files import publish, sha256_json

RECORD = "parity.json"
FOLDER_VARIABLE = "MEGATRON_KD_CACHE"
PACKAGES = ("megatron-bridge", "megatron-core", "transformers", "torch", "transformer-engine")
CODE = Path(__file__).parents[2]
DECIDES = ("host/**/*.py", "models/transformers_faults.py")
"""The code that decides what the host and transformers compute."""


def cache_folder() -> Path:
    """`MEGATRON_KD_CACHE`, or megatron_kd in the user's cache folder."""
    own = os.environ.get(FOLDER_VARIABLE)
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_kd"


def key_of(subject: dict) -> str:
    """The hash that names a proof.

    Args:
        subject: What was compared: plain values, or values with a repr that tells them apart.
    """
    installed = {name: _version(name) for name in PACKAGES}
    return sha256_json(
        {"subject": json.loads(json.dumps(subject, default=repr)), "installed": installed}
        | {"code": _code_hash()}
    )


def known(key: str, output_dir: str | None) -> dict | None:
    """The proof of this name, from beside the run or from the cache folder; None without one."""
    beside = {} if output_dir is None else _read(Path(output_dir) / RECORD)
    return beside.get(key) or _read(_file(key)) or None


def keep(key: str, proof: dict, output_dir: str | None) -> None:
    """Write a proof into the cache folder, where that can be written, and beside the run."""
    # A machine without a home folder compares again; the run's own record is below.
    with contextlib.suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        publish(_file(key), json.dumps(proof, indent=1))
    if output_dir is not None:
        path = Path(output_dir) / RECORD
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, json.dumps(_read(path) | {key: proof}, indent=1))


def _file(key: str) -> Path:
    return cache_folder() / "parity" / f"{key}.json"


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _version(name: str) -> str | None:
    """None where it is not installed, as Transformer Engine on a CPU."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _code_hash() -> str:
    whole = xxhash.xxh3_128()
    for path in sorted(path for pattern in DECIDES for path in CODE.glob(pattern)):
        whole.update(path.relative_to(CODE).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()
