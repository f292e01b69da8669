"""The command line: what its help shows, what a fast command does not import, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_kd import cli

REPOSITORY = Path(__file__).parents[2]
RECIPE = str(REPOSITORY / "recipes" / "llama-8k-offline.yaml")
# Each takes from half a second to ten to import; a command that only reads files needs none.
HEAVY = {"torch", "transformers", "datasets", "megatron", "modelopt", "pyarrow", "pandas", "scipy"}
# One process for all commands of a test, and a fork of it for each: starting Python takes longest.
RUN = """
import json, os, sys
from megatron_kd.cli import main
for words in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    os.dup2(1, 2)
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    print("\\nIMPORTED " + json.dumps([status, sorted(sys.modules)]), flush=True)
    os._exit(0)
"""


def imports_of(commands: list[list[str]]) -> list[tuple[int, set[str], str]]:
    """Exit status, imported top-level modules and output of each command, none run before it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=True,
    )
    results, shown = [], []
    for line in done.stdout.splitlines():
        if line.startswith("IMPORTED "):
            status, modules = json.loads(line.removeprefix("IMPORTED "))
            tops = {name for name in modules if "." not in name}
            results.append((status, tops, "\n".join(shown)))
            shown = []
        else:
            shown.append(line)
    assert len(results) == len(commands), done.stdout
    return results


def test_help_fits_a_screen_and_begins_with_the_way_to_a_student(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named[:5] == ["prepare", "capture", "plan", "distill", "export"]
    assert sorted(named) == sorted(cli.COMMANDS)


def test_a_developers_command_is_called_by_both_words():
    name, command, arguments = cli.find_command(["dev", "bench", "loss"])
    assert (name, command, arguments) == ("dev bench", cli.DEVELOPER_COMMANDS["bench"], ["loss"])


def test_developers_commands_stand_apart(capsys):
    with pytest.raises(SystemExit):
        cli.main(["dev", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.DEVELOPER_COMMANDS)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "x.yaml"])
    assert stop.value.code == 2
    assert "megatron-kd dev bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prepar"], "did you mean prepare?"),
        (["dev", "benhc"], "did you mean dev bench?"),
        (["zzz"], "there are prepare, capture, plan"),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2 and expected in capsys.readouterr().err


# A developer's: their tables of implementations hold functions of tensors.
LOAD_TORCH = {"dev bench", "dev plot"}


@pytest.mark.extended
def test_the_help_of_a_command_imports_no_framework():
    names = [*([name] for name in cli.COMMANDS), *(["dev", n] for n in cli.DEVELOPER_COMMANDS)]
    results = imports_of([[*words, "--help"] for words in names])
    slow = {}
    for words, (status, modules, shown) in zip(names, results, strict=True):
        assert status == 0
        assert f"usage: megatron-kd {' '.join(words)}" in shown
        if modules & HEAVY:
            slow[" ".join(words)] = modules & HEAVY
    assert not slow.keys() - LOAD_TORCH, slow


@pytest.mark.parametrize("command", ["distill", "plan"])
def test_a_wrong_key_is_refused_before_a_framework_is_imported(command):
    ((status, modules, shown),) = imports_of([[command, RECIPE, "loss.imp=dense"]])
    assert status in (1, 2)
    assert "did you mean loss.impl" in shown and "Traceback" not in shown
    assert not modules & (HEAVY | {"matplotlib"})


def test_the_older_spelling_of_the_recipe_still_leads_to_it(capsys):
    words = ["--config", RECIPE, "loss.imp=dense"]
    assert cli.main(["distill", *words]) == 2
    assert "did you mean loss.impl" in capsys.readouterr().err
    assert cli.main(["distill", "loss.imp=dense", *words[:2]]) == 2
    assert "did you mean loss.impl" in capsys.readouterr().err
    assert cli.main(["distill"]) == 2
    assert "which recipe?" in capsys.readouterr().err


def test_options_may_stand_between_the_recipe_and_its_overrides(capsys):
    assert cli.main(["distill", RECIPE, "--dry-run", "loss.imp=dense"]) == 2
    assert "did you mean loss.impl" in capsys.readouterr().err


@pytest.mark.parametrize("explained", [False, True])
@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("modelopt", "scripts/setup.sh on a machine without a GPU"),
        ("megatron.bridge", "container/Dockerfile on GPUs"),
        ("megatron-bridge", "container/Dockerfile on GPUs"),
        ("vllm.engine", "pip install 'megatron-kd[vllm]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_brings_it(
    monkeypatch, capsys, package, remedy, explained
):
    def run(args, recapture):
        absence = ModuleNotFoundError(f"No module named {package!r}", name=package)
        if explained:
            raise ValueError(f"this engine needs {package}") from absence
        raise absence

    monkeypatch.setattr("megatron_kd.cache.verify.run", run)
    assert cli.main(["verify", "x"]) == 1
    said = capsys.readouterr().err
    assert remedy in said and said.count("\n") == 1


def test_a_missing_module_that_no_extra_brings_is_not_hidden(monkeypatch):
    def run(args, recapture):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr("megatron_kd.cache.verify.run", run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["verify", "x"])


def test_reading_a_gguf_file_without_its_package_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    words = ["--gguf", str(tmp_path / "m.gguf"), "--output", str(tmp_path / "hf")]
    assert cli.main(["import-gguf", *words]) == 1
    said = capsys.readouterr().err
    assert "megatron-kd[gguf]" in said and said.count("\n") == 1
