import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prepared import random_sequences, write_split
from tiny_chat import write_prompts

SCRIPT = Path(__file__).with_name("kill_runs.py")


@pytest.mark.parametrize("work", ["capture", pytest.param("generate", marks=pytest.mark.extended)])
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments_leaves_what_resumes_to_the_same_bytes(
    kills, work, teacher_dir, chat_model_dir, tmp_path
):
    if work == "capture":
        data = write_split(tmp_path / "data" / "train", random_sequences(0, 40))
        model = teacher_dir
    else:
        data, model = write_prompts(tmp_path / "prompts.jsonl", 16), chat_model_dir
    done = subprocess.run(
        [sys.executable, SCRIPT, work, data, model, tmp_path, str(kills), "17"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"] == kills and report["completed"] >= 1
    if kills >= 50:  # before the first shard, between shards, and with many done
        assert min(report["moments"]) <= 1 and max(report["moments"]) >= report["shards"] // 2
