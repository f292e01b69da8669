"""Which way imports point: import-linter's contracts, and the same for what it does not see.

import-linter reads import statements, also those inside functions. A module that is imported by
its name (`importlib.import_module("package.module")`, or an entry of a registry such as
`"package.module:attribute"`) is a string to it; `test_names_in_strings_point_down` holds those to
the same layers.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_kd.extras import EXTRAS
from megatron_kd.extras import ROOMS as EXTRA_OF_ROOM

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megatron_kd"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONTRACTS = {each["id"]: each for each in PROJECT["tool"]["importlinter"]["contracts"]}
LAYERS = [re.split(r" [|:] ", layer) for layer in CONTRACTS["layers"]["layers"]]
HEIGHT = {name: -depth for depth, layer in enumerate(LAYERS) for name in layer}
HOST = {"megatron", "modelopt"}
NAME = re.compile(r"(megatron_kd|megatron|modelopt)(\.\w+)+(:\w+)?")


def modules() -> dict[str, ast.Module]:
    """Every module of the package: its dotted name and its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def imported(tree: ast.AST) -> set[str]:
    """Names of the modules that import statements anywhere in a syntax tree ask for."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in this package"
            names.add(node.module)
    return names


def named(tree: ast.AST) -> set[str]:
    """Names of modules of ours, or of the host's, that stand in a string alone."""
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text.split(":")[0] for text in strings if NAME.fullmatch(text)}


def test_the_contracts_hold():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def room(module: str) -> str | None:
    """The package of ours, or the ground-floor module, that a dotted name lies in."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "megatron_kd" and rest else None


def reaches_up(module: str, tree: ast.AST) -> list[str]:
    """What a module imports by name that stands beside it or above it."""
    own = room(module)
    wrong = []
    for name in sorted(named(tree)):
        target = room(name)
        if target is None:
            allowed = own == "host"
        else:
            allowed = target == own or HEIGHT[target] < HEIGHT[own]
        if not allowed:
            wrong.append(f"{module} names {name}")
    return wrong


def test_names_in_strings_point_down():
    wrong = [
        line
        for module, tree in MODULES.items()
        if room(module)
        for line in reaches_up(module, tree)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_kd.cache.verify", 'importlib.import_module("megatron_kd.teacher.capture")'),
        ("megatron_kd.losses.dense", 'TABLE = {"x": "megatron_kd.cache.reader:open"}'),
        ("megatron_kd.tools.doctor.machine", 'import_module("megatron.core.datasets")'),
    ],
)
def test_a_name_that_points_up_is_found(module, source):
    assert reaches_up(module, ast.parse(source))
    assert not reaches_up("megatron_kd.host.train", ast.parse(source))


# What is imported and no distribution of ours: the host's packages and what only benches look for.
OPTIONAL = {"megatron", "modelopt", "liger_kernel", "triton", "veomni"}
BASE = {"numpy", "safetensors", "torch", "xxhash"}


def test_every_package_that_is_imported_is_declared():
    declared = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert declared == BASE
    known = set(sys.stdlib_module_names) | {"megatron_kd"} | OPTIONAL | BASE
    undeclared = [
        f"{module} imports {name}"
        for module, tree in MODULES.items()
        for name in {name.split(".")[0] for name in imported(tree)} - known
        if name not in EXTRAS[EXTRA_OF_ROOM.get(room(module), "eval")]
        and name not in {"gguf", "vllm"}  # extras of their own
    ]
    # To show tokens as text, `inspect --tokenizer` needs the extra data beside its own.
    assert undeclared == ["megatron_kd.cache.inspect imports transformers"]
