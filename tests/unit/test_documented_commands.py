"""Every command line in the documentation is one that the program accepts; every link leads to a
file.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from megatron_kd import cli
from megatron_kd.config import from_recipe

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SCRIPT = re.compile(r"(?:bash )?scripts/\w+\.(?:sh|py)")
ELLIPSES = {"…", "..."}


def lines(page: Path) -> list[str]:
    """Command lines of a page: fenced as bash or indented, continuation lines joined."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += ["\n".join(re.findall(r"^ {4}(\S.*)$", outside, re.MULTILINE))]
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page: after `megatron-kd`, or `torchrun … -m megatron_kd`."""
    found = []
    for line in lines(page):
        words = shlex.split(line, comments=True)
        for start in ("megatron-kd", "megatron_kd"):
            if start in words:
                found.append(words[words.index(start) + 1 :])
    return found


DOCUMENTED = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page)
]


def test_commands_are_found():
    assert len(DOCUMENTED) > 20


@pytest.mark.parametrize("words", DOCUMENTED)
def test_the_program_accepts_the_command(words, capsys):
    if words in (["--help"], ["dev", "--help"]):
        return
    elided = any(word in ELLIPSES for word in words)
    name, command, arguments = cli.find_command([word for word in words if word not in ELLIPSES])
    parser = cli.parser_of(name, importlib.import_module(command.module))
    if elided:  # the page leaves required arguments out
        for action in parser._actions:
            action.required = False
    try:
        args = parser.parse_intermixed_args(arguments)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    recipe = getattr(args, "recipe", None)
    if recipe is None or recipe.rpartition("/")[2] == "mine.yaml":
        return  # a reader's own
    overrides = [o for o in args.overrides if o != "key=value"]
    assert from_recipe(recipe, overrides)  # every key that the page sets is one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_recipes_and_links_exist(page):
    text = page.read_text()
    named = SCRIPT.findall(text) + re.findall(r"recipes/[\w/]+\.yaml", text)
    for path in named:
        path = path.removeprefix("bash ")
        assert (REPOSITORY / path).is_file() or path == "recipes/mine.yaml", path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
