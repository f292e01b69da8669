"""Check a machine with GPUs: probe it, prove the losses and layouts on it, measure them beside the
goals and other packages', train every recipe for 20 steps on random weights.

Every part takes at most 8 minutes. Started again, it goes on: parts that ended well for the same
commit and settings are kept. FOLDER/report.md can be pasted into an issue.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from megatron_kd.files import publish
from megatron_kd.tools.gpu_check.part import (
    FAILED,
    LIMIT_S,
    MISSED,
    OK,
    SKIPPED,
    TIMED_OUT,
    Outcome,
    Settings,
    read,
    write,
)

GRACE_S = 45
"""For torchrun to end its ranks: it waits half a minute for them before it kills them."""


def add_arguments(parser) -> None:
    parser.add_argument("folder", nargs="?", default="runs/gpu_check", help="or runs/gpu_check")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of this machine to use")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts; see --list")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="small shapes on the CPU: it shows that the check itself runs",
    )


def run(args) -> int:
    """Run what is not there yet, and write the report after each part.

    Returns:
        0 nothing failed and no goal was missed; 1 otherwise.
    """
    from megatron_kd.tools.gpu_check.parts import PARTS

    if args.list:
        for name, part in PARTS.items():
            print(f"{name:<36}{part.title}")
        return 0
    unknown = [name for name in args.only or () if name not in PARTS]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; --list names them")
    settings = Settings(
        folder=str(Path(args.folder).resolve()),
        device="cpu" if args.rehearse else "cuda",
        ranks=args.ranks,
        small=args.rehearse,
    )
    measured = _measured(settings)
    outcomes = {}
    for name, part in PARTS.items():
        path = settings.place("parts") / f"{name}.json"
        found = read(path)
        if args.only is None or name in args.only:
            if found is None or found.measured != measured or found.status not in (OK, MISSED):
                found = _run(name, part, settings, path)
                found.measured = measured
                write(path, found)
            print(f"{name:<36}{found.status:<10}{found.seconds:6.0f} s", flush=True)
        if found is not None:
            outcomes[name] = found
            report = settings.place(".") / "report.md"
            publish(report, "\n".join(_report(settings, outcomes, PARTS)) + "\n")
    print(f"report: {Path(settings.folder) / 'report.md'}")
    bad = (FAILED, TIMED_OUT, MISSED)
    return 1 if any(outcome.status in bad for outcome in outcomes.values()) else 0


def _measured(settings: Settings) -> str:
    import torch

    from megatron_kd.tools.benchmark import environment

    if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
        raise ValueError(
            f"--ranks {settings.ranks} wants as many GPUs, and PyTorch sees "
            f"{torch.cuda.device_count()} on this machine: run it where they are, or try the check "
            "itself on a CPU with --rehearse"
        )
    plain = dataclasses.asdict(settings) | {"folder": ""}
    name = environment.device_name(torch.device(settings.device), 1)
    return f"{environment.commit()} {name} {json.dumps(plain)}"


def _run(name: str, part, settings: Settings, path: Path) -> Outcome:
    if settings.ranks < part.least_ranks:
        return Outcome(SKIPPED, [f"Takes --ranks {part.least_ranks} or more."])
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "megatron_kd.tools.gpu_check.worker", name]
    words += [json.dumps(dataclasses.asdict(settings)), str(path)]
    started = time.monotonic()
    log = settings.place("parts") / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(LIMIT_S)
            outcome = read(path)
            if outcome is None:
                tail = log.read_text(errors="replace").splitlines()[-15:]
                outcome = Outcome(
                    FAILED, [f"Ended with {process.returncode}.", "```", *tail, "```"]
                )
        except subprocess.TimeoutExpired:
            outcome = Outcome(TIMED_OUT, [f"Ended after {LIMIT_S} s; see {log.name}."])
        finally:
            _end(process)
    outcome.seconds = time.monotonic() - started
    return outcome


def _end(process: subprocess.Popen) -> None:
    """End a part and everything it started. torchrun puts its ranks out of our reach, into sessions
    of their own, but ends them itself when it is asked to end.
    """
    for request in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        sent = request  # once: a second one would interrupt torchrun while it ends its ranks
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, sent)
            except ProcessLookupError:  # all of it has ended
                process.wait()
                return
            sent = 0  # asks whether anything is left
            process.poll()  # so that the first of the group does not stay as a zombie
            time.sleep(0.1)


def _report(settings: Settings, outcomes: dict[str, Outcome], parts: dict) -> list[str]:
    """Lines of the report, in Markdown."""
    title = "GPU check, rehearsed on a CPU at small shapes" if settings.small else "GPU check"
    (first, *_) = outcomes.values()
    lines = [f"# {title}", "", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), ""]
    lines += [f"`{first.measured or _measured(settings)}`", "", "| part | status | s |"]
    lines += ["| --- | --- | --- |"]
    for name, outcome in outcomes.items():
        lines.append(f"| {name} | {outcome.status} | {outcome.seconds:.0f} |")
    for name, outcome in outcomes.items():
        lines += ["", f"## {parts[name].title} ({name}): {outcome.status}", "", *outcome.lines]
    return lines
