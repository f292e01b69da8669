"""Configurations with the sizes and settings of published models, as their config.json has them."""

COMMON = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 31990,
    "eos_token_id": [31991, 31992],
    "pad_token_id": 31999,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
EXPERTS = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def configuration(architecture: str, model_type: str, **settings) -> dict:
    return COMMON | {"architectures": [architecture], "model_type": model_type} | settings


def _llama(**settings):
    return configuration("LlamaForCausalLM", "llama", **settings)


def _mistral(**settings):
    return configuration("MistralForCausalLM", "mistral", head_dim=128, **settings)


def _qwen2(**settings):
    return configuration("Qwen2ForCausalLM", "qwen2", **settings)


def _qwen3(**settings):
    return configuration("Qwen3ForCausalLM", "qwen3", head_dim=128, **settings)


def _qwen3_moe(**settings):
    return configuration("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, **settings)


def _windowed(first_layer: int) -> dict:
    return {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": first_layer,
    }


PLAIN = {
    "llama": _llama(),
    "llama, tied": _llama(tie_word_embeddings=True),
    "mistral": _mistral(sliding_window=None),
    "qwen2": _qwen2(tie_word_embeddings=True),
    "qwen2, window above the last layer": _qwen2(**_windowed(24)),
    "qwen3": _qwen3(tie_word_embeddings=True),
    "qwen3_moe": _qwen3_moe(),
}
"""What the converters of both tested hosts get right by themselves."""

MENDED = {
    "llama, llama3": _llama(rope_scaling=LLAMA3),
    "llama, linear": _llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama, yarn": _llama(rope_scaling=YARN),
    "mistral, window": _mistral(sliding_window=4096),
    "qwen2, yarn": _qwen2(rope_scaling=YARN),
    "qwen2, window": _qwen2(**_windowed(21)),
    "qwen3, yarn": _qwen3(rope_scaling=YARN),
    "qwen3, window in every layer": _qwen3(**_windowed(0)),
    "qwen3_moe, yarn": _qwen3_moe(rope_scaling=YARN),
    "qwen3_moe, window": _qwen3_moe(use_sliding_window=True, sliding_window=4096),
    "gpt_oss": configuration(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_scaling=GPT_OSS_YARN,
        max_position_embeddings=131072,
    ),
}
"""What `host.versions.rotary` and `host.versions.windows` put right, on one host at least. The
published values of llama3 and gpt_oss the converters have too, and a shrunken copy has others."""

RIGHT_ON_0_6 = {"llama, linear", "mistral, window"}
"""Of these, what Bridge 0.6 converts by itself."""

REFUSED = {
    "llama, dynamic": (
        _llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        "of type dynamic, whose frequencies depend on the length",
    ),
    "llama, bias": (_llama(attention_bias=True), "the host cannot convert it: AttributeError"),
    "mistral, yarn": (
        _mistral(sliding_window=None, rope_scaling=YARN),
        "unexpected keyword argument 'scale_factor'",
    ),
}
"""Name → (configuration, a part of the refusal)."""
