"""docs/api.md is what the docstrings say."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_reference_is_up_to_date():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "api_reference.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
