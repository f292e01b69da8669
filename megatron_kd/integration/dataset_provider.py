"""The address under which older checkpoints' `run_config.yaml` names the dataset provider.

The host looks the name up whenever it reads such a checkpoint, and warns where it is lost. It makes
nothing but the sections `model` and `tokenizer` of its own accord; a user who has its `instantiate`
make the section `dataset` gets a provider of today.
"""

from megatron_kd.config import CacheConfig, DataConfig
from megatron_kd.data.dataset import SampleOptions
from megatron_kd.host import dataset_provider

_SAMPLES = ("sequence_length", "topk", "temperature", "hidden_states", "documents_apart")


def DistillDatasetProvider(*, mode: str, **fields):
    """Today's provider with the values that were recorded in the one of that time."""
    caches = [{"path": path, "weight": weight} for path, weight in fields.pop("caches")]
    topk = fields["topk"]
    samples = {name: fields.pop(name) for name in (*_SAMPLES, "document_multiple")}
    cache = {"check_checksums": fields.pop("check_checksums"), "topk": topk}
    place = {"path": caches[0]["path"]} if len(caches) == 1 else {"mixture": caches}
    return dataset_provider.DistillDatasetProvider(
        cache=CacheConfig(**cache, **place) if mode == "offline" else None,
        data=DataConfig(
            path=fields.pop("data_path"),
            shuffle=fields.pop("shuffle"),
            seed=fields.pop("seed"),
            dataloader=fields["dataloader_type"],
            num_workers=fields["num_workers"],
        ),
        samples=SampleOptions(**samples),
        **fields,
    )
