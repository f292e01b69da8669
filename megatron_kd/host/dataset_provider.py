"""Megatron-Bridge's dataset hook: training and validation samples from a teacher cache or from
prepared data.
"""

from dataclasses import dataclass, field
from pathlib import Path

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider

from megatron_kd.cache.selection import SampleChoice
from megatron_kd.config import CacheConfig, DataConfig, DistillConfig
from megatron_kd.data.dataset import DistillDataset, SampleOptions
from megatron_kd.data.sequence_format import TRAIN, VALIDATION
from megatron_kd.data.sources import check_same_tokens, open_caches, open_sequences

SPARE_ITEMS = 1 << 30
"""Items past the run's own. The host's sequential sampler refuses to start where nothing is left to
read, as when a finished run is started again. Items are computed when they are read, so they cost
nothing."""


@dataclass(kw_only=True)
class DistillDatasetProvider(DatasetProvider):
    """Recorded in the host's `run_config.yaml`, so its fields are plain values, or dataclasses of
    them; what it has opened is kept beside the fields.

    Each split is opened, and checked, once in the life of a provider; whoever needs its manifest or
    its samples before training asks the provider.
    """

    cache: CacheConfig | None = None
    """Where the teacher's rows are; None online."""

    data: DataConfig = field(default_factory=DataConfig)
    """Where the prepared data is, and in which order samples are drawn."""

    samples: SampleOptions = field(default_factory=SampleOptions)
    """How a stored sample becomes tensors."""

    evaluation_samples: int = 0
    """What one evaluation reads; every evaluation of a run reads the same samples."""

    skip_getting_attention_mask_from_dataset: bool = True

    @classmethod
    def of(cls, config: DistillConfig, *, pin_memory: bool) -> "DistillDatasetProvider":
        """The provider of a run. How its samples are laid out follows from the host's
        configuration later.
        """
        offline, data = config.mode == "offline", config.data
        return cls(
            cache=config.cache if offline else None,
            data=data,
            samples=SampleOptions(
                topk=config.cache.topk,
                temperature=config.loss.divergence.temperature,
                source_temperatures=_temperatures(config),
                hidden_states=offline and bool(config.hidden_states.pairs),
            ),
            dataloader_type=data.dataloader,
            num_workers=data.num_workers,
            persistent_workers=data.num_workers > 0,
            data_sharding=True,
            pin_memory=pin_memory,
        )

    def build_datasets(self, context: DatasetBuildContext):
        """Training, validation and (none) test datasets.

        Raises:
            CacheError: The cache is incomplete or damaged.
            ValueError: The sequence length differs from the data's, or there is nothing to train
                on.
        """
        train = self._dataset(TRAIN, context.train_samples, shuffle=self.data.shuffle)
        validation = None
        if self.evaluation_samples:
            period = self.evaluation_samples
            validation = self._dataset(VALIDATION, period, period=period)
        return train, validation, None

    def open(self, split: str):
        """The stored samples of a split, checked against the prepared data where both are given."""
        opened = self.__dict__.setdefault("_opened", {})
        if split not in opened:
            opened[split] = self._open(split)
        return opened[split]

    def prepared_length(self) -> int | None:
        """The sequence length the samples were prepared for, where their manifest says it."""
        length = self._of_the_data("seq_length")
        return None if length is None else int(length)

    def vocabulary(self) -> str | None:
        """The hash of what the ids stand for; None in data prepared before it was recorded."""
        named = self._of_the_data("vocabulary")
        if named is None and self.data.path:  # beside a cache from before it was carried over
            named = open_sequences(f"{self.data.path}/{TRAIN}").manifest.get("vocabulary")
        return named

    def _of_the_data(self, name: str):
        """A value of the prepared data's manifest, which a cache carries too."""
        manifest = self.open(TRAIN).manifest
        for entry in (manifest, manifest.get("data") or {}):
            if not isinstance(entry, str) and entry.get(name):
                return entry[name]
        return None

    def packing(self) -> str | None:
        """How documents were packed into samples: none, naive or block; None where nobody knows."""
        return self.open(TRAIN).manifest.get("packing")

    @property
    def documents_apart(self) -> bool:
        """Whether attention keeps the documents of a sample apart."""
        return self.samples.documents_apart

    def __getstate__(self) -> dict:
        """Open files stay in this process; a copy opens its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def _dataset(self, split: str, length: int, *, shuffle=False, period=None) -> DistillDataset:
        source = self.open(split)
        if self.dataloader_type == "single":
            length += SPARE_ITEMS
        elif self.dataloader_type == "cyclic" and split == TRAIN:
            length, shuffle = len(source), False  # the host's sampler shuffles and repeats
        return DistillDataset(
            source,
            self.samples,
            length,
            shuffle=shuffle,
            seed=self.data.seed,
            period=period,
            numbers=[0] if self.cache is None else self._numbers(split),
        )

    def _choice(self) -> SampleChoice | None:
        chosen = self.cache.filter
        return None if chosen is None else SampleChoice(**vars(chosen))

    def _numbers(self, split: str) -> list[int]:
        """The caches of the run that give samples of a split."""
        sources = self.cache.sources()
        numbers = list(range(len(sources)))
        if split == VALIDATION:  # of a mixture, those that have one
            found = [number for number in numbers if Path(sources[number][0], split).is_dir()]
            numbers = found or numbers
        return numbers

    def _open(self, split: str):
        prepared = f"{self.data.path}/{split}" if self.data.path else None
        if self.cache is None:
            return open_sequences(prepared)
        sources = [self.cache.sources()[number] for number in self._numbers(split)]
        source = open_caches(
            [(f"{path}/{split}", weight) for path, weight in sources],
            check_checksums=self.cache.check_checksums,
            choice=self._choice() if split == TRAIN else None,
            share_by=self.cache.share_by,
            each_alone=self.cache.differ,
        )
        if prepared:
            check_same_tokens(source, open_sequences(prepared))
        return source


def _temperatures(config: DistillConfig) -> tuple[float, ...]:
    """Of each cache, where they have losses of their own."""
    if not config.cache.differ:
        return ()
    return tuple(divergence.temperature for divergence in config.divergences())
