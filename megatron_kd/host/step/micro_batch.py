"""One micro-batch of this rank: what each pipeline stage needs, on its device.

Bridge's own step drops the batch keys it does not know, so the teacher's rows would never arrive.

s: sequence positions on this context-parallel rank, b: micro-batch, k: support, h: the teacher's
hidden size.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.utils import get_model_config

from megatron_kd.host import versions
from megatron_kd.host.step import packed_documents
from megatron_kd.host.step.device_copy import to_device
from megatron_kd.host.step.nvtx_ranges import stage

FIRST_STAGE_KEYS = ("tokens", "position_ids")
TEACHER_KEYS = ("topk_ids", "topk_logprobs", "log_z_tau", "teacher_hidden")
LAST_STAGE_KEYS = ("labels", "loss_mask", *TEACHER_KEYS)


class DataWait:
    """Seconds this rank waited for its data loader."""

    def __init__(self):
        self.seconds = 0.0

    def next(self, data_iterator: Iterator):
        """The next item; the time it took to come is added up."""
        started = time.perf_counter()
        with stage("wait for data"):
            item = next(data_iterator)
        self.seconds += time.perf_counter() - started
        return item

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True)
class LossInputs:
    """What the last stage's loss needs of one micro-batch, in the data loader's layout.

    Online the first five are None: the teacher is in the process.
    """

    topk_ids: torch.Tensor | None  # [b, s, k] int32, −1 in an unused slot
    topk_logprobs: torch.Tensor | None  # [b, s, k] fp32, nats, −inf in an unused slot
    log_z_tau: torch.Tensor | None  # [b, s] fp32, the teacher's normalizer at the temperature
    teacher_hidden: torch.Tensor | None  # [b, s, h], the teacher's last hidden state
    source: torch.Tensor | None  # [b, 1] int64, the number of its cache, in host memory
    loss_mask: torch.Tensor  # [b, s] fp32
    supervised_index: torch.Tensor  # [rows] int64, into the flattened [s · b]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch on this stage's device; None where the stage has no use for them.

    Attributes:
        model_arguments: Keyword arguments of the model's forward.
        loss_mask: [b, s] fp32; last stage.
        loss_inputs: Last stage.
        sample_index: [b, 1] int64 in host memory.
    """

    model_arguments: dict
    loss_mask: torch.Tensor | None = None
    loss_inputs: LossInputs | None = None
    sample_index: torch.Tensor | None = None


def load(
    data_iterator: Iterator, model: torch.nn.Module, wait: DataWait, *, documents_apart: bool
) -> MicroBatch:
    """This rank's part of the next micro-batch.

    Args:
        model: The (wrapped) model chunk that will run it.
        documents_apart: Samples hold documents that must not attend to one another.
    """
    groups = get_pg_collection(model)
    first, last = is_pp_first_stage(groups.pp), is_pp_last_stage(groups.pp)
    if not first and not last and not documents_apart:
        return MicroBatch(_model_arguments({}))
    whole = wait.next(data_iterator)
    keys = FIRST_STAGE_KEYS if first else ()
    predicts_more_tokens = bool(getattr(get_model_config(model), "mtp_num_layers", None))
    if last:
        keys += LAST_STAGE_KEYS
        if predicts_more_tokens and not first:
            keys += FIRST_STAGE_KEYS
    batch = {key: whole.get(key) for key in keys}
    if documents_apart:
        batch = packed_documents.on_this_rank(batch, whole["cu_seqlens"], groups.cp)
    else:
        batch = versions.current().batch_on_this_cp_rank(batch, groups.cp)
    mask_in_host_memory = batch.get("loss_mask")
    batch = {key: None if value is None else to_device(value) for key, value in batch.items()}
    arguments = _model_arguments(batch)
    if predicts_more_tokens:  # the host shifts the mask along with the labels
        arguments["loss_mask"] = batch.get("loss_mask")
    if documents_apart:
        arguments["packed_seq_params"] = packed_documents.parameters(whole["cu_seqlens"])
    if not last:
        return MicroBatch(arguments, sample_index=whole["sample_index"])
    mask = batch["loss_mask"]
    inputs = LossInputs(
        **{key: batch[key] for key in TEACHER_KEYS},
        source=whole.get("source"),
        loss_mask=mask,
        supervised_index=to_device(supervised_index(mask_in_host_memory)),
    )
    return MicroBatch(arguments, mask, inputs, whole["sample_index"])


def _model_arguments(batch: dict) -> dict:
    return {
        "input_ids": batch.get("tokens"),
        "position_ids": batch.get("position_ids"),
        "attention_mask": None,
        "labels": batch.get("labels"),
    }


def supervised_index(mask_in_host_memory: torch.Tensor) -> torch.Tensor:
    """Rows of the flattened [s · b] positions that the mask [b, s] keeps, [rows] int64, found in
    host memory, so that no device waits.
    """
    return mask_in_host_memory.t().reshape(-1).nonzero().squeeze(-1)
