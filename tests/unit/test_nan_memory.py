"""Memory that nobody wrote reads as NaN in this suite's own process; for the ranks of `run_ranks`
tests/dist/test_gloo.py sees to it."""

import torch


def test_floating_memory_is_nan():
    like = torch.zeros(3, 4, dtype=torch.bfloat16)
    for made in (
        torch.empty(3, 4),
        torch.empty((2, 2), dtype=torch.float64),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (3, 1)),
        like.new_empty(5),
        like.new_empty_strided((2, 3), (3, 1)),
        torch.empty(2, 2, requires_grad=True),
    ):
        assert torch.isnan(made).all() and made.numel()
    assert torch.empty_like(like).dtype == like.dtype


def test_integers_are_far_outside_any_vocabulary():
    assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    assert torch.empty(2, dtype=torch.bool).dtype == torch.bool
    assert torch.empty(2, device="meta").is_meta


def test_a_device_context_still_chooses_the_device():
    """A model built on the meta device takes no memory."""
    with torch.device("meta"):
        made = torch.empty(1 << 40)
        layer = torch.nn.Linear(1 << 20, 1 << 20)
    assert made.is_meta and layer.weight.is_meta
