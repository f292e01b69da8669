"""Checks of one recipe on this machine: models, tokenizers, vocabulary, cache, disk."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_kd.config import DistillConfig
from megatron_kd.stages import Stage
from megatron_kd.tools.doctor.finding import Finding

GIB = 1 << 30
CHECKPOINT_BYTES = {True: 14, False: 12}
"""Bytes of one parameter in a checkpoint, by whether weights have 16 bits: then 2 and an fp32 main
weight with two states, else 4 and two states."""


def check_recipe(config: DistillConfig, stage: Stage | None = None) -> Iterator[Finding]:
    """Everything a run would refuse, and what it would only find out later.

    Args:
        config: The recipe, already valid by itself.
        stage: Which stage of a run in several it is; None in a run of one.
    """
    from megatron_kd.host import train as bridge
    from megatron_kd.host.parity import proof

    try:
        container = bridge.prepare(config, starts=False, stage=stage)
        parity = proof.compare_alone(config, container)
    except (ValueError, OSError) as error:
        yield Finding("fault", "recipe", str(error), "see the message")
        return
    yield Finding("ok", "recipe", f"{config.mode}, loss {config.loss.impl}: a run would start")
    for line in parity:
        yield Finding("ok", "parity", line)
    if not parity:
        yield Finding(
            "warning",
            "parity",
            f"{proof.SWITCH}: whether the host computes the student as transformers does is not "
            "checked",
            "remove the setting",
        )
    yield _vocabulary(container)
    source = container.dataset.open("train")
    yield from _tokenizers(config, source)
    yield _samples(container, source, stage.first if stage else 0)
    if config.mode == "offline":
        yield _cache(source)
    yield from _disk(config, container)


def _vocabulary(container) -> Finding:
    model = container.model
    ranks = model.tensor_model_parallel_size
    words = f"{model.vocab_size:,} output rows"
    if ranks > 1:
        words += f", {model.vocab_size // ranks:,} on each of {ranks} tensor-parallel ranks"
    return Finding("ok", "vocabulary", words)


def _tokenizers(config: DistillConfig, source) -> Iterator[Finding]:
    from megatron_kd.models.fingerprint import tokenizer_of

    data = source.manifest.get("tokenizer")
    known = {"the data's": data} if isinstance(data, str) and len(data) == 64 else {}
    models = {"the student's": config.student.hf_path, "the teacher's": config.teacher.hf_path}
    for name, directory in models.items():
        if directory:
            known[name] = tokenizer_of(directory)
    missing = [name for name, value in known.items() if value is None]
    if missing:
        yield Finding(
            "warning",
            "tokenizer",
            f"{' and '.join(missing)} tokenizer is not in the model's directory",
            "put the tokenizer's files there, so that it can be compared",
        )
    present = {name: value for name, value in known.items() if value is not None}
    if len(set(present.values())) > 1:
        listed = ", ".join(f"{name} {value[:12]}" for name, value in present.items())
        yield Finding(
            "warning",
            "tokenizer",
            f"their ids stand for the same tokens, but they differ otherwise: {listed}",
            "look at their special tokens and at how they split text; the data's is the one that "
            "counts in training",
        )
    elif len(present) > 1:
        yield Finding("ok", "tokenizer", f"{', '.join(present)} are the same")


def _samples(container, source, first_iteration: int) -> Finding:
    train = container.train
    wanted = (train.train_iters - first_iteration) * train.global_batch_size
    epochs = wanted / len(source)
    return Finding(
        "ok", "samples", f"{len(source):,}; the run reads {wanted:,}, {epochs:.2f} epochs"
    )


def _cache(source) -> Finding:
    manifest = source.manifest
    first = source[0]  # its shard's checksum and its token hash are checked
    kept = first.mass[first.loss_mask]
    mass = f"{kept.mean():.3f}" if len(kept) else "none supervised"
    return Finding(
        "ok",
        "cache",
        f"K = {manifest['topk']}, {manifest['positions']:,} positions; teacher mass of the first "
        f"sample {mass}. `megatron-kd verify` checks every byte",
    )


def _disk(config: DistillConfig, container) -> Iterator[Finding]:
    from megatron_kd.tools.planning.model_shape import shape_of_directory

    place = Path(config.output_dir).absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        yield Finding(
            "fault", "output_dir", f"{place} cannot be written", "choose another output_dir"
        )
        return
    checkpoint = container.checkpoint
    if not checkpoint.save:
        yield Finding(
            "warning", "disk", "the run saves no checkpoints", "set bridge.checkpoint.save"
        )
        return
    try:
        parameters = shape_of_directory(config.student.hf_path, "student").parameters
    except ValueError as error:
        yield Finding("warning", "disk", f"the checkpoint's size is unknown: {error}")
        return
    each = parameters * CHECKPOINT_BYTES[bool(container.model.bf16 or container.model.fp16)]
    count = max(1, container.train.train_iters // (checkpoint.save_interval or 1))
    kept = checkpoint.most_recent_k if (checkpoint.most_recent_k or -1) > 0 else count
    needed, free = each * min(kept, count), shutil.disk_usage(place).free
    detail = (
        f"{min(kept, count)} checkpoints of {each / GIB:.1f} GiB, {free / GIB:.0f} GiB free at "
        f"{place}"
    )
    if needed > free:
        yield Finding(
            "fault",
            "disk",
            detail,
            "set bridge.checkpoint.most_recent_k, a longer save_interval, or another output_dir",
        )
    else:
        yield Finding("ok", "disk", detail)
