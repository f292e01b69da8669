"""Small random models of every architecture a student can be cut from."""

import copy

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOWED = dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=4, tie_word_embeddings=True)),
    "llama-biased": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, head_dim=4, attention_bias=True, mlp_bias=True),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, head_dim=8, sliding_window=6)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2-windowed": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, **WINDOWED)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8)),
}


def write_model(name, path):
    """Saves a case with every parameter random, norms and biases among them."""
    model_class, config = CASES[name]
    torch.manual_seed(0)
    model = model_class(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    model.save_pretrained(path)
    return model
