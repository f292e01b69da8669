"""A Python that has its imports behind it: python server.py SOCKET KIND

It imports what KIND names (`imports.py`), listens on SOCKET, and forks once per request. The fork
is an interpreter of its own: it takes the arguments, environment, working directory and open files
of the process that asked (`client.py`), runs the script, and ends with a real exit status or
signal. Nothing that one request does is seen by the next.

Only a process with one Python thread and no process group may be forked, so this one does nothing
but import and fork.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
from pathlib import Path

MOST_FILES = 250
PR_SET_PDEATHSIG = 1
OWN_FILES = 1000  # the server's own descriptors start here, out of the way of a request's


def main() -> None:
    path, kind, executable = sys.argv[1:]
    server = Server(path)
    sys.path.pop(0)
    import_for(kind)
    server.listen()
    job = server.serve()
    if job is not None:  # in a fork
        del server
        job.run(executable)


def import_for(kind: str) -> None:
    """Import what every request of this kind would import."""
    imports = runpy.run_path(str(Path(__file__).with_name("imports.py")))
    imports["KINDS"][kind]()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page


class Server:
    def __init__(self, path: str):
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._children = {}  # pid → connection of the client that asked

    def listen(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(f"{self._path}.new")
        self._listener = _moved_up(made)
        self._listener.listen(64)
        os.rename(f"{self._path}.new", self._path)  # there is none to be seen before it listens
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        # The process that started the server holds the other end of its standard input.
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._ended = False

    def serve(self) -> "Job | None":
        """Fork for every request until standard input closes; returns a job in a fork alone."""
        while not self._ended:
            for key, _ in self._selector.select():
                job = key.data(key.fileobj)
                if job is not None:
                    return job
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _end(self, _) -> None:
        self._ended = os.read(0, 1) == b""

    def _accept(self, listener) -> "Job | None":
        connection = _moved_up(listener.accept()[0])
        try:
            job = Job.received(connection)
        except (OSError, ValueError) as error:
            print(f"warm server: a request was lost: {error!r}", file=sys.stderr)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            connection.close()
            for other in self._children.values():
                other.close()
            listener.close()
            return job
        for file in job.files:
            os.close(file)
        client = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        note = Path(f"{self._path}.{client[0]}")
        note.with_suffix(".new").write_text(str(pid))
        note.with_suffix(".new").rename(note)  # for `process_behind`
        connection.sendall(struct.pack("<i", pid))
        self._children[pid] = connection
        self._selector.register(
            connection, selectors.EVENT_READ, lambda source, pid=pid: self._asked(source, pid)
        )
        end = os.pidfd_open(pid)
        self._selector.register(
            end, selectors.EVENT_READ, lambda end, pid=pid: self._ends(end, pid)
        )
        return None

    def _asked(self, connection, pid: int) -> None:
        """A client passes a signal on, one byte; one that is gone has been killed."""
        if pid not in self._children:  # it has ended, and was killed together with its client
            return
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        for number in signals or [signal.SIGKILL]:
            os.kill(pid, number)
        if not signals:
            self._selector.unregister(connection)

    def _ends(self, end: int, pid: int) -> None:
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        connection = self._children.pop(pid)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):  # the client may have been killed while it waited
                connection.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
        connection.close()


class Job:
    """What one interpreter was asked to run, and with which open files."""

    def __init__(self, request: dict, files: list[int]):
        self._request, self.files = request, files

    @classmethod
    def received(cls, connection) -> "Job":
        connection.settimeout(60)
        header, files, _, _ = socket.recv_fds(connection, 4, MOST_FILES)
        (length,) = struct.unpack("<i", header)
        text = b""
        while len(text) < length:
            part = connection.recv(length - len(text))
            if not part:
                raise ValueError("its client is gone")
            text += part
        connection.settimeout(None)
        return cls(json.loads(text), files)

    def run(self, executable: str) -> None:
        """Become the interpreter that was asked for.

        Args:
            executable: What this interpreter calls itself, and starts processes with.
        """
        request = self._request
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.executable = executable
        multiprocessing.set_executable(executable)
        high = [_to_high(file) for file in self.files]  # a number may be another file's place
        for file, number in zip(high, request["files"], strict=True):
            os.dup2(file, number, inheritable=True)
            os.close(file)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _run_as_python(request["arguments"], request["path"])


def _run_as_python(arguments: list[str], path: list[str]) -> None:
    """Run arguments as the command line of an interpreter whose PYTHONPATH is path."""
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):
        if arguments[0] == "-u":
            sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]  # the client takes no others than this and warnings
    first, *rest = arguments
    known = set(sys.path)
    sys.path[:0] = [entry for entry in path if entry not in known]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _moved_up(connection: socket.socket) -> socket.socket:
    """The same socket under a number that no request asks for."""
    file = _to_high(connection.detach())
    return socket.socket(fileno=file)


def _to_high(file: int) -> int:
    high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, OWN_FILES)
    os.close(file)
    return high


if __name__ == "__main__":
    main()
