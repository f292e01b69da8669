"""Tiny students whose attention windows and rotary positions the host's converters drop or get
wrong; in 32 positions each of these settings changes most of what the model computes.
"""

from pathlib import Path

import small_world
import torch
from transformers import AutoConfig, AutoModelForCausalLM

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
WINDOW = 8

COMMON = {
    "vocab_size": small_world.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
STUDENTS = {
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, llama3 of another length": ("llama", {"rope_scaling": LLAMA3}),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen2, yarn with its own factors": (
        "qwen2",
        {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 16, "truncate": False}},
    ),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3, yarn": ("qwen3", {"head_dim": 8, "rope_scaling": YARN}),
    "qwen3, window": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 0,
        },
    ),
    "qwen3_moe, window": ("qwen3_moe", EXPERTS),
    "mistral, window": ("mistral", {"head_dim": 8, "sliding_window": WINDOW}),
}
"""Name → (model type, settings)."""


def configuration(name: str):
    """transformers' configuration of a student."""
    kind, settings = STUDENTS[name]
    return AutoConfig.for_model(kind, **(COMMON | settings))


def write(name: str, directory: Path) -> Path:
    """A student with random weights as a Hugging Face directory, which is returned."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configuration(name), dtype=torch.float32)
    model.eval().save_pretrained(directory)
    return directory
