"""The forward step of Megatron-Bridge's loop, offline and online.

It loads a micro-batch, gives the last stage's `DistillationLoss` the teacher's rows, runs the
model, and reports every quantity as (sum, supervised tokens), which the host adds up over
micro-batches and ranks before it divides.

s: sequence positions on this rank, b: micro-batch.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.bridge.training.state import GlobalState

from megatron_kd.host.step import micro_batch
from megatron_kd.host.step.distillation_loss import DistillationLoss
from megatron_kd.host.step.finite_loss import check_finite
from megatron_kd.host.step.micro_batch import DataWait
from megatron_kd.host.step.nvtx_ranges import stage

NO_TOKENS = 1e-9
"""Added to a reported token count: it vanishes beside 1, and a batch without a supervised token
reports 0, not NaN.
"""


class DistillationStep:
    """Callable for `pretrain`: (state, data_iterator, model) → (per-token loss [b, s], loss
    function).

    Args:
        directory: The run's output_dir, where the samples of a loss that is not finite are named.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
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
            batch = micro_batch.load(
                data_iterator,
                model,
                self.data_wait,
                documents_apart=state.cfg.dataset.documents_apart,
            )
        state.timers("batch-generator").stop()
        loss = DistillationLoss.of(model)
        if loss is not None:
            loss.begin(batch.loss_inputs)
        with state.straggler_timer, stage("forward"):
            output = model(**batch.model_arguments)
        report = {} if loss is None else loss.end()
        check = None
        if state.cfg.rerun_state_machine.check_for_nan_in_loss:
            check = partial(check_finite, sample_index=batch.sample_index, directory=self.directory)
        return output, partial(
            sum_over_tokens, loss_mask=batch.loss_mask, report=report, check=check
        )


def sum_over_tokens(
    per_token_loss: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    report: dict[str, torch.Tensor],
    check=None,
):
    """The host's loss function: (sum of the loss, supervised tokens, report).

    Args:
        per_token_loss: [b, s] fp32, nats.
        loss_mask: [b, s].
        report: [b, s] each, detached, summed under the mask.
        check: Called with the sum; it raises where that is not finite. None checks nothing.
    """
    mask = loss_mask.float().view(-1)
    total = torch.sum(per_token_loss.float().view(-1) * mask)
    if check is not None:
        check(total)
    tokens = mask.sum()
    count = tokens + NO_TOKENS

    def summed(values):
        return torch.stack([torch.sum(values.detach().reshape(-1).float() * mask), count])

    return total, tokens.to(torch.int), {name: summed(v) for name, v in report.items()}
