"""What a part of the check is, what it is told, and what it answers."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_kd.files import publish

LIMIT_S = 480
"""No part may take longer; what it wrote until then stays."""

OK, MISSED, FAILED, TIMED_OUT, SKIPPED = "ok", "missed", "failed", "timed out", "skipped"
"""How a part ended: a goal that was missed is no fault, but the check says so."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is checked, equal for all parts; it travels to a fresh process as JSON."""

    folder: str
    device: str = "cuda"
    ranks: int = 1
    small: bool = False
    """Small shapes: a rehearsal, whose figures mean nothing."""

    def place(self, name: str) -> Path:
        """A folder of a part's own, made."""
        place = Path(self.folder) / name
        place.mkdir(parents=True, exist_ok=True)
        return place


@dataclass
class Outcome:
    """What a part found: its status, and the lines (Markdown) of its section in the report."""

    status: str = OK
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0
    measured: str = ""
    """Commit and settings it holds for; a part is not run again for the same."""

    def worsen(self, status: str) -> None:
        """Take a status unless a worse one is known."""
        order = (SKIPPED, OK, MISSED, FAILED)
        self.status = max(self.status, status, key=order.index)


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        title: In the report.
        run: Settings → outcome; called in a process of its own.
        least_ranks: Skipped where there are fewer.
    """

    title: str
    run: Callable[[Settings], Outcome]
    least_ranks: int = 1


def read(path: Path) -> Outcome | None:
    """The outcome that a part left; None where there is none."""
    return Outcome(**json.loads(path.read_text())) if path.is_file() else None


def write(path: Path, outcome: Outcome) -> None:
    """Whole or not at all."""
    publish(path, json.dumps(asdict(outcome), indent=1))


def table(heads: list[str], rows: list[list]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
