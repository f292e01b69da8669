"""Training samples in any order: from a teacher cache (offline) or from prepared sequences
(online).

S: sequence length the model trains on; K: cached support. A stored sample has n ≤ S + 1 tokens; row
    t concerns
`tokens[t + 1]`, so it pairs with Megatron's `labels[t]`, and nothing has to be shifted but the
labels themselves.
"""

from collections import OrderedDict
from typing import Protocol

import numpy as np
import torch

PAD_TOKEN = 0
"""Fills positions past a sample's end. They are masked, and causal attention keeps them from every
real position.
"""


class SampleSource(Protocol):
    """What both `CacheReader` and `SequenceReader` offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int): ...


class DistillDataset(torch.utils.data.Dataset):
    """`length` training samples drawn from `source`, epoch after epoch.

    Args:
        source: Stored samples, by index.
        sequence_length: S. Stored samples longer than S + 1 tokens are refused when read.
        length: How many items the dataset has; past the source's end the next epoch starts.
        shuffle: Draw each epoch in an order of its own, a function of `seed` and the epoch alone.
        period: Items after which the same samples come again, for evaluation: every evaluation sees
            one set.

        temperature: The loss's τ; where the cache holds the teacher's normaliser at it, items carry
            it.

    Items are mappings of tensors: tokens, labels, position_ids [S] int64, loss_mask [S] fp32,
    sample_index [1] int64 and, from a cache, topk_ids [S, K] int32 (−1 where nothing is stored) and
    topk_logprobs [S, K] fp32, nats (−inf).
    """

    def __init__(
        self,
        source: SampleSource,
        sequence_length: int,
        length: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        period: int | None = None,
        temperature: float = 1.0,
    ):
        if len(source) == 0:
            raise ValueError("the source holds no samples; prepare or capture some first")
        self.source = source
        self.sequence_length = sequence_length
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.period = period
        self.temperature = temperature
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
        S, n = self.sequence_length, len(sample.tokens)
        if n > S + 1:
            raise ValueError(
                f"sample {index} has {n} tokens, but the model's sequence length is {S}, which "
                f"takes {S + 1}; "
                "set bridge.model.seq_length to the prepared data's, or prepare again with a "
                "shorter --seq-length"
            )
        tokens = np.full(S + 1, PAD_TOKEN, dtype=np.int64)
        tokens[:n] = sample.tokens
        loss_mask = np.zeros(S, dtype=np.float32)
        loss_mask[: n - 1] = sample.loss_mask[: n - 1]
        item = {
            "tokens": torch.from_numpy(tokens[:-1]),
            "labels": torch.from_numpy(tokens[1:]),
            "position_ids": torch.arange(S, dtype=torch.int64),
            "loss_mask": torch.from_numpy(loss_mask),
            "sample_index": torch.tensor([index], dtype=torch.int64),
        }
        if hasattr(sample, "topk_ids"):
            item |= _support(sample, S, n)
            if self.temperature != 1.0 and self.temperature in sample.log_z:
                log_z = np.zeros(S, dtype=np.float32)
                log_z[: n - 1] = sample.log_z[self.temperature][: n - 1]
                item["log_z_tau"] = torch.from_numpy(log_z)
        return item

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(
                len(self.source)
            )
            if len(self._orders) > 2:  # an epoch and the one before it, at its border
                self._orders.popitem(last=False)
        return self._orders[epoch]


def _support(sample, S: int, n: int) -> dict[str, torch.Tensor]:
    K = sample.topk_ids.shape[1]
    ids = np.full((S, K), -1, dtype=np.int32)
    logprobs = np.full((S, K), -np.inf, dtype=np.float32)
    ids[: n - 1] = sample.topk_ids[: n - 1]
    logprobs[: n - 1] = sample.topk_logprobs[: n - 1]
    return {"topk_ids": torch.from_numpy(ids), "topk_logprobs": torch.from_numpy(logprobs)}
