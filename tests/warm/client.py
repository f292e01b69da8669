"""Stands where an interpreter would: python -IS client.py SOCKET ARGUMENTS…

It asks the server behind SOCKET for a process that runs ARGUMENTS, hands over its own open files,
environment and directory, passes signals on, and ends as that process ends. What was
decided by an import (another OMP_NUM_THREADS, an option of the interpreter) it leaves to the real
interpreter. It imports nothing that takes time.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    path, *arguments = sys.argv[1:]
    with open(f"{path}.json") as description:
        python = json.load(description)
    if not _serves(python["fixed"], arguments):
        os.execv(python["executable"], [python["executable"], *arguments])
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    early = []
    pass_on = early.append
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: pass_on(number))
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "path": [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p],
        "directory": os.getcwd(),
        "files": files,
    }
    text = json.dumps(request).encode(errors="surrogateescape")
    socket.send_fds(connection, [struct.pack("<i", len(text))], files)
    connection.sendall(text)
    for number in files:  # a pipe must close when the process closes it
        os.close(number)
    _integer(connection)  # its process id
    pass_on = lambda number: connection.send(bytes([number]))  # noqa: E731
    for number in early:
        pass_on(number)
    status = _integer(connection)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _serves(fixed: dict, arguments: list[str]) -> bool:
    """Whether a process that has imported can still become this one.

    Args:
        fixed: Variables that were read by an import, and the values they had.
    """
    if any(os.environ.get(name, value) != value for name, value in fixed.items()):
        return False
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-c", "-m"):
            return True
        if argument != "-u" and not argument.startswith("-W"):
            return False
    return False


def _is_open(number: int) -> bool:
    """False for the directory that lists the files themselves."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _integer(connection) -> int:
    received = connection.recv(4, socket.MSG_WAITALL)
    if len(received) < 4:
        os._exit(70)  # the server is gone
    return struct.unpack("<i", received)[0]


if __name__ == "__main__":
    os._exit(main())
