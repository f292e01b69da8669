"""The CPU backend's attention and norm against the host's own, on one rank and without packing.

s: sequence, b: micro-batch, n: heads, d: channels of a head.
"""

import itertools

import pytest
import torch
from gloo import run_ranks

S, B, N, GROUPS, D = 16, 2, 4, 2, 8
BOUNDS = [0, 4, 12, 16]  # three documents that two context-parallel ranks can share

ATTENTION = {
    "plain": {},
    "window": {"window_size": (3, 0)},
    "sink": {"softmax_type": "off-by-one"},
    "scaled by layer": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
}


def _set_up(context_parallel_size):
    from megatron_kd.host.cpu import backend as cpu_backend

    cpu_backend.activate()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks // context_parallel_size,
        context_parallel_size=context_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)


def _attention(context_parallel_size, groups, **options):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=N * D,
        num_attention_heads=N,
        num_query_groups=groups,
        context_parallel_size=context_parallel_size,
        attention_dropout=0.0,
        **options,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return DotProductAttention(config, 2, AttnMaskType.causal, "self", pg_collection=collection)


def _inputs(groups, batch):
    """query, key, value [s, b, n, d] and an upstream gradient for the context."""
    generator = torch.Generator().manual_seed(5)
    heads = (N, groups, groups, N)
    made = [torch.randn(S, batch, n, D, generator=generator) for n in heads]
    return made[:3], made[3].flatten(2)


def _run(attention, inputs, upstream, **arguments):
    """Context, and the gradients of query, key and value."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    context = attention(*inputs, None, **arguments)
    context.backward(upstream)
    return [context.detach(), *(x.grad for x in inputs)]


def _departures(want, got):
    return [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(want, got, strict=True)]


def compare_attention(rank):
    """name → relative departures of (context, d_query, d_key, d_value) on this rank."""
    _set_up(context_parallel_size=2)
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_kd.data.document_layout import context_parallel_places

    found = {}
    for (name, options), groups in itertools.product(ATTENTION.items(), (N, GROUPS)):
        one, two = (_attention(ranks, groups, **options) for ranks in (1, 2))
        inputs, upstream = _inputs(groups, B)
        want = _run(one, inputs, upstream)
        mine, _ = context_parallel_places([0, S], rank, 2)
        got = _run(two, [x[mine] for x in inputs], upstream[mine])
        found[f"{name}, {groups} groups"] = _departures([x[mine] for x in want], got)

        inputs, upstream = _inputs(groups, 1)
        parts = [slice(*pair) for pair in itertools.pairwise(BOUNDS)]
        alone = [_run(one, [x[part] for x in inputs], upstream[part]) for part in parts]
        want = [torch.cat(pieces)[:, 0] for pieces in zip(*alone, strict=True)]
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        for ranks, attention in ((1, one), (2, two)):
            mine, _ = context_parallel_places(BOUNDS, rank, ranks)
            got = _run(
                attention,
                [x[mine, 0] for x in inputs],
                upstream[mine, 0],
                packed_seq_params=packed,
            )
            found[f"{name}, {groups} groups, packed, {ranks} ranks"] = _departures(
                [x[mine] for x in want], got
            )
    return found


def compare_norms(rank):
    """(relative departures of a norm's output and gradients with the sequence sharded; whether its
    parameters are marked with and without sequence parallelism), for each kind, with weights around
    one and around zero.
    """
    _set_up(context_parallel_size=1)
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    found = {}
    for kind, zero_centered in itertools.product(("RMSNorm", "LayerNorm"), (False, True)):
        norms = []
        for sequence_parallel in (False, True):
            config = TransformerConfig(
                num_layers=1,
                hidden_size=N * D,
                num_attention_heads=N,
                tensor_model_parallel_size=2,
                sequence_parallel=sequence_parallel,
                normalization=kind,
                layernorm_zero_centered_gamma=zero_centered,
                persist_layer_norm=False,
            )
            norms.append(WrappedTorchNorm(config, N * D, eps=1e-3))
        generator = torch.Generator().manual_seed(6)
        states, upstream = (torch.randn(S, B, N * D, generator=generator) for _ in range(2))
        whole, part = norms
        if zero_centered:  # the same function in PyTorch's own class
            whole = getattr(torch.nn, kind)(N * D, eps=1e-3)
        for norm, center in ((whole, 1.0), (part, 0.0 if zero_centered else 1.0)):
            assert all((norm.weight == center).tolist()), (kind, zero_centered)
            with torch.no_grad():
                norm.weight.copy_(center + torch.linspace(-2, 2, N * D))
        whole_states = states.clone().requires_grad_()
        whole(whole_states).backward(upstream)
        mine = slice(rank * S // 2, (rank + 1) * S // 2)
        part_states = states[mine].clone().requires_grad_()
        output = part(part_states)
        output.backward(upstream[mine])
        torch.distributed.all_reduce(part.weight.grad)  # as the host does for marked parameters
        found[kind, zero_centered] = (
            _departures(
                [whole(states)[mine].detach(), whole_states.grad[mine], whole.weight.grad],
                [output.detach(), part_states.grad, part.weight.grad],
            ),
            [all(p.sequence_parallel for p in norm.parameters()) for norm in norms],
        )
    return found


def test_attention_equals_the_hosts_own_on_one_rank():
    by_rank = run_ranks(2, compare_attention, host=True)
    assert len(by_rank[0]) == len(ATTENTION) * 2 * 3
    for found in by_rank:
        for name, departures in found.items():
            assert max(departures) < 2e-6, (name, departures)


def test_norms_of_a_sharded_sequence_are_marked_and_add_up():
    for found in run_ranks(2, compare_norms, host=True):
        for departures, marked in found.values():
            assert max(departures) < 2e-6, departures
            assert marked == [False, True]


@pytest.mark.parametrize("bounds", [[0, 6, 16], [0, 15]])
def test_documents_that_ranks_cannot_share_are_refused(bounds):
    from megatron_kd.data.document_layout import context_parallel_places

    with pytest.raises(ValueError, match="pad it to a multiple of 4"):
        context_parallel_places(bounds, 0, 2)
