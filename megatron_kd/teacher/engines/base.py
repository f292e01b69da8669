"""What every teacher engine is: documents in, the kept part of the teacher's next-token
distributions out.

Letters: n tokens of a document, r asked rows, k kept candidates, v teacher vocabulary, h teacher
hidden size.

Row t is the teacher's distribution of tokens[t + 1] given tokens[0 .. t]. The normalizer is that of
the whole vocabulary (ids below `vocab_size`) at temperature 1, whatever is kept of it.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from megatron_kd.cache.format import SAMPLINGS


class EngineError(ValueError):
    """The engine cannot give the rows that were asked for; the message says what to change."""


class EngineUnavailable(OSError):
    """The engine stopped answering. Finished shards are kept; run the same command again to go
    on."""


MOST_BEYOND = 0.5
"""Share of a distribution beyond the vocabulary that is more than untrained padding rows take."""


class MassBeyond:
    """How much of its probability a teacher gives to ids that no token has. What is kept of a row
    is normalized without it.
    """

    def __init__(self):
        self.rows, self.total, self.largest = 0, 0.0, 0.0

    def add(self, shares: np.ndarray, vocab_size: int) -> None:
        """Count rows.

        Args:
            shares: [r], the mass from vocab_size on, of 1.

        Raises:
            EngineError: More than half of a row's mass.
        """
        self.rows += len(shares)
        self.total += float(shares.sum())
        self.largest = max(self.largest, float(shares.max(initial=0.0)))
        if self.largest > MOST_BEYOND:
            raise EngineError(
                f"the teacher gives {self.largest:.3f} of its probability at one position to ids "
                f"from {vocab_size} on, which no token of the data has, so a cached row would hold "
                "only the rest. Prepare the data with the teacher's own tokenizer, and capture "
                "without --vocab-size"
            )

    def __str__(self) -> str:
        mean = self.total / max(1, self.rows)
        return f"{mean:.2e} of the teacher's probability, at most {self.largest:.2e} at a position"


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
    """Seed of the random draws. What is drawn for a document depends on the seed and on the
    document's tokens, not on its place or batch."""
    temperatures: tuple[float, ...] = ()
    """Further temperatures τ whose normalizer log Σ_v exp(log p_v / τ) is kept, so that τ ≠ 1 is
    exact in training."""
    labels: bool = False
    """Also return the log-probability of each row's next token, whether it is kept or not."""
    hidden: bool = False
    """Also return the hidden states that the output layer reads."""
    beyond: MassBeyond = field(default_factory=MassBeyond, compare=False, repr=False)
    """What engines find beyond the vocabulary; servers that list candidates cannot know it."""

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
class TeacherDocument:
    """One text that the teacher reads alone, from position 0."""

    tokens: np.ndarray
    """[n] int32."""
    rows: np.ndarray
    """[r] int64, ascending: positions whose next-token distribution is wanted."""

    def labels(self) -> np.ndarray:
        """[r] int64, the token after each row.

        Raises:
            EngineError: A row is the text's last, after which none comes.
        """
        if len(self.rows) and int(self.rows[-1]) + 1 >= len(self.tokens):
            raise EngineError(
                "a text's last position is supervised, and no token of it follows there, so that "
                "it has no log-probability; leave out --label-logprob, or clear the mask there"
            )
        return self.tokens[self.rows + 1].astype(np.int64)

    @property
    def run_tokens(self) -> int:
        """Tokens the teacher must read: what follows the last asked row cannot change any of
        them."""
        return int(self.rows[-1]) + 1


@dataclass(frozen=True)
class TeacherRows:
    """The kept part of r distributions, sorted by falling probability, ties by rising id."""

    topk_ids: np.ndarray
    """[r, k] int32, distinct along k; -1 in unused slots, which come last."""
    topk_logprobs: np.ndarray
    """[r, k] fp32, nats; -inf in unused slots."""
    log_z: dict[float, np.ndarray] = field(default_factory=dict)
    """τ: [r] fp32, log Σ_v exp(log p_v / τ)."""
    label_logprobs: np.ndarray | None = None
    """[r] fp32, nats, of the next token; None where they were not asked."""
    hidden: np.ndarray | None = None
    """[r, h] in the engine's dtype (fp32 where numpy lacks it)."""


@dataclass(frozen=True, kw_only=True)
class TeacherDescription:
    """What a cache's manifest says about its teacher."""

    version: str
    """Engine and library versions."""
    fingerprint: dict[str, str]
    """Hashes of config and weights, or the id that a server reports."""
    output_rows: int | None = None
    """Rows of the output layer, padding included; None where a server does not say."""
    hidden_size: int | None = None
    """h; None where the engine cannot return hidden states."""
    max_tokens: int | None = None
    """The longest text it can give rows for; None where that is not known."""
    tokenizer: str | None = None
    """Hash of its tokenizer as prepared data names it; None where it cannot be seen."""
    license: str | None = None
    """What its model card states; None where that is not known."""


def option(
    default: Any,
    help: str,
    *,
    shapes_rows: bool = False,
    recorded_at_default: bool = False,
    unasked: bool | str = True,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of an engine's Options. From it come the command line's option of that name, its
    help, its place in the manifest and what is refused.

    Args:
        default: An option that is not given has this value.
        help: What it does, for `megatron-kd capture --help`.
        shapes_rows: Another value gives other rows, if only in their last bits. It is then recorded
            in the cache, and a resumed capture with another value is refused.
        recorded_at_default: Record it at its default too. The first caches hold some options so.
            Leave it out for a new one: caches from before the option can then be resumed.
        unasked: Whether `megatron-kd verify --repair`, which asks nobody, takes another value from
            a manifest, which anybody may have written. A name: not while the environment has a
            variable of that name, whose value would then go where the manifest says.
        choices: The only values there are, beside a default of None.
        minimum: The smallest value there is.
        metavar: What stands for the value in the help.
    """
    metadata = dict(
        help=help,
        shapes_rows=shapes_rows,
        recorded_at_default=recorded_at_default,
        unasked=unasked,
        choices=choices,
        minimum=minimum,
        metavar=metavar,
    )
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine's Options derives from. Each field is made by `option` and holds a str, int,
    float, bool, one of these or None, or a tuple of one of these."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if "help" not in f.metadata:
                raise EngineError(f"the engine option {f.name} must be declared with option(…)")
            value = getattr(self, f.name)
            choices, minimum = f.metadata["choices"], f.metadata["minimum"]
            if value is None and f.default is None:
                continue
            if choices is not None and value not in choices:
                raise EngineError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
            if minimum is not None and value < minimum:
                raise EngineError(f"{f.name} must be at least {minimum}, got {value}")

    def shaping(self) -> dict[str, Any]:
        """The options that shape rows, with their values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["shapes_rows"]}

    def recorded(self) -> dict[str, Any]:
        """What a cache's manifest records of them: the options that shape rows, but at its default
        an option only where `recorded_at_default` says so."""
        always = {f.name for f in fields(self) if f.metadata["recorded_at_default"]}
        defaults = {f.name: f.default for f in fields(self)}
        return {
            name: value
            for name, value in self.shaping().items()
            if name in always or value != defaults[name]
        }


def options_of(engine: type, name: str, given: Mapping[str, Any]) -> EngineOptions:
    """An engine's options object from what was given by name.

    Args:
        engine: The class, with its Options.
        name: What the engine is called.

    Raises:
        EngineError: An option is not one of this engine's, or its value is refused.
    """
    known = {f.name for f in fields(engine.Options)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise EngineError(
            f"{', '.join(unknown)}: not an option of the {name} engine, which has "
            f"{', '.join(sorted(known))}"
        )
    return engine.Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


class TeacherEngine(ABC):
    """An engine is built from a teacher, a RowRequest and its own Options, and closed after use.

    Its module is imported to list its options, so it imports what is heavy only inside functions.
    """

    Options: ClassVar[type[EngineOptions]]
    """What can be set, beside the request."""
    spans_ranks: ClassVar[bool] = False
    """Whether all ranks of a torchrun hold one teacher together. Otherwise each rank is a worker
    with a teacher of its own."""

    @classmethod
    @contextlib.contextmanager
    def session(cls, options: EngineOptions) -> Iterator[bool]:
        """Surrounds `describe` and the engine's life. Yields whether this process runs the capture;
        where it does not, its part is done by then."""
        yield True

    @classmethod
    @abstractmethod
    def describe(cls, teacher: str, options: EngineOptions) -> TeacherDescription:
        """Names the teacher without loading it.

        Raises:
            ValueError: It is not a teacher of this engine.
            EngineUnavailable: Its server does not answer.
        """

    @abstractmethod
    def __init__(self, teacher: str, request: RowRequest, options: EngineOptions): ...

    @abstractmethod
    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
        """Yields (index into documents, rows) once per document, in any order.

        Closing the iterator stops the work. Every document has at least one asked row.

        Raises:
            EngineError: The teacher cannot give such rows.
            EngineUnavailable: The teacher stopped answering.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the teacher."""
