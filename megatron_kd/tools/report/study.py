"""Run the variants of a study over several seeds, score every student on held-out sequences, and
write tables and figures.

The study is a YAML file: a recipe, the command that trains it, seeds, runs (name: overrides) and
sections that compare runs. Finished runs are kept, so a study that was stopped goes on.
"""

import csv
import dataclasses
import json
import shlex
import statistics
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from megatron_kd.metrics_file import curve, peak_bytes_by_rank, read_metrics
from megatron_kd.recipe_file import merged_recipe
from megatron_kd.sections import Integer, Number, build, config_section
from megatron_kd.tools.report.held_out import Scores, held_out_scores
from megatron_kd.tools.report.study_figures import draw
from megatron_kd.typed_mapping import ConfigError

FINISHED = "finished"
SCORES = "held_out.json"
STUDENTS_AT_ONCE = 8
LOG_LINES = 20


@config_section
class StudyRun:
    overrides: list[str] = field(default_factory=list)
    """Of the recipe, `key=value`."""
    title: str | None = None
    """How tables call it; null takes the run's name."""
    series: str | None = None
    """The line it belongs to in a section of kind `lines`."""
    x: Number | None = None
    """Its place on that line."""


@config_section
class StudySection:
    title: str
    kind: Literal["bars", "curves", "lines"] = "bars"
    """The figure: held-out scores as bars or over x, or loss curves."""
    x_label: str = ""
    runs: list[str]


@config_section
class StudyConfig:
    recipe: str
    command: str
    """What trains: it is given `--config RECIPE` and overrides, and must not return before the end.
    """
    output_dir: str
    """One folder per run and seed goes below it."""
    teacher: str
    """Hugging Face directory."""
    held_out: str
    """One split of prepared data that no run trains on."""
    held_out_sequences: Integer | None = None
    """Score on this many of its sequences, evenly spaced; null scores on all."""
    seeds: list[Integer]
    """Of data order and initialisation."""
    runs: dict[str, StudyRun]
    sections: dict[str, StudySection]

    def __post_init__(self):
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be distinct and at least one, not {self.seeds}")
        for name, section in self.sections.items():
            unknown = sorted(set(section.runs) - set(self.runs))
            if unknown:
                raise ConfigError(f"sections.{name}.runs: {unknown} are not among the study's runs")
            if section.kind == "lines" and any(self.runs[run].x is None for run in section.runs):
                raise ConfigError(f"sections.{name} draws lines: every run of it needs an x")

    def folder(self, run: str, seed: int) -> Path:
        return Path(self.output_dir) / run / str(seed)

    def title(self, run: str) -> str:
        return self.runs[run].title or run


@dataclass
class Row:
    """One trained student; a line of the table."""

    run: str
    seed: int
    iterations: int
    held_out_kl: float
    next_token_accuracy: float
    teacher_agreement: float
    final_kd_loss: float
    final_lm_loss: float
    seconds_per_iteration: float
    tokens_per_s: float
    model_tflops_per_s: float
    peak_mib: float


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
        draw(study, section, rows, output / f"study_{name}.png")
    Console().print(f"{len(rows)} runs: {output}/study.csv, study.md and a PNG per section")
    return 1 if failed else 0


def read_study(path: str | Path) -> StudyConfig:
    """The checked study.

    Raises:
        ConfigError: Names the key and what was expected.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no study at {path}")
    return build(StudyConfig, merged_recipe(path))


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
        *("--config", study.recipe),
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
    if before != now:
        raise ConfigError(
            f"{folder} was trained with {shlex.join(before)}, the study now has "
            f"{shlex.join(now)}; remove the folder, or give the run another name"
        )
    return True


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
            (Path(student).parent / SCORES).write_text(json.dumps(content))


def _scored(folder: Path, by: dict) -> bool:
    path = folder / SCORES
    return path.is_file() and json.loads(path.read_text())["by"] == by


def collect(study: StudyConfig) -> list[Row]:
    """A row per scored run, in the study's order."""
    folders = [(name, seed) for name in study.runs for seed in study.seeds]
    return [
        _row(name, seed, folder)
        for name, seed in folders
        if (folder := study.folder(name, seed)).joinpath(SCORES).is_file()
    ]


def _row(name: str, seed: int, folder: Path) -> Row:
    records = read_metrics(folder)
    scores = Scores(**json.loads((folder / SCORES).read_text())["scores"])
    steps = [record for record in records if record["kind"] == "train"]
    warm = steps[1:] or steps  # the first iteration also warms up

    def median(key: str) -> float:
        return statistics.median(record[key] for record in warm)

    def last(loss: str) -> float:
        _, values = curve(records, "validation", loss)
        return values[-1] if values else float("nan")

    return Row(
        run=name,
        seed=seed,
        iterations=steps[-1]["iteration"],
        held_out_kl=scores.kl,
        next_token_accuracy=scores.accuracy,
        teacher_agreement=scores.agreement,
        final_kd_loss=last("kd loss"),
        final_lm_loss=last("lm loss"),
        seconds_per_iteration=median("seconds"),
        tokens_per_s=median("tokens_per_s"),
        model_tflops_per_s=median("model_tflops_per_s"),
        peak_mib=max(peak_bytes_by_rank(folder)) / (1 << 20),
    )


def write_table(rows: list[Row], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in dataclasses.fields(Row))
        for row in rows:
            values = dataclasses.astuple(row)
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)


def summary(study: StudyConfig, rows: list[Row]) -> str:
    """Markdown: a table per section, mean ± standard deviation over seeds. Time and memory are in
    those of kind `curves` alone: the other sections' runs may have shared the machine.
    """
    parts = []
    for section in study.sections.values():
        headings = ["run", "seeds", "held-out KL (nats)", "next token", "teacher's first"]
        if section.kind == "curves":
            headings += ["s/iteration", "TFLOP/s", "peak (MiB)"]
        lines = [
            f"## {section.title}",
            "",
            f"| {' | '.join(headings)} |",
            f"|---{'|--:' * (len(headings) - 1)}|",
        ]
        for name in section.runs:
            own = [row for row in rows if row.run == name]
            if not own:
                continue
            cells = [
                mean_sd([row.held_out_kl for row in own], "{:.3f}"),
                mean_sd([100 * row.next_token_accuracy for row in own], "{:.1f}") + " %",
                mean_sd([100 * row.teacher_agreement for row in own], "{:.1f}") + " %",
                mean_sd([row.seconds_per_iteration for row in own], "{:.2f}"),
                mean_sd([row.model_tflops_per_s for row in own], "{:.3f}"),
                mean_sd([row.peak_mib for row in own], "{:,.0f}"),
            ][: len(headings) - 2]
            lines.append(f"| {study.title(name)} | {len(own)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def mean_sd(values: list[float], form: str) -> str:
    text = form.format(statistics.mean(values))
    return f"{text} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else text
