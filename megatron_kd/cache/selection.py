"""Some samples of a cache, chosen by what its teacher thought of them."""

from dataclasses import asdict, dataclass

import numpy as np

from megatron_kd.cache.format import CacheError
from megatron_kd.cache.reader import CachedSample, CacheReader
from megatron_kd.files import sha256_json


@dataclass(frozen=True, kw_only=True)
class SampleChoice:
    """Which samples are kept; None sets no bound."""

    min_mass: float | None = None
    """Of the mean mass of a sample's rows."""
    min_perplexity: float | None = None
    max_perplexity: float | None = None
    """Of the teacher, on a sample's supervised tokens."""


class SelectedReader:
    """Reads like a `CacheReader`, as if the other samples were not there.

    Which samples those are is found from two numbers per row, without decoding rows.

    Args:
        reader: The cache.
        choice: What is kept of it.

    Raises:
        CacheError: The cache lacks what is asked for, or no sample is left.
    """

    def __init__(self, reader: CacheReader, choice: SampleChoice):
        self.reader, self.choice = reader, choice
        means = reader.mean_rows()
        keep = np.isfinite(means["mass"])  # a sample without a row has no mean
        if choice.min_mass is not None:
            keep &= means["mass"] >= choice.min_mass
        if choice.min_perplexity is not None or choice.max_perplexity is not None:
            if "label_logprob" not in means:
                raise CacheError(
                    f"{reader.path} does not hold the next tokens' log-probabilities, so the "
                    "teacher's perplexity is not known; capture again with --label-logprob"
                )
            with np.errstate(over="ignore"):
                perplexity = np.exp(-means["label_logprob"])
            keep &= perplexity >= (choice.min_perplexity or 0.0)
            if choice.max_perplexity is not None:
                keep &= perplexity <= choice.max_perplexity
        self._kept = np.flatnonzero(keep)
        if not self._kept.size:
            raise CacheError(
                f"{reader.path}: none of its {len(reader)} samples is within {choice}; their mean "
                f"mass is {np.nanmean(means['mass']):.4f}"
            )
        positions = int(reader.row_counts()[self._kept].sum())
        own = {"filter": asdict(choice), "samples": int(self._kept.size), "positions": positions}
        bound = {"cache": reader.fingerprint, **own}
        self.manifest = {**reader.manifest, **own, "fingerprint": sha256_json(bound)}

    def __len__(self) -> int:
        return self._kept.size

    def __getitem__(self, index: int) -> CachedSample:
        return self.reader[self._place(index)]

    def cu_seqlens(self, index: int) -> np.ndarray:
        """[documents + 1] int32, without decoding rows."""
        return self.reader.cu_seqlens(self._place(index))

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} chosen from a cache")
        return int(self._kept[index])

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def spec(self):
        return self.reader.spec

    @property
    def topk(self) -> int:
        return self.reader.topk

    @property
    def vocab_size(self) -> int:
        return self.reader.vocab_size

    @property
    def tokenizer(self):
        return self.reader.tokenizer

    @property
    def sampling_method(self) -> str:
        return self.reader.sampling_method

    @property
    def fingerprint(self) -> str:
        """Binds the cache and what is kept of it."""
        return self.manifest["fingerprint"]
