"""Start the real thing for tests, in processes that have the host imported already (`warm`): single
commands, ranks with the environment that torchrun gives them, or torchrun itself.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import backend
import comparison
import pytest
from torch.distributed import TCPStore
from warm import process_behind, warm_python

from megatron_kd.host.parity import record
from megatron_kd.metrics_file import curve, read_metrics

REPOSITORY = Path(__file__).parents[2]
RUN_CASE = Path(__file__).with_name("run_case.py")
DISTILL = REPOSITORY / "scripts" / "distill.py"
PROOFS = REPOSITORY / "build" / "tests" / "cache"
TIMEOUT_S = 900
EXPORT = "exported"
LAST_CHARACTERS = 6000


def environment() -> dict[str, str]:
    path = [str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        backend.SWITCH: backend.BACKEND,
        # Proofs that the host computes a model are kept from one test process to the next; they are
        # bound to the code that they prove.
        record.FOLDER_VARIABLE: os.environ.get(record.FOLDER_VARIABLE, str(PROOFS)),
    }


def host_python() -> str:
    """Takes what `python` takes, with the host imported; its processes are all fresh."""
    return warm_python("host")


def torchrun(ranks: int, *command: str) -> list[str]:
    """A command line of the real torchrun, with a rendezvous of its own, that starts `command` on
    `ranks` ranks. `start_ranks` is quicker where torchrun itself is not at stake.
    """
    launcher = [host_python(), "-m", "torch.distributed.run", "--standalone"]
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
        tail = done.stdout[-LAST_CHARACTERS:]
        raise AssertionError(f"exit status {done.returncode} of {command}:\n{tail}")
    return done.stdout


@dataclass
class Ranks:
    """Processes of one group, one per rank, started with what torchrun would give them."""

    processes: list[subprocess.Popen]
    store: TCPStore  # where they meet; torchrun's agent holds it too
    folder: tempfile.TemporaryDirectory = field(repr=False)

    def log(self, rank: int) -> str:
        """What a rank has written so far."""
        return (Path(self.folder.name) / str(rank)).read_text(errors="replace")

    def pids(self) -> list[int]:
        """The processes that run the ranks, in their order, to signal or to look at."""
        return [process_behind(process.pid) for process in self.processes]

    def poll(self) -> int | None:
        """The first exit status that is not 0; 0 when every rank has ended; else None."""
        found = [process.poll() for process in self.processes]
        failed = [status for status in found if status]
        return failed[0] if failed else (None if None in found else 0)

    def output(self) -> str:
        """What the ranks have written so far, one after another."""
        return "\n".join(self.log(rank) for rank in range(len(self.processes)))

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The first exit status that is not 0, after which the other ranks are killed; or 0."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                codes = [process.poll() for process in self.processes]
                self.kill()
                tails = "\n".join(self.log(rank)[-2000:] for rank in range(len(codes)))
                raise AssertionError(f"not done after {timeout_s} s: {codes}\n{tails}")
            time.sleep(0.01)
        self.kill()
        return status

    def check(self) -> None:
        """Wait; a rank that fails ends the test with its last lines."""
        if self.wait():
            codes = [process.returncode for process in self.processes]
            first = next(rank for rank, code in enumerate(codes) if code not in (0, -9))
            tail = self.log(first)[-LAST_CHARACTERS:]
            raise AssertionError(f"rank {first} of exit statuses {codes} failed:\n{tail}")

    def kill(self) -> None:
        """SIGKILL every rank that still runs."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def start_ranks(ranks: int, *command: str, python: str | None = None) -> Ranks:
    """Start `command` on every rank of a new group.

    Args:
        python: The interpreter; None is `host_python()`.
    """
    if backend.ON_GPUS and ranks > backend.visible_gpus():
        pytest.skip(f"{ranks} ranks want a GPU each; {backend.visible_gpus()} are visible")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    shared = environment() | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    processes = []
    for rank in range(ranks):
        with (Path(folder.name) / str(rank)).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [python or host_python(), *map(str, command)],
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return Ranks(processes, store, folder)


def run_cases(
    recipe: Path, ranks: int, cases: dict[str, list[str]], *, export: Collection[str] = ()
) -> dict[str, "Curves"]:
    """Run every case, one after another, each in a fresh group of ranks; returns name → curves.
    Output goes below the recipe's folder.

    Args:
        export: Cases whose trained student is written too (`Curves.weights`).
    """
    folder = recipe.parent / "runs"
    for name, overrides in cases.items():
        own = [*backend.PRECISION, f"output_dir={folder / name}"]
        if name in export:
            own.append(f"export.hf_path={folder / name / EXPORT}")
        try:
            start_ranks(ranks, RUN_CASE, recipe, *own, *overrides).check()
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from None
    return {name: Curves(folder / name) for name in cases}


def answers_of(script: str, *arguments, asked: list, columns: int = 400) -> list:
    """What a script of this folder that prints "ANSWER " and JSON says, when it reads `asked` as
    JSON from its standard input.
    """
    done = subprocess.run(
        [host_python(), str(Path(__file__).with_name(script)), *map(str, arguments)],
        input=json.dumps(asked),
        env=environment() | {"COLUMNS": str(columns)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0, done.stderr[-LAST_CHARACTERS:]
    return [json.loads(line) for line in lines]


def prepare_all(recipe: Path, cases: dict[str, list[str]]) -> dict[str, str]:
    """name → what preparing the recipe with these overrides says: "accepted", or the refusal."""
    answers = answers_of("prepare_all.py", recipe, asked=list(cases.values()))
    return dict(zip(cases, answers, strict=True))


def call_all(calls: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    """name → (exit status, output with its white space folded) of command lines of megatron-kd."""
    answers = answers_of("call_all.py", asked=list(calls.values()))
    return dict(zip(calls, map(tuple, answers), strict=True))


@dataclass
class Launch:
    """Cases for one group of ranks, as `run_cases` takes them."""

    ranks: int
    cases: dict[str, list[str]]
    export: Collection[str] = ()


class Launches:
    """Curves by the name of a case. Each case runs when it is first asked for, so a selection of
    tests runs no more than it needs; one that failed is not run again.
    """

    def __init__(self, recipe: Path, launches: Collection[Launch]):
        self._recipe = recipe
        self._launches = {name: launch for launch in launches for name in launch.cases}
        self._found = {}

    def __getitem__(self, name: str) -> "Curves":
        if name not in self._found:
            launch = self._launches[name]
            self._found[name] = None
            try:
                found = run_cases(
                    self._recipe, launch.ranks, {name: launch.cases[name]}, export=launch.export
                )
            except pytest.skip.Exception:  # it needs more GPUs: each test that asks is skipped
                del self._found[name]
                raise
            self._found |= found
        assert self._found[name] is not None, f"case {name!r} failed before"
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
