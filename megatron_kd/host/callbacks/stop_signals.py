"""Stop a run on a signal: finish the step, save, exit 0.

Schedulers announce the end of a job with SIGTERM, or with a signal of the user's choice some time
ahead of it; a user presses Ctrl-C. The host has a setting for this (`train.exit_signal_handler`),
but not every version installs the handler, and it listens to one signal. Here the ranks agree after
every step, and the host's own `train.exit_interval` does the rest: it saves unless this step has
saved already, and leaves the loop with status 0.
"""

import os
import signal
import sys

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""All mean the same. SIGUSR1 is for launchers that must not end `torchrun`, which acts on the
others: it gives its ranks `--shutdown-timeout` seconds (30) and then exits with status 1."""


class StopOnSignal(Callback):
    """Callback for `pretrain`, on every rank; one rank that received a signal stops them all.

    A signal that comes before training starts is remembered, and the run stops after its first
    step.
    """

    def __init__(self):
        self.received: int | None = None
        self._rank_process = os.getpid()

    def listen(self) -> "StopOnSignal":
        """Install the handlers. Processes forked later, such as loader workers, inherit them and
        live on until the rank ends.
        """
        for number in SIGNALS:
            signal.signal(number, self._note)
        return self

    def on_train_step_end(self, context: CallbackContext) -> None:
        asked = torch.tensor([self.received is not None], dtype=torch.int32, device="cuda")
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        if not asked.item():
            return
        context.state.cfg.train.exit_interval = 1
        if torch.distributed.get_rank() == 0:
            step = context.state.train_state.step + 1
            print(f"megatron_kd: stopping after iteration {step}: a rank was asked to", flush=True)

    def _note(self, number, frame) -> None:
        if self.received is None and os.getpid() == self._rank_process:
            name = signal.Signals(number).name
            print(
                f"megatron_kd: {name}: will save and stop after this step",
                file=sys.stderr,
                flush=True,
            )
        self.received = number
