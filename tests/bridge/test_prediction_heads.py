"""How a newer core weighs the loss of heads for multi-token prediction under context parallelism:
as without it, whatever the masks are.
"""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from gloo import run_ranks

S, D = 16, 3
MASKS = {
    "all": [1.0] * S,
    "no end": [1.0] * (S - 3) + [0.0] * 3,
    # Rank 0 holds the first and the last quarter: none is its own, and one moves there.
    "none of one rank": [0.0] * 4 + [1.0] * 8 + [0.0] * 4,
    "a first token of a part": [0.0] * 12 + [1.0] + [0.0] * 3,
    "none": [0.0] * S,
}


def gradient(hidden, labels, mask, group):
    """Of what the head read, [s, 1, h], with a loss that is linear in it."""
    import megatron.core.models.gpt.gpt_model as gpt_model

    config = SimpleNamespace(
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.3,
        calculate_per_token_loss=True,
        mtp_detach_heads=False,
    )
    both = torch.cat([torch.zeros_like(hidden), hidden]).requires_grad_()
    gpt_model.process_mtp_loss(
        hidden_states=both,
        labels=labels,
        loss_mask=mask,
        output_layer=lambda states, **options: (states, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda labels, states: states.sum(-1).T * labels,
        config=config,
        cp_group=group,
    ).sum().backward()
    return both.grad[len(hidden) :]


def on_both_ranks(rank):
    """mask → the largest departure of this rank's gradient from one rank's."""
    from megatron.core import parallel_state

    from megatron_kd.host import versions

    versions.apply_patches()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, 1, D, generator=make)
    labels = torch.randint(1, 9, (1, S), generator=make)
    places = torch.cat([torch.arange(S).chunk(4)[part] for part in (rank, 3 - rank)])
    found = {}
    for name, kept in MASKS.items():
        mask = torch.tensor([kept])
        want = gradient(hidden, labels, mask, None)[places]
        got = gradient(hidden[places], labels[:, places], mask[:, places], group)
        found[name] = (got - want).abs().max().item()
    return found


@pytest.mark.extended
def test_context_parallel_ranks_weigh_heads_as_one_rank_does():
    if tuple(map(int, version("megatron-bridge").split(".")[:2])) < (0, 6):
        pytest.skip("this core does not weigh by counts")
    for departures in run_ranks(2, on_both_ranks, host=True):
        assert departures == pytest.approx(dict.fromkeys(MASKS, 0.0), abs=1e-6)
