"""config.json of the published models that the recipes name, from their numbers; nothing is
downloaded.

Sources: the models' own config.json on the Hugging Face hub, Megatron-Bridge's provider of each
model, and for the 3.23 B student arXiv 2608.03796.
"""

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_position_embeddings=40960,
    torch_dtype="bfloat16",
)
NEMOTRON = dict(
    architectures=["NemotronForCausalLM"],
    model_type="nemotron",
    num_hidden_layers=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=256000,
    hidden_act="relu2",
    norm_eps=1e-5,
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_experts_per_tok=4,
    vocab_size=201088,
    sliding_window=128,
    attention_bias=True,
    rms_norm_eps=1e-5,
    rope_theta=150000,
    rope_scaling=dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)

# The student of the quickstart: 24 of the 30 layers of SmolLM2-135M-Instruct.
SMOLLM2 = LLAMA | dict(
    num_hidden_layers=24,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rope_scaling=None,
    rope_theta=100000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)

# directory below models/ → (config.json, published parameters in billions).
MODELS = {
    "Llama-3.1-8B-Instruct": (
        LLAMA | dict(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336),
        8.03,
    ),
    "llama-3.23b": (
        LLAMA | dict(num_hidden_layers=28, hidden_size=2816, intermediate_size=7168),
        3.23,
    ),
    "Qwen3-8B": (
        QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
        8.19,
    ),
    "Qwen3-4B": (
        QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
        4.02,
    ),
    "gpt-oss-20b": (GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32), 20.91),
    "Minitron-4B-Base": (
        NEMOTRON | dict(hidden_size=3072, intermediate_size=9216, num_attention_heads=24),
        4.19,
    ),
}
