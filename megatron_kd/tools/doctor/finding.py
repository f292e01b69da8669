"""What one check found."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    """What was looked at, in a word or two."""

    detail: str
    """What is there."""

    remedy: str = ""
    """What to do; empty where nothing is wrong."""
