"""A study with a trainer that takes no time: what is run, kept, scored, tabulated and drawn."""

import csv
import json
import sys
import time
from pathlib import Path

import pytest
import yaml
from small_report import TEXT, write_sequences

from megatron_kd.cli import main
from megatron_kd.tools.report import study as study_module
from megatron_kd.tools.report.study import train
from megatron_kd.tools.report.study_config import read_study
from megatron_kd.tools.report.study_figures import figure_of
from megatron_kd.tools.report.study_results import collect, mean_sd
from megatron_kd.typed_mapping import ConfigError

REPOSITORY = Path(__file__).parents[3]

# Takes what scripts/distill.py takes and leaves what it leaves: a loss curve, an exported student.
TRAINER = """
import json, pathlib, shutil, sys
given = dict(pair.split("=", 1) for pair in sys.argv[2:])
if "fail" in given:
    sys.exit("no such thing")
folder = pathlib.Path(given["output_dir"])
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(given) + chr(10))
level = float(given["level"]) + int(given["data.seed"])
speed = dict(tokens_per_s=50, model_tflops_per_s=1)
lines = [
    dict(kind="train", iteration=step, losses={{"kd loss": level / step}}, seconds=step, **speed)
    for step in (1, 2, 3)
]
last = {{"kd loss": level, "lm loss": 2 * level}}
lines.append(dict(kind="validation", iteration=3, losses=last))
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
peaks = {{"peak_bytes_by_rank": [3 << 20, 5 << 20]}}
(folder / "peak_memory.json").write_text(json.dumps(peaks))
if "stopped" not in given:
    shutil.copytree(given["model"], folder / "hf")
"""


@pytest.fixture
def study(tmp_path, models):
    trainer, calls = tmp_path / "trainer.py", tmp_path / "calls.jsonl"
    trainer.write_text(TRAINER.format(calls=str(calls)))
    mask = [True] * (len(TEXT) - 1) + [False]
    data = write_sequences(tmp_path / "held-out", "none", [(TEXT, mask, [0, len(TEXT)])])
    runs = {
        "one": {"title": "first", "x": 1, "overrides": [f"model={models['a']}", "level=1"]},
        "two": {"x": 10, "overrides": [f"model={models['b']}", "level=2"]},
    }
    names = list(runs)
    content = {
        "recipe": "recipe.yaml",
        "command": f"{sys.executable} {trainer}",
        "output_dir": str(tmp_path / "runs"),
        "teacher": models["teacher"],
        "held_out": str(data),
        "seeds": [1, 2],
        "runs": runs,
        "sections": {
            "a": {"title": "A", "kind": "curves", "runs": names},
            "b": {"title": "B", "kind": "lines", "x_label": "x", "runs": names},
            "c": {"title": "C", "runs": names},
        },
    }
    return write(tmp_path, content), content, calls


def write(folder, content):
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_run_is_trained_scored_and_shown(study, tmp_path):
    path, content, calls = study
    output = tmp_path / "results"
    assert main(["study", str(path), "--output", str(output), "--jobs", "2"]) == 0
    given = [json.loads(line) for line in calls.read_text().splitlines()]
    assert len(given) == 4
    assert {(g["level"], g["data.seed"], g["bridge.rng.seed"]) for g in given} == {
        (level, seed, seed) for level in "12" for seed in "12"
    }
    with open(output / "study.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["seed"]) for row in rows] == [
        (run, seed) for run in ("one", "two") for seed in "12"
    ]
    assert [float(row["final_kd_loss"]) for row in rows] == [2, 3, 3, 4]
    assert {float(row["seconds_per_iteration"]) for row in rows} == {2.5}
    assert {float(row["peak_mib"]) for row in rows} == {5}
    kl = [float(row["held_out_kl"]) for row in rows]
    assert kl[0] == kl[1] != kl[2] == kl[3] > 0
    text = (output / "study.md").read_text()
    assert f"| first | 2 | {kl[0]:.3f} ± 0.000 |" in text
    tables = dict(zip("abc", text.split("\n## "), strict=True))
    assert {name for name, table in tables.items() if "s/iteration" in table} == {"a"}
    for table in tables.values():  # every line as wide as its heading
        rows = [line.count("|") for line in table.splitlines() if line.startswith("|")]
        assert len(rows) == 4 and len(set(rows)) == 1
    assert sorted(path.name for path in output.glob("*.png")) == [
        f"study_{name}.png" for name in "abc"
    ]


def test_figures_draw_the_means_over_seeds(study, tmp_path):
    path, _, _ = study
    assert main(["study", str(path), "--output", str(tmp_path / "results")]) == 0
    study = read_study(path)
    rows = collect(study)
    kl = [next(row.held_out_kl for row in rows if row.run == name) for name in ("one", "two")]
    curves, lines, bars = (
        figure_of(study, section, rows).axes for section in study.sections.values()
    )
    drawn = {line.get_label(): line.get_xydata().tolist() for line in curves[0].get_lines()}
    assert drawn == {  # level / step, with the levels 2 and 3 of run one, 3 and 4 of run two
        "first": [[1, 2.5], [2, 1.25], [3, pytest.approx(2.5 / 3)]],
        "two": [[1, 3.5], [2, 1.75], [3, pytest.approx(3.5 / 3)]],
    }
    assert [bar.get_width() for bar in curves[1].patches] == [2.5, 2.5]
    (line,) = lines[0].get_lines()[:1]
    assert line.get_xydata().tolist() == [[1, pytest.approx(kl[0])], [10, pytest.approx(kl[1])]]
    assert [bar.get_width() for bar in bars[0].patches] == pytest.approx(kl)
    assert [label.get_text() for label in bars[0].get_yticklabels()] == ["first", "two"]
    assert bars[0].figure.get_suptitle() == "C"


def test_mean_and_deviation_over_seeds():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_sd([4.0]) == (4.0, 0.0)


def test_finished_runs_are_kept_and_failed_ones_repeated(study, tmp_path, capsys):
    path, content, calls = study
    output = str(tmp_path / "results")
    content["runs"]["two"]["overrides"].append("fail=1")
    write(tmp_path, content)
    assert main(["study", str(path), "--output", output]) == 1
    assert "no such thing" in capsys.readouterr().err
    assert len(calls.read_text().splitlines()) == 2
    content["runs"]["two"]["overrides"].pop()
    write(tmp_path, content)
    assert main(["study", str(path), "--output", output, "--only", "one"]) == 0
    assert len(calls.read_text().splitlines()) == 2
    assert main(["study", str(path), "--output", output]) == 0
    assert len(calls.read_text().splitlines()) == 4


def test_a_run_that_stopped_early_is_not_finished(study, tmp_path, capsys):
    """It saves and ends with status 0 when it is asked to stop, and exports nothing."""
    path, content, calls = study
    content["runs"]["two"]["overrides"].append("stopped=1")
    write(tmp_path, content)
    assert main(["study", str(path), "--output", str(tmp_path / "results")]) == 1
    assert "two, seed 1 failed" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "two" / "1" / "finished").exists()


def test_a_finished_run_of_other_overrides_is_refused(study, tmp_path, capsys):
    path, content, calls = study
    arguments = ["study", str(path), "--output", str(tmp_path / "results")]
    assert main(arguments) == 0
    content["runs"]["one"]["overrides"].append("level=5")
    write(tmp_path, content)
    assert main(arguments) == 1
    assert "remove the folder, or give the run another name" in capsys.readouterr().err
    assert len(calls.read_text().splitlines()) == 4


@pytest.mark.extended
def test_a_run_that_an_earlier_version_finished_is_kept(study, tmp_path):
    path, content, calls = study
    content["runs"]["one"]["overrides"].append("loss.tail=renormalize")
    write(tmp_path, content)
    arguments = ["study", str(path), "--output", str(tmp_path / "results")]
    assert main(arguments) == 0
    started = len(calls.read_text().splitlines())
    for file in (tmp_path / "runs" / "one").glob("*/finished"):
        spelled = [x.replace("renormalize", "renormalise") for x in json.loads(file.read_text())]
        file.write_text(json.dumps(["--config", *spelled]))
    assert main(arguments) == 0
    assert len(calls.read_text().splitlines()) == started


def test_scores_follow_what_they_are_measured_on(study, tmp_path, models):
    path, content, _ = study
    output = tmp_path / "results"

    def scores():
        assert main(["study", str(path), "--output", str(output)]) == 0
        with open(output / "study.csv") as file:
            return [row["held_out_kl"] for row in csv.DictReader(file)]

    before = scores()
    content["teacher"] = models["a"]
    write(tmp_path, content)
    after = scores()
    assert after != before and float(after[0]) == pytest.approx(0, abs=1e-6)


def test_an_interrupt_starts_no_further_run(study, monkeypatch):
    started = []

    def interrupted(study, name, seed):
        started.append(name)
        time.sleep(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(study_module, "_launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(read_study(study[0]), ["one", "two"], jobs=1)
    assert len(started) <= 2  # of four; the second may begin before the first is heard of


def test_bad_studies_are_refused(study, tmp_path, capsys):
    path, content, _ = study
    for change, message in (
        ({"seeds": []}, "at least one"),
        ({"sections": {"a": {"title": "A", "runs": ["three"]}}}, "three"),
        ({"runs": {"one": {"overides": []}}, "sections": {}}, "did you mean runs.one.overrides"),
        (
            {
                "runs": {"one": {}},
                "sections": {"l": {"title": "", "kind": "lines", "runs": ["one"]}},
            },
            "needs an x",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read_study(write(tmp_path, content | change))
    write(tmp_path, content)
    assert main(["study", str(path), "--output", "x", "--only", "three"]) == 1
    assert "three" in capsys.readouterr().err
    assert main(["study", "nowhere.yaml", "--output", "x"]) == 1
    assert "no study at nowhere.yaml" in capsys.readouterr().err
    path.write_text("runs: [*.mlp.*]")
    assert main(["study", str(path), "--output", "x"]) == 1
    assert "is not valid YAML" in capsys.readouterr().err


def test_the_study_that_ships_is_whole():
    study = read_study(REPOSITORY / "configs" / "study" / "laptop.yaml")
    shown = {name for section in study.sections.values() for name in section.runs}
    assert shown == set(study.runs)
    assert len(study.seeds) == 3
