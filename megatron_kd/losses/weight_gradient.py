"""The output layer's gradient, summed over chunks in fp32, and where the host wants it.

Summing 64 chunks in bf16 costs about 1 % of the gradient, so the sum is fp32 whatever the dtype of
the products; where the library can, it happens inside the product.

Letters: n rows, D hidden, Vp this rank's vocabulary.
"""

import functools

import torch

from megatron_kd.losses.elementwise import accumulation_dtype

# A 16-bit product that the library cannot sum in fp32 is formed in slices of the vocabulary: each
# is still in the cache when it is added, there is no second [Vp, D], and no fp32 copy of all of dz
# where the library has to widen its factors.
SLICE_BYTES = 8 << 20


class WeightGradient:
    """Sum of dz^T h over chunks, [Vp, D].

    With fuse the host's own `weight.main_grad` receives it: the protocol of Megatron's
    gradient_accumulation_fusion, `get_main_grad()` for Megatron-FSDP included.
    """

    def __init__(
        self, weight: torch.Tensor, valid: int, *, fuse: bool, into_main_grad: bool
    ) -> None:
        dtype = accumulation_dtype(weight.dtype)
        self.weight, self.valid, self.fuse = weight, valid, fuse
        main_grad = main_grad_of(weight) if fuse else None
        self.is_main_grad = into_main_grad and fuse and main_grad.dtype == dtype
        self.total = main_grad if self.is_main_grad else torch.empty_like(weight, dtype=dtype)
        self.started = self.is_main_grad  # the first product overwrites memory that holds nothing

    def add_(self, dz: torch.Tensor, h: torch.Tensor) -> None:
        """dz [n, valid], h [n, D]"""
        total, beta = self.total[: self.valid], float(self.started)
        self.started = True
        if dz.dtype == total.dtype:
            total.addmm_(dz.T, h, beta=beta)
        elif dz.is_cuda and _sums_in_product():
            torch.addmm(total, dz.T, h, out_dtype=total.dtype, beta=beta, out=total)
        else:
            rows = max(1, SLICE_BYTES // (4 * max(h.shape)))
            for i in range(0, self.valid, rows):
                part = dz[:, i : i + rows].T @ h
                if beta:
                    total[i : i + rows] += part
                else:
                    total[i : i + rows] = part

    def finish(self, scale: torch.Tensor | None = None) -> torch.Tensor | None:
        """What autograd gets: the sum in the weight's dtype, or the host's dummy."""
        if not self.started:
            self.total.zero_()
        elif not self.is_main_grad:
            self.total[self.valid :] = 0
        if scale is not None:
            self.total.mul_(scale)
        if not self.fuse:
            return self.total.to(self.weight.dtype)
        if not self.is_main_grad:
            main_grad_of(self.weight).add_(self.total)
        return fused_dummy(self.weight)


def main_grad_of(weight: torch.Tensor) -> torch.Tensor:
    """The host's gradient buffer of a parameter."""
    if hasattr(weight, "get_main_grad"):
        return weight.get_main_grad()
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


@functools.cache
def _sums_in_product() -> bool:
    """Whether this torch's addmm takes 16-bit factors and an fp32 sum on CUDA."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")
