"""DeepSeek-V2's scale of the attention, which transformers leaves without its factor."""

import math

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from megatron_kd.models.transformers_faults import mend

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=12,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
PLAIN = 16**-0.5


def model(**settings) -> DeepseekV2ForCausalLM:
    torch.manual_seed(3)
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, **settings)).eval()


def yarn(**settings) -> dict:
    return {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16} | settings


def scales(loaded) -> list[float]:
    return [layer.self_attn.scaling for layer in loaded.model.layers]


def test_the_scale_is_the_one_of_the_authors_code():
    loaded = model(rope_scaling=yarn(mscale=0.707, mscale_all_dim=0.707))
    tokens = torch.arange(3, 40)[None]
    before = loaded(tokens).logits
    assert scales(loaded) == [PLAIN] * 2, "transformers has it now: this mend can go"
    assert mend(loaded) == 2
    expected = PLAIN * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert scales(loaded) == pytest.approx([expected] * 2)
    assert not torch.allclose(loaded(tokens).logits, before, atol=1e-4)


def test_a_second_time_changes_nothing():
    loaded = model(rope_scaling=yarn(mscale=0.707, mscale_all_dim=0.707))
    mend(loaded)
    once = scales(loaded)
    assert mend(loaded) == 0
    assert scales(loaded) == once


@pytest.mark.parametrize("rope", [None, yarn(), yarn(mscale=1.0, mscale_all_dim=0)])
def test_without_the_factor_it_stays(rope):
    loaded = model(rope_scaling=rope)
    assert mend(loaded) == 0
    assert scales(loaded) == [PLAIN] * 2
