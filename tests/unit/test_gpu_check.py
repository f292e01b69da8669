"""The check of a GPU machine: what is run again, how a part can end, and what the report says. The
parts themselves are rehearsed in tests/slow/test_gpu_check_rehearsal.py.
"""

import os
import subprocess
import sys
import time

import pytest

from megatron_kd.cli import main
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.gpu_check import checkout_tests, command, measured, part, recipe_runs
from megatron_kd.tools.gpu_check.part import Outcome, Part, Settings


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the command with parts that a test gives, in a folder of its own; returns its status."""

    def run(outcomes: dict[str, Outcome], *options: str) -> int:
        calls.clear()

        def ran(name, chosen, settings, path):
            calls.append(name)
            return outcomes[name]

        names = {name: Part(name.title(), lambda settings: Outcome()) for name in outcomes}
        monkeypatch.setattr("megatron_kd.tools.gpu_check.parts.PARTS", names)
        monkeypatch.setattr(command, "_run", ran)
        return main(["dev", "gpu-check", str(tmp_path), "--rehearse", *options])

    calls = run.calls = []
    run.report = lambda: (tmp_path / "report.md").read_text()
    return run


def test_what_ended_well_is_not_run_again_and_the_rest_is(check):
    found = {"first": Outcome(lines=["fine"]), "second": Outcome(part.FAILED, ["broken"])}
    assert check(found) == 1
    assert check.calls == ["first", "second"]
    report = check.report()
    assert "| first | ok | 0 |" in report and "## Second (second): failed" in report
    found["second"] = Outcome(part.MISSED, ["slow"])
    assert check(found) == 1 and check.calls == ["second"]
    assert check(found) == 1 and check.calls == []
    assert "fine" in check.report() and "broken" not in check.report()


def test_other_settings_are_another_measurement(check):
    found = {"first": Outcome()}
    assert check(found) == 0
    assert check(found, "--ranks", "2") == 0 and check.calls == ["first"]


def test_a_part_that_is_not_there_is_named(check, capsys):
    assert check({"first": Outcome()}, "--only", "second") == 1
    assert "no part second; --list names them" in capsys.readouterr().err


def test_without_gpus_the_remedy_is_said(tmp_path, capsys):
    assert main(["dev", "gpu-check", str(tmp_path), "--ranks", "64"]) == 1
    assert "wants as many GPUs" in capsys.readouterr().err and not list(tmp_path.glob("*.md"))


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(tmp_path, monkeypatch):
    settings, path = Settings(folder=str(tmp_path), device="cpu"), tmp_path / "outcome.json"
    monkeypatch.setattr(command, "LIMIT_S", 0.1)
    started = time.monotonic()
    ended = command._run("probe", Part("Probe", None), settings, path)
    assert ended.status == part.TIMED_OUT and time.monotonic() - started < 30
    few = command._run("probe", Part("Probe", None, least_ranks=2), settings, path)
    assert few.status == part.SKIPPED


@pytest.mark.parametrize(
    ("peak_gib", "speed", "status"), [(2.9, 11.5, "ok"), (3.1, 11.5, "missed"), (2.9, 9, "missed")]
)
def test_goals_are_held_to_what_was_measured(tmp_path, monkeypatch, peak_gib, speed, status):
    row = {"implementation": "in_forward", "status": "ok", "iterations_per_s": str(speed)}
    row["peak_memory_bytes"] = str(int(peak_gib * 2**30))
    monkeypatch.setattr(measured, "_bench", lambda *given: ([row], Outcome()))
    assert measured.paper(32768)(Settings(folder=str(tmp_path))).status == status


def test_every_recipe_is_a_part_and_knows_its_ranks(tmp_path):
    ranks = {
        name: recipe_runs._Plan(name, Settings(folder=str(tmp_path))).ranks
        for name in recipe_runs.names()
    }
    assert ranks["gpt-oss-20b-32k-four-nodes"] == 32 and ranks["qwen3-8b-to-4b"] == 8
    assert ranks["study"] == 1 and ranks["llama-8k-online"] == 1


def test_every_loss_that_is_measured_is_known():
    assert {*measured.OURS, *measured.PEERS} <= IMPLEMENTATIONS.keys()


ENDLESS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(flush=True)
time.sleep(600)
"""


def test_what_a_part_started_is_ended_with_it():
    part = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], start_new_session=True, stdout=subprocess.PIPE
    )
    part.stdout.readline()
    command._end(part)
    assert part.returncode
    with pytest.raises(ProcessLookupError):
        os.killpg(part.pid, 0)


@pytest.mark.parametrize("count", [0, 5, 95])
def test_shares_of_the_layouts_are_all_of_them_once(count):
    cases = [f"case {n}" for n in range(count)]
    shares = [checkout_tests.share(cases, n) for n in range(checkout_tests.LAYOUT_PARTS)]
    assert sum(shares, []) == cases
    assert max(map(len, shares)) <= -(-count // checkout_tests.LAYOUT_PARTS)
