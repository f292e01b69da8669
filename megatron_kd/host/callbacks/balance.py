"""Keep the hidden-state loss in its asked proportion to the divergence."""

from pathlib import Path

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron_kd.host.step.hidden_states import LossWeights
from megatron_kd.metrics_file import HIDDEN_LOSS, KD_LOSS, read_metrics


class BalanceWeights(Callback):
    """Balance the weights after every step. A resumed run starts with what its last step reported.

    Args:
        weights: Those of this run's loss.
        directory: The run's output_dir, which every rank can read.
    """

    def __init__(self, weights: LossWeights, directory: str | Path):
        self.weights = weights
        self.directory = Path(directory)

    def on_train_start(self, context: CallbackContext) -> None:
        step = context.state.train_state.step
        if step == 0:
            return
        for record in read_metrics(self.directory):
            if record["kind"] == "train" and record["iteration"] == step:
                self._balance(record["losses"])
                return
        raise ValueError(
            f"the metrics in {self.directory} have no iteration {step}, from which this run "
            "resumes and whose losses balance the next step: keep metrics.jsonl with the "
            "checkpoints, with a bridge.logger.log_interval that divides the save_interval, or set "
            "hidden_states.balance=false"
        )

    def on_train_step_end(self, context: CallbackContext) -> None:
        losses = context.loss_dict or {}  # only the last stage has them, and uses the weights
        self._balance({name: value.item() for name, value in losses.items()})

    def _balance(self, losses: dict[str, float]) -> None:
        if HIDDEN_LOSS in losses:
            self.weights.balance(losses[KD_LOSS], losses[HIDDEN_LOSS])
