"""What every engine that generates is: prompts in, responses out.

Letters: p tokens of a prompt, m tokens of a response, v vocabulary, k kept candidates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import xxhash

from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineOptions,
    RowRequest,
    TeacherDescription,
    TeacherRows,
)

STOP, LENGTH = "stop", "length"
"""Why most responses end: the model ended its turn, or the limit of new tokens was reached."""
ENDED = (STOP, "tool_calls")
"""Reasons of a response that is over; any other cut it short."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn. Refused here when it makes no sense for any engine."""

    max_new_tokens: int = 512
    """A response that is not over by then is cut there, and marked."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token each time."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Draw from this many most likely tokens; 0: from all."""
    seed: int = 1234
    """What is drawn for a prompt depends on it, on the prompt's place and on the sample's number,
    not on its batch."""
    samples: int = 1
    """Responses per prompt."""

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0), ("samples", 1)):
            if getattr(self, name) < low:
                raise EngineError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0.0 <= self.temperature < math.inf:
            raise EngineError(
                f"temperature must be 0 (the most likely token) or more, got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise EngineError(f"top_p must lie in (0, 1], got {self.top_p}; 1 draws from all")
        if self.temperature == 0 and self.samples > 1:
            raise EngineError(
                f"temperature 0 gives one response, so {self.samples} per prompt would be copies "
                "of it; raise the temperature, or ask for one"
            )


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    number: int
    """Its place among the prompts, from 0; with the seed it decides what is drawn."""
    tokens: np.ndarray
    """[p] int32, up to where the response begins."""
    messages: list[dict] | None = None
    """The turns it was made of; None where it is plain text."""
    tools: list[dict] | None = None
    """Descriptions of the tools that the turns name, as the chat template takes them."""
    text: str | None = None
    """The plain text it was made of; None where it is turns."""


@dataclass(frozen=True)
class Response:
    """What an engine answered: tokens, or the words of a server that shows none."""

    stop_reason: str
    """The engine's word for why it ends; STOP and LENGTH mean the same for all."""
    tokens: np.ndarray | None = None
    """[m] int32, the token that ends the turn among them; None from a server of text."""
    rows: TeacherRows | None = None
    """[m, k] of each token's distribution, row i for tokens[i]; None where they were not asked."""
    text: str | None = None
    """The server's own words for it; None where the engine has none."""
    message: dict | None = None
    """The assistant's turn, from a server of chats that shows no tokens."""


class Generator(ABC):
    """An engine that generates, built from a model and closed after use.

    Its module is imported to list its options, so it imports what is heavy only inside functions.
    """

    Options: ClassVar[type[EngineOptions]]
    """What can be set, beside the sampling."""
    gives_rows: ClassVar[bool] = False
    """Whether it can return the distributions that it draws from."""
    gives_tokens: ClassVar[bool] = True
    """Whether responses come as tokens."""

    @classmethod
    @abstractmethod
    def describe(cls, model: str, options: EngineOptions) -> TeacherDescription:
        """Names the model without loading it.

        Raises:
            ValueError: It is not a model of this engine.
            EngineUnavailable: Its server does not answer.
        """

    @classmethod
    def refuse(cls, sampling: Sampling, request: RowRequest | None) -> None:
        """Refuses what this engine cannot do, before anything is loaded.

        Raises:
            EngineError: The message says what to change.
        """
        if request is None:
            return
        if not cls.gives_rows:
            raise EngineError(
                "this engine returns no distributions beside its responses; leave out --capture, "
                "prepare the responses and run megatron-kd capture over them"
            )
        if request.sampling != "topk" or request.hidden:
            raise EngineError(
                "--capture keeps the largest candidates alone; for random draws or hidden states "
                "prepare the responses and run megatron-kd capture over them"
            )

    @abstractmethod
    def __init__(
        self,
        model: str,
        sampling: Sampling,
        ends: Sequence[int],
        vocab_size: int,
        request: RowRequest | None,
        options: EngineOptions,
    ):
        """Loads the model.

        Args:
            ends: Tokens that end a response.
            vocab_size: Ids at or above it are padding rows of the output layer, never drawn.
            request: What to keep of the distributions; None keeps nothing.
        """

    @abstractmethod
    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Response]]:
        """Yields (index into prompts, number of the sample, response), in any order.

        Closing the iterator stops the work.

        Raises:
            EngineError: The model cannot answer such prompts.
            EngineUnavailable: The model's server stopped answering.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the model."""


def seed_of(sampling: Sampling, number: int, sample: int) -> int:
    """The seed of one response, from 0 to 2³¹ − 1."""
    key = np.array([sampling.seed, number, sample], "<i8").tobytes()
    return xxhash.xxh3_64_intdigest(key) >> 33


def asked(prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[int, int]]:
    """(index of the prompt, number of the sample) of every response that is wanted."""
    return [(i, j) for i in range(len(prompts)) for j in range(sampling.samples)]


def closed_at_end(
    tokens: Sequence[int], stop_reason: Any, ends: Sequence[int], end: Any = None
) -> np.ndarray:
    """A response's tokens with the token that ends it, which some servers leave out.

    Args:
        end: The token that the server says it stopped at, where it says one.
    """
    tokens = list(tokens)
    if stop_reason == STOP and type(end) is int and end in ends and tokens[-1:] != [end]:
        tokens.append(end)
    return np.asarray(tokens, np.int32)
