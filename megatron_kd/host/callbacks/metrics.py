"""Write a run's metrics to one JSON-lines file, show progress, and report each rank's peak memory.

One line per logged iteration (`"kind": "train"`) and per evaluation (`"kind": "validation"`):
losses in nats per supervised token, the gradient norm, tokens per second, model TFLOP/s per rank,
seconds, seconds of them spent waiting for data, peak bytes of this rank. What the host does not log
itself goes to its TensorBoard and W&B too. Floating-point numbers are written in full, so two runs
can be compared to the bit.
"""

import json
import math
import time
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from tqdm import tqdm

from megatron_kd.files import publish
from megatron_kd.host.step.micro_batch import DataWait
from megatron_kd.metrics_file import FILE_NAME, KD_LOSS, PEAK_MEMORY, read_metrics


class RunMetrics(Callback):
    """Callback for `pretrain`; the first data-parallel rank of the last pipeline stage writes.

    Args:
        directory: Where `metrics.jsonl` and `peak_memory.json` go. A resumed run continues the
            file: lines of iterations it will repeat are dropped.
        data_wait: Seconds that the run's forward step waits for data.
        progress: Show a bar on standard error.
    """

    def __init__(self, directory: str | Path, data_wait: DataWait, *, progress: bool = True):
        self.directory = Path(directory)
        self.data_wait = data_wait
        self.progress = progress
        self._bar = None
        self._writes = False
        self._step_started_s = 0.0
        self._last_validation = None

    def on_train_start(self, context: CallbackContext) -> None:
        self._writes = writes_metrics(context.model)
        if not self._writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        start, total = context.state.train_state.step, context.state.cfg.train.train_iters
        keep_until(self.directory / FILE_NAME, start)
        if self.progress:
            self._bar = tqdm(
                initial=start, total=total, desc="distil", unit="it", dynamic_ncols=True
            )

    def on_train_step_start(self, context: CallbackContext) -> None:
        self.data_wait.take()  # an evaluation's waits are not this step's
        self._step_started_s = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        cfg, step = context.state.cfg, context.state.train_state.step + 1
        speed = self._speed(cfg)
        if step % cfg.logger.log_interval == 0:
            _log(context.state, speed | {"peak-GB": torch.cuda.max_memory_allocated() / 1e9}, step)
        if not self._writes or (step % cfg.logger.log_interval and step != cfg.train.train_iters):
            return
        losses = _reported(context.loss_dict or {})
        self._write(
            kind="train",
            iteration=step,
            losses=losses,
            grad_norm=_number(context.grad_norm),
            learning_rate=_learning_rate(context.optimizer),
            skipped=bool(context.skipped_iter),
            **speed,
            peak_bytes=torch.cuda.max_memory_allocated(),
        )
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(
                {name: f"{value:.3f}" for name, value in losses.items() if "loss" in name}
            )

    def _speed(self, cfg) -> dict[str, float]:
        seconds = time.perf_counter() - self._step_started_s
        samples = cfg.train.global_batch_size
        flops = num_floating_point_operations(cfg, samples) / torch.distributed.get_world_size()
        return {
            "tokens_per_s": samples * cfg.model.seq_length / seconds,
            "model_tflops_per_s": flops / seconds / 1e12,
            "seconds": seconds,
            "data_wait_s": self.data_wait.take(),
        }

    def on_eval_end(self, context: CallbackContext) -> None:
        if context.total_loss_dict and writes_metrics(context.model):
            self.record_validation(context.state.train_state.step, context.total_loss_dict)

    def record_validation(self, iteration: int, total_loss_dict: dict[str, torch.Tensor]) -> None:
        """Write one evaluation; the host repeats the last one of a run, which is left out."""
        if iteration == self._last_validation:
            return
        self._last_validation = iteration
        losses = _reported(total_loss_dict)
        self._write(kind="validation", iteration=iteration, losses=losses)
        if self._bar is not None:
            shown = "  ".join(
                f"{name} {value:.4f}" for name, value in losses.items() if "loss" in name
            )
            self._bar.write(f"iteration {iteration}: validation {shown}")

    def on_train_end(self, context: CallbackContext) -> None:
        if self._bar is not None:
            self._bar.close()
        peaks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, torch.cuda.max_memory_allocated())
        if self._writes:
            (self.directory / PEAK_MEMORY).write_text(json.dumps({"peak_bytes_by_rank": peaks}))

    def _write(self, **record) -> None:
        with open(self.directory / FILE_NAME, "a") as metrics:
            metrics.write(json.dumps(record) + "\n")


def writes_metrics(model) -> bool:
    """Whether this rank has the losses and is the one to record them."""
    groups = get_pg_collection(model)
    return is_pp_last_stage(groups.pp) and groups.dp_cp.rank() == 0 and groups.tp.rank() == 0


def keep_until(path: Path, iteration: int) -> None:
    """Drop the records a run resumed after `iteration` writes again; all of them at iteration 0."""
    if not path.exists():
        return
    kept = [r for r in read_metrics(path.parent) if 0 < iteration and r["iteration"] <= iteration]
    publish(path, "".join(json.dumps(record) + "\n" for record in kept))


def _log(state, values: dict[str, float], step: int) -> None:
    """To the host's TensorBoard and W&B, which one rank has."""
    if state.tensorboard_logger is not None:
        for name, value in values.items():
            state.tensorboard_logger.add_scalar(f"distillation/{name}", value, step)
    if state.wandb_logger is not None:
        named = {f"distillation/{name}": value for name, value in values.items()}
        state.wandb_logger.log(named, step)


def _reported(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    """The losses as numbers, without the caches that no sample came from, which have none."""
    numbers = {name: value.item() for name, value in losses.items()}
    return {
        name: value
        for name, value in numbers.items()
        if not (name.startswith(f"{KD_LOSS}/") and math.isnan(value))
    }


def _number(value) -> float | None:
    return None if value is None else float(value)


def _learning_rate(optimizer) -> float | None:
    rates = [group["lr"] for group in optimizer.param_groups if group]
    return float(rates[0]) if rates else None
