"""Run the variants of a study over several seeds, score every student on held-out sequences, and
write tables and figures.

The study is a YAML file: a recipe, the command that trains it, seeds, runs (name: overrides) and
sections that compare runs. Finished runs are kept, so a study that was stopped goes on.
"""

import dataclasses
import json
import shlex
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from megatron_kd.tools import figures
from megatron_kd.tools.console import table_console
from megatron_kd.tools.report.held_out import held_out_scores
from megatron_kd.tools.report.study_config import StudyConfig, read_study
from megatron_kd.tools.report.study_figures import figure_of
from megatron_kd.tools.report.study_results import SCORES_FILE, collect, summary, write_table
from megatron_kd.typed_mapping import ConfigError

FINISHED = "finished"
STUDENTS_AT_ONCE = 8
LOG_LINES = 20


def add_arguments(parser) -> None:
    parser.add_argument("study", metavar="YAML")
    parser.add_argument("--output", required=True, metavar="DIR", help="for tables and figures")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="train no others")


def run(args) -> int:
    study = read_study(args.study)
    unknown = sorted(set(args.only or ()) - set(study.runs))
    if unknown:
        raise ConfigError(f"--only: {unknown} are not runs of {args.study}: {sorted(study.runs)}")
    failed = train(study, args.only or list(study.runs), args.jobs)
    score(study)
    rows = collect(study)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    write_table(rows, output / "study.csv")
    (output / "study.md").write_text(summary(study, rows))
    for name, section in study.sections.items():
        if any(row.run in section.runs for row in rows):
            figures.save(figure_of(study, section, rows), output / f"study_{name}.png", dpi=120)
    table_console().print(f"{len(rows)} runs: {output}/study.csv, study.md and a PNG per section")
    return 1 if failed else 0


def train(study: StudyConfig, names: list[str], jobs: int) -> list[Path]:
    """Train what is not finished; returns the folders of runs that failed.

    Raises:
        ConfigError: A finished run was trained with other overrides than the study has now.
    """
    waiting = [
        (name, seed) for seed in study.seeds for name in names if not _finished(study, name, seed)
    ]
    failed, lock = [], threading.Lock()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=len(waiting))

        def train_one(name: str, seed: int) -> None:
            folder = study.folder(name, seed)
            status = _launch(study, name, seed)
            with lock:
                progress.advance(bar)
                if status:
                    failed.append(folder)
                    log = folder / "log.txt"
                    tail = "\n".join(log.read_text().splitlines()[-LOG_LINES:])
                    progress.console.print(f"{tail}\n{name}, seed {seed} failed: {log}")

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for _ in pool.map(lambda each: train_one(*each), waiting):
                pass  # what it raises, Ctrl-C too, cancels the runs that have not begun
    return failed


def _launch(study: StudyConfig, name: str, seed: int) -> int:
    folder = study.folder(name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = _arguments(study, name, seed)
    command = [*shlex.split(study.command), *arguments]
    with open(folder / "log.txt", "w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    # A run that was asked to stop early ends well too, but exports nothing.
    if status == 0 and (folder / "hf" / "config.json").is_file():
        (folder / FINISHED).write_text(json.dumps(arguments))
        return 0
    return status or 1


def _arguments(study: StudyConfig, name: str, seed: int) -> list[str]:
    folder = study.folder(name, seed)
    return [
        study.recipe,
        f"output_dir={folder}",
        f"export.hf_path={folder}/hf",
        f"data.seed={seed}",
        f"bridge.rng.seed={seed}",
        *study.runs[name].overrides,
    ]


def _finished(study: StudyConfig, name: str, seed: int) -> bool:
    folder = study.folder(name, seed)
    if not (folder / FINISHED).is_file():
        return False
    before, now = json.loads((folder / FINISHED).read_text()), _arguments(study, name, seed)
    if _as_spelled_today(before) != _as_spelled_today(now):
        raise ConfigError(
            f"{folder} was trained with {shlex.join(before)}, the study now has "
            f"{shlex.join(now)}; remove the folder, or give the run another name"
        )
    return True


def _as_spelled_today(arguments: list[str]) -> list[str]:
    """Arguments of a run, also of one that an earlier version finished."""
    return [
        argument.replace("loss.tail=renormalise", "loss.tail=renormalize")
        for argument in arguments
        if argument != "--config"
    ]


def score(study: StudyConfig) -> None:
    """Write `held_out.json` beside every trained student that has none by this measure."""
    from megatron_kd.data.sequences import SequenceReader

    sequences = SequenceReader(study.held_out)
    by = {
        "teacher": study.teacher,
        "data": sequences.fingerprint,
        "sequences": study.held_out_sequences,
    }
    waiting = [
        folder
        for name in study.runs
        for seed in study.seeds
        if _finished(study, name, seed) and not _scored(folder := study.folder(name, seed), by)
    ]
    for start in range(0, len(waiting), STUDENTS_AT_ONCE):
        students = [str(folder / "hf") for folder in waiting[start : start + STUDENTS_AT_ONCE]]
        found = held_out_scores(study.teacher, students, sequences, limit=study.held_out_sequences)
        for student, scores in found.items():
            content = {"by": by, "scores": dataclasses.asdict(scores)}
            (Path(student).parent / SCORES_FILE).write_text(json.dumps(content))


def _scored(folder: Path, by: dict) -> bool:
    path = folder / SCORES_FILE
    return path.is_file() and json.loads(path.read_text())["by"] == by
