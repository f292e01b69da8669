"""One forward step of Megatron-Bridge's loop with a distillation loss.

Bridge's own step drops the batch keys it does not know, so the teacher's rows would never arrive.
This one moves what each pipeline stage needs, hands the teacher's rows to the last stage's
`DistillationLoss`, and reports every quantity as (sum, supervised tokens), which the host adds up
over micro-batches and ranks before it divides.

s: sequence positions on this rank, b: micro-batch, K: support.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.utils import get_model_config, unwrap_model

from megatron_kd.host.callbacks import profiling
from megatron_kd.host.callbacks.sample_guard import check_finite
from megatron_kd.host.step import packed_documents
from megatron_kd.host.step.distillation_loss import DistillationLoss, LossBatch
from megatron_kd.host.versions import features as host_version

FIRST_STAGE_KEYS = ("tokens", "position_ids")
TEACHER_KEYS = ("topk_ids", "topk_logprobs", "log_z_tau", "teacher_hidden")
LAST_STAGE_KEYS = ("labels", "loss_mask", *TEACHER_KEYS)

NO_TOKENS = 1e-9
"""Added to a reported token count: it vanishes beside 1, and a batch without a supervised token
reports 0, not NaN.
"""


class DataWait:
    """Seconds this rank waited for its data loader."""

    def __init__(self):
        self.seconds = 0.0

    def next(self, data_iterator: Iterator):
        """The next item, its wait added up."""
        started = time.perf_counter()
        with profiling.stage("wait for data"):
            item = next(data_iterator)
        self.seconds += time.perf_counter() - started
        return item

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class OfflineStep:
    """Callable for `pretrain`: (state, data_iterator, model) → (per-token loss [b, s], loss
    function).
    """

    def __init__(self):
        self.data_wait = DataWait()

    def __call__(
        self,
        state: GlobalState,
        data_iterator: Iterator,
        model: torch.nn.Module,
        return_schedule_plan: bool = False,
    ):
        if return_schedule_plan:
            raise ValueError(
                "overlap_moe_expert_parallel_comm runs the model in pieces that the distillation "
                "loss cannot follow; set bridge.model.overlap_moe_expert_parallel_comm=false"
            )
        state.timers("batch-generator", log_level=2).start()
        with state.straggler_timer(bdata=True):
            batch, host_mask = load_batch(
                data_iterator,
                model,
                self.data_wait,
                documents_apart=state.cfg.dataset.documents_apart,
            )
        state.timers("batch-generator").stop()
        loss = DistillationLoss.of(model)
        if loss is not None:
            loss.begin(
                LossBatch(
                    **{key: batch[key] for key in TEACHER_KEYS},
                    loss_mask=batch["loss_mask"],
                    supervised_index=supervised_index(host_mask, batch["loss_mask"].device),
                )
            )
        with state.straggler_timer, profiling.stage("forward"):
            output = model(
                input_ids=batch.get("tokens"),
                position_ids=batch.get("position_ids"),
                attention_mask=None,
                labels=batch.get("labels"),
                loss_mask=batch.get("loss_mask"),
                **attention_arguments(batch),
            )
        metrics = loss.end() if loss is not None else {}
        check = state.cfg.rerun_state_machine.check_for_nan_in_loss
        return output, partial(
            sum_over_tokens,
            loss_mask=batch.get("loss_mask"),
            metrics=metrics,
            sample_index=batch.get("sample_index") if check else None,
        )


def load_batch(
    data_iterator, model, wait: DataWait, *, documents_apart: bool
) -> tuple[dict, torch.Tensor | None]:
    """This rank's part of the next micro-batch, on its device, and the loss mask still on the host.

    Args:
        documents_apart: Samples hold documents that must not attend to one another.

    Returns:
        The tensors this pipeline stage needs ([b, s] and [b, s, K]; with documents apart also
        packed_seq_params), and loss_mask [b, s] in host memory.
    """
    groups = get_pg_collection(model)
    first, last = is_pp_first_stage(groups.pp), is_pp_last_stage(groups.pp)
    if not first and not last and not documents_apart:
        return {}, None
    whole = wait.next(data_iterator)
    keys = FIRST_STAGE_KEYS if first else ()
    uses_mtp = (getattr(get_model_config(model), "mtp_num_layers", None) or 0) > 0
    if last:
        keys = (*keys, *LAST_STAGE_KEYS, *(FIRST_STAGE_KEYS if uses_mtp and not first else ()))
    batch = {key: whole.get(key) for key in keys}
    if documents_apart:
        batch = packed_documents.on_this_rank(batch, whole["cu_seqlens"], groups.cp)
    else:
        batch = host_version.batch_on_this_cp_rank(batch, groups.cp)
    host_mask = batch.get("loss_mask")
    on_device = {
        key: value.cuda(non_blocking=True) if value is not None else None
        for key, value in batch.items()
    }
    if documents_apart:
        on_device["packed_seq_params"] = packed_documents.parameters(whole["cu_seqlens"])
    return on_device | {"sample_index": whole["sample_index"]}, host_mask


def attention_arguments(batch: dict) -> dict:
    """The model's keyword arguments for attention that keeps documents apart, if this batch needs
    it.
    """
    packed = batch.get("packed_seq_params")
    return {} if packed is None else {"packed_seq_params": packed}


def supervised_index(host_mask: torch.Tensor, device) -> torch.Tensor:
    """Rows of the flattened [s · b] positions that the mask keeps, found on the host so that no
    device waits.

    Args:
        host_mask: [b, s], in host memory.

    Returns:
        [rows] int64 on `device`.
    """
    return host_mask.t().reshape(-1).nonzero().squeeze(-1).to(device, non_blocking=True)


def sum_over_tokens(
    per_token_loss: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    metrics: dict[str, torch.Tensor],
    sample_index: torch.Tensor | None,
):
    """The host's loss function: (sum of the loss, supervised tokens, report).

    Args:
        per_token_loss: [b, s] fp32, nats.
        loss_mask: [b, s].
        metrics: [b, s] each, detached, summed under the mask.
        sample_index: Samples of this micro-batch, to name when the loss is not finite; None skips
            that check.
    """
    mask = loss_mask.float().view(-1)
    losses = per_token_loss.float().view(-1)
    total = torch.sum(losses * mask)
    if sample_index is not None:
        check_finite(total, sample_index)
    tokens = mask.sum()
    count = tokens + NO_TOKENS

    def report(values):
        return torch.stack([torch.sum(values.detach().reshape(-1).float() * mask), count])

    reports = {name: report(values) for name, values in metrics.items()}
    return total, tokens.to(torch.int), reports


def unwrapped(model):
    """The Megatron-Core model inside its data-parallel and precision wrappers."""
    return unwrap_model(model)
