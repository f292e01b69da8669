"""dH, dW and d_bias of the output layer, from the gradients of the chunks' logits.

Summing 64 chunks of dW in bf16 costs about 1 % of the gradient, so the sum is fp32 whatever the
dtype of the products; where the library can, it happens inside the product.

s sequence, b micro-batch, h hidden, vp = v/tp this rank's vocabulary, n rows of a chunk.
"""

import torch
import torch.distributed as dist

from megatron_kd.losses.fp32_sum import add_product_
from megatron_kd.losses.kernels import accumulation_dtype
from megatron_kd.losses.positions import Positions
from megatron_kd.losses.vocab_parallel import VocabShard, reduce_scatter_sequence


class Gradients:
    """dH, dW and d_bias as the chunks come in; what autograd does not ask for is not formed."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: Positions,
        shard: VocabShard,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
        *,
        sequence_parallel: bool,
        fuse: bool,
        into_main_grad: bool,
        gathered: torch.Tensor | None = None,
    ) -> None:
        """Make room for the gradients.

        Args:
            hidden: [s, b, h], or this rank's [s/tp, b, h] with sequence_parallel.
            weight: [vp, h], the parameter itself.
            bias: [vp] or None.
            positions: The rows that are worked on.
            shard: This rank's part of the vocabulary.
            dtype: Of the products.
            needs: Whether autograd asks for the gradients of hidden, weight and bias.
            sequence_parallel: Whether dH is reduce-scattered along s.
            fuse: Whether dW goes to the host's main_grad.
            into_main_grad: Whether it may be summed there from the start.
            gathered: [s * b, h] of dtype, the hidden states of the whole sequence where they were
                gathered for this pass alone: dH of a row takes their place as soon as the row's
                products are done, so that one [s * b, h] serves for both.
        """
        self.positions, self.shard = positions, shard
        self.sequence_parallel, self.hidden_dtype = sequence_parallel, hidden.dtype
        self.hidden = self.weight = self.bias = self.bias_dtype = None
        self.takes_their_place = needs[0] and gathered is not None
        if self.takes_their_place:
            self.hidden = gathered
        elif needs[0]:
            make = torch.empty if positions.index is None else torch.zeros
            shape = (positions.total, hidden.shape[-1])
            self.hidden = make(shape, dtype=dtype, device=hidden.device)  # [s * b, h]
        if needs[1]:
            self.weight = WeightGradient(
                weight, shard.unpadded_rows, fuse=fuse, into_main_grad=into_main_grad
            )
        if needs[2]:
            self.bias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype))
            self.bias_dtype = bias.dtype

    def add_(self, part: slice, dz: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> None:
        """Add a chunk: dz [n, vp], its hidden states h [n, h], and the weight w [vp, h].

        h may be overwritten, see `gathered`: it is read before dH is written.
        """
        if self.weight is not None:
            self.weight.add_(dz, h)
        if self.hidden is not None:
            if self.positions.index is None:
                torch.mm(dz, w, out=self.hidden[part])
            else:
                self.positions.put_(self.hidden, part, dz @ w)
        if self.bias is not None:
            self.bias[: dz.shape[1]] += dz.sum(0, dtype=self.bias.dtype)

    def reduced(self, shape: torch.Size) -> "Gradients":
        """These gradients, dH summed over the vocabulary's shards and of the shape of hidden."""
        group = self.shard.group
        if self.takes_their_place and self.positions.index is not None:
            worked_on = torch.zeros(
                len(self.hidden), 1, dtype=torch.bool, device=self.hidden.device
            )
            worked_on[self.positions.index] = True
            self.hidden.masked_fill_(~worked_on, 0.0)  # hidden states still
        if self.hidden is not None:
            if self.sequence_parallel:
                whole = self.hidden.view(-1, *shape[1:])
                self.hidden = reduce_scatter_sequence(whole, group)
            elif group is not None:
                dist.all_reduce(self.hidden, group=group)
            self.hidden = self.hidden.view(shape)
        return self

    def for_autograd(self, scale: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """What autograd gets for hidden_states, output_weight and bias, times scale, in place."""
        if scale is not None:
            for gradient in (self.hidden, self.bias):
                if gradient is not None:
                    gradient.mul_(scale)
        return (
            None if self.hidden is None else self.hidden.to(self.hidden_dtype),
            None if self.weight is None else self.weight.for_autograd(scale),
            None if self.bias is None else self.bias.to(self.bias_dtype),
        )


class WeightGradient:
    """Sum of dz^T h over chunks, [vp, h].

    With fuse the host's own `weight.main_grad` receives it: the protocol of Megatron's
    gradient_accumulation_fusion. A weight of Megatron-FSDP is left to autograd all the same: a
    fused layer has to overwrite the buffer that `weight.get_main_grad()` hands out, and where heads
    for multi-token prediction share the weight the last would be all that remains.
    """

    def __init__(
        self, weight: torch.Tensor, unpadded_rows: int, *, fuse: bool, into_main_grad: bool
    ) -> None:
        dtype = accumulation_dtype(weight.dtype)
        self.weight, self.unpadded_rows = weight, unpadded_rows
        self.fuse = fuse and not hasattr(weight, "get_main_grad")
        main_grad = main_grad_of(weight) if self.fuse else None
        self.is_main_grad = into_main_grad and self.fuse and main_grad.dtype == dtype
        self.total = main_grad if self.is_main_grad else torch.empty_like(weight, dtype=dtype)
        self.started = self.is_main_grad  # the first product overwrites memory that holds nothing

    def add_(self, dz: torch.Tensor, h: torch.Tensor) -> None:
        """Add the product of dz [n, vp] and the chunk's hidden states h [n, h]."""
        add_product_(self.total[: self.unpadded_rows], dz, h, beta=float(self.started))
        self.started = True

    def for_autograd(self, scale: torch.Tensor | None = None) -> torch.Tensor | None:
        """The sum, times scale, in the weight's dtype; or, where main_grad has it, the dummy."""
        if not self.started:
            self.total.zero_()
        elif not self.is_main_grad:
            self.total[self.unpadded_rows :] = 0
        if scale is not None:
            self.total.mul_(scale)
        if not self.fuse:
            return self.total.to(self.weight.dtype)
        if not self.is_main_grad:
            main_grad_of(self.weight).add_(self.total)
        return fused_dummy(self.weight)


def main_grad_of(weight: torch.Tensor) -> torch.Tensor:
    """The host's gradient buffer of a parameter."""
    if getattr(weight, "main_grad", None) is None:
        raise ValueError(
            "gradient_accumulation_fusion needs output_weight.main_grad, which Megatron's DDP "
            "wrapper sets; wrap the model first, or turn the fusion off"
        )
    return weight.main_grad


def fused_dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets when main_grad has it: Megatron's hooks want a tensor and a flag."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)
