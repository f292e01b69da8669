"""A teacher, students and held-out sequences small enough to make in a moment."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_kd.data.sequences import SequenceWriter

VOCAB = 40
TEXT = [3, 17, 9, 0, 39, 5, 5, 21, 30]


def llama(directory, seed, vocab=VOCAB):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def write_sequences(directory, packing, samples):
    """`samples`: (tokens, loss mask, document bounds) each."""
    directory.mkdir(parents=True)
    writer = SequenceWriter(directory)
    for tokens, mask, bounds in samples:
        writer.append(np.array(tokens), np.array(mask), np.array(bounds))
    writer.close(
        split=directory.name,
        packing=packing,
        seq_length=16,
        vocab_size=VOCAB,
        tokenizer="none",
    )
    return directory
