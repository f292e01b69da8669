"""Write docs/configuration.md, every key of a recipe, from the sections' own fields and docstrings.

python scripts/configuration_page.py [FILE]: default docs/configuration.md. A test compares the page
with what this writes.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path

from megatron_kd.config import DistillConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
CHAPTERS = (
    # title, what it is for, keys of the recipe in the order in which one writes a recipe
    ("A run", "What every recipe says first.", ("mode", "output_dir", "student", "export")),
    (
        "Where the teacher is",
        "`mode: offline` reads its rows from a cache; `mode: online` holds it beside the student.",
        ("cache", "teacher", "data"),
    ),
    ("The loss", "What is minimized, and what computes it.", ("loss", "hidden_states")),
    ("Which checkpoint counts", "", ("selection",)),
    ("Where and how it runs", "", ("launch", "progress", "profile")),
    ("The host", "", ("bridge",)),
)
HEAD = """# Every key of a recipe

Written by `python scripts/configuration_page.py` from `megatron_kd/config.py`: do not edit it by
hand. A recipe is a YAML file of these keys; `key.subkey=value` on the command line changes any of
them, and `include` lists files that are merged before. A key that is not here is refused with the
nearest one that is. Bold: there is no default, a recipe must set it. In a list's entries `[]`
stands for any entry.
"""


def documented(cls: type) -> dict[str, str]:
    """Field → the docstring that stands below it, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


def inner_section(kind) -> tuple[type | None, bool]:
    """The section among the members of a field's type, and whether there is a list of it."""
    if dataclasses.is_dataclass(kind):
        return kind, False
    for member in typing.get_args(kind):
        section, _ = inner_section(member)
        if section is not None:
            return section, typing.get_origin(kind) is list
    return None, False


def allowed(kind) -> str:
    """The values that a field's type lets in, where they are few; else ''."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (member, *others) = (m for m in typing.get_args(kind) if m is not type(None))
        return "" if others else allowed(member)
    return ""


def as_yaml(field: dataclasses.Field) -> str | None:
    """A field's default as a recipe writes it; None where it has none."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    value = getattr(value, "default", value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def rows(cls: type, prefix: str, only: str | None = None) -> list[str]:
    """Lines of a table: a section's keys, those of the sections in it after them."""
    kinds, said, lines = typing.get_type_hints(cls, include_extras=False), documented(cls), []
    for field in dataclasses.fields(cls):
        if only not in (None, field.name):
            continue
        key = prefix + field.name
        if flat := field.metadata.get("flat"):
            lines += rows(flat, prefix)
            continue
        section, listed = inner_section(kinds[field.name])
        if section is None or field.name in said:
            default = as_yaml(field)
            shown = f"**`{key}`**" if default is None else f"`{key}`"
            values = allowed(kinds[field.name])
            meaning = said[field.name] + (f" One of {values}." if values else "")
            lines.append(f"| {shown} | {f'`{default}`' if default else ''} | {escaped(meaning)} |")
        if section is not None:
            lines += rows(section, f"{key}[]." if listed else f"{key}.")
    return lines


def escaped(text: str) -> str:
    """Text that stays one cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def page() -> str:
    """The whole page; every key of `DistillConfig` is in one chapter."""
    text = [HEAD]
    chapters = [name for _, _, names in CHAPTERS for name in names]
    missing = {field.name for field in dataclasses.fields(DistillConfig)} ^ set(chapters)
    if missing:
        raise ValueError(f"scripts/configuration_page.py: CHAPTERS and the keys differ: {missing}")
    for title, purpose, names in CHAPTERS:
        text.append(f"## {title}\n")
        if purpose:
            text.append(f"{purpose}\n")
        text.append("| key | default | |\n|---|---|---|")
        text += [line for name in names for line in rows(DistillConfig, "", only=name)]
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page())
