"""Sizes from config.json, against what transformers builds and what a checkpoint takes."""

import json
import struct

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_kd.models.parameter_axes import sizes_in_layer
from megatron_kd.tools.planning.model_shape import shape_of_config, shape_of_directory
from megatron_kd.tools.planning.run_settings import RunSettings
from megatron_kd.tools.planning.stage_memory import plan_memory

SIZES = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=101,
)
CASES = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=16, dtype="bfloat16"),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, head_dim=4, dtype="float16"),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "qwen3-biased": Qwen3Config(**SIZES, attention_bias=True),
}


@pytest.mark.parametrize("name", CASES)
def test_config_json_alone_says_what_the_built_architecture_says(name, tmp_path):
    CASES[name].save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert sizes_in_layer(content) is not None
    built = shape_of_config(AutoConfig.from_pretrained(tmp_path / "model"), "model")
    assert shape_of_directory(tmp_path / "model", "student") == built


@pytest.mark.parametrize("missing", ["num_key_value_heads", "head_dim", "intermediate_size"])
def test_what_a_file_leaves_open_has_the_architectures_default(missing, tmp_path):
    content = CASES["qwen3"].to_dict()
    del content[missing]
    (tmp_path / "config.json").write_text(json.dumps(content))
    built = shape_of_config(AutoConfig.from_pretrained(tmp_path), tmp_path.name)
    assert sizes_in_layer(content) is None
    assert shape_of_directory(tmp_path, "student") == built


@pytest.mark.parametrize("name", ["llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_planned_weights_take_the_bytes_of_a_bf16_checkpoint(name, tmp_path):
    model = AutoModelForCausalLM.from_config(CASES[name], dtype="bfloat16")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("rb") as content:
        header_bytes = 8 + struct.unpack("<Q", content.read(8))[0]
    (stage,) = plan_memory(
        shape_of_directory(tmp_path, "student"),
        RunSettings(sequence_length=8, vocab_divisor=1),
        impl="dense",
        gpu_bytes=1 << 30,
    )
    assert stage.parts["weights"] == file.stat().st_size - header_bytes


def test_counts_the_architecture_not_the_file(llama_directory):
    tied = shape_of_directory(llama_directory(tie_word_embeddings=True), "student")
    whole = shape_of_directory(llama_directory(tie_word_embeddings=False), "student")
    assert whole.parameters - tied.parameters == 1000 * 64
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert (tied.layers[0].sharded, tied.layers[0].replicated) == (layer, 128)


def test_mixture_of_experts_and_unknown_architectures(tmp_path):
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=100,
    )
    config.save_pretrained(tmp_path)
    shape = shape_of_directory(tmp_path, "student")
    assert (shape.experts, shape.experts_per_token, shape.expert_ffn_size) == (8, 2, 16)
    assert shape.layers[0].experts == 8 * 3 * 32 * 16
    assert shape.layers[0].sharded == 32 * 16 * 2 * 2 + 32 * 16 * 2  # q and o, k and v
    with pytest.raises(ValueError, match="kv_lora_rank"):
        shape_of_config(DeepseekV3Config(), "latent")


@pytest.mark.parametrize("content", ["{not json", "[]", "{}", '{"model_type": "nonesuch"}'])
def test_what_is_no_configuration_is_refused_by_its_file(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json is not a model configuration"):
        shape_of_directory(tmp_path, "student")
