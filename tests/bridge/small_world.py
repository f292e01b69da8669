"""A small world for tests of the real host: Llama-shaped teacher and student, their data, the
teacher's cache.
"""

import json
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_kd.cache import CacheSpec, CacheWriter
from megatron_kd.data.sequences import SequenceWriter

VOCAB_SIZE = 500  # not a multiple of anything the host pads to
SEQUENCE_LENGTH = 32
TOPK = 24
TRAIN_SAMPLES, VALIDATION_SAMPLES = 40, 8

CACHE = {
    "vocab_size": VOCAB_SIZE,
    "topk": TOPK,
    "teacher": "small",
    "tokenizer": "none",
    "codec": "fp16",
}
SEQUENCES = {
    "seq_length": SEQUENCE_LENGTH,
    "tokenizer": "none",
    "vocab_size": VOCAB_SIZE,
    "template": None,
}


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


def mixture_of_experts(directory: Path, *, layers: int, hidden: int, seed: int) -> None:
    """A small mixture of experts with an auxiliary loss that is large enough to be seen."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3MoeForCausalLM(config).eval().save_pretrained(directory)


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


def masked_documents(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Full-length samples whose masks, read in order four at a time, are as uneven as they can be.

    Batch 0: nothing, one row, all rows, half of them. Batch 1: nothing at all. Batch 2: nothing on
    the second of two data-parallel ranks. Batch 3: nothing on the second of two context-parallel
    ranks, which holds the middle half. Then from the start.
    """
    S = SEQUENCE_LENGTH
    generator = torch.Generator().manual_seed(11)
    nothing, everything = torch.zeros(S + 1, dtype=torch.bool), torch.ones(S + 1, dtype=torch.bool)
    everything[-1] = False
    one_row, half, ends = nothing.clone(), everything.clone(), everything.clone()
    one_row[5], half[: S // 2], ends[S // 4 : 3 * S // 4] = True, False, False
    masks = [nothing, one_row, everything, half]
    masks += [nothing] * 4
    masks += [half, nothing, everything, nothing]
    masks += [ends] * 4
    tokens = [torch.randint(3, VOCAB_SIZE, (S + 1,), generator=generator) for _ in range(count)]
    return [(tokens[i], masks[i % len(masks)].clone()) for i in range(count)]


def packed_documents(count: int, seed: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Samples of two documents each, which still fit when two context-parallel ranks pad them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = ([17, 14], [9, 20], [2, 29], [16, 16])
    samples = []
    for index in range(count):
        sample = []
        for n in lengths[index % len(lengths)]:
            kept = torch.rand(n, generator=generator) < 0.7
            kept[0], kept[-1] = True, False
            sample.append((torch.randint(3, VOCAB_SIZE, (n,), generator=generator), kept))
        samples.append(sample)
    return samples


@torch.no_grad()
def write_packed(directory: Path, split: str, teacher, samples, packing: str) -> None:
    """directory/cache and directory/data of samples that hold several documents.

    Args:
        packing: "block": the teacher reads each document alone; "naive": a sample is one text.
    """
    folder = directory / "data" / split
    folder.mkdir(parents=True)
    sequences = SequenceWriter(folder)
    spec = CacheSpec(packing=packing, data={"seq_length": SEQUENCE_LENGTH}, **CACHE)
    with CacheWriter(directory / "cache" / split, spec, shard_positions=256) as writer:
        for documents_of_sample in samples:
            tokens, mask = (torch.cat(parts) for parts in zip(*documents_of_sample, strict=True))
            if packing == "naive":
                texts = [tokens]
            else:
                texts = [text for text, _ in documents_of_sample]
            logits = torch.cat([teacher(text[None]).logits[0] for text in texts])
            values, ids = torch.log_softmax(logits.double(), -1).float().topk(TOPK, dim=-1)
            bounds = np.cumsum([0] + [len(text) for text in texts])
            writer.append(tokens, mask, ids, values, cu_seqlens=bounds)
            sequences.append(tokens.numpy(), mask.numpy(), bounds)
    sequences.close(split=split, packing=packing, **SEQUENCES)


@torch.no_grad()
def write_cache(
    directory,
    teacher,
    samples,
    *,
    topk=TOPK,
    vocab_size=VOCAB_SIZE,
    sampling="topk",
    temperatures=(),
) -> None:
    """The teacher's exact top-K of every supervised row; fp16 codec."""
    description = CACHE | {"vocab_size": vocab_size, "topk": topk, "sampling": sampling}
    description["temperatures"] = list(temperatures)
    with CacheWriter(directory, CacheSpec(**description), shard_positions=256) as writer:
        for tokens, mask in samples:
            logprobs = torch.log_softmax(teacher(tokens[None]).logits[0].double(), -1)
            values, ids = logprobs.float().topk(topk, dim=-1)
            log_z = {tau: torch.logsumexp(logprobs / tau, -1).float() for tau in temperatures}
            writer.append(tokens, mask, ids, values, log_z=log_z)


def write_sequences(directory: Path, samples) -> None:
    """The same samples as prepared data, for online runs."""
    directory.mkdir(parents=True)
    writer = SequenceWriter(directory)
    for tokens, mask in samples:
        writer.append(tokens.numpy(), mask.numpy(), [0, len(tokens)])
    writer.close(split=directory.name, packing="none", **SEQUENCES)


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


def add_variants(directory: Path) -> None:
    """Beside what `build` makes: students deep/, tied/ and moe/, and data masked/, block/, naive/
    and documents/ (those of block/, one per sample), each with cache and prepared data.
    """
    teacher = LlamaForCausalLM.from_pretrained(directory / "teacher").eval()
    llama(directory / "deep", layers=4, hidden=32, seed=2)
    llama(directory / "tied", layers=2, hidden=32, seed=2, tied=True)
    mixture_of_experts(directory / "moe", layers=2, hidden=32, seed=2)
    counts = {"train": TRAIN_SAMPLES, "validation": VALIDATION_SAMPLES}
    for seed, (split, count) in enumerate(counts.items(), start=21):
        packed = packed_documents(count, seed)
        for packing in ("block", "naive"):
            write_packed(directory / packing, split, teacher, packed, packing)
        apart = [document for sample in packed for document in sample]
        for name, samples in (("masked", masked_documents(count)), ("documents", apart)):
            write_cache(directory / name / "cache" / split, teacher, samples)
            write_sequences(directory / name / "data" / split, samples)
