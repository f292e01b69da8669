"""The attention of Gemma 2 as each host has it, alone, against its definition in transformers: the
model as a whole needs Transformer Engine.

s: positions, n: heads, g: groups of keys, d: channels of a head.
"""

import math

import parts
import pytest
import torch

WINDOW, CAP, SCALAR = 6, 5.0, 9.0
S, N, G, D = 24, 4, 2, 8


def by_definition(query, key, value, window: int | None) -> torch.Tensor:
    """query [s, 1, n, d], key and value [s, 1, g, d] → [s, 1, n · d], in fp64."""
    q, k, v = (x[:, 0].double() for x in (query, key, value))
    k, v = (x.repeat_interleave(N // G, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) / math.sqrt(SCALAR)
    scores = CAP * torch.tanh(scores / CAP)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window  # transformers counts the query's own key
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).reshape(S, 1, N * D)


def check_every_other_layer_from_the_first_on_has_a_window(folder):
    from megatron.bridge.models.gemma.gemma2_provider import (
        Gemma2DotProductAttention,
        Gemma2ModelProvider,
    )
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType
    from transformers import Gemma2Config

    from megatron_kd.host import versions
    from megatron_kd.host.versions import windows

    config = Gemma2Config(num_hidden_layers=4, sliding_window=WINDOW)
    provider = Gemma2ModelProvider(
        num_layers=4,
        hidden_size=N * D,
        num_attention_heads=N,
        num_query_groups=G,
        kv_channels=D,
        query_pre_attn_scalar=SCALAR,
        attn_logit_softcapping=CAP,
        masked_softmax_fusion=False,
        bf16=False,
    )
    windows.correct(provider, config)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    try:
        layers = torch.nn.ModuleList(
            Gemma2DotProductAttention(
                config=provider,
                layer_number=number,
                attn_mask_type=AttnMaskType.causal,
                attention_type="self",
            )
            for number in range(1, 5)
        )
        for hook in versions.current().model_hooks:
            hook([layers])
        generator = torch.Generator().manual_seed(5)
        query, key, value = (
            2 * torch.randn(S, 1, heads, D, generator=generator) for heads in (N, G, G)
        )
        for number, layer in enumerate(layers, start=1):
            window = WINDOW if config.layer_types[number - 1] == "sliding_attention" else None
            assert (number % 2 == 1) == (window is not None)
            expected = by_definition(query, key, value, window)
            got = layer(query, key, value, None)
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    finally:
        parallel_state.destroy_model_parallel()


def check_the_window_goes_through_no_fused_kernel(folder):
    """On GPUs the kernel for causal softmax reads no mask."""
    from types import SimpleNamespace

    from megatron_kd.host import versions
    from megatron_kd.host.versions import v0_3

    if versions.current() is not v0_3.HOST:
        return  # 0.6 tells its windowed layers' softmax that the mask is an arbitrary one

    class Gemma2DotProductAttention(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layer_number, self.window_size = number, None
            self.config = SimpleNamespace(window_size=(7, 0))
            self.scale_mask_softmax = SimpleNamespace(
                scaled_masked_softmax_fusion=True, window_size=None
            )

    layers = torch.nn.ModuleList(map(Gemma2DotProductAttention, (1, 2)))
    v0_3.window_gemma2_layers([layers])
    windowed, whole = (layer.scale_mask_softmax for layer in layers)
    assert (windowed.window_size, windowed.scaled_masked_softmax_fusion) == ((7, 0), False)
    assert (whole.window_size, whole.scaled_masked_softmax_fusion) == (None, True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return parts.results_of(__name__, tmp_path_factory.mktemp("windows"))


@pytest.mark.parametrize("name", parts.names_of(globals()))
def test_gemma_windows(results, name):
    assert results[name] is None, results[name]
