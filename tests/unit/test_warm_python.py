"""The interpreters that tests fork behave as fresh ones."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

import pytest
from warm import process_behind, warm_python
from warm.server import Server

VALUES = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    values = options.pop("env", VALUES)
    return subprocess.run(
        [warm_python("torch"), *arguments],
        env=values,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


@pytest.mark.parametrize("status", [0, 7])
def test_exit_status(status):
    assert run("-c", f"import sys; sys.exit({status})").returncode == status


def test_an_exception_is_a_traceback_and_status_1():
    done = run("-c", "1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_death_by_a_signal_is_seen():
    assert run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    assert run("-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM


def test_input_arguments_environment_and_folder_arrive(tmp_path):
    code = "import json, os, sys; print(json.dumps([sys.stdin.read(), sys.argv, os.getcwd(),"
    code += " os.environ['ASKED'], 'HOME' in os.environ]))"
    values = {"ASKED": "yes", "OMP_NUM_THREADS": "1"}
    done = run("-c", code, "a", "b", input="text", env=values, cwd=tmp_path)
    assert json.loads(done.stdout) == ["text", ["-c", "a", "b"], str(tmp_path), "yes", False]


def test_nothing_is_left_for_the_next():
    code = "import torch, json; torch.manual_seed(3); json.left = 1; torch.set_num_threads(2)"
    first = run("-c", code)
    assert first.returncode == 0, first.stderr
    code = "import torch, json; print(hasattr(json, 'left'), torch.initial_seed() == 3)"
    assert run("-c", code).stdout.split() == ["False", "False"]


def test_signals_reach_the_process_and_its_end_is_that_of_the_client(tmp_path):
    code = "import signal, sys, time, pathlib\n"
    code += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\n"
    code += f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\ntime.sleep(300)"
    for kill, status in ((signal.SIGUSR1, 5), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen([warm_python("torch"), "-c", code], env=VALUES)
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        (tmp_path / "ready").unlink()
        behind = process_behind(process.pid)
        process.send_signal(kill)
        assert process.wait(60) == status
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{behind}") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{behind}")


def test_what_an_import_decided_goes_to_the_real_interpreter():
    done = run("-c", "import sys; print(sys.executable)", env=VALUES | {"OMP_NUM_THREADS": "2"})
    assert done.stdout.strip() == sys.executable
    warm = run("-c", "import sys; print(sys.executable)")
    assert warm.stdout.strip() == warm_python("torch")


def test_a_process_killed_together_with_its_client_leaves_the_server_alive(tmp_path):
    """The server may read of both ends at once, the process's first."""
    server = Server(str(tmp_path / "socket"))
    client, connection = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    end = os.pidfd_open(pid)
    server._children[pid] = connection
    for source in (connection, end):
        server._selector.register(source, selectors.EVENT_READ)
    os.kill(pid, signal.SIGKILL)
    client.close()
    server._ends(end, pid)
    server._asked(connection, pid)
    assert not server._children
