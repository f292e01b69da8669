"""A random Llama of a few thousand weights, written as a Hugging Face directory, and its plain
forward pass."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_kd.teacher.engines.base import TeacherDocument

VOCAB = 131


def write_teacher(path, *, seed=0, vocab=VOCAB, layers=2, dtype=torch.float32):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path)
    return model.eval()


@torch.inference_mode()
def full_logprobs(model, tokens, vocab=VOCAB):
    """[n, V] fp32: the definition, one document at a time."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    return model(input_ids=ids).logits[0, :, :vocab].float().log_softmax(-1)


def documents(seed, lengths, vocab=VOCAB, supervised=0.7):
    rng = np.random.default_rng(seed)
    made = []
    for n in lengths:
        rows = np.flatnonzero(rng.random(n) < supervised)
        rows = rows if len(rows) else np.array([n - 1])
        made.append(
            TeacherDocument(rng.integers(0, vocab, n, dtype=np.int32), rows.astype(np.int64))
        )
    return made
