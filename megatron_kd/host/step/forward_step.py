"""The forward step of Megatron-Bridge's loop, offline and online.

It loads a micro-batch, gives the last stage's `DistillationLoss` the teacher's rows, runs the
model, and reports every quantity as (sum, supervised tokens), which the host adds up over
micro-batches and ranks before it divides.

s: sequence positions on this rank, b: micro-batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from megatron.bridge.training.state import GlobalState

from megatron_kd.host.step import micro_batch
from megatron_kd.host.step.device_copy import to_device
from megatron_kd.host.step.distillation_loss import DistillationLoss
from megatron_kd.host.step.finite_loss import check_finite
from megatron_kd.host.step.micro_batch import DataWait
from megatron_kd.host.step.nvtx_ranges import stage
from megatron_kd.metrics_file import KD_LOSS

NO_TOKENS = 1e-9
"""Added to a reported token count: it vanishes beside 1, and a batch without a supervised token
reports 0, not NaN.
"""


class DistillationStep:
    """Callable for `pretrain`: (state, data_iterator, model) → (per-token loss [b, s], loss
    function).

    Args:
        directory: The run's output_dir, where the samples of a loss that is not finite are named.
        sources: Names of the caches of a mixture, each of which is then reported by itself.
    """

    def __init__(self, directory: str | Path, sources: Sequence[str] = ()):
        self.directory = Path(directory)
        self.sources = sources
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
        by_source = {}
        if report and self.sources:
            source = to_device(batch.loss_inputs.source)
            by_source = {
                f"{KD_LOSS}/{name}": source == number for number, name in enumerate(self.sources)
            }
        return output, partial(
            sum_over_tokens,
            loss_mask=batch.loss_mask,
            report=report,
            by_source=by_source,
            check=check,
        )


def sum_over_tokens(
    per_token_loss: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    report: dict[str, torch.Tensor],
    by_source: Mapping[str, torch.Tensor] = MappingProxyType({}),
    check=None,
):
    """The host's loss function: (sum of the loss, supervised tokens, report).

    Args:
        per_token_loss: [b, s] fp32, nats.
        loss_mask: [b, s].
        report: [b, s] each, detached, summed under the mask.
        by_source: Name: [b, 1] bool, the samples whose share of the KD loss is reported by itself.
            It is the mean over their tokens, and NaN where a batch has none.
        check: Called with the sum; it raises where that is not finite. None checks nothing.
    """
    mask = loss_mask.float().view(-1)
    total = torch.sum(per_token_loss.float().view(-1) * mask)
    if check is not None:
        check(total)
    tokens = mask.sum()
    count = tokens + NO_TOKENS

    def summed(values, own=mask, own_count=count):
        return torch.stack([torch.sum(values.detach().reshape(-1).float() * own), own_count])

    sums = {name: summed(values) for name, values in report.items()}
    for name, chosen in by_source.items():
        own = (loss_mask.float() * chosen).view(-1)
        sums[name] = summed(report[KD_LOSS], own, own.sum())
    return total, tokens.to(torch.int), sums
