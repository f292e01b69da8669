"""What every teacher engine is: documents in, the kept part of the teacher's next-token
distributions out.

Letters: n tokens of a document, r asked rows, K kept candidates, V teacher vocabulary, D teacher
hidden size.

Row t is the teacher's distribution of tokens[t + 1] given tokens[0 .. t]. The normaliser is that of
the whole vocabulary (ids below `vocab_size`) at temperature 1, whatever is kept of it.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

SAMPLINGS = ("topk", "random")

ENGINES = {
    # name: (module, class; the module is imported only when the engine is asked for)
    "transformers": ("megatron_kd.teacher.engines.transformers", "TransformersEngine"),
    "vllm": ("megatron_kd.teacher.engines.vllm", "VllmEngine"),
    "vllm-server": ("megatron_kd.teacher.engines.vllm_server", "VllmServerEngine"),
    "megatron": ("megatron_kd.host.megatron_engine.engine", "MegatronEngine"),
    "sglang": ("megatron_kd.teacher.engines.sglang", "SglangEngine"),
}


class EngineError(ValueError):
    """The engine cannot give the rows that were asked for; the message says what to change."""


class EngineUnavailable(OSError):
    """The engine stopped answering. Finished shards are kept; run the same command again to go
    on."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """What to keep of each distribution. Refused here when it makes no sense for any teacher."""

    topk: int
    """Candidates per row: the K largest, or the number of draws with sampling "random"."""
    vocab_size: int
    """Ids at or above it are padding rows of the teacher's output layer: no mass, never kept."""
    top_p: float = 1.0
    """Keep the smallest leading part of the K whose mass reaches top_p; the other slots stay
    unused."""
    sampling: str = "topk"
    """"topk", or "random": K draws from the teacher itself, each id's weight its share of the
    draws, an unbiased estimate of the distribution (arXiv 2503.16870). The weights of a row sum to
    one."""
    seed: int = 1234
    """Of the draws; each document's draws depend on this and on its tokens, not on its place or
    batch."""
    temperatures: tuple[float, ...] = ()
    """Further temperatures τ whose normaliser log Σ_v exp(log p_v / τ) is kept, so that τ ≠ 1 is
    exact in training."""
    hidden: bool = False
    """Also return the hidden states that the output layer reads."""

    def __post_init__(self) -> None:
        if self.topk < 1 or self.topk > self.vocab_size:
            raise EngineError(
                f"topk must lie between 1 and the vocabulary size {self.vocab_size}, got "
                f"{self.topk}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise EngineError(
                f"top_p must lie in (0, 1], got {self.top_p}; 1 keeps all K candidates"
            )
        if self.sampling not in SAMPLINGS:
            raise EngineError(
                f"sampling must be one of {', '.join(SAMPLINGS)}, got {self.sampling!r}"
            )
        if self.sampling == "random" and self.top_p != 1.0:
            raise EngineError("top_p cuts a top-K list; with sampling random leave it at 1")
        for tau in self.temperatures:
            if not 0.0 < tau < float("inf"):
                raise EngineError(f"temperatures must be positive numbers, got {tau}")
        if len(set(self.temperatures)) != len(self.temperatures):
            raise EngineError(f"temperatures must differ from each other, got {self.temperatures}")


@dataclass(frozen=True)
class Document:
    """One text that the teacher reads alone, from position 0."""

    tokens: np.ndarray  # [n] int32
    rows: np.ndarray  # [r] int64, ascending: positions whose next-token distribution is wanted

    @property
    def run_tokens(self) -> int:
        """Tokens the teacher must read: what follows the last asked row cannot change any of
        them."""
        return int(self.rows[-1]) + 1


@dataclass(frozen=True)
class Rows:
    """The kept part of r distributions, sorted by falling probability, ties by rising id."""

    topk_ids: np.ndarray  # [r, K] int32, distinct along K; -1 in unused slots (they come last)
    topk_logprobs: np.ndarray  # [r, K] fp32, nats; -inf in unused slots
    log_z: dict[float, np.ndarray] = field(
        default_factory=dict
    )  # τ: [r] fp32, log Σ_v exp(log p_v / τ)
    hidden: np.ndarray | None = None  # [r, D] in the engine's dtype (fp32 where numpy lacks it)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What a cache's manifest says about its teacher."""

    version: str
    """Engine and library versions."""
    fingerprint: dict[str, str]
    """Hashes of config and weights, or the id that a server reports."""
    output_rows: int | None = None
    """Rows of the output layer, padding included; None where a server does not say."""
    hidden_size: int | None = None
    """D; None where the engine cannot return hidden states."""
    max_tokens: int | None = None
    """The longest text it can give rows for; None where that is not known."""
    tokenizer: str | None = None
    """Hash of its tokenizer as prepared data names it; None where it cannot be seen."""
    licence: str | None = None


class TeacherEngine(Protocol):
    """An engine is built from a teacher, a RowRequest and its own Options, and closed after use."""

    Options: type
    """A dataclass of plain values, each field documented; the command line's options by the same
    names."""

    @classmethod
    def describe(cls, teacher: str, options: Any) -> Teacher:
        """Names the teacher without loading it.

        Raises:
            EngineError: it is not a teacher of this engine.
            EngineUnavailable: its server does not answer.
        """

    def stream(self, documents: Sequence[Document]) -> Iterator[tuple[int, Rows]]:
        """Yields (index into documents, rows) once per document, in any order.

        Closing the iterator stops the work. Every document has at least one asked row.

        Raises:
            EngineError: the teacher cannot give such rows.
            EngineUnavailable: the teacher stopped answering.
        """

    def close(self) -> None:
        """Frees the teacher."""


def engine_class(name: str) -> type:
    """The class behind an engine's name.

    Raises:
        EngineError: no such engine, or the package it needs is not installed.
    """
    if name not in ENGINES:
        raise EngineError(f"no teacher engine {name!r}; there are {', '.join(sorted(ENGINES))}")
    module, attribute = ENGINES[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the {name} engine needs the package {error.name}, which is not installed here"
        ) from error
