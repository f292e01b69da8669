"""What stays of a configuration in its shrunken copy: every mechanism, in reach of 96 tokens."""

import json

import pytest

from megatron_kd.host.parity.shrunken import (
    ORIGINAL_LENGTH,
    SEQUENCE_LENGTH,
    WINDOW,
    CannotShrinkError,
    shrunken,
    write_configuration,
)

SIZES = {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def small(full: dict, **layout) -> dict:
    """The whole configuration of the copy."""
    return full | shrunken(full, **layout)


def test_grouped_queries_stay_grouped_and_can_be_split():
    for ranks in (1, 2, 4):
        copy = small(SIZES, ranks=ranks)
        groups, heads = copy["num_key_value_heads"], copy["num_attention_heads"]
        assert groups % ranks == 0 and heads % ranks == 0
        assert heads > groups and heads % groups == 0
        assert copy["hidden_size"] % heads == 0 and copy["vocab_size"] % ranks == 0


def test_one_group_of_keys_stays_one():
    copy = small(SIZES | {"num_key_value_heads": 1}, ranks=2)
    assert copy["num_key_value_heads"] == 1
    assert copy["num_attention_heads"] % 2 == 0


def test_heads_that_do_not_fill_the_width_do_not_in_the_copy():
    fills = small(SIZES | {"head_dim": 128})
    other = small(SIZES | {"head_dim": 256})
    assert fills["num_attention_heads"] * fills["head_dim"] == fills["hidden_size"]
    assert other["num_attention_heads"] * other["head_dim"] != other["hidden_size"]


def test_a_scale_of_the_attention_that_is_not_the_heads_own_stays_another():
    same = small(SIZES | {"head_dim": 256, "query_pre_attn_scalar": 256})
    other = small(SIZES | {"head_dim": 128, "query_pre_attn_scalar": 144})
    assert same["query_pre_attn_scalar"] == same["head_dim"]
    assert other["query_pre_attn_scalar"] == round(144 / 128 * other["head_dim"]) == 18


def test_windows_come_within_the_sequences():
    assert small(SIZES | {"sliding_window": 4096})["sliding_window"] == WINDOW
    assert WINDOW < SEQUENCE_LENGTH // 4
    assert small(SIZES | {"sliding_window": None})["sliding_window"] is None


@pytest.mark.parametrize(
    ("first", "expected"),
    [(21, ["full_attention", "sliding_attention"]), (0, ["sliding_attention"] * 2)],
)
def test_layers_with_a_window_are_still_those_from_a_number_on(first, expected):
    kinds = ["full_attention"] * first + ["sliding_attention"] * (28 - first)
    copy = small(SIZES | {"layer_types": kinds, "max_window_layers": first, "sliding_window": 99})
    assert copy["layer_types"] == expected
    assert copy["max_window_layers"] == expected.count("full_attention")


def test_a_window_above_the_last_layer_reaches_none():
    copy = small(SIZES | {"layer_types": ["full_attention"] * 28, "max_window_layers": 28})
    assert copy["max_window_layers"] >= copy["num_hidden_layers"]


def test_a_pattern_is_kept_from_the_first_layer_on():
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    copy = small(SIZES | {"num_hidden_layers": 24, "layer_types": kinds})
    assert copy["layer_types"] == kinds[:6]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipeline_stages_hold_equally_many_layers(stages):
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 8
    full = SIZES | {"num_hidden_layers": 24, "layer_types": kinds}
    copy = small(full, stages=stages)
    assert copy["num_hidden_layers"] % stages == 0
    assert len(copy["layer_types"]) == copy["num_hidden_layers"]
    assert set(copy["layer_types"]) == set(kinds)


def test_dense_layers_before_experts_stay_before_them():
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    copy = small(SIZES | experts | {"first_k_dense_replace": 3, "moe_intermediate_size": 2048})
    assert 0 < copy["first_k_dense_replace"] < copy["num_hidden_layers"]
    groups = copy["n_group"]
    assert 1 < groups and copy["n_routed_experts"] % groups == 0
    assert 0 < copy["topk_group"] < groups
    # what may be chosen is more than what is chosen
    per_group = copy["n_routed_experts"] // groups
    assert copy["num_experts_per_tok"] < copy["topk_group"] * per_group * 2


def test_experts_can_be_shared_out():
    full = SIZES | {"num_experts": 128, "num_experts_per_tok": 8}
    for ranks in (2, 3, 16):
        copy = small(full, expert_ranks=ranks)
        assert copy["num_experts"] % ranks == 0
        assert copy["num_experts_per_tok"] < copy["num_experts"]


def test_scaled_positions_begin_within_the_sequences_and_reach_as_far_as_before():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    copy = small(SIZES | {"rope_scaling": rope})
    assert copy["rope_scaling"] == rope | {"original_max_position_embeddings": ORIGINAL_LENGTH}
    assert copy["max_position_embeddings"] == 4 * ORIGINAL_LENGTH
    assert ORIGINAL_LENGTH < SEQUENCE_LENGTH
    alone = small(SIZES | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert alone["max_position_embeddings"] == ORIGINAL_LENGTH


def test_positions_by_kind_of_layer_are_scaled_each():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    full = SIZES | {"rope_parameters": rope}
    assert small(full)["rope_parameters"] == rope
    assert small(full)["max_position_embeddings"] == ORIGINAL_LENGTH


def test_latent_attention_without_a_rank_of_queries_keeps_none():
    latent = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128}
    copy = small(SIZES | latent | {"qk_rope_head_dim": 64, "v_head_dim": 128})
    assert copy["q_lora_rank"] is None
    assert 0 < copy["kv_lora_rank"] < 64 and copy["v_head_dim"] != copy["qk_nope_head_dim"]


def test_ids_stay_in_the_vocabulary():
    copy = small(SIZES | {"pad_token_id": 151643, "eos_token_id": [151645, 151643]})
    ids = [copy["pad_token_id"], *copy["eos_token_id"]]
    assert all(0 <= token < copy["vocab_size"] for token in ids)


def test_a_configuration_without_its_sizes_is_refused():
    nested = {"text_config": SIZES, "vision_config": {}}
    with pytest.raises(CannotShrinkError, match="no number under num_hidden_layers"):
        shrunken(nested)


def test_too_many_layers_to_have_one_of_each_kind_are_refused():
    kinds = ["full_attention"] * 27 + ["linear_attention"]
    with pytest.raises(CannotShrinkError, match="28 layers are needed"):
        shrunken(SIZES | {"layer_types": kinds})


def test_what_is_written_is_the_directorys_own_configuration_but_for_sizes(tmp_path):
    written = SIZES | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "a_setting_transformers_does_not_know": "kept",
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "copy").mkdir()
    settings = write_configuration(tmp_path, tmp_path / "copy")
    copy = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert copy["a_setting_transformers_does_not_know"] == "kept"
    assert "quantization_config" not in copy
    assert copy["torch_dtype"] == "float32"
    assert settings["hidden_size"] == copy["hidden_size"] < 200
