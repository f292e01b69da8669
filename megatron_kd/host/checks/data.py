"""What was captured, prepared and asked for belongs together: cache, prepared data, student, loss.

A mismatch would train on the wrong rows without an error; here it is one sentence with the remedy.
"""

from megatron_kd.config import DistillConfig
from megatron_kd.data.document_layout import DocumentLayout
from megatron_kd.models.fingerprint import vocabulary_of
from megatron_kd.typed_mapping import ConfigError


def check_data(config: DistillConfig, container) -> None:
    """Open what the run reads, and compare it with the student and the loss.

    Raises:
        ConfigError: Two parts do not fit; the message names both and the remedy.
    """
    if config.data.dataloader == "cyclic" and not config.data.shuffle:
        raise ConfigError(
            "data.dataloader=cyclic always shuffles; use single, or set data.shuffle=true"
        )
    train = container.dataset.open("train")
    if container.dataset.evaluation_samples:
        container.dataset.open("validation")
    _check_tokenizers(config, container)
    _check_vocabulary(config, train, container.model.vocab_size)
    if container.dataset.documents_apart:
        _check_documents(train, container)
    else:
        _check_sequence_length(container)
    _check_sources(config, container)
    _check_topk(config, train)
    _check_temperature(config, train)
    _check_hidden_states(config, train)
    if config.data.dataloader == "cyclic":
        _check_cyclic(len(train), container.train)


def _check_vocabulary(config: DistillConfig, source, student_vocab: int) -> None:
    vocab = source.manifest["vocab_size"]
    if config.mode == "offline" and vocab != student_vocab:
        _check_padding_rows(config, vocab, student_vocab)
    if config.mode == "online" and vocab > student_vocab:
        raise ConfigError(
            f"the data at {config.data.path} was prepared with a tokenizer of {vocab} ids, more "
            f"than the student's vocabulary of {student_vocab}: prepare it again with the "
            "student's tokenizer"
        )


def _check_padding_rows(config: DistillConfig, vocab: int, student_vocab: int) -> None:
    """A cache may know fewer ids than the student has output rows where no token has the others."""
    cache, student = config.cache.sources()[0][0], config.student.hf_path
    if vocab > student_vocab:
        raise ConfigError(
            f"the cache at {cache} was captured over {vocab} ids, but the student has "
            f"{student_vocab} output rows. If the teacher's rows from {student_vocab} on are "
            f"padding, capture again with --vocab-size {student_vocab}, which masks them; with "
            "different tokenizers distillation by logits is not defined"
        )
    own = vocabulary_of(student)
    if own is None:
        raise ConfigError(
            f"the cache at {cache} was captured over {vocab} ids, and the student {student} has "
            f"{student_vocab} output rows but no tokenizer that shows whether those from {vocab} "
            "on are padding: put the tokenizer's files into its directory"
        )
    if own.size > vocab:
        raise ConfigError(
            f"the student's tokenizer has tokens up to id {own.size - 1}, but the cache at {cache} "
            f"was captured over {vocab} ids: capture again without --vocab-size, from data "
            "prepared with the student's tokenizer"
        )


def _check_tokenizers(config: DistillConfig, container) -> None:
    """The data, the student and a resident teacher mean the same token by an id."""
    models = {"student": config.student.hf_path}
    if config.mode == "online":
        models["teacher"] = config.teacher.hf_path
    known = {f"the {role} {path}": vocabulary_of(path) for role, path in models.items()}
    hashes = {name: own.hash for name, own in known.items() if own is not None}
    if container.dataset.vocabulary() is not None:
        first = config.data.path or config.cache.sources()[0][0]
        hashes[f"the data of {first}"] = container.dataset.vocabulary()
    if len(set(hashes.values())) > 1:
        raise ConfigError(
            "the vocabularies differ between "
            + ", ".join(f"{name} ({value[:12]})" for name, value in hashes.items())
            + ": an id stands for another token in each, so distillation by logits is not defined. "
            "Choose a student and a teacher with one tokenizer and prepare the data with it; if "
            "their ids do mean the same, put the tokenizer of the data into the model's directory"
        )


def _check_sequence_length(container) -> None:
    length, model_length = container.dataset.prepared_length(), container.model.seq_length
    if length is not None and length != model_length:
        raise ConfigError(
            f"bridge.model.seq_length is {model_length}, but the samples were prepared with "
            f"--seq-length {length}. Set bridge.model.seq_length={length} (or leave it out), or "
            "prepare and capture again"
        )


def _check_documents(source, container) -> None:
    if container.train.micro_batch_size != 1:
        raise ConfigError(
            "attention that keeps the documents of block-packed samples apart takes one sample at "
            f"a time: set bridge.train.micro_batch_size=1, not {container.train.micro_batch_size} "
            "(pack longer sequences to fill the device)"
        )
    multiple, length = container.dataset.samples.document_multiple, container.model.seq_length
    needed, reason = container.dataset.prepared_length() or 0, "they were prepared for"
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


def _check_sources(config: DistillConfig, container) -> None:
    if not config.cache.differ:
        return
    evaluation = getattr(getattr(container, "validation", None), "eval_micro_batch_size", None)
    size = max(container.train.micro_batch_size, evaluation or 1)
    if size != 1:
        raise ConfigError(
            "a loss of its own for a cache of cache.mixture needs micro-batches of one cache, and "
            f"those of {size} samples may hold several: set bridge.train.micro_batch_size=1 (and "
            "bridge.validation.eval_micro_batch_size, where it is set), or one loss for all"
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
    if config.mode != "offline":
        return
    common = config.loss.divergence
    if not config.cache.differ:  # samples of all caches may share a batch, so all must have it
        _check_normalizer(common, source.manifest, "loss")
        return
    for number, (divergence, reader) in enumerate(
        zip(config.divergences(), getattr(source, "readers", [source]), strict=True)
    ):
        _check_normalizer(divergence, reader.manifest, f"cache.mixture[{number}].loss")


def _check_normalizer(divergence, manifest: dict, section: str) -> None:
    temperature = divergence.temperature
    if divergence.tail != "bucket" or temperature == 1.0:
        return
    captured = [float(tau) for tau in manifest.get("temperatures", [])]
    if temperature not in captured:
        raise ConfigError(
            f"{section}.tail=bucket at {section}.temperature={temperature} needs the teacher's "
            f"normalizer at that temperature; the cache holds those for {captured or 'none'}. "
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
