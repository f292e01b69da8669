"""A loss between hidden states beside the loss between logits: its value, projection and weight.

Online the teacher's layers are in the process; offline the cache holds the teacher's last hidden
state. Both use what is here.

s: sequence positions of the micro-batch on this context-parallel rank, s': those of them that this
tensor-parallel rank holds (s / tp under sequence parallelism, else s), b: micro-batch, h: the
student's hidden size, h_t: the teacher's.
"""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_kd.config import HiddenStatesConfig
from megatron_kd.losses.hidden_states import HIDDEN_STATE_LOSSES

PROJECTION = "hidden_state_projection"
PROJECTION_SEED = 20


class LossWeights:
    """What the logits loss and the hidden-state loss are multiplied by, the same on every rank.

    A balanced weight makes the hidden-state loss as large as `weight` × the divergence. It is
    taken from the global means of the step before, so it depends neither on the parallel layout nor
    on the micro-batch size, and it uses the divergence's magnitude: one from a truncated teacher
    may be negative.
    """

    def __init__(self, config: HiddenStatesConfig):
        self.config = config
        self.logits = config.logits_weight
        self.hidden = config.weight

    def balance(self, divergence: float, hidden_loss: float) -> None:
        """Set the weights of the next step from this step's means over all supervised tokens.

        Args:
            divergence: Nats.
            hidden_loss: In the hidden-state loss's own unit.
        """
        if self.config.balance and hidden_loss > 0:
            self.hidden = self.config.weight * abs(divergence) / hidden_loss

    def mix(self, logits_loss: torch.Tensor, hidden_loss: torch.Tensor | None) -> torch.Tensor:
        """[s, b] each → the loss to train on [s, b]; logits_loss itself where nothing is mixed."""
        total = logits_loss if self.logits == 1 else self.logits * logits_loss
        return total if hidden_loss is None else total + self.hidden * hidden_loss


class LastHiddenState:
    """The offline loss between the last hidden states, which are what the output layer reads.

    Args:
        model: The student's chunk with the output layer; holds the projection.
        output_layer: Its output layer.
        kind: "mse" or "cosine".
        tp_group: Tensor-parallel ranks, or None.
    """

    def __init__(self, model, output_layer, kind: str, tp_group):
        self._model, self._kind = model, kind
        self._parallel = {
            "sequence_parallel": bool(getattr(output_layer, "sequence_parallel", False)),
            "tp_group": tp_group,
        }
        self._student = None
        output_layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def loss(self, teacher: torch.Tensor) -> torch.Tensor:
        """The teacher's states [s, b, h_t] against those of the output layer's last call; [s, b]
        fp32. The student's are let go.
        """
        student, self._student = self._student, None
        return hidden_state_loss(
            student,
            part_of_this_rank(teacher, **self._parallel),
            model=self._model,
            kind=self._kind,
            **self._parallel,
        )

    def _keep(self, module, arguments, keywords) -> None:
        """Forward pre-hook of the output layer."""
        self._student = arguments[0] if arguments else keywords["input_"]


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
        predictions: [s', b, h], the student's.
        targets: [s', b, h_t], the teacher's.
        model: Holds the projection h → h_t where the two differ (`add_projection`).
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


def part_of_this_rank(whole: torch.Tensor, *, sequence_parallel: bool, tp_group) -> torch.Tensor:
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
