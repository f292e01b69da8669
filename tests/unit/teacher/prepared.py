"""Prepared data for the tiny teacher, written by the real writer, and captures of it."""

import numpy as np
from tiny_teacher import VOCAB

from megatron_kd.data.sequences import SequenceWriter


def write_split(folder, sequences, *, packing="none", vocab=VOCAB, tokenizer="0" * 64):
    """sequences: (tokens, loss_mask, cu_seqlens) triples."""
    folder.mkdir(parents=True)
    writer = SequenceWriter(folder)
    for tokens, mask, bounds in sequences:
        writer.append(tokens, mask, bounds)
    writer.close(
        split=folder.name,
        seq_length=max(len(tokens) for tokens, _, _ in sequences) - 1,
        packing=packing,
        vocab_size=vocab,
        tokenizer=tokenizer,
    )
    return folder


def random_sequences(seed, count, *, length=33, vocab=VOCAB, documents=1):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, vocab, length, dtype=np.int32)
        mask = rng.random(length) < 0.8
        cuts = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
        bounds = np.array([0, *cuts, length], np.int32)
        mask[bounds[1:] - 1] = False  # nothing of the same document follows
        made.append((tokens, mask, bounds))
    return made


def command(data, teacher, output, *more):
    return [
        "capture",
        *("--data", str(data)),
        *("--teacher", str(teacher)),
        *("--output", str(output)),
        *("--topk", "8", "--shard-positions", "70", "--dtype", "float32"),
        *more,
    ]


def shards_of(folder):
    """Everything but the manifest, which also says where the data lay."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("shard-*"))
    }
