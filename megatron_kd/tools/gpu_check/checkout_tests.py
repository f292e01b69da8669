"""The repository's own tests on this machine's devices; skipped where there is no checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

from megatron_kd.tools.gpu_check.part import FAILED, SKIPPED, Outcome, Settings

ROOT = Path(__file__).parents[3]
LAYOUT_PARTS = 24
"""Into how many parts the matrix of layouts is cut. One has four cases, each with the run that it
must equal, and a start takes the better part of a minute on a GPU."""


def losses(settings: Settings) -> Outcome:
    """Exactness against fp64, no synchronization, a short training with each head."""
    return _pytest(settings, "losses", ["tests/gpu"], [] if settings.small else ["-m", "gpu"])


def ranks(settings: Settings) -> Outcome:
    """Vocabulary shards against one rank."""
    where = ["tests/dist/losses"] if settings.small else ["tests/dist"]
    return _pytest(settings, "ranks", where, [])


def layouts(number: int):
    """The part that runs the share `number`, from 0, of the matrix of layouts and features."""

    def run(settings: Settings) -> Outcome:
        if not _present():
            return _absent()
        if settings.small and number:
            return Outcome(SKIPPED, ["The first stands for all in a rehearsal."])
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/bridge/test_equality.py", "--collect-only"]
            + ["-q", "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=_environment(settings),
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        cases = share([line for line in listed.splitlines() if "::" in line], number)
        return _pytest(settings, f"layouts_{number}", cases[:1] if settings.small else cases, [])

    return run


def share(cases: list[str], number: int) -> list[str]:
    """Neighbors of the list, which often equal the same run; all shares together are the list."""
    bounds = [len(cases) * n // LAYOUT_PARTS for n in (number, number + 1)]
    return cases[slice(*bounds)]


def _environment(settings: Settings) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    chosen = {"MEGATRON_KD_BACKEND": settings.device, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return os.environ | chosen | {"MEGATRON_KD_GPU_TESTS_ON": settings.device}


def _present() -> bool:
    return (ROOT / "tests" / "backend.py").is_file()


def _absent() -> Outcome:
    return Outcome(SKIPPED, ["Needs a checkout, or the image, which carries the tests."])


def _pytest(settings: Settings, name: str, where: list[str], options: list[str]) -> Outcome:
    if not _present():
        return _absent()
    log = settings.place(name) / "tests.log"
    with log.open("w") as output:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *where,
                *options,
                "-q",
                "-s",
                "-p",
                "no:cacheprovider",
            ],
            cwd=ROOT,
            env=_environment(settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    lines = log.read_text(errors="replace").splitlines()
    told = [line for line in lines if re.match(r"(FAILED|ERROR|E   )|.*(it/s|ms per step)", line)]
    outcome = Outcome(lines=["```", *told[:40], *lines[-1:], "```"])
    if done.returncode:
        outcome.worsen(FAILED)
    return outcome
