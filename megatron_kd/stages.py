"""A recipe in stages: one run whose settings change at given iterations, for example 8K then 32K.

A recipe may list `stages`. Each entry gives its `iterations` and whatever it changes of the rest of
the recipe: sequence length, batch size, caches, loss, learning rate. Iterations count through all
stages, and so does the learning rate's schedule, which ends with the last stage unless the recipe
says where. Each stage is checked as a recipe of its own, all of them before the first one starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_kd import sections
from megatron_kd.config import DistillConfig, from_recipe
from megatron_kd.recipe_file import resolved, unresolved_recipe
from megatron_kd.typed_mapping import ConfigError

LENGTH = "iterations"
SECTIONS = ("bridge", "cache", "data", "loss")
HOST_SECTIONS = ("model", "optimizer", "scheduler", "train", "validation")
OPTIMIZER_KEYS = ("lr", "min_lr", "weight_decay", "clip_grad")
"""The optimizer's settings that the host takes from its configuration when it goes on from a
checkpoint; all others it takes from the checkpoint, whatever a stage says."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run; a recipe without `stages` is a run of one stage."""

    config: DistillConfig
    """The stage as a recipe of its own. It trains to `bridge.train.train_iters`, which counts from
    the start of the run."""

    number: int = 1
    """Counts from 1."""

    count: int = 1
    """Stages of the run."""

    first: int = 0
    """Iterations of the stages before it."""

    before: DistillConfig | None = None
    """The stage before it; None in the first stage."""

    @property
    def last(self) -> int:
        """The iteration after which the stage ends."""
        return self.config.bridge["train"]["train_iters"]

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"stage {self.number} of {self.count}"


def stages_of(path: str | Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """The stages of a recipe, each with its whole configuration, checked as `from_recipe` does.

    Args:
        path: The YAML file.
        overrides: `key=value` strings; they change what the stages have in common.

    Raises:
        ConfigError: Names the stage, the key and the remedy.
    """
    recipe = unresolved_recipe(path, overrides)
    if "stages" not in recipe:
        return [Stage(config=from_recipe(path, overrides))]
    listed = recipe.pop("stages")
    if not OmegaConf.is_list(listed) or not listed:
        raise ConfigError("stages must be a list, such as [{iterations: 1000}, {iterations: 500}]")
    common = resolved(recipe, path, throw_on_missing=False)
    _check_common(common)
    changes = [_changes(entry, number) for number, entry in enumerate(listed, 1)]
    lengths = [entry.pop(LENGTH) for entry in changes]
    for number, change in enumerate(changes, 1):
        _check_changes(change, number, overrides)
    made, first = [], 0
    for number, (length, change) in enumerate(zip(lengths, changes, strict=True), 1):
        try:
            whole = resolved(OmegaConf.merge(recipe, change), path)
            whole = _with_iterations(whole, first + length, sum(lengths))
            if number < len(lengths):
                whole["export"] = {}
            config = sections.build(DistillConfig, whole)
        except ConfigError as error:
            raise ConfigError(f"stage {number} of {len(lengths)}: {error}") from error
        before = made[-1].config if made else None
        made.append(
            Stage(
                config=config,
                number=number,
                count=len(lengths),
                first=first,
                before=before,
            )
        )
        first += length
    return made


def _check_common(recipe: Mapping) -> None:
    """Refuse what has no meaning over several stages, or cannot be right there."""
    host = recipe.get("bridge") or {}
    train, optimizer = host.get("train") or {}, host.get("optimizer") or {}
    for key in ("train_iters", "train_samples", "num_epochs"):
        if train.get(key) is not None:
            raise ConfigError(f"bridge.train.{key} and stages: the stages' iterations say it")
    if train.get("rampup_batch_size") is not None:
        raise ConfigError("bridge.train.rampup_batch_size and stages: let stages raise the batch")
    if optimizer.get("decoupled_lr") is not None:
        raise ConfigError("bridge.optimizer.decoupled_lr and stages do not go together")
    if (recipe.get("selection") or {}).get("keep_best"):
        raise ConfigError(
            "selection.keep_best compares validation losses of the whole run, and stages may "
            "change loss and data: remove it, or stages"
        )
    if recipe.get("profile") is not None:
        raise ConfigError("profile runs 15 iterations of one recipe: remove it, or stages")
    if (recipe.get("data") or {}).get("dataloader") == "batch":
        raise ConfigError("data.dataloader=batch cannot go on in another stage: use single")
    checkpoint = host.get("checkpoint") or {}
    if not checkpoint.get("save", True) or not checkpoint.get("save_interval", True):
        raise ConfigError("stages need checkpoints: a stage goes on from the last one's")


def _changes(entry: Any, number: int) -> DictConfig:
    """A stage's entry, which gives its iterations."""
    if not OmegaConf.is_dict(entry):
        raise ConfigError(f"stages: entry {number} must be a mapping with `{LENGTH}`, not {entry}")
    length = entry.get(LENGTH)
    if type(length) is not int or length < 1:
        raise ConfigError(
            f"stages: entry {number} needs `{LENGTH}`, a whole number from 1, not {length}"
        )
    return entry.copy()


def _check_changes(change: DictConfig, number: int, overrides: Sequence[str]) -> None:
    plain = OmegaConf.to_container(change, resolve=False)
    _check_keys(plain, SECTIONS, number, "")
    _check_keys(plain.get("bridge") or {}, HOST_SECTIONS, number, "bridge.")
    host = plain.get("bridge") or {}
    _check_keys(host.get("optimizer") or {}, OPTIMIZER_KEYS, number, "bridge.optimizer.")
    if "dataloader" in (plain.get("data") or {}):
        raise ConfigError(f"stages: entry {number} cannot change data.dataloader")
    for name in ("train_iters", "train_samples", "num_epochs", "rampup_batch_size"):
        if name in (host.get("train") or {}):
            raise ConfigError(
                f"stages: entry {number} gives `{LENGTH}`; remove bridge.train.{name}"
            )
    for override in overrides:
        key = override.partition("=")[0]
        if OmegaConf.select(change, key, throw_on_missing=False) is not None:
            raise ConfigError(
                f"override {key}: entry {number} of stages sets it too; change it in the recipe"
            )


def _check_keys(given: Mapping, allowed: Sequence[str], number: int, prefix: str) -> None:
    for key in given:
        if key not in allowed:
            may = ", ".join(f"{prefix}{name}" for name in allowed)
            raise ConfigError(
                f"stages: entry {number} cannot change {prefix}{key}: one run, with one "
                f"student and its optimizer, goes through all stages. It may change {may}"
            )


def _with_iterations(whole: dict, last: int, total: int) -> dict:
    host = dict(whole.get("bridge") or {})
    scheduler = dict(host.get("scheduler") or {})
    # The host refuses another learning rate than the checkpoint's unless it is told that it is
    # meant.
    scheduler.setdefault("override_opt_param_scheduler", True)
    if not {"lr_decay_iters", "lr_decay_samples"} & scheduler.keys():
        scheduler["lr_decay_iters"] = total
    host["scheduler"] = scheduler
    host["train"] = dict(host.get("train") or {}) | {"train_iters": last}
    return whole | {"bridge": host}
