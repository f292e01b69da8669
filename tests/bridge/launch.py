"""Start the real thing for tests: torchrun with several cases per launch, or scripts/distill.py
itself.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import comparison

from megatron_kd.metrics_file import curve, read_metrics

REPOSITORY = Path(__file__).parents[2]
RUN_CASES = Path(__file__).with_name("run_cases.py")
DISTILL = REPOSITORY / "scripts" / "distill.py"
TIMEOUT_S = 1800
EXPORT = "exported"


def environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MEGATRON_KD_BACKEND": "cpu",
    }


def torchrun(ranks: int, *command: str) -> list[str]:
    """A command line that starts `command` on `ranks` ranks, with a rendezvous of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *map(str, command)]


def run(command: list[str], *, succeeds: bool = True) -> str:
    """Run to the end and return the output; a surprise ends the test with its last lines."""
    done = subprocess.run(
        command,
        env=environment(),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if (done.returncode == 0) != succeeds:
        raise AssertionError(f"exit status {done.returncode} of {command}:\n{done.stdout[-6000:]}")
    return done.stdout


def run_cases(
    recipe: Path, ranks: int, cases: dict[str, list[str]], *, export: Collection[str] = ()
) -> dict[str, "Curves"]:
    """Run every case in one group of ranks; returns name → curves. Output goes below the recipe's
    folder.

    Args:
        export: Cases whose trained student is written too (`Curves.weights`).
    """
    folder = recipe.parent / "runs"
    listed = []
    for name, overrides in cases.items():
        own = [f"output_dir={folder / name}"]
        if name in export:
            own.append(f"export.hf_path={folder / name / EXPORT}")
        listed.append({"config": str(recipe), "overrides": [*own, *overrides]})
    file = recipe.parent / f"cases-{ranks}-{len(list(recipe.parent.glob('cases-*')))}.json"
    file.write_text(json.dumps(listed))
    run(torchrun(ranks, RUN_CASES, file))
    return {name: Curves(folder / name) for name in cases}


@dataclass
class Launch:
    """Cases for one group of ranks, as `run_cases` takes them."""

    ranks: int
    cases: dict[str, list[str]]
    export: Collection[str] = ()


class Launches:
    """Curves by the name of a case, over several launches. Each starts when one of its cases is
    first asked for, so a selection of tests runs no more than it needs.
    """

    def __init__(self, recipe: Path, launches: Collection[Launch]):
        self._recipe = recipe
        self._waiting = {name: launch for launch in launches for name in launch.cases}
        self._found = {}

    def __getitem__(self, name: str) -> "Curves":
        if name not in self._found:
            launch = self._waiting.get(name)
            assert launch is not None, f"the launch with {name!r} failed before"
            for case in launch.cases:
                del self._waiting[case]
            self._found |= run_cases(self._recipe, launch.ranks, launch.cases, export=launch.export)
        return self._found[name]


class Curves:
    """The metrics of one finished run, read when they are first asked for."""

    def __init__(self, directory: Path):
        self.directory = directory

    @cached_property
    def records(self) -> list[dict]:
        return read_metrics(self.directory)

    def weights(self) -> dict:
        """Tensors of the exported student, by name."""
        return comparison.weights(self.directory / EXPORT)

    def train(self, name: str = "kd loss") -> list[float]:
        return curve(self.records, "train", name)[1]

    def validation(self, name: str = "kd loss") -> list[float]:
        return curve(self.records, "validation", name)[1]

    def grad_norms(self) -> list[float]:
        return [r["grad_norm"] for r in self.records if r["kind"] == "train"]
