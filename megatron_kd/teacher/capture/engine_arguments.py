"""The command line's options for engines, made from the Options of every engine there is."""

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.engines import ENGINES, engine_class
from megatron_kd.teacher.engines.base import EngineError

_PREFIX = "engine option "  # no other option of a command can be called so


def add_engine_arguments(
    parser: argparse.ArgumentParser, registry: Mapping[str, str | type] = ENGINES
) -> None:
    """Adds the options of all engines, each once; its help says whose it is.

    Args:
        registry: The engines there are to choose from.

    Raises:
        ValueError: Two engines mean different types by one option.
    """
    parser.add_argument("--engine", default=CaptureJob.engine, choices=sorted(registry))
    group = parser.add_argument_group("options of the engines")
    for name, by_engine in _fields_by_name(registry).items():
        first, *others = (_parsing(f, kind) for f, kind in by_engine.values())
        if any(other != first for other in others):
            raise ValueError(f"the engines {', '.join(by_engine)} differ in the type of {name}")
        of_engine = {engine: f for engine, (f, _) in by_engine.items()}
        if "type" in first:
            given = (f.metadata["metavar"] for f in of_engine.values())
            first["metavar"] = next(filter(None, given), name.upper())
        flag = f"--{name.replace('_', '-')}"
        # No default: an option that was not given is not the engine's business.
        group.add_argument(flag, dest=_PREFIX + name, default=None, help=_help(of_engine), **first)


def given_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by name, whichever engine they belong to."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }


def _fields_by_name(registry: Mapping[str, str | type]) -> dict[str, dict[str, tuple[Field, Any]]]:
    """Option: engine: its field and the field's type."""
    found: dict[str, dict[str, tuple[Field, Any]]] = {}
    for engine in registry:
        try:
            options = engine_class(engine, registry).Options
        except EngineError:  # not installed here; --engine says so
            continue
        hints = typing.get_type_hints(options)
        for f in fields(options):
            found.setdefault(f.name, {})[engine] = f, hints[f.name]
    return found


def _parsing(f: Field, kind: Any) -> dict[str, Any]:
    """What argparse needs to know of an option beside its name and help."""
    more = {}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        kind, more = typing.get_args(kind)[0], {"action": "append"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if f.default else "store_true"}
    return {"type": kind, **more}


def _help(by_engine: Mapping[str, Field]) -> str:
    engines_of: dict[str, list[str]] = {}
    for engine, f in by_engine.items():
        text, notes = f.metadata["help"], list(f.metadata["choices"] or ())
        if f.default not in (None, (), False):
            notes.append(f"default {f.default}")
        if notes:
            text += f" ({', '.join(notes)})"
        engines_of.setdefault(text, []).append(engine)
    words = "; ".join(f"{', '.join(names)}: {text}" for text, names in engines_of.items())
    return words.replace("%", "%%")
