"""Let the learning rate of a new stage be what its recipe says.

The host goes on from a checkpoint with the optimizer's own record of its learning rates, and counts
its schedule in samples. So without this a stage's learning rate would have no effect, and after a
change of the batch size the schedule would stand at another iteration than the run.
"""

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_kd.stages import Stage


class StageStart(Callback):
    """Callback for `pretrain`; acts where a stage after the first begins. A checkpoint from within
    the stage has it all.
    """

    def __init__(self, stage: Stage):
        self.stage = stage

    def on_train_start(self, context: CallbackContext) -> None:
        step, stage = context.state.train_state.step, self.stage
        if stage.number == 1 or step != stage.first:
            return
        batch = context.state.cfg.train.global_batch_size
        begin(context.optimizer, context.scheduler, batch=batch, batch_before=stage.batch_before)


def begin(optimizer, scheduler, *, batch: int, batch_before: int) -> None:
    """Give the optimizer the scheduler's rates, and the scheduler the new batch size.

    Args:
        optimizer: As loaded; `max_lr` and `min_lr` of its groups are the last stage's.
        scheduler: The host's, with the new stage's rates and the steps of the checkpoint.
        batch: Samples of a step from now on.
        batch_before: Samples of a step until now. A step that was skipped did not count, and does
            not.
    """
    for group in optimizer.param_groups:
        for name in ("max_lr", "min_lr"):
            if name in group:
                group[name] = getattr(scheduler, name)
    scheduler.num_steps = scheduler.num_steps * batch // batch_before
    scheduler.step(increment=0)
