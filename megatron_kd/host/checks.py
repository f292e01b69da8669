"""Refuse runs whose parts do not belong together, before any process group starts.

Cache, prepared data, student, teacher and an earlier checkpoint each know what they were made from.
A mismatch would train on the wrong rows without an error; here it is one sentence with the remedy.
"""

import dataclasses
import json
from pathlib import Path

from megatron_kd.config import DistillConfig
from megatron_kd.data.document_layout import DocumentLayout
from megatron_kd.files import publish
from megatron_kd.typed_mapping import ConfigError

IDENTITY = "run_identity.json"

# What a resumed run must share with its checkpoint → how to say it.
_IDENTITY_KEYS = {
    "mode": "mode",
    "source_fingerprint": "the cache (or, online, the prepared data)",
    "vocab_size": "the vocabulary size",
    "sequence_length": "the sequence length",
    "lora": "student.lora",
}


def check(config: DistillConfig, container) -> None:
    """Check everything that can be checked without a process group.

    Args:
        config: The run.
        container: The host's configuration of it, datasets included.

    Raises:
        ConfigError: Two parts do not fit; the message names both and the remedy.
    """
    if config.data.dataloader == "cyclic" and not config.data.shuffle:
        raise ConfigError(
            "data.dataloader=cyclic always shuffles; use single, or set data.shuffle=true"
        )
    _check_virtual_pipeline(config, container.model)
    _check_fully_sharded(container)
    train = container.dataset.open("train")
    if container.dataset.evaluation_samples:
        container.dataset.open("validation")
    _check_vocabulary(config, train, container.model.vocab_size)
    if container.dataset.documents_apart:
        _check_documents(train, container)
    else:
        _check_sequence_length(config, train, container.model.seq_length)
    _check_shares(container.model)
    _check_topk(config, train)
    _check_temperature(config, train)
    _check_hidden_states(config, train)
    if config.data.dataloader == "cyclic":
        _check_cyclic(len(train), container.train)
    _check_resume(config, identity(config, container, train))


def identity(config: DistillConfig, container, source) -> dict:
    """What a checkpoint of this run is bound to."""
    lora = config.student.lora
    return {
        "mode": config.mode,
        "source_fingerprint": fingerprint(source),
        "vocab_size": container.model.vocab_size,
        "sequence_length": container.model.seq_length,
        "lora": None if lora is None else dataclasses.asdict(lora),
    }


def record_identity(config: DistillConfig, container) -> None:
    """Write the run's identity beside its checkpoints, by rename; one rank calls it."""
    path = Path(config.output_dir) / IDENTITY
    path.parent.mkdir(parents=True, exist_ok=True)
    record = identity(config, container, container.dataset.open("train"))
    publish(path, json.dumps(record, indent=1))


def fingerprint(source) -> str:
    """The hash that binds a cache or prepared data."""
    own = getattr(source, "fingerprint", None)
    return own if own is not None else source.manifest["fingerprint"]


def data_sequence_length(source) -> int | None:
    """The sequence length the samples were prepared for, where their manifest says it."""
    manifest = source.manifest
    for entry in (manifest, manifest.get("data") or {}):
        if not isinstance(entry, str) and entry.get("seq_length"):
            return int(entry["seq_length"])
    return None


def _check_vocabulary(config: DistillConfig, source, student_vocab: int) -> None:
    vocab = source.manifest["vocab_size"]
    if config.mode == "offline" and vocab != student_vocab:
        raise ConfigError(
            f"the cache at {config.cache.sources()[0][0]} was captured over {vocab} ids, but the "
            f"student has a vocabulary of {student_vocab}. If the larger one only has padding "
            f"rows, capture again with --vocab-size {min(vocab, student_vocab)}, which masks them; "
            "with different tokenizers distillation by logits is not defined"
        )
    if config.mode == "online" and vocab > student_vocab:
        raise ConfigError(
            f"the data at {config.data.path} was prepared with a tokenizer of {vocab} ids, more "
            f"than the student's vocabulary of {student_vocab}: prepare it again with the "
            "student's tokenizer"
        )


def _check_sequence_length(config: DistillConfig, source, model_length: int) -> None:
    length = data_sequence_length(source)
    if length is not None and length != model_length:
        raise ConfigError(
            f"bridge.model.seq_length is {model_length}, but the samples were prepared with "
            f"--seq-length {length}. Set bridge.model.seq_length={length} (or leave it out), or "
            "prepare and capture again"
        )


def _check_virtual_pipeline(config: DistillConfig, model) -> None:
    if not model.virtual_pipeline_model_parallel_size:
        return
    if config.data.dataloader == "batch":
        raise ConfigError(
            "a virtual pipeline reads every batch once for each chunk of the model, which the host "
            "does not provide for with data.dataloader=batch; use single or cyclic"
        )
    if model.pipeline_model_parallel_size == 2 and not model.overlap_p2p_comm:
        # Both neighbours are one rank then, and the host's batched messages reach the wrong chunk.
        raise ConfigError(
            "with two pipeline stages the host exchanges the chunks of a virtual pipeline wrongly "
            "unless bridge.model.overlap_p2p_comm=true and bridge.model.batch_p2p_comm=false; set "
            "both, or use more stages"
        )


def _check_fully_sharded(container) -> None:
    sharded = container.ddp.use_megatron_fsdp or container.dist.use_megatron_fsdp
    checkpoint = container.checkpoint
    if (
        sharded
        and (checkpoint.save or checkpoint.load)
        and checkpoint.ckpt_format != "fsdp_dtensor"
    ):
        raise ConfigError(
            "Megatron-FSDP has a checkpoint format of its own: set "
            f"bridge.checkpoint.ckpt_format=fsdp_dtensor, not {checkpoint.ckpt_format}"
        )


def _check_documents(source, container) -> None:
    if container.train.micro_batch_size != 1:
        raise ConfigError(
            "attention that keeps the documents of block-packed samples apart takes one sample at "
            f"a time: set bridge.train.micro_batch_size=1, not {container.train.micro_batch_size} "
            "(pack longer sequences to fill the device)"
        )
    multiple, length = container.dataset.document_multiple, container.model.seq_length
    needed, reason = data_sequence_length(source) or 0, "they were prepared for"
    if multiple > 1:
        counts = [
            DocumentLayout.positions(source.cu_seqlens(i), multiple) for i in range(len(source))
        ]
        if max(counts) > needed:
            needed = max(counts)
            reason = f"they take when every document is padded to a multiple of {multiple}, which "
            reason += "context parallelism asks for"
    if length < needed:
        raise ConfigError(
            f"bridge.model.seq_length is {length}, less than the {needed} positions of the samples "
            f"({reason}); set it to {-(-needed // multiple) * multiple}"
        )


def _check_shares(model) -> None:
    """Ranks that share a sequence hold equal parts of it."""
    shares = 2 * model.context_parallel_size if model.context_parallel_size > 1 else 1
    if model.sequence_parallel:
        shares *= model.tensor_model_parallel_size
    if model.seq_length % shares:
        raise ConfigError(
            f"bridge.model.seq_length={model.seq_length} cannot be shared out equally under "
            f"context_parallel_size={model.context_parallel_size} and sequence_parallel="
            f"{str(bool(model.sequence_parallel)).lower()}; use a multiple of {shares}"
        )


def _check_topk(config: DistillConfig, source) -> None:
    if config.mode != "offline" or config.cache.topk is None:
        return
    if config.cache.topk > source.topk:
        raise ConfigError(
            f"cache.topk={config.cache.topk} is more than the {source.topk} that the cache holds "
            f"per position; leave it out, or capture again with --topk {config.cache.topk}"
        )
    if source.sampling_method != "topk":
        raise ConfigError(
            "cache.topk needs a cache of the most likely tokens; this one was sampled at random "
            "(or mixes both), and the first entries of a sample are none. Remove cache.topk"
        )


def _check_temperature(config: DistillConfig, source) -> None:
    divergence = config.loss.divergence
    temperature = divergence.temperature
    if config.mode != "offline" or divergence.tail != "bucket" or temperature == 1.0:
        return
    captured = [float(tau) for tau in source.manifest.get("temperatures", [])]
    if temperature not in captured:
        raise ConfigError(
            f"loss.tail=bucket at loss.temperature={temperature} needs the teacher's "
            f"normaliser at that temperature; the cache holds those for {captured or 'none'}. "
            f"Capture again with --temperatures {temperature}, or use tail none or renormalize"
        )


def _check_hidden_states(config: DistillConfig, source) -> None:
    if config.mode != "offline" or not config.hidden_states.pairs:
        return
    if not source.manifest.get("hidden_size"):
        raise ConfigError(
            "hidden_states needs the last hidden state of the teacher, which the cache at "
            f"{config.cache.sources()[0][0]} does not hold (in a mixture, every cache must, in "
            "one width and dtype). Capture again with --hidden-dtype float16, or remove "
            "hidden_states.pairs"
        )


def _check_cyclic(samples: int, train) -> None:
    if samples < train.global_batch_size:
        raise ConfigError(
            "data.dataloader=cyclic needs at least one global batch of samples; there are "
            f"{samples}, and bridge.train.global_batch_size is {train.global_batch_size}. Use "
            "data.dataloader=single"
        )


def _check_resume(config: DistillConfig, now: dict) -> None:
    path = Path(config.output_dir) / IDENTITY
    has_checkpoint = any(Path(config.output_dir).glob("checkpoints/iter_*"))
    if not has_checkpoint or not path.exists():
        return
    before = json.loads(path.read_text())
    for key, name in _IDENTITY_KEYS.items():
        if before.get(key) != now[key]:
            raise ConfigError(
                f"{config.output_dir} holds a checkpoint of another run: {name} was "
                f"{before.get(key)}, now it is {now[key]}. Choose another output_dir, or give back "
                "what the checkpoint was trained with"
            )
