"""Interpreters with their imports behind them, for tests that start many processes.

`warm_python("host")` is the path of an executable that takes what `python` takes (a script, -m or
-c, and arguments) and starts in milliseconds what would import for half a minute. Use it wherever a
test would say `sys.executable`; a test of what a command imports, or of the installed entry point,
must not.
"""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
START_S = 300
# Variables that are read once, by an import. A request for other values gets a cold interpreter.
FIXED = {
    "torch": {"OMP_NUM_THREADS": "1"},
    "host": {
        "OMP_NUM_THREADS": "1",
        "MEGATRON_KD_BACKEND": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    },
}


def process_behind(pid: int) -> int:
    """The process that runs what was asked for, given the one that a test started or found."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for folder in _folders:
            note = folder / f"socket.{pid}"
            if note.exists():
                return int(note.read_text())
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} did not ask for a warm interpreter")


_folders = []


@functools.cache
def warm_python(kind: str) -> str:
    """The executable of this kind ("torch" or "host", see imports.py); its server starts on first
    use and ends with this process.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"warm-{kind}-"))
    _folders.append(folder)
    path = folder / "socket"
    shim = folder / "python"
    shim.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{HERE / "client.py"}" "{path}" "$@"\n'
    )
    shim.chmod(0o755)
    description = {"executable": sys.executable, "fixed": FIXED[kind]}
    (folder / "socket.json").write_text(json.dumps(description))
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(path), kind, str(shim)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | FIXED[kind] | {"PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )

    @atexit.register
    def end():
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    deadline = time.monotonic() + START_S
    while not path.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the warm interpreter did not start:\n{log.read_text()[-6000:]}")
        time.sleep(0.05)
    return str(shim)
