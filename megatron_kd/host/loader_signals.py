"""What a data loader's worker process does on a signal."""

import signal


class LoaderWorkerSignals:
    """What a loader worker does on the signal: live on after the first, end on the second.

    A scheduler signals every process of a job. PyTorch's own handler would end the worker, and the
    rank with it, before it could save. The host's handler ignores the signal for ever, so that a
    rank that fails hangs at exit: it ends its workers with this signal and waits for them.
    """

    def __init__(self, number: int):
        self.number = number

    def __enter__(self) -> "LoaderWorkerSignals":
        signal.signal(self.number, self._first)
        return self

    def _first(self, number, frame) -> None:
        signal.signal(number, signal.SIG_DFL)
