"""Remember the checkpoint with the lowest validation KD loss, and stop when it no longer falls."""

import json
import math
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_kd.config import SelectionConfig
from megatron_kd.files import publish
from megatron_kd.host.export import BEST_FILE
from megatron_kd.metrics_file import FILE_NAME, KD_LOSS, curve, read_metrics


class SelectBest(Callback):
    """Callback for `pretrain`, on every rank; all of them decide alike.

    What was evaluated before is read from the run's metrics, so a resumed run decides as an
    unbroken one.

    Args:
        config: What to select by.
        directory: The run's output_dir.
    """

    def __init__(self, config: SelectionConfig, directory: str | Path):
        self.config = config
        self.directory = Path(directory)
        self.history: dict[int, float] = {}  # iteration → nats per supervised token

    def on_train_start(self, context: CallbackContext) -> None:
        step = context.state.train_state.step
        if step and (self.directory / FILE_NAME).is_file():
            iterations, values = curve(read_metrics(self.directory), "validation", KD_LOSS)
            past = zip(iterations, values, strict=True)
            self.history = {i: value for i, value in past if 0 < i <= step}
            self._stop_without_progress(context)

    def on_eval_end(self, context: CallbackContext) -> None:
        step = context.state.train_state.step
        value = _on_every_rank((context.total_loss_dict or {}).get(KD_LOSS))
        if step == 0 or step in self.history or not math.isfinite(value):
            return  # the student it started from has no checkpoint; the last evaluation is repeated
        self.history[step] = value
        best = best_of(self.history, self.config.min_improvement)
        if torch.distributed.get_rank() == 0:
            record = {"iteration": best, KD_LOSS: self.history[best]}
            publish(self.directory / BEST_FILE, json.dumps(record) + "\n")
        self._stop_without_progress(context)

    def _stop_without_progress(self, context: CallbackContext) -> None:
        if self.config.patience is None or not self.history:
            return
        best = best_of(self.history, self.config.min_improvement)
        since = sum(iteration > best for iteration in self.history)
        if since < self.config.patience:
            return
        step = context.state.train_state.step
        # The host's loop ends here as at the end of a run: it saves, evaluates, and calls
        # on_train_end.
        context.state.cfg.train.train_iters = step
        if torch.distributed.get_rank() == 0:
            print(
                f"megatron_kd: stopping at iteration {step}: the validation KD loss has not fallen "
                f"below iteration {best}'s for {since} evaluations",
                flush=True,
            )


def best_of(history: dict[int, float], min_improvement: float) -> int:
    """The iteration to keep: later ones count only if they are lower by more than
    `min_improvement` nats.
    """
    iterations = sorted(history)
    best = iterations[0]
    for iteration in iterations[1:]:
        if history[iteration] < history[best] - min_improvement:
            best = iteration
    return best


def _on_every_rank(value: torch.Tensor | None) -> float:
    """The loss, which only the last pipeline stage has."""
    known = torch.tensor(-math.inf if value is None else value.item(), device="cuda")
    torch.distributed.all_reduce(known, op=torch.distributed.ReduceOp.MAX)
    return known.item()
