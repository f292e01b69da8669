"""What the ranks of `run_ranks` have in common with the process that tests run in."""

import torch
from gloo import run_ranks


def unwritten(rank):
    """Whether memory that nobody wrote is NaN on this rank, by the ways to get some."""
    made = (torch.empty(3), torch.empty_like(torch.zeros(2, 2)), torch.zeros(1).new_empty(4))
    return [bool(torch.isnan(x).all()) for x in made]


def test_memory_that_nobody_wrote_is_nan_in_ranks_too():
    assert run_ranks(2, unwritten) == [[True] * 3] * 2
