"""Training samples in any order: from a teacher cache (offline) or from prepared sequences
(online).

A stored sample has at most s + 1 tokens. Its row t is about `tokens[t + 1]`, so it pairs with
Megatron's `labels[t]`, and nothing has to be shifted but the labels themselves.

Legend: s positions of a training sequence, k candidates of a position, h hidden size, n tokens of a
stored sample.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_kd.data.document_layout import DocumentLayout, position_ids

PAD_TOKEN = 0
"""Fills positions past a sample's end. They are masked, and causal attention keeps them from every
real position.
"""


class SampleSource(Protocol):
    """What both `CacheReader` and `SequenceReader` offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int): ...


@dataclass(kw_only=True)
class SampleOptions:
    """How a stored sample becomes tensors."""

    sequence_length: int = 0
    """s; 0 until the host's configuration gives it. A stored sample longer than s + 1 tokens is
    refused when it is read."""

    topk: int | None = None
    """k, if fewer than the cache's are used: the most likely ones."""

    temperature: float = 1.0
    """The loss's τ; where the cache holds the teacher's normalizer at it, items carry it."""

    source_temperatures: tuple[float, ...] = ()
    """The τ of each cache of a mixture, where they have losses of their own; empty: `temperature`
    for all."""

    hidden_states: bool = False
    """Items carry the teacher's last hidden state, which the cache must hold."""

    documents_apart: bool = False
    """Lay the documents of a sample out for attention that keeps them apart (`DocumentLayout`);
    otherwise a sample is one text."""

    document_multiple: int = 1
    """What each of them is padded to a multiple of."""


class DistillDataset(torch.utils.data.Dataset):
    """`length` training samples drawn from `source`, epoch after epoch.

    Args:
        source: Stored samples, by index.
        options: How they become tensors.
        length: How many items the dataset has; past the source's end the next epoch starts.
        shuffle: Draw each epoch in an order of its own, a function of `seed` and the epoch alone.
        seed: Of the order.
        period: Items after which the same samples come again, for evaluation: every evaluation sees
            one set.
        numbers: Of the caches that `source` mixes, among those of the run, or of the one it is.

    Items are mappings of tensors: tokens, labels, position_ids [s] int64, loss_mask [s] fp32,
    sample_index [1] int64; from a cache, source [1] int64 (its number), topk_ids [s, k] int32 (−1
    where nothing is stored), topk_logprobs [s, k] fp32, nats (−inf), and teacher_hidden [s, h] fp16
    or fp32 (0); with documents apart, cu_seqlens [documents + 1] int32, from 0 to s, one length per
    sample.
    """

    def __init__(
        self,
        source: SampleSource,
        options: SampleOptions,
        length: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        period: int | None = None,
        numbers: Sequence[int] = (0,),
    ):
        if len(source) == 0:
            raise ValueError("the source holds no samples; prepare or capture some first")
        self.source = source
        self.options = options
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.period = period
        self.numbers = numbers
        self._orders = OrderedDict()

    def __len__(self) -> int:
        return self.length

    def sample_index(self, item: int) -> int:
        """The index in the source of the dataset's item."""
        if self.period is not None:
            item %= self.period
        epoch, position = divmod(item, len(self.source))
        if not self.shuffle:
            return position
        return int(self._order(epoch)[position])

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        index = self.sample_index(item)
        sample = self.source[index]
        options, s, n = self.options, self.options.sequence_length, len(sample.tokens)
        rows = places = slice(0, n - 1)
        bounds, end = None, n - 1
        if options.documents_apart:
            layout = DocumentLayout.of(sample.cu_seqlens, options.document_multiple)
            rows, places, end = layout.rows, layout.places, int(layout.bounds[-1])
            bounds = layout.filled(s) if end <= s else None
        if end > s:
            raise ValueError(
                f"sample {index} has {n} tokens and needs {end} positions, but the model's "
                f"sequence length is {s}; raise bridge.model.seq_length, or prepare again with a "
                "shorter --seq-length"
            )

        def spread(values, filler, dtype):
            """values [n, …] of the sample → [s, …], row t where tokens[t] is an input."""
            out = np.full((s, *values.shape[1:]), filler, dtype)
            out[places] = values[rows]
            return torch.from_numpy(out)

        labels = np.append(sample.tokens[1:], PAD_TOKEN)
        item = {
            "tokens": spread(sample.tokens, PAD_TOKEN, np.int64),
            "labels": spread(labels, PAD_TOKEN, np.int64),
            "position_ids": torch.arange(s, dtype=torch.int64),
            "loss_mask": spread(sample.loss_mask, 0, np.float32),
            "sample_index": torch.tensor([index], dtype=torch.int64),
        }
        if bounds is not None:
            item["position_ids"] = torch.from_numpy(position_ids(bounds))
            item["cu_seqlens"] = torch.from_numpy(bounds)
        if hasattr(sample, "rows"):  # of a cache; prepared sequences have none
            stored, number = sample.rows, self._number(index)
            item["source"] = torch.tensor([number], dtype=torch.int64)
            place = np.full(n, -1)  # of each token in the sequence; -1 where it is no input
            place[rows] = np.arange(n - 1) if isinstance(places, slice) else places
            place = place[stored.positions]
            # The cache gives each position's entries from the most likely to the least.
            item["topk_ids"] = _placed(stored.topk_ids[:, : options.topk], place, s, -1)
            item["topk_logprobs"] = _placed(
                stored.topk_logprobs[:, : options.topk], place, s, -np.inf
            )
            temperature = (options.source_temperatures or {number: options.temperature})[number]
            if temperature != 1.0 and temperature in stored.log_z:
                item["log_z_tau"] = _placed(stored.log_z[temperature], place, s, 0)
            if options.hidden_states:
                item["teacher_hidden"] = _placed(stored.hidden, place, s, 0)
        return item

    def _number(self, index: int) -> int:
        """Of the cache that a sample comes from, among those of the run."""
        locate = getattr(self.source, "locate", None)
        return self.numbers[locate(index)[0] if locate else 0]

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(
                len(self.source)
            )
            if len(self._orders) > 2:  # an epoch and the one before it, at its border
                self._orders.popitem(last=False)
        return self._orders[epoch]


def _placed(values: np.ndarray, place: np.ndarray, s: int, filler) -> torch.Tensor:
    """Stored rows [r, …] at their places in a sequence: [s, …] of the same dtype.

    Args:
        place: [r], ascending where it is not -1; a row without a place is left out.
    """
    if (place < 0).any():
        values, place = values[place >= 0], place[place >= 0]
    out = np.empty((s, *values.shape[1:]), values.dtype)
    first = int(place[0]) if place.size else 0
    end = first + place.size
    if not place.size or place[-1] == end - 1:  # one run of rows is a plain copy
        out[:first], out[first:end], out[end:] = filler, values, filler
    else:
        empty = np.ones(s, bool)
        empty[place] = False
        out[empty] = filler
        out[place] = values
    return torch.from_numpy(out)
