"""Sections of a configuration file: dataclasses whose values pydantic checks.

A section is a class under `@config_section` whose fields have the types of this module. They are
strict: true is no integer, "3" is no integer, and a number may be written 1e-4, which YAML reads as
a string. `build` makes one from a mapping; its errors name the full key, what was expected, what
came, and the nearest known key.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from megatron_kd.typed_mapping import ConfigError, unknown_key, wrong_value


def _read_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a string; what is no number stays what it is, to be refused."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Number = Annotated[float, Strict(), BeforeValidator(_read_number)]
NotNegative = Annotated[Number, Field(ge=0)]

Section = TypeVar("Section")


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_section(cls: type[Section]) -> type[Section]:
    """Make a class a section: a dataclass of keyword arguments that refuses unknown ones.

    What involves several fields is checked in `__post_init__`, which raises ConfigError.
    """
    return pydantic.dataclasses.dataclass(cls, kw_only=True, config=ConfigDict(extra="forbid"))


def build(cls: type[Section], mapping: Mapping, prefix: str = "") -> Section:
    """Make a section from a mapping, the sections in it included.

    Args:
        cls: A class under `@config_section`.
        mapping: Keys and values as YAML has them.
        prefix: The key under which the mapping stands, such as `student.lora`.

    Raises:
        ConfigError: A key is unknown or missing, or a value is wrong. Several faults are several
            lines.
    """
    try:
        return TypeAdapter(cls).validate_python(mapping)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(cls, error, prefix))) from error


def _sentences(cls: type, error: ValidationError, prefix: str) -> list[str]:
    """What is wrong, one sentence per key."""
    by_key: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        key, known = _place(cls, fault["loc"], prefix)
        by_key.setdefault(key, []).append(_sentence(key, known, fault))
    # Members of a union each say why they do not take the value.
    return ["; or ".join(sentences) for sentences in by_key.values()]


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
}
_BOUNDS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} at most",
}


def _sentence(key: str, known: list[str], fault: Mapping) -> str:
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"{key} is required: set it in the recipe or as key=value"
    if kind == "unexpected_keyword_argument":
        return str(unknown_key(key, known))
    if kind == "literal_error":
        return str(wrong_value(key, value, re.findall(r"'([^']*)'", context["expected"])))
    if kind in _EXPECTED:
        return f"{key or 'the configuration'} must be {_EXPECTED[kind]}, not {value!r}"
    if kind in _BOUNDS:
        return f"{key} must be {_BOUNDS[kind].format(**context)}, not {value!r}"
    return f"{key}: {fault['msg']}"


def _place(cls: type, location: tuple, prefix: str) -> tuple[str, list[str]]:
    """The full key of a fault, and the keys that its section knows.

    Args:
        location: pydantic's path to the fault. Behind a field whose type is a union it goes on with
            the member's name, which is no key.
    """
    key, known, kinds = prefix, keys_of(cls), [cls]
    for part in location:
        sections = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(part, int):
            key = f"{key}[{part}]"
        elif sections:
            known = keys_of(sections[0])
            key = f"{key}.{part}" if key else part
        elif any(typing.get_origin(kind) is dict for kind in kinds):
            key = f"{key}.{part}"
        else:
            break
        kinds = _inner_kinds(sections[0], part) if sections else _members(kinds)
    return key, known


def keys_of(cls: type) -> list[str]:
    """The keys of a section; a field whose metadata have `flat` gives that dataclass's keys."""
    keys = []
    for field in dataclasses.fields(cls):
        flat = field.metadata.get("flat")
        keys += [f.name for f in dataclasses.fields(flat)] if flat else [field.name]
    return keys


def _inner_kinds(cls: type, name: Any) -> list:
    """The types that a field of a section may have, members of a union one by one."""
    hint = typing.get_type_hints(cls).get(name)
    return _flat_union(hint)


def _members(kinds: list) -> list:
    """The types of the elements of lists and mappings."""
    return [
        inner
        for kind in kinds
        for last in typing.get_args(kind)[-1:]
        for inner in _flat_union(last)
    ]


def _flat_union(hint: Any) -> list:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(hint) if member is not type(None)]
    return [hint]
