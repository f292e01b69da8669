"""The teacher engines, by the name that `--engine` takes.

An engine of another package, or of another part of this one, is a further entry: its class, or
"module:Class", whose module is imported when options are listed or the engine is used.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping

from megatron_kd.extras import MissingExtra
from megatron_kd.teacher.engines.base import EngineError, TeacherEngine

ENGINES: dict[str, str | type[TeacherEngine]] = {
    "transformers": "megatron_kd.teacher.engines.transformers:TransformersEngine",
    "vllm": "megatron_kd.teacher.engines.vllm:VllmEngine",
    "vllm-server": "megatron_kd.teacher.engines.vllm_server:VllmServerEngine",
    "sglang": "megatron_kd.teacher.engines.sglang:SglangEngine",
}


def engine_class(name: str, registry: Mapping[str, str | type] | None = None) -> type:
    """The class behind an engine's name.

    Args:
        registry: Where to look; None: ENGINES. Engines that generate have one of their own.

    Raises:
        EngineError: There is no such engine, or the package it needs is not installed.
    """
    registry = ENGINES if registry is None else registry
    if name not in registry:
        raise EngineError(f"no teacher engine {name!r}; there are {', '.join(sorted(registry))}")
    entry = registry[name]
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    with explained_absence(name):
        return getattr(importlib.import_module(module), attribute)


@contextlib.contextmanager
def explained_absence(name: str) -> Iterator[None]:
    """While inside, a package that is not installed is an EngineError that names engine and
    package. Engines import what is heavy when it is needed, so this may come as late as the
    session, `describe` or the constructor."""
    try:
        yield
    except MissingExtra as error:
        raise EngineError(f"the {name} engine cannot be used: {error}") from error
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the {name} engine needs the package {error.name}, which is not installed here"
        ) from error
