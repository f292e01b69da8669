"""What a codec is: the tensors a shard keeps of its rows, and the way there and back.

A codec knows rows alone: not files, samples' tokens or the rest of a cache. It stands below the
format, which refuses names that are not among `CODECS`.

Letters: R rows of a sample, K slots of a row, E the candidates of all rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_kd.files import TensorLayout

ID_BITS = 20
"""Of an id at most: a vocabulary has at most 2^20 ids."""

LARGEST_HALF = 65504.0
"""The largest number in half precision."""


class RowSpec(Protocol):
    """What a codec reads of a `CacheSpec`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def topk(self) -> int: ...


@dataclass(frozen=True)
class RowEntries:
    """The rows of one sample as they come to be encoded: candidates in rising id in each row."""

    counts: np.ndarray
    """[R] int64, from 1 to K: candidates of each row."""
    ids: np.ndarray
    """[E] int64, distinct in each row."""
    logprobs: np.ndarray
    """[E] fp64, nats, at most 0, finite."""
    mass: np.ndarray
    """[R] fp64, from 0 to 1: the sum of each row's probabilities."""


class Codec(ABC):
    """One way to store rows.

    `tensors` names the lengths of its shapes: "R" (one for each row), "S" (one for each sample),
    or a name of the codec's own, such as "stream_bytes", whose part for each sample is found by
    `pointers` or `bounds`.
    """

    groups: Mapping[str, str] = {}
    """Tensor name: what `inspect` says its bytes are spent on. Others count as "the rest"."""
    pointers: Mapping[str, str] = {}
    """Name of a stored [S + 1] tensor of offsets: the length whose parts it bounds. Writing and
    checking these tensors is the format's business; `tensors` need not list them."""

    @abstractmethod
    def tensors(self, spec: RowSpec) -> dict[str, TensorLayout]:
        """Tensors of a shard, beside the pointers."""

    @abstractmethod
    def encode(self, rows: RowEntries, spec: RowSpec) -> dict[str, np.ndarray]:
        """A sample's part of each of the `tensors`. There may be no rows."""

    @abstractmethod
    def decode(
        self, parts: Mapping[str, np.ndarray], counts: np.ndarray | None, spec: RowSpec
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a sample back, by falling log-probability, ties by rising id.

        Args:
            parts: A sample's part of each of the `tensors`, from a file that may have been forged.
            counts: [R] int64, from 1 to K; None where every row has K candidates.

        Returns:
            ([R, K] int32 ids, [R, K] fp32 log-probabilities in nats, [R] fp32 mass); -1 and -inf in
            unused slots, which come last.

        Raises:
            ValueError: The parts hold no such rows; the message says why.
        """

    @abstractmethod
    def bytes_per_position(self, vocab_size: int, topk: int) -> float:
        """About what a row of K candidates takes, as an estimate before there are any."""

    def bounds(self, offsets: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Length: [S + 1] int64 bounds of each sample's part, for those that follow from others.

        Args:
            offsets: Length: [S + 1] int64, as read from the pointers.
        """
        return {}

    def mass(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The mass of each row of a shard, [R] fp32, without decoding rows.

        A codec that keeps masses otherwise than as numbers in a tensor `mass` says how here.

        Args:
            tensors: The shard's, by name.
        """
        return tensors["mass"].astype(np.float32)


def wide_ids(vocab_size: int) -> bool:
    """Whether an id needs more than two bytes."""
    return vocab_size > 1 << 16
