#!/usr/bin/env python
"""Write docs/api.md from signatures and docstrings: python scripts/api_reference.py [--check]

It reads the source and imports none of it, so it needs neither the host nor PyTorch.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "api.md"
LINE_LENGTH = 100
HEADINGS = ("Args", "Returns", "Yields", "Raises", "Example", "Source")

# (title, [module: all names, or module:name …]); a package stands for what its __all__ lists.
SECTIONS = (
    (
        "Recipes",
        [
            "megatron_kd.config:from_recipe DistillConfig StudentConfig LoraConfig "
            "TeacherConfig CacheConfig DataConfig LossConfig HiddenStatesConfig ExportConfig "
            "SelectionConfig",
            "megatron_kd.typed_mapping:ConfigError",
        ],
    ),
    ("Losses", ["megatron_kd.losses"]),
    ("Cache", ["megatron_kd.cache"]),
    (
        "Data",
        [
            "megatron_kd.data.prepare.command:prepare PrepareOptions",
            "megatron_kd.data.prepare.chat:ChatRules",
            "megatron_kd.data.sequences:Sequence SequenceReader SequenceWriter",
            "megatron_kd.data.sources:open_caches open_sequences check_same_tokens",
            "megatron_kd.data.dataset:SampleSource DistillDataset",
            "megatron_kd.data.document_layout:DocumentLayout",
        ],
    ),
    (
        "Teacher",
        [
            "megatron_kd.teacher.capture.job:capture resume",
            "megatron_kd.teacher.capture.setting:CaptureJob",
            "megatron_kd.teacher.capture.workers:Worker",
            "megatron_kd.teacher.engines.base:TeacherEngine RowRequest Document Rows Teacher "
            "engine_class EngineError EngineUnavailable",
        ],
    ),
    (
        "Student",
        [
            "megatron_kd.models.prune:write_student",
            "megatron_kd.models.channels:TeacherShape Selection select_leading "
            "evenly_spaced_layers",
            "megatron_kd.models.importance:Importance measure select_important",
        ],
    ),
    (
        "Planning",
        [
            "megatron_kd.tools.planning.model_shape:ModelShape shape_of_directory",
            "megatron_kd.tools.planning.run_settings:RunSettings Recompute from_config",
            "megatron_kd.tools.planning.stage_memory:plan_memory longest_sequence StageMemory",
            "megatron_kd.tools.planning.loss_memory:loss_memory LossMemory",
            "megatron_kd.tools.planning.time_cost:step_time StepTime capture_seconds "
            "cache_bytes_per_position",
        ],
    ),
    (
        "The host",
        [
            "megatron_kd.host.cpu.backend:activate",
            "megatron_kd.host.train:prepare run",
            "megatron_kd.host.dataset_provider:DistillDatasetProvider",
            "megatron_kd.host.step.offline:OfflineStep",
            "megatron_kd.host.step.distillation_loss:register DistillationLoss LossBatch",
            "megatron_kd.host.online.modelopt:set_up OnlineStep",
            "megatron_kd.host.online.criteria:FullVocabularyLogitsKLLoss "
            "HiddenStateLoss WeightedBalancer",
            "megatron_kd.host.step.hidden_states:Weights hidden_state_loss",
            "megatron_kd.host.parameters.freezing:train_only",
            "megatron_kd.host.parameters.lora:add",
            "megatron_kd.host.export:export",
        ],
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if docs/api.md is stale"
    )
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(
            "docs/api.md is not what the docstrings say; run python scripts/api_reference.py",
            file=sys.stderr,
        )
        return 1
    return 0


def page() -> str:
    """The whole reference, as Markdown."""
    parts = [
        "# API reference",
        "<!-- Written by scripts/api_reference.py from the docstrings: change those. -->",
        "What Python code may call. The commands are described by `megatron-kd COMMAND --help`, "
        "the formats on disk by [the cache's page](cache-format.md). Losses, cache, data, student "
        "and planning can be imported without the host; the last section needs it.",
        "In shapes, S is the sequence, B the micro-batch, D the hidden size, V the vocabulary, Vp "
        "this rank's part of it, and K the support: the teacher's kept tokens.",
        "\n".join(f"- [{title}](#{_anchor(title)})" for title, _ in SECTIONS),
    ]
    for title, sources in SECTIONS:
        parts.append(f"## {title}")
        for source in sources:
            module, _, names = source.partition(":")
            grouped = dict.fromkeys(home for home, _ in _resolve(module, names.split()))
            for home in grouped:
                own = [name for other, name in _resolve(module, names.split()) if other == home]
                shown = module if not names else home
                parts += list(_module(home, shown, own))
    return "\n\n".join(parts) + "\n"


def _resolve(module: str, names: list[str]) -> list[tuple[str, str]]:
    """(module that defines it, name) of each name; without names, of what a package exports."""
    if names:
        return [(module, name) for name in names]
    origin, exported = {}, []
    for node in _parse(module).body:
        if isinstance(node, ast.ImportFrom):
            origin |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
    return [(origin[name], name) for name in exported]


def _module(module: str, shown: str, names: list[str]) -> Iterator[str]:
    lines = _path(module).read_text().splitlines()
    found = {node.name: node for node in _parse(module).body if hasattr(node, "name")}
    for name in names:
        if name not in found:
            raise SystemExit(f"{module} defines no {name}; correct SECTIONS of {__file__}")
        yield f"### `{shown}.{name}`"
        if isinstance(found[name], ast.ClassDef):
            yield from _class(found[name], lines)
        else:
            yield _code(_call(*_signature(found[name])))
            yield from _docstring(found[name])


def _class(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    bases = {ast.unparse(base) for base in node.bases}
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    fields = list(_fields(node, lines))
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if any(text.startswith("dataclass") for text in decorators) or "NamedTuple" in bases:
        star = ["*"] if any("kw_only=True" in text for text in decorators) else []
        yield _code(_call(node.name, star + [field for field, _ in fields]))
    elif "__init__" in methods:
        _, given, _ = _signature(methods["__init__"], method=True)
        yield _code(_call(node.name, given))
    else:
        yield _code(f"class {node.name}({', '.join(sorted(bases))})" if bases else node.name)
    yield from _docstring(node)
    if "__init__" in methods and ast.get_docstring(methods["__init__"]):
        yield from _docstring(methods["__init__"])
    described = [f"- `{field.partition(':')[0]}`: {text}" for field, text in fields if text]
    if described:
        yield "\n".join(described)
    listed = []
    for name, method in methods.items():
        text = ast.get_docstring(method)
        if name.startswith("_") or not text:
            continue
        is_property = any(ast.unparse(item) == "property" for item in method.decorator_list)
        call = name if is_property else _line(*_signature(method, method=True))
        listed.append(f"- `{call}`: {_one_line(text.split(chr(10) * 2)[0])}")
    if listed:
        yield "\n".join(listed)


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, str]]:
    """(declaration, description) of each annotated field: the string below it, or its comment."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or item.target.id.startswith("_"):
            continue
        _, _, text = lines[item.end_lineno - 1].partition("  # ")
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = after.value.value
        yield ast.unparse(item), _one_line(text)


def _signature(node: ast.FunctionDef, *, method: bool = False) -> tuple[str, list[str], str]:
    """(name, arguments, what follows the closing parenthesis)."""
    arguments, given = node.args, []
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults, strict=True):
        given.append(_argument(argument, default))
    if method and not any(ast.unparse(item) == "staticmethod" for item in node.decorator_list):
        given = given[1:]
    if arguments.vararg:
        given.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        given.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        given.append(_argument(argument, default))
    if arguments.kwarg:
        given.append("**" + _argument(arguments.kwarg, None))
    return node.name, given, f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotated = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else ""
    text = annotated or argument.arg
    if default is None:
        return text
    equals = " = " if annotated else "="
    return f"{text}{equals}{ast.unparse(default)}"


def _line(name: str, given: list[str], returns: str = "") -> str:
    return f"{name}({', '.join(given)}){returns}"


def _call(name: str, given: list[str], returns: str = "") -> str:
    line = _line(name, given, returns)
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in given), f"){returns}"])


def _docstring(node) -> Iterator[str]:
    """A docstring in Google's style as paragraphs, and its sections as lists."""
    text = ast.get_docstring(node) or ""
    section = re.compile(rf"^({'|'.join(HEADINGS)}):(.*(?:\n(?: .*)?$)*)", re.MULTILINE)
    start = 0
    for found in section.finditer(text):
        yield from _prose(text[start : found.start()])
        yield _section(found[1], textwrap.dedent(found[2]).strip())
        start = found.end()
    yield from _prose(text[start:])


def _prose(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith(" "):
            yield _code(textwrap.dedent(block))
        elif block:
            yield _one_line(block)


def _section(title: str, body: str) -> str:
    if title in ("Args", "Raises"):
        items = [_one_line(item) for item in re.split(r"\n(?=\S)", body)]
        items = [re.sub(r"^([^:]+): ", r"- `\1`: ", item) for item in items]
        return f"{title}:\n\n" + "\n".join(items)
    return f"{title}:\n\n{_code(body)}" if title == "Example" else f"{title}: {_one_line(body)}"


def _path(module: str) -> Path:
    path = REPOSITORY.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parse(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text())


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
