"""Losses between hidden states beside the loss between logits: layers, projection, weights.

Online the teacher's layers are in the process (`modelopt.py` hooks them); offline the cache holds
the teacher's last hidden state (`loss_seam.py` hands it over). Both use what is here.

s: sequence positions of the micro-batch on this context-parallel rank, s': the part of them this
tensor-parallel rank holds (s / tp under sequence parallelism, else s), b: micro-batch, D: student's
hidden size, H: teacher's.
"""

from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_kd.config import FINAL_NORM, HiddenStatesConfig
from megatron_kd.losses.hidden_states import HIDDEN_STATE_LOSSES
from megatron_kd.metrics_file import read_metrics
from megatron_kd.typed_mapping import ConfigError

PROJECTION = "hidden_state_projection"
HIDDEN_LOSS, TOTAL_LOSS = "hidden loss", "total loss"
PROJECTION_SEED = 20


class Weights:
    """What the logits loss and the hidden-state loss are multiplied by, the same on every rank.

    A balanced weight makes the hidden-state loss as large as `weight` × the logits loss. It is
    taken from the global means of the step before, so it depends neither on the parallel layout nor
    on the micro-batch size, and it uses the logits loss's magnitude: a top-K divergence may be
    negative.
    """

    def __init__(self, config: HiddenStatesConfig):
        self.config = config
        self.logits = config.logits_weight
        self.hidden = config.weight

    def update(self, kd_loss: float, hidden_loss: float) -> None:
        """Set the weights of the next step from this step's means, in nats and in the hidden loss's
        unit.
        """
        if self.config.balance and hidden_loss > 0:
            self.hidden = self.config.weight * abs(kd_loss) / hidden_loss


class BalanceWeights(Callback):
    """Update the weights after every step. A resumed run takes up the last step's from its metrics.

    Args:
        weights: Of this run.
        directory: The run's output_dir, which every rank can read.
    """

    def __init__(self, weights: Weights, directory: str | Path):
        self.weights = weights
        self.directory = Path(directory)

    def on_train_start(self, context: CallbackContext) -> None:
        step = context.state.train_state.step
        if step == 0:
            return
        for record in read_metrics(self.directory):
            if record["kind"] == "train" and record["iteration"] == step:
                self._update(record["losses"])
                return
        raise ValueError(
            f"the metrics in {self.directory} have no iteration {step}, from which this run "
            "resumes and whose losses balance the next step: keep metrics.jsonl with the "
            "checkpoints, with a bridge.logger.log_interval that divides the save_interval, or set "
            "hidden_states.balance=false"
        )

    def on_train_step_end(self, context: CallbackContext) -> None:
        losses = context.loss_dict or {}  # only the last stage has them, and uses the weights
        self._update({name: value.item() for name, value in losses.items()})

    def _update(self, losses: dict[str, float]) -> None:
        if HIDDEN_LOSS in losses:
            self.weights.update(losses["kd loss"], losses[HIDDEN_LOSS])


def hidden_state_loss(
    predictions: torch.Tensor,
    targets: torch.Tensor,
    *,
    model: torch.nn.Module,
    kind: str,
    sequence_parallel: bool,
    tp_group: torch.distributed.ProcessGroup | None,
) -> torch.Tensor:
    """Per-token loss between hidden states, the same on every tensor-parallel rank.

    Args:
        predictions: [s', b, D], the student's.
        targets: [s', b, H], the teacher's.
        model: Holds the projection D → H where the two differ (`add_projection`).
        kind: "mse" or "cosine".
        sequence_parallel: Whether s' is a part of s.
        tp_group: Tensor-parallel ranks, or None.

    Returns:
        [s, b] fp32. Its gradient needs no reduction over tensor-parallel ranks.
    """
    projection = getattr(model, PROJECTION, None)
    if projection is not None:
        predictions = projection(predictions)
    loss = HIDDEN_STATE_LOSSES[kind](predictions, targets)  # [s', b]
    if not sequence_parallel or tp_group is None:
        return loss
    # Every rank goes on with the whole sequence's loss, so each one's gradient is its own part.
    return gather_from_sequence_parallel_region(
        loss, tensor_parallel_output_grad=False, group=tp_group
    )


def own_part(whole: torch.Tensor, *, sequence_parallel: bool, tp_group) -> torch.Tensor:
    """[s, …] → [s', …], the positions this tensor-parallel rank holds."""
    if not sequence_parallel or tp_group is None:
        return whole
    return whole.chunk(tp_group.size(), dim=0)[tp_group.rank()]


def add_projection(model: torch.nn.Module, student_size: int, teacher_size: int) -> None:
    """Give a model chunk the linear map from its hidden size to the teacher's, where they differ.

    It is trained with the student, saved in its checkpoints, and left out of the export. Its start
    is a function of the two sizes alone, so every layout begins alike.
    """
    if student_size == teacher_size:
        return
    projection = torch.nn.Linear(student_size, teacher_size, bias=False)
    generator = torch.Generator().manual_seed(PROJECTION_SEED)
    with torch.no_grad():
        start = torch.randn(teacher_size, student_size, generator=generator)
        projection.weight.copy_(start / student_size**0.5)
    reference = next(model.parameters())
    projection.to(device=reference.device, dtype=reference.dtype)
    # The host adds up its gradient over tensor-parallel ranks that each saw a part of the sequence.
    projection.weight.sequence_parallel = bool(model.config.sequence_parallel)
    model.add_module(PROJECTION, projection)


def layer_name(layer: int | str, provider) -> str:
    """A configured layer as a module name of the model chunk on this (last) pipeline stage.

    Raises:
        ConfigError: The layer is on an earlier stage.
    """
    if layer == FINAL_NORM:
        return "decoder.final_layernorm"
    index = layer if layer >= 0 else provider.num_layers + layer
    local = index - get_transformer_layer_offset(provider)
    if local < 0:
        raise ConfigError(
            f"hidden_states.pairs names layer {layer}, which is not on the last pipeline stage; "
            "ModelOpt compares layers of the last stage only: choose later layers, or fewer stages"
        )
    return f"decoder.layers.{local}"


def check_layers(config: HiddenStatesConfig, student, teacher) -> None:
    """Refuse layers that do not exist, and recomputation that would detach them.

    Raises:
        ConfigError: Names the pair.
    """
    for pair in config.pairs:
        for layer, provider, whose in zip(
            pair, (student, teacher), ("student", "teacher"), strict=True
        ):
            count = provider.num_layers
            if layer != FINAL_NORM and not -count <= layer < count:
                raise ConfigError(
                    f"hidden_states.pairs: {list(pair)} names layer {layer} of the {whose}, which "
                    f"has {count} layers (0 … {count - 1}, or -1 for the last)"
                )
        if pair[0] != FINAL_NORM and student.recompute_granularity == "full":
            raise ConfigError(
                "bridge.model.recompute_granularity=full runs the student's layers without a "
                f"graph, so a loss on layer {pair[0]} would have no gradient; use {FINAL_NORM}, or "
                "recompute_granularity=selective"
            )
