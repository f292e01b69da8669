"""What a benchmark measures: one sweep, and one case of it."""

import itertools
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from megatron_kd.recipe_file import merged_recipe
from megatron_kd.sections import Integer, Number, build, config_section
from megatron_kd.tools.benchmark.implementations import BARE, IMPLEMENTATIONS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation at one shape. Plain values: it travels to a fresh process as JSON."""

    implementation: str
    seq_tokens: int
    chunk_tokens: int | None
    """None where the implementation takes no chunk size."""
    hidden: int
    vocab: int
    topk: int
    dtype: str
    device: str
    tp: int
    threads: int
    warm_up_iterations: int
    iterations: int
    memory_limit_bytes: int | None
    """CPU only: what the address space of one rank may grow by."""


@config_section
class BenchmarkConfig:
    implementations: list[str]
    """Names in `tools.benchmark.implementations`; the bare products are always measured."""

    seq_tokens: list[Integer]
    """Sequence lengths; the micro-batch is 1."""

    chunk_tokens: list[Integer] = field(default_factory=lambda: [1024])
    """Chunk sizes. Implementations that take none are measured once per length."""

    hidden: Integer
    """Hidden size of student and teacher."""

    vocab: Integer
    """Rows of the output layer, over all ranks."""

    topk: Integer = 100
    """The teacher's kept tokens per position."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of hidden states and weights."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu ranks talk over gloo, cuda ranks (one device each) over NCCL."""

    tp: Integer = 1
    """Ranks that share the vocabulary."""

    threads: Integer | None = None
    """CPU threads per rank; None: the machine's, divided among the ranks."""

    warm_up_iterations: Integer = 2
    """Iterations before the timed ones; the first compiles."""

    iterations: Integer = 5
    """Timed iterations, the same number on every rank."""

    memory_limit_gib: Number | None = None
    """CPU only: what all ranks together may allocate; None: four fifths of what is free."""

    timeout_s: Number = 1800.0
    """A case that takes longer is ended and recorded as timed_out."""

    def __post_init__(self):
        unknown = [name for name in self.implementations if name not in IMPLEMENTATIONS]
        if unknown:
            raise ValueError(
                f"implementations: unknown {', '.join(unknown)} (known here: "
                f"{', '.join(IMPLEMENTATIONS)})"
            )
        for name in ("implementations", "seq_tokens", "chunk_tokens"):
            if not getattr(self, name):
                raise ValueError(f"{name} must list at least one")
        numbers = ("hidden", "vocab", "topk", "tp", "warm_up_iterations", "iterations")
        counts = {name: [getattr(self, name)] for name in numbers}
        counts |= {"seq_tokens": self.seq_tokens, "chunk_tokens": self.chunk_tokens}
        for name, values in counts.items():
            if min(values) < 1:
                raise ValueError(f"{name} must be positive; got {min(values)}")
        if self.topk > self.vocab:
            raise ValueError(f"topk {self.topk} exceeds the vocabulary of {self.vocab}")
        if self.vocab % self.tp:
            raise ValueError(f"vocab {self.vocab} must be divisible by tp {self.tp}")

    def cases(self, threads: int, memory_limit_bytes: int | None) -> list[Case]:
        """Every case once; those of one length are together, its bare products first."""
        names = list(dict.fromkeys([BARE, *self.implementations]))
        cases = {}
        for length, name in itertools.product(self.seq_tokens, names):
            for chunk in self.chunk_tokens if IMPLEMENTATIONS[name].chunked else [None]:
                case = Case(
                    implementation=name,
                    seq_tokens=length,
                    chunk_tokens=chunk,
                    hidden=self.hidden,
                    vocab=self.vocab,
                    topk=self.topk,
                    dtype=self.dtype,
                    device=self.device,
                    tp=self.tp,
                    threads=threads,
                    warm_up_iterations=self.warm_up_iterations,
                    iterations=self.iterations,
                    memory_limit_bytes=memory_limit_bytes,
                )
                cases[tuple(asdict(case).items())] = case
        return list(cases.values())


def read_config(path, overrides=()) -> BenchmarkConfig:
    """The checked sweep of a YAML file (with `include`) and `key=value` overrides.

    Raises:
        ConfigError: Names the key, what was expected, and the nearest known key.
    """
    return build(BenchmarkConfig, merged_recipe(path, overrides))
