"""What looks at caches loads no framework: `verify`, `inspect` and every --help answer at once."""

import subprocess
import sys

import pytest
from cache_samples import make_samples, write_cache

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "matplotlib", "fsspec", "megatron")


def loaded_by(*arguments):
    """The heavy packages that a command has loaded when it is through."""
    code = (
        "import sys\n"
        "from megatron_kd import cli\n"
        "try:\n    status = cli.main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    status = stop.code\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "print(status, *loaded, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", ["verify", "inspect", "prepare", "convert"])
def test_help(command):
    assert loaded_by(command, "--help") == "0"


def test_verify_and_inspect(tmp_path):
    path = write_cache(tmp_path / "c", make_samples(count=3))
    assert loaded_by("verify", path, "--decode") == "0"
    assert loaded_by("inspect", path) == "0"
    assert loaded_by("inspect", path, "--png", tmp_path / "c.png") == "0 matplotlib"
