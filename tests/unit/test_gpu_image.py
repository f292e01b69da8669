"""container/Dockerfile and what it keeps of its base image; nothing here can build it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "container" / "Dockerfile").read_text()
LISTS = ROOT / "scripts" / "requirements"
STACKS = sorted(
    match[1]
    for path in LISTS.glob("stack-*.txt")
    if (match := re.fullmatch(r"stack-([\d.]+)\.txt", path.name))
)
SCRIPT = ROOT / "container" / "held_packages.py"


def held_packages():
    specification = importlib.util.spec_from_file_location("held_packages", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_every_stack_has_a_base_image():
    bases = re.findall(r"^FROM \S+/pytorch:\S+ AS base-(\S+)$", DOCKERFILE, re.MULTILINE)
    assert bases == STACKS


def test_what_the_image_copies_is_there():
    for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("stack", STACKS)
def test_the_lists_bring_everything_but_what_the_image_holds(stack):
    wanted = LISTS / f"stack-{stack}.txt"
    names = {
        re.split(r"[=<>\[ ]", line, maxsplit=1)[0]
        for line in wanted.read_text().splitlines()
        if line and not line.startswith("#")
    }
    done = run("--without", wanted)
    kept = {line.split("==")[0] for line in done.stdout.splitlines() if line and line[0] != "#"}
    assert done.returncode == 0
    assert names - kept <= {"torch", "triton"}
    assert "torch" in names - kept


def test_names_are_compared_as_pip_compares_them():
    lines = "Flash_Attn==2\ntransformer.engine[pytorch]>=2\ntorchmetrics==1\n# torch\ntorch ; x\n"
    assert held_packages().without_held(lines) == "torchmetrics==1\n# torch"


def test_a_package_that_pip_replaced_is_told(tmp_path):
    held = tmp_path / "held.txt"
    held.write_text(run().stdout)
    assert "torch==" in held.read_text()
    assert run("--check", held).returncode == 0
    held.write_text(re.sub(r"torch==\S+", "torch==2.11.0a0+eb65b36914", held.read_text()))
    done = run("--check", held)
    assert done.returncode == 1
    assert "torch==2.11.0a0+eb65b36914" in done.stderr and "base image" in done.stderr
