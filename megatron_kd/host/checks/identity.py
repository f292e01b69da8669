"""What a run's checkpoints are bound to: a resumed run reads the same samples over the same ids."""

import dataclasses
import json
from pathlib import Path

from megatron_kd.config import DistillConfig
from megatron_kd.files import publish
from megatron_kd.typed_mapping import ConfigError

IDENTITY = "run_identity.json"

# What a resumed run must share with its checkpoint → how to say it.
_IDENTITY_KEYS = {
    "mode": "mode",
    "source_fingerprint": "the cache (or, online, the prepared data)",
    "vocab_size": "the vocabulary size",
    "sequence_length": "the sequence length",
    "lora": "student.lora",
}


def identity(config: DistillConfig, container, source) -> dict:
    """What a checkpoint of this run is bound to."""
    lora = config.student.lora
    return {
        "mode": config.mode,
        "source_fingerprint": fingerprint(source),
        "vocab_size": container.model.vocab_size,
        "sequence_length": container.model.seq_length,
        "lora": None if lora is None else dataclasses.asdict(lora),
    }


def record_identity(config: DistillConfig, container) -> None:
    """Write the run's identity beside its checkpoints, by rename; one rank calls it."""
    path = Path(config.output_dir) / IDENTITY
    path.parent.mkdir(parents=True, exist_ok=True)
    record = identity(config, container, container.dataset.open("train"))
    publish(path, json.dumps(record, indent=1))


def fingerprint(source) -> str:
    """The hash that binds a cache or prepared data."""
    own = getattr(source, "fingerprint", None)
    return own if own is not None else source.manifest["fingerprint"]


def check_identity(config: DistillConfig, container) -> None:
    """Refuse to go on from a checkpoint of another run.

    Raises:
        ConfigError: Names what it was bound to, and what it would be now.
    """
    path = Path(config.output_dir) / IDENTITY
    places = [Path(config.output_dir) / "checkpoints"]
    if container.checkpoint.load:
        places.append(Path(container.checkpoint.load))
    has_checkpoint = any(any(place.glob("iter_*")) for place in places)
    if not has_checkpoint or not path.exists():
        return
    now = identity(config, container, container.dataset.open("train"))
    before = json.loads(path.read_text())
    for key, name in _IDENTITY_KEYS.items():
        if before.get(key) != now[key]:
            raise ConfigError(
                f"{config.output_dir} holds a checkpoint of another run: {name} was "
                f"{before.get(key)}, now it is {now[key]}. Choose another output_dir, or give back "
                "what the checkpoint was trained with"
            )
