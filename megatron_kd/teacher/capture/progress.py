"""What a capture says while it runs: an estimate after the first rows, then its rate and the time
left."""

import sys
import time
from datetime import timedelta

from rich import progress
from rich.console import Console
from rich.filesize import decimal

_LINE_EVERY_S = 15.0
_ESTIMATE_AFTER_S = 2.0
# On text of its own tokenizer, 80 to 99 % of the next tokens are among a model's first twenty
# candidates.
_UNLIKELY_SHARE = 0.4


class Progress:
    """A bar on a terminal, a line every 15 s elsewhere (logs of array jobs). Everything goes to
    stderr.

    Args:
        label: Command, split and worker, shown on every line.
        total: What this process has to make. The clock starts with the object.
        unit: What is counted.
    """

    def __init__(self, label: str, total: int, unit: str):
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._started = self._last = self._last_line = time.monotonic()
        self._rate = self._longest_gap = 0.0
        console = Console(stderr=True)
        self._bar = None
        if console.is_terminal:
            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn(f"{unit}, {{task.fields[rate]}}"),
                progress.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(label, total=total, rate="")
            self._bar.start()

    def advance(self, count: int) -> None:
        """Call when some come in."""
        now = time.monotonic()
        elapsed, gap = now - self._started, now - self._last
        self._longest_gap = max(self._longest_gap, gap)
        if self.done and (gap >= 0.1 * elapsed or self._longest_gap <= 0.05 * elapsed):
            # Rows come in bursts, a batch at a time: only between bursts is their number over the
            # time a rate.
            self._rate = self.done / (self._last - self._started)
        self._last = now
        self.done += count
        if self.done >= self.total:
            self._rate = self.done / elapsed
        if self._bar is not None:
            rate = f"{self._rate:,.0f}/s" if self._rate else ""
            self._bar.update(self._task, completed=self.done, rate=rate)
        elif self._rate and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            digits = 0 if self._rate >= 10 else 2
            left = (self.total - self.done) / self._rate
            self._say(
                f"{self.done:,} of {self.total:,} {self.unit}, {self._rate:,.{digits}f}/s, "
                f"{_duration(left)} left"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _say(self, text: str) -> None:
        line = f"{self.label}: {text}"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


class CaptureProgress(Progress):
    """The progress of a capture, and an estimate of the whole after its first rows.

    Args:
        label: Split and worker, shown on every line.
        positions: Rows this process has to make.
        free_bytes: Free space where they go, or None where it is not known.
    """

    def __init__(self, label: str, positions: int, free_bytes: int | None):
        super().__init__(f"capture {label}", positions, "positions")
        self._free_bytes = free_bytes
        self._estimated = False

    @property
    def wants_estimate(self) -> bool:
        return not self._estimated

    @property
    def ready_to_estimate(self) -> bool:
        enough = time.monotonic() - self._started >= _ESTIMATE_AFTER_S
        return self._rate > 0 and (enough or self.done >= self.total)

    def estimate(self, bytes_per_position: float, label_share: float | None = None) -> None:
        """Says once what the whole work will take, from the rows made so far and their encoded
        size, and warns of rows that know too little of the next tokens."""
        self._estimated = True
        total_bytes = bytes_per_position * self.total
        self._say(
            f"estimate from {self.done:,} positions: {self.total:,} positions at "
            f"{self._rate:,.0f}/s take {_duration(self.total / self._rate)} and "
            f"{decimal(int(total_bytes))} ({bytes_per_position:.0f} bytes/position)"
        )
        if self._free_bytes is not None and total_bytes > self._free_bytes:
            self._say(
                f"warning: only {decimal(self._free_bytes)} are free there; the capture will stop "
                "when the disk is full, keep its finished shards, and go on when it is run again "
                "with more room"
            )

        if label_share is not None and label_share < _UNLIKELY_SHARE:
            self._say(
                f"warning: only {label_share:.0%} of the next tokens are among the teacher's "
                "candidates; is it the teacher whose tokenizer the data was prepared with?"
            )


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
