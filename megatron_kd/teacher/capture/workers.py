"""Which part of the shards this process makes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_kd.teacher.engines.base import EngineError


@dataclass(frozen=True)
class Worker:
    """Worker `index` of `count` makes every count-th shard, beginning with its own number."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise EngineError(
                f"worker {self.index} of {self.count}: workers are numbered 0 to {self.count - 1}"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def takes(self, shard: int) -> bool:
        return shard % self.count == self.index

    @classmethod
    def parse(
        cls, text: str, environment: Mapping[str, str] | None = None, *, ranks: bool = True
    ) -> "Worker":
        """From i/n; the ranks of a torchrun, where there is one, share that part out.

        Args:
            environment: Holds torchrun's RANK and WORLD_SIZE.
            ranks: False where all ranks of a torchrun hold one teacher together.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match:
            raise EngineError(f"--worker must be i/n, e.g. 0/8 to 7/8, got {text!r}")
        worker = cls(int(match[1]), int(match[2]))
        return worker._of_rank(environment or {}) if ranks else worker

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, ranks: bool = True) -> "Worker":
        """From torchrun (RANK, WORLD_SIZE) and SLURM job arrays (SLURM_ARRAY_TASK_*), alone or one
        within the other.

        Args:
            ranks: False where all ranks of a torchrun hold one teacher together.
        """

        index, count = 0, 1
        if "SLURM_ARRAY_TASK_ID" in environment:
            first = _number(environment, "SLURM_ARRAY_TASK_MIN", 0)
            step = _number(environment, "SLURM_ARRAY_TASK_STEP", 1) or 1
            count = _number(environment, "SLURM_ARRAY_TASK_COUNT", 1)
            index = (_number(environment, "SLURM_ARRAY_TASK_ID", 0) - first) // step
        worker = cls(index, count)
        return worker._of_rank(environment) if ranks else worker

    def _of_rank(self, environment: Mapping[str, str]) -> "Worker":
        world = _number(environment, "WORLD_SIZE", 1)
        return Worker(self.index * world + _number(environment, "RANK", 0), self.count * world)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if text and not re.fullmatch(r"\d+", text):
        raise EngineError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text) if text else default
