"""The versions of the host this package runs on: one module each (`v0_3`, `v0_6`), and the choice.

A module of this folder named `vMAJOR_MINOR`, after megatron-bridge's version, holds a `HOST`: what
it was tested with and what is different there, each with its reason. Adding a version is such a
module and the requirement lists of its stack (`scripts/requirements/stack-MAJOR.MINOR*.txt`).

The installed megatron-bridge decides: its own module, or else the nearest older one; `check` warns
of a version that no module is for, and refuses a host that lacks a seam. Importing this imports
neither torch nor the host, as the CPU backend asks before it lets the host be imported.
"""

import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import re

from packaging.requirements import Requirement

from megatron_kd.host.versions.description import Host

PACKAGES = {"megatron-bridge": "bridge", "megatron-core": "core"}

# What the package replaces, calls with more than a documented signature, or reads from inside.
SEAMS = (
    "megatron.core.models.gpt.gpt_model.GPTModel.compute_language_model_loss",
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear.forward",
    "megatron.core.utils.get_batch_on_this_cp_rank",
    "megatron.bridge.data.samplers.build_pretraining_data_loader",
    "megatron.bridge.training.callbacks.Callback.on_train_step_end",
    "megatron.bridge.training.config.DatasetBuildContext",
    "megatron.bridge.training.config.TrainingConfig.exit_interval",
    "megatron.bridge.training.eval.evaluate",
    "megatron.bridge.training.pretrain.pretrain",
)

logger = logging.getLogger(__name__)
_applied = set()


def _described() -> dict[tuple[int, int], Host]:
    """(major, minor) of megatron-bridge → its description, oldest first."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if match := re.fullmatch(r"v(\d+)_(\d+)", module.name):
            described = importlib.import_module(f"{__name__}.{module.name}")
            found[int(match[1]), int(match[2])] = described.HOST
    return dict(sorted(found.items()))


HOSTS = _described()


def nearest(bridge: str) -> Host:
    """The description for a version of megatron-bridge: its own, else the nearest older one, else
    the oldest.
    """
    numbers = re.findall(r"\d+", bridge)[:2]
    wanted = tuple(map(int, numbers))
    older = [version for version in HOSTS if version <= wanted]
    return HOSTS[max(older) if older else min(HOSTS)]


@functools.cache
def current() -> Host:
    """The description that applies to the installed host.

    Raises:
        importlib.metadata.PackageNotFoundError: megatron-bridge is not installed.
    """
    return nearest(importlib.metadata.version("megatron-bridge"))


def installed() -> dict[str, str]:
    """Installed versions of the packages whose insides this package touches."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def tested() -> dict[str, tuple[str, ...]]:
    """Package → the versions this package is tested with, oldest first."""
    return {
        name: tuple(getattr(host, field) for host in HOSTS.values())
        for name, field in PACKAGES.items()
    }


def unmet_requirement(package: str) -> str | None:
    """What the installed megatron-bridge itself demands of `package`, where the installed version
    does not meet it: `transformers<5.0.0`. None where it does, or where one of them is missing.
    """
    try:
        version = importlib.metadata.version(package)
        lines = importlib.metadata.requires("megatron-bridge") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in map(Requirement, lines):
        if requirement.name == package and requirement.marker is None:
            if not requirement.specifier.contains(version, prereleases=True):
                return str(requirement)
    return None


def check() -> None:
    """Warn of an untested host; refuse one that lacks a seam.

    Raises:
        RuntimeError: Something this package hooks into is not there; all of it is named.
    """
    missing = [seam for seam in SEAMS if not _exists(seam)]
    found = ", ".join(f"{name} {version}" for name, version in installed().items())
    known = " or ".join(
        f"megatron-bridge {host.bridge} with megatron-core {host.core}" for host in HOSTS.values()
    )
    if missing:
        raise RuntimeError(
            f"{found}: this host has no {', '.join(missing)}, which distillation hooks into. "
            f"Install {known}"
        )
    if any(version not in tested()[name] for name, version in installed().items()):
        used = nearest(installed()["megatron-bridge"])
        logger.warning(
            "%s is untested here; tested: %s. Everything distillation hooks into was found, so "
            "the run goes on with what holds for megatron-bridge %s: compare its first losses with "
            "a tested host's",
            found,
            known,
            used.bridge,
        )


def apply_patches() -> None:
    """Change what the installed host does wrong; calling it again does nothing."""
    for patch in current().patches:
        if patch not in _applied:
            patch()
            _applied.add(patch)


def _exists(seam: str) -> bool:
    parts = seam.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[cut:]:
                found = getattr(found, name)
        except AttributeError:
            return False
        return True
    return False
