"""What a run's checkpoints are bound to: a resumed run reads the same samples over the same ids."""

import dataclasses
import json
from pathlib import Path

from megatron_kd.config import DistillConfig
from megatron_kd.files import publish
from megatron_kd.stages import Stage
from megatron_kd.typed_mapping import ConfigError

IDENTITY = "run_identity.json"
"""Of a run, or of its first stage."""

STAGE_IDENTITY = "run_identity.stage-{}.json"
"""Of a later stage, by its number."""

# What a resumed run must share with its checkpoint → how to say it.
_IDENTITY_KEYS = {
    "mode": "mode",
    "source_fingerprint": "the cache (or, online, the prepared data)",
    "vocab_size": "the vocabulary size",
    "sequence_length": "the sequence length",
    "lora": "student.lora",
    "first_iteration": "the iteration after which the stage begins",
}


def identity(config: DistillConfig, container, source, first_iteration: int = 0) -> dict:
    """What a checkpoint of this run is bound to."""
    lora = config.student.lora
    return {
        "mode": config.mode,
        "source_fingerprint": fingerprint(source),
        "vocab_size": container.model.vocab_size,
        "sequence_length": container.model.seq_length,
        "lora": None if lora is None else dataclasses.asdict(lora),
        "first_iteration": first_iteration,
    }


def record_identity(config: DistillConfig, container, stage: Stage | None = None) -> None:
    """Write the identity of a run, or of one stage, beside its checkpoints, by rename; one rank
    calls it.
    """
    path = _file(config, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    first = stage.first if stage else 0
    record = identity(config, container, container.dataset.open("train"), first)
    publish(path, json.dumps(record, indent=1))


def fingerprint(source) -> str:
    """The hash that binds a cache or prepared data."""
    own = getattr(source, "fingerprint", None)
    return own if own is not None else source.manifest["fingerprint"]


def check_identity(config: DistillConfig, container, stage: Stage | None = None) -> None:
    """Refuse to go on from a checkpoint of another run, or of another stage than its recipe says.

    Raises:
        ConfigError: Names what it was bound to, and what it would be now.
    """
    path = _file(config, stage)
    places = [Path(config.output_dir) / "checkpoints"]
    if container.checkpoint.load:
        places.append(Path(container.checkpoint.load))
    has_checkpoint = any(any(place.glob("iter_*")) for place in places)
    if not has_checkpoint:
        return
    later = sorted(Path(config.output_dir).glob(STAGE_IDENTITY.format("*")))
    if stage is None and later:
        raise ConfigError(
            f"{config.output_dir} holds checkpoints of a run in stages, and this recipe has none: "
            "choose another output_dir, or give back its `stages`"
        )
    if not path.exists():
        return
    first = stage.first if stage else 0
    now = identity(config, container, container.dataset.open("train"), first)
    before = {"first_iteration": 0} | json.loads(path.read_text())
    for key, name in _IDENTITY_KEYS.items():
        if before.get(key) != now[key]:
            raise ConfigError(
                f"{config.output_dir} holds a checkpoint of another run: {name} was "
                f"{before.get(key)}, now it is {now[key]}. Choose another output_dir, or give back "
                "what the checkpoint was trained with"
            )


def _file(config: DistillConfig, stage: Stage | None) -> Path:
    later = stage is not None and stage.number > 1
    return Path(config.output_dir) / (STAGE_IDENTITY.format(stage.number) if later else IDENTITY)
