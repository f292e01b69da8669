"""The whole check of a GPU machine, rehearsed at small shapes on the CPU backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_kd.tools.gpu_check.checkout_tests import LAYOUT_PARTS
from megatron_kd.tools.gpu_check.parts import PARTS

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


@pytest.mark.slow
def test_every_part_runs_at_small_shapes(tmp_path):
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path), "--rehearse", "--ranks", "4"],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    report = (tmp_path / "report.md").read_text()
    summary = report.split("\n## ")[0].splitlines()  # below stand the parts' own tables
    ended = dict(line.split(" | ")[:2] for line in summary if line.startswith("| "))
    ended = {name.removeprefix("| "): status for name, status in ended.items()}
    skipped = {name for name in PARTS if ended[name] != "ok"}
    assert skipped == {
        "recipe-minitron-8b-to-4b",
        *(f"layouts-{n + 1}" for n in range(1, LAYOUT_PARTS)),
    }
