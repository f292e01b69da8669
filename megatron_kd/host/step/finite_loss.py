"""Stop at a loss that is not finite, and name the samples of its micro-batch."""

import json
import os
import time
from pathlib import Path

import torch

FILE_NAME = "non_finite_loss.json"


class NonFiniteLoss(RuntimeError):
    """The loss of a micro-batch is NaN or infinite; the message names its samples."""


def check_finite(loss: torch.Tensor, sample_index: torch.Tensor, directory: Path) -> None:
    """Raise if `loss` is not finite, after adding the samples to a file.

    Args:
        loss: Scalar, summed over the micro-batch.
        sample_index: [b, 1] int64 in host memory, indices in the cache or the prepared data.
        directory: The run's output_dir, where `non_finite_loss.json` gets one line.

    Raises:
        NonFiniteLoss: The loss is NaN or infinite.
    """
    value = loss.item()
    if value - value == 0.0:  # false for NaN and for both infinities
        return
    samples = sample_index.reshape(-1).tolist()
    rank = int(os.environ.get("RANK", "0"))
    directory.mkdir(parents=True, exist_ok=True)
    record = {"rank": rank, "loss": str(value), "samples": samples, "unix_time_s": time.time()}
    with open(directory / FILE_NAME, "a") as report:
        report.write(json.dumps(record) + "\n")
    raise NonFiniteLoss(
        f"the loss of a micro-batch on rank {rank} is {value}; its samples are {samples}. Look at "
        "them with `megatron-kd inspect`, and lower the learning rate if they are sound (written "
        f"to {directory / FILE_NAME})"
    )
