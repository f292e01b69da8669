"""The address under which older checkpoints' `run_config.yaml` names the dataset provider.

The host looks the name up whenever it reads such a checkpoint, and instantiates it where a user
reads the whole file back with `ConfigContainer.from_yaml`.
"""

from megatron_kd.host.dataset_provider import DistillDatasetProvider

__all__ = ["DistillDatasetProvider"]
