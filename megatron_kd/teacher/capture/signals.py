"""How a capture is asked to stop: at once, since whatever is on disk is whole."""

import contextlib
import signal
from collections.abc import Iterator


class Stopped(Exception):
    """SIGTERM or SIGINT came. `status` is the exit status that says so."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT raise Stopped once; what is on disk stays whole, as after any
    kill."""

    def stop(signum, frame):
        for name in before:
            signal.signal(name, signal.SIG_DFL)  # a second one need not wait for the tidying up
        raise Stopped(signum)

    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    for name in before:
        signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
