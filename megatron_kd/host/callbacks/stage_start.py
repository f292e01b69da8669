"""Let the learning rate of a new stage be what its recipe says.

The host goes on from a checkpoint with the optimizer's own record of its learning rates (from core
0.19 it refuses a checkpoint whose record differs), and counts its schedule in samples. So the first
process of a stage loads with the rates of the stage before it, and then takes its own; and after a
change of the batch size the schedule is moved to the iteration of the run. A checkpoint from within
the stage has it all.
"""

from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer

from megatron_kd.host.container import LEARNING_RATES
from megatron_kd.stages import Stage


class StageStart(Callback):
    """Callback for `pretrain`; acts where a stage after the first begins."""

    def __init__(self, stage: Stage):
        self.stage = stage

    def on_train_start(self, context: CallbackContext) -> None:
        step, stage = context.state.train_state.step, self.stage
        if stage.before is None or step != stage.first:
            return
        rates = learning_rates(stage.config.bridge)
        for group in context.optimizer.param_groups:
            group.update(max_lr=rates["lr"], min_lr=rates["min_lr"])
        scheduler = context.scheduler
        scheduler.max_lr, scheduler.min_lr = rates["lr"], rates["min_lr"]
        # A step that was skipped did not count, and does not.
        batch = context.state.cfg.train.global_batch_size
        batch_before = stage.before.bridge["train"].get("global_batch_size", 1)
        scheduler.num_steps = scheduler.num_steps * batch // batch_before
        scheduler.step(increment=0)


def take_over(container: ConfigContainer, stage: Stage) -> None:
    """Where a new stage begins, set the learning rates to those of the checkpoint it will load."""
    if stage.before is None or last_iteration(stage) != stage.first:
        return
    for name, value in learning_rates(stage.before.bridge).items():
        setattr(container.optimizer, name, value)


def last_iteration(stage: Stage) -> int:
    """The iteration of the newest complete checkpoint that a run would go on from; 0 without."""
    config = stage.config
    checkpoint = config.bridge.get("checkpoint") or {}
    folder = checkpoint.get("load", Path(config.output_dir) / "checkpoints")
    file = Path(folder) / "latest_train_state.pt"
    return int(torch.load(file, weights_only=True)["step"]) if file.is_file() else 0


def learning_rates(bridge: dict) -> dict[str, float]:
    """The highest and the lowest learning rate of a recipe's section `bridge`."""
    given = bridge.get("optimizer") or {}
    return {name: given.get(name, value) for name, value in LEARNING_RATES.items()}
