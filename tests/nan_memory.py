"""Memory that nobody wrote reads as NaN, in tests: what is used before it is written shows.

`poison()` replaces the ways to get uninitialized memory by ones that fill floating tensors with NaN
and integers with their largest value: `torch.empty`, `torch.empty_like`, `torch.empty_strided`,
`Tensor.new_empty` and `Tensor.new_empty_strided`.

PyTorch's own switch for this (`torch.utils.deterministic.fill_uninitialized_memory`) works only
with deterministic algorithms, which are other ones than a user's run takes.
"""

import functools

import torch
from torch.utils._device import _device_constructors

_PLACES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def fill_(tensor):
    """tensor, with a value in every element that no computation should leave there."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided or not tensor.numel():
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _poisoned(make):
    @functools.wraps(make)
    def call(*args, **options):
        return fill_(make(*args, **options))

    call.unpoisoned = make
    return call


def poison():
    """Poison uninitialized memory from here on in this process."""
    # `with torch.device(…)` knows the constructors by identity and lists them once: before they are
    # replaced, or a model built on the meta device would be allocated for real.
    _device_constructors()
    for owner, name in _PLACES:
        make = getattr(owner, name)
        if not hasattr(make, "unpoisoned"):
            setattr(owner, name, _poisoned(make))
