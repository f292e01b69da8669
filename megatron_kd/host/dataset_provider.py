"""Megatron-Bridge's dataset hook: training and validation samples from a teacher cache or from
prepared data.
"""

from dataclasses import dataclass, field
from pathlib import Path

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider

from megatron_kd.data.dataset import DistillDataset
from megatron_kd.data.sources import check_same_tokens, open_caches, open_sequences

TRAIN, VALIDATION = "train", "validation"

SPARE_ITEMS = 1 << 30
"""Items past the run's own. The host's sequential sampler refuses to start where nothing is left to
read, as when a finished run is started again. Items are computed when they are read, so they cost
nothing."""


@dataclass(kw_only=True)
class DistillDatasetProvider(DatasetProvider):
    """Recorded in the host's `run_config.yaml`, so it holds plain values only.

    `evaluation_samples` is what one evaluation reads; every evaluation of a run reads the same
    samples.
    """

    mode: str = "offline"
    caches: list[tuple[str, float]] = field(default_factory=list)
    data_path: str | None = None
    sequence_length: int = 0
    check_checksums: bool = True
    shuffle: bool = True
    seed: int = 1234
    evaluation_samples: int = 0
    topk: int | None = None
    temperature: float = 1.0
    hidden_states: bool = False
    documents_apart: bool = False
    document_multiple: int = 1
    skip_getting_attention_mask_from_dataset: bool = True

    def build_datasets(self, context: DatasetBuildContext):
        """Training, validation and (none) test datasets.

        Raises:
            CacheError: The cache is incomplete or damaged.
            ValueError: The sequence length differs from the data's, or there is nothing to train
                on.
        """
        train = self._dataset(TRAIN, context.train_samples, shuffle=self.shuffle)
        validation = None
        if self.evaluation_samples:
            period = self.evaluation_samples
            validation = self._dataset(VALIDATION, period, period=period)
        return train, validation, None

    def _dataset(self, split: str, length: int, *, shuffle=False, period=None) -> DistillDataset:
        source = self.open(split)
        if self.dataloader_type == "single":
            length += SPARE_ITEMS
        elif self.dataloader_type == "cyclic" and split == TRAIN:
            length, shuffle = len(source), False  # the host's sampler shuffles and repeats
        return DistillDataset(
            source,
            self.sequence_length,
            length,
            shuffle=shuffle,
            seed=self.seed,
            period=period,
            topk=self.topk,
            temperature=self.temperature,
            hidden_states=self.hidden_states,
            documents_apart=self.documents_apart,
            document_multiple=self.document_multiple,
        )

    def open(self, split: str):
        """The stored samples of a split, checked against the prepared data where both are given."""
        prepared = f"{self.data_path}/{split}" if self.data_path else None
        if not self.caches:
            return open_sequences(prepared)
        sources = [(f"{path}/{split}", weight) for path, weight in self.caches]
        if split == VALIDATION:  # of a mixture, those caches that have one
            sources = [entry for entry in sources if Path(entry[0]).is_dir()] or sources
        source = open_caches(sources, check_checksums=self.check_checksums)
        if prepared:
            check_same_tokens(source, open_sequences(prepared))
        return source
