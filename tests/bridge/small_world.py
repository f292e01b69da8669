"""A small world for tests of the real host: Llama-shaped teacher and student, their data, the
teacher's cache.
"""

import json
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_kd.cache import CacheWriter
from megatron_kd.data.sequences import SequenceWriter

VOCAB_SIZE = 500  # not a multiple of anything the host pads to
SEQUENCE_LENGTH = 32
TOPK = 24
TRAIN_SAMPLES, VALIDATION_SAMPLES = 40, 8


def llama(
    directory: Path, *, layers: int, hidden: int, seed: int, tied: bool = False
) -> LlamaForCausalLM:
    """A randomly initialised model, saved as a Hugging Face directory."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def documents(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [n], loss_mask [n]) with lengths up to S + 1 and masks that keep between none and all
    rows.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        n = SEQUENCE_LENGTH + 1 - (index % 5) * 3
        tokens = torch.randint(3, VOCAB_SIZE, (n,), generator=generator)
        kept = torch.rand(n, generator=generator) < (0.2 + 0.8 * (index % 4) / 3)
        kept[0], kept[-1] = True, False
        made.append((tokens, kept))
    return made


@torch.no_grad()
def write_cache(directory, teacher, samples, *, topk=TOPK, vocab_size=VOCAB_SIZE) -> None:
    """The teacher's exact top-K of every supervised row; fp16 codec."""
    with CacheWriter(
        directory,
        vocab_size=vocab_size,
        topk=topk,
        teacher="small",
        tokenizer="none",
        codec="fp16",
        shard_positions=256,
    ) as writer:
        for tokens, mask in samples:
            logprobs = torch.log_softmax(teacher(tokens[None]).logits[0].double(), -1).float()
            values, ids = logprobs.topk(topk, dim=-1)
            writer.append(tokens, mask, ids, values)


def write_sequences(directory: Path, samples) -> None:
    """The same samples as prepared data, for online runs."""
    directory.mkdir(parents=True)
    writer = SequenceWriter(directory)
    for tokens, mask in samples:
        writer.append(tokens.numpy(), mask.numpy(), [0, len(tokens)])
    writer.close(
        split=directory.name,
        seq_length=SEQUENCE_LENGTH,
        packing="none",
        tokenizer="none",
        vocab_size=VOCAB_SIZE,
        template=None,
    )


def online(directory: Path, impl: str) -> list[str]:
    """Overrides that turn the recipe into an online one."""
    return [
        "mode=online",
        f"teacher.hf_path={directory}/teacher",
        f"data.path={directory}/data",
        f"loss.impl={impl}",
    ]


def build(directory: Path, *, student_layers: int = 2, tied: bool = False) -> Path:
    """Everything a recipe needs below `directory`, and the recipe itself; returns the recipe's
    path.
    """
    teacher = llama(directory / "teacher", layers=4, hidden=64, seed=1)
    llama(directory / "student", layers=student_layers, hidden=32, seed=2, tied=tied)
    samples = {
        "train": documents(TRAIN_SAMPLES, seed=3),
        "validation": documents(VALIDATION_SAMPLES, seed=4),
    }
    for split, documents_of_split in samples.items():
        write_cache(directory / "cache" / split, teacher, documents_of_split)
        write_sequences(directory / "data" / split, documents_of_split)
    recipe = {
        "mode": "offline",
        "output_dir": str(directory / "run"),
        "student": {"hf_path": str(directory / "student")},
        "cache": {"path": str(directory / "cache")},
        "data": {"num_workers": 0},
        "progress": False,
        "bridge": {
            "model": {"seq_length": SEQUENCE_LENGTH},
            "tokenizer": {
                "tokenizer_type": "NullTokenizer",
                "tokenizer_model": None,
                "vocab_size": VOCAB_SIZE - 1,
            },
            "train": {
                "train_iters": 6,
                "global_batch_size": 4,
                "micro_batch_size": 1,
                "eval_interval": 3,
                "eval_iters": 2,
            },
            "optimizer": {"lr": 1e-2, "min_lr": 1e-2, "optimizer": "sgd", "weight_decay": 0.0},
            "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 0},
            "checkpoint": {"save": None, "load": None},
            "logger": {"tensorboard_dir": None},
        },
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    (directory / "world.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return path
