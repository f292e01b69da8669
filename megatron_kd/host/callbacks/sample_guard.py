"""Name the samples of a batch whose loss is not finite."""

import json
import os
import time
from pathlib import Path

import torch

FILE_NAME = "non_finite_loss.json"

_report_directory: Path | None = None


class NonFiniteLoss(RuntimeError):
    """The loss of a micro-batch is NaN or infinite; the message names its samples."""


def set_report_directory(path: str | Path) -> None:
    """Where the samples of a non-finite batch are written; a run sets it to its output
    directory.
    """
    global _report_directory
    _report_directory = Path(path)


def check_finite(loss: torch.Tensor, sample_index: torch.Tensor) -> None:
    """Stop the run if `loss` is not finite, with the batch's sample ids on disk and in the message.

    Args:
        loss: Scalar, summed over the micro-batch.
        sample_index: [b, 1] int64 in host memory, indices in the cache or the prepared data.

    Raises:
        NonFiniteLoss: The loss is NaN or infinite.
    """
    value = loss.item()
    if value - value == 0.0:  # false for NaN and for both infinities
        return
    samples = sample_index.reshape(-1).tolist()
    rank = int(os.environ.get("RANK", "0"))
    message = (
        f"the loss of a micro-batch on rank {rank} is {value}; its samples are {samples}. Look at "
        "them with `megatron-kd inspect`, and lower the learning rate if they are sound"
    )
    if _report_directory is not None:
        _report_directory.mkdir(parents=True, exist_ok=True)
        record = {"rank": rank, "loss": str(value), "samples": samples, "unix_time_s": time.time()}
        with open(_report_directory / FILE_NAME, "a") as report:
            report.write(json.dumps(record) + "\n")
        message += f" (written to {_report_directory / FILE_NAME})"
    raise NonFiniteLoss(message)
