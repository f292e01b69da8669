"""Check plain mappings (from YAML and the command line) against plain dataclasses, the host's above
all, whose annotations are not ours to choose.

Every error names the full key, what was expected, what came, and the nearest known key. Our own
sections are checked by pydantic: `megatron_kd.sections`.
"""

import dataclasses
import difflib
import enum
import importlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union


class ConfigError(ValueError):
    """A key, type or value of the configuration is wrong; the message names the key and the
    remedy.
    """


def build(cls: type, mapping: Mapping, prefix: str = "") -> Any:
    """Make an instance of a plain dataclass from `mapping`, nested dataclasses included.

    A field with metadata {"formerly": {old: new}} reads an old spelling of a value as the new one.

    Raises:
        ConfigError: An unknown key, a missing key, a wrong type, or a value `__post_init__`
            refuses.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{prefix or 'the configuration'} must be a mapping, not {mapping!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for name, value in mapping.items():
        key = _join(prefix, name)
        if name not in fields:
            raise unknown_key(key, fields)
        formerly = fields[name].metadata.get("formerly", {})
        value = formerly.get(value, value) if isinstance(value, str) else value
        values[name] = check(value, hints[name], key)
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ConfigError(
                f"{_join(prefix, name)} is required: set it in the recipe or as key=value"
            )
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, AssertionError) as error:
        names_field = prefix and str(error).partition(" ")[0] in fields
        key = f"{prefix}." if names_field else f"{prefix}: " if prefix else ""
        raise ConfigError(f"{key}{error}") from error


def plain(instance: Any) -> Any:
    """A dataclass as the mapping it was made from, nested ones included; the keys of a field whose
    metadata have `flat` stand beside the others."""
    if isinstance(instance, (list, tuple)):
        return [plain(value) for value in instance]
    if isinstance(instance, Mapping):
        return {name: plain(value) for name, value in instance.items()}
    if not dataclasses.is_dataclass(instance):
        return instance
    mapping = {}
    for f in dataclasses.fields(instance):
        value = plain(getattr(instance, f.name))
        mapping |= value if f.metadata.get("flat") else {f.name: value}
    return mapping


def update(instance: Any, mapping: Mapping, prefix: str = "") -> None:
    """Set the fields of dataclass `instance` from `mapping`, in place, recursing where both sides
    nest.

    A mapping with `_target_: package.module.Class` builds that class from its other keys.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{prefix} must be a mapping, not {mapping!r}")
    hints = _hints(type(instance))
    fields = {f.name: f for f in dataclasses.fields(instance) if not f.name.startswith("_")}
    for name, value in mapping.items():
        key = _join(prefix, name)
        if name not in fields:
            raise unknown_key(key, fields)
        if value is None and fields[name].default is None:
            setattr(instance, name, None)  # whatever the annotation forgets to say
            continue
        current = getattr(instance, name)
        nests = isinstance(value, Mapping) and "_target_" not in value
        if nests and dataclasses.is_dataclass(current):
            update(current, value, key)
        else:
            setattr(instance, name, check(value, hints.get(name, Any), key))


def check(value: Any, annotation: Any, key: str) -> Any:
    """Return `value` as `annotation` wants it, or raise ConfigError. Unresolvable annotations
    accept anything.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(value, Mapping) and "_target_" in value:
        return _instantiate(value, key)
    if annotation is Any or isinstance(annotation, (str, typing.TypeVar)):
        return value
    if origin in (Union, types.UnionType):
        return _check_union(value, arguments, key)
    if origin is Literal:
        if value in arguments:
            return value
        raise wrong_value(key, value, arguments)
    if origin is typing.Annotated:
        return check(value, arguments[0], key)
    if origin in (list, tuple, set, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _wrong_type(key, value, "a list")
        items = arguments[0] if arguments and Ellipsis not in arguments[1:] else Any
        if origin is tuple and len(arguments) > 1 and Ellipsis not in arguments:
            if len(value) != len(arguments):
                raise _wrong_type(key, value, f"a list of {len(arguments)} values")
            return tuple(
                check(v, a, f"{key}[{i}]")
                for i, (v, a) in enumerate(zip(value, arguments, strict=True))
            )
        checked = [check(v, items, f"{key}[{i}]") for i, v in enumerate(value)]
        return checked if origin is Sequence else origin(checked)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong_type(key, value, "a mapping")
        kind = arguments[1] if arguments else Any
        return {name: check(v, kind, _join(key, str(name))) for name, v in value.items()}
    if origin is Callable or annotation in (Callable, typing.Callable):
        return import_name(value, key) if isinstance(value, str) else value
    return _check_class(value, annotation, key)


def _check_class(value: Any, annotation: Any, key: str) -> Any:
    if annotation is type(None):
        if value is None:
            return None
        raise _wrong_type(key, value, "null")
    if annotation is bool:
        if isinstance(value, bool):
            return value
        raise _wrong_type(key, value, "true or false")
    if annotation is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise _wrong_type(key, value, "an integer")
    if annotation is float:
        number = _as_number(value)
        if number is None:
            raise _wrong_type(key, value, "a number")
        return float(number)
    if annotation is str:
        if isinstance(value, str):
            return value
        raise _wrong_type(key, value, "a string")
    if not isinstance(annotation, type):
        return value
    if issubclass(annotation, enum.Enum):
        if isinstance(value, annotation):
            return value
        if isinstance(value, str) and value in annotation.__members__:
            return annotation[value]
        raise wrong_value(key, value, annotation.__members__)
    if annotation.__module__ == "torch" and annotation.__name__ == "dtype":
        return _as_dtype(value, key)
    if dataclasses.is_dataclass(annotation):
        return value if isinstance(value, annotation) else build(annotation, value, key)
    if annotation in (list, dict, tuple, set):
        if not isinstance(value, (list, tuple) if annotation is not dict else Mapping):
            raise _wrong_type(key, value, f"a {annotation.__name__}")
        return annotation(value)
    if isinstance(value, annotation):
        return value
    if isinstance(value, str):
        return import_name(value, key)
    raise _wrong_type(key, value, annotation.__name__)


def _check_union(value: Any, members: tuple, key: str) -> Any:
    if value is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    if len(members) == 1:
        return check(value, members[0], key)
    errors = []
    for member in sorted(members, key=lambda member: member in (str, Any)):
        try:
            return check(value, member, key)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError("; or ".join(errors))


def unknown_key(key: str, known) -> ConfigError:
    """The error for a key nobody knows, with the nearest known one."""
    prefix, _, name = key.rpartition(".")
    near = difflib.get_close_matches(
        name, [k for k in known if not k.startswith("_")], n=1, cutoff=0.5
    )
    hint = f"; did you mean {_join(prefix, near[0])}?" if near else ""
    listed = ", ".join(sorted(known)) if len(known) <= 24 else f"{len(known)} keys"
    return ConfigError(f"unknown key {key}{hint} (known here: {listed})")


def import_name(name: str, key: str) -> Any:
    """The object called `package.module.attribute`.

    Raises:
        ConfigError: There is no such object.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {name!r} cannot be imported ({error}); write package.module.name"
        ) from error


def _instantiate(mapping: Mapping, key: str) -> Any:
    cls = import_name(mapping["_target_"], f"{key}._target_")
    arguments = {name: value for name, value in mapping.items() if name != "_target_"}
    if dataclasses.is_dataclass(cls):
        return build(cls, arguments, key)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from error


def _as_number(value: Any) -> float | int | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _as_dtype(value: Any, key: str) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise wrong_value(key, value, ("float32", "bfloat16", "float16"))
    return dtype


def _hints(cls: type) -> dict:
    """Type hints of every class in the hierarchy that can be resolved; the host's are not all
    importable.
    """
    hints = {}
    for base in reversed(cls.__mro__):
        module = importlib.import_module(base.__module__)
        for name, annotation in vars(base).get("__annotations__", {}).items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                hints |= typing.get_type_hints(alone, vars(module), dict(vars(base)))
            except (NameError, TypeError, AttributeError, SyntaxError):
                hints[name] = Any
    return hints


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _wrong_type(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key} must be {expected}, not {value!r}")


def wrong_value(key: str, value: Any, allowed) -> ConfigError:
    """The error for a value that is none of those allowed, with the nearest of them."""
    allowed = [str(a) for a in allowed]
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{key} must be one of {', '.join(allowed)}, not {value!r}{hint}")
