"""Every command line in the documentation is one that the program accepts; every link leads to a
file.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from megatron_kd import cli

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SCRIPT = re.compile(r"(?:bash )?scripts/\w+\.(?:sh|py)")
ELLIPSES = {"…", "..."}


def lines(page: Path) -> list[str]:
    """Command lines of a page: fenced as bash or indented, continuation lines joined."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    blocks += ["\n".join(re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE))]
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def commands(page: Path) -> list[list[str]]:
    """The words of each `megatron-kd` command of a page, also those started by torchrun."""
    found = []
    for line in lines(page):
        words = shlex.split(line, comments=True)
        for start in ("megatron-kd", "megatron_kd.cli"):
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
    name, *arguments = words
    assert name in cli.COMMANDS or name == "--help"
    if name == "--help":
        return
    elided = any(word in ELLIPSES for word in arguments)
    arguments = [word for word in arguments if word not in ELLIPSES]
    parser = cli.parser_of(name, importlib.import_module(cli.COMMANDS[name][0]))
    if elided:  # the page leaves required arguments out
        for action in parser._actions:
            action.required = False
    try:
        parser.parse_args(arguments)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_recipes_and_links_exist(page):
    text = page.read_text()
    named = SCRIPT.findall(text) + re.findall(r"recipes/[\w/]+\.yaml", text)
    for path in named:
        path = path.removeprefix("bash ")
        assert (REPOSITORY / path).is_file() or path == "recipes/mine.yaml", path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
