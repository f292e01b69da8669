"""Turn text, conversations or token ids into training sequences, split and packed."""

import argparse
import datetime
import hashlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from megatron_kd.data.prepare.chat import ASSISTANT_TURNS, ChatRules
from megatron_kd.data.prepare.document_store import DocumentStore
from megatron_kd.data.prepare.documents import (
    DocumentTokenizer,
    default_bos,
    load_tokenizer,
    tokenizer_hash,
    vocabulary_hash,
)
from megatron_kd.data.prepare.packing import OVERLONG, DocumentSlice, assemble, best_fit, cut
from megatron_kd.data.prepare.records import FIELDS, read_records
from megatron_kd.data.prepare.split import validation_documents
from megatron_kd.data.sequence_format import PACKINGS, TRAIN, VALIDATION
from megatron_kd.data.sequences import SequenceWriter
from megatron_kd.files import published_directory

DEFAULT_OVERLONG = {"text": "split", "messages": "truncate", "tokens": "split"}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Everything but inputs and tokenizer that decides what the prepared data is."""

    seq_length: int
    """Predictions per sequence; sequences hold up to one token more."""
    packing: str = "none"
    """none: one piece of one document per sequence. naive: several, as if one text. block: several,
    kept apart in attention, positions and loss."""
    overlong: str | None = None
    """What becomes of documents longer than a sequence: split, truncate or drop. None splits text
    and tokens and truncates conversations."""
    bos: str | None = "auto"
    """Token before each text; "auto" adds one if the tokenizer does, None adds none."""
    eos: str | None = "auto"
    """Token after each text; "auto" takes the tokenizer's end token, None adds none."""
    validation_fraction: float = 0.05
    """Share of the tokens held out, by whole documents."""
    split_seed: int = 1234
    """Chooses which documents are held out."""
    record_field: str | None = None
    """text, messages or tokens; None takes the one a record has."""
    hf_split: str | None = None
    """Split to read of a saved DatasetDict."""
    chat: ChatRules = field(default_factory=ChatRules)
    """How conversations are rendered."""
    max_documents: int | None = None
    """Stop after this many documents."""
    max_tokens: int | None = None
    """Stop after the document that brings the tokens to this many."""
    skip_invalid: bool = False
    """Leave out records that cannot be used, instead of stopping at the first."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1, got {self.seq_length}")
        if self.packing not in PACKINGS:
            raise ValueError(f"--packing must be one of {', '.join(PACKINGS)}, got {self.packing}")
        if self.overlong is not None and self.overlong not in OVERLONG:
            raise ValueError(
                f"--overlong must be one of {', '.join(OVERLONG)}, got {self.overlong}"
            )
        for name in ("max_documents", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def prepare(
    inputs: list[str],
    tokenizer_path: str | os.PathLike,
    output: str | os.PathLike,
    options: PrepareOptions,
    *,
    overwrite: bool = False,
    report=None,
) -> dict[str, dict]:
    """Writes `output`/train and, if anything is held out, `output`/validation.

    The same inputs, tokenizer and options give the same bytes.

    Args:
        inputs: See `records.read_records`.
        tokenizer_path: Hugging Face directory with a fast tokenizer.
        output: The directory to make, in one piece.
        overwrite: Replace an existing `output`.
        report: Called with a line of text for people about each record left out, about documents
            that have nothing to train on, and about what looks like a mistake in the data.

    Returns:
        The manifest of each split.

    Raises:
        ValueError: Bad options, records or tokenizer, or nothing is left to train on.
        FileNotFoundError: An input is missing.
        FileExistsError: `output` exists and `overwrite` is false.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    bos = default_bos(tokenizer) if options.bos == "auto" else options.bos
    eos = tokenizer.eos_token if options.eos == "auto" else options.eos
    maker = DocumentTokenizer(tokenizer, bos=bos, eos=eos, chat=options.chat)
    with published_directory(output, overwrite=overwrite) as folder:
        store = DocumentStore(folder)
        try:
            skipped = _fill(store, maker, inputs, options, report)
            held_out = validation_documents(
                store.digests,
                [store.length(document) for document in range(len(store))],
                fraction=options.validation_fraction,
                seed=options.split_seed,
            )
            description = {
                "seq_length": options.seq_length,
                "packing": options.packing,
                "vocab_size": maker.vocab_size,
                "tokenizer": tokenizer_hash(tokenizer),
                "vocabulary": vocabulary_hash(tokenizer),
                "template": None if maker.chat is None else maker.chat.fingerprint,
                "bos": bos,
                "eos": eos,
                "overlong": options.overlong or DEFAULT_OVERLONG,
                "validation_fraction": options.validation_fraction,
                "split_seed": options.split_seed,
                "corpus": hashlib.sha256(b"".join(store.digests)).hexdigest(),
                "skipped_records": skipped,
            }
            parts = {TRAIN: [d for d in range(len(store)) if not held_out[d]]}
            if held_out.any():
                parts[VALIDATION] = [d for d in range(len(store)) if held_out[d]]
            manifests = {
                name: _write_split(
                    folder / name, name, documents, store, options, description, report
                )
                for name, documents in parts.items()
            }
        finally:
            store.remove()
    return manifests


def _fill(store, maker, inputs, options: PrepareOptions, report) -> int:
    """Tokenises the inputs into the store; returns how many records were left out."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    skipped = 0

    def skip(message: str) -> None:
        nonlocal skipped
        skipped += 1
        if report is not None:
            report(f"left out: {message}")

    skip_invalid = skip if options.skip_invalid else None
    records = read_records(
        inputs,
        field=options.record_field,
        hf_split=options.hf_split,
        skip_invalid=skip_invalid,
    )
    documents = maker.documents(records, skip_invalid=skip_invalid)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("tokenise")
        for document in documents:
            store.append(document)
            progress.update(
                task, description=f"tokenise: {len(store)} documents, {store.tokens} tokens"
            )
            if len(store) == options.max_documents:
                break
            if options.max_tokens is not None and store.tokens >= options.max_tokens:
                break
    store.finish()
    if not len(store):
        raise ValueError(f"no documents in {', '.join(inputs)}; {skipped} records were left out")
    if report is not None:
        _report_suspicions(maker, report)
    return skipped


def _report_suspicions(maker: DocumentTokenizer, report) -> None:
    if maker.texts_with_control_tokens:
        report(
            f"warning: {maker.texts_with_control_tokens} texts spell control tokens of the "
            "tokenizer; they are tokenised as ordinary characters, and all of it is trained. Text "
            "that was rendered with a chat template beforehand belongs here as messages"
        )
    if maker.chat is not None and maker.chat.turns_without_end:
        report(
            f"warning: {maker.chat.turns_without_end} assistant turns are ended by no control "
            "token that is trained: from them the student does not learn where to stop"
        )


def _write_split(
    folder: Path, name, documents, store, options: PrepareOptions, description, report
) -> dict:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    folder.mkdir()
    limit = options.seq_length + 1
    pieces, counts, dropped = _cut_all(documents, store, limit, options)
    if dropped and report is not None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        report(f"{name}: left out as nothing could be trained: {reasons}")
    if not pieces:
        raise ValueError(
            f"nothing in the {name} split can be trained on: all its documents are shorter than "
            "two tokens, dropped as too long, or without a token to learn"
        )
    if options.packing == "none":
        groups = [[number] for number in range(len(pieces))]
    else:
        groups = best_fit([len(piece) for piece in pieces], limit)
    writer = SequenceWriter(folder)
    quiet = not console.is_terminal
    for group in track(groups, f"write {name}", console=console, transient=True, disable=quiet):
        parts = [
            store.part(piece.document, piece.start, piece.end)
            for piece in (pieces[number] for number in group)
        ]
        writer.append(*assemble(parts, packing=options.packing))
    return writer.close(
        split=name,
        **description,
        **counts,
        pieces=len(pieces),
        fill_rate=round(writer.tokens / (writer.samples * limit), 6),
    )


def _cut_all(
    documents, store, limit: int, options: PrepareOptions
) -> tuple[list[DocumentSlice], dict, Counter]:
    """The pieces to train on, counts for the manifest, and for people why others are left out."""
    pieces, counts = [], Counter(overlong_documents=0, dropped_pieces=0)
    kinds, dropped = Counter(), Counter()
    for document in documents:
        kind, length = store.kinds[document], store.length(document)
        kinds[kind] += 1
        counts["overlong_documents"] += length > limit
        rule = options.overlong or DEFAULT_OVERLONG[kind]
        cuts = cut(document, length, limit, rule)
        if not cuts:
            counts["dropped_pieces"] += 1
            dropped["shorter than two tokens" if length < 2 else "longer than a sequence"] += 1
        for piece in cuts:
            _, wanted = store.part(document, piece.start + 1, piece.end)
            if wanted.any():
                pieces.append(piece)
            else:
                counts["dropped_pieces"] += 1
                whole = len(piece) == length
                part = f"{kind} without" if whole else f"pieces cut from {kind} that have not"
                dropped[f"{part} a token to learn"] += 1
    return pieces, {"documents": dict(sorted(kinds.items())), **counts}, dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="pydoc (the language reference in every Python), .jsonl, .jsonl.gz or .parquet files, "
        "folders of these, or datasets saved to disk",
    )
    add("--tokenizer", required=True, metavar="DIR", help="Hugging Face directory, the teacher's")
    add("--output", required=True, metavar="DIR", help="gets the folders train and validation")
    add("--seq-length", type=int, required=True, help="predictions per sequence")
    add("--packing", choices=PACKINGS, default="none", help="see docs/packing.md; default none")
    add(
        "--overlong",
        choices=OVERLONG,
        help="documents longer than a sequence; default: split text, truncate conversations",
    )
    add("--validation-fraction", type=float, default=0.05, help="of the tokens; default 0.05")
    add("--split-seed", type=int, default=1234)
    add("--field", choices=FIELDS, help="which one to read where records have several")
    add("--hf-split", metavar="NAME", help="split of a saved DatasetDict")
    add("--bos", default="auto", metavar="auto|none|TOKEN", help="before each text")
    add("--eos", default="auto", metavar="auto|none|TOKEN", help="after each text")
    add("--assistant-turns", choices=ASSISTANT_TURNS, default="all", help="which ones are trained")
    add_template_arguments(parser)
    add("--max-documents", type=int)
    add("--max-tokens", type=int, help="stop after the document that reaches this many")
    add("--skip-invalid", action="store_true", help="leave out unusable records, do not stop")
    add("--overwrite", action="store_true", help="replace an existing directory")


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """What a chat template is told beside the messages."""
    add = parser.add_argument
    add("--template-kwargs", type=json.loads, default={}, metavar="JSON", help="for the template")
    add(
        "--template-date",
        type=datetime.date.fromisoformat,
        default=ChatRules.date,
        metavar="YYYY-MM-DD",
        help="what a template that prints today's date is told",
    )


def run(args: argparse.Namespace) -> int:
    options = PrepareOptions(
        seq_length=args.seq_length,
        packing=args.packing,
        overlong=args.overlong,
        bos=None if args.bos == "none" else args.bos,
        eos=None if args.eos == "none" else args.eos,
        validation_fraction=args.validation_fraction,
        split_seed=args.split_seed,
        record_field=args.field,
        hf_split=args.hf_split,
        chat=ChatRules(args.assistant_turns, args.template_kwargs, args.template_date),
        max_documents=args.max_documents,
        max_tokens=args.max_tokens,
        skip_invalid=args.skip_invalid,
    )
    manifests = prepare(
        args.input,
        args.tokenizer,
        args.output,
        options,
        overwrite=args.overwrite,
        report=lambda line: print(line, file=sys.stderr),
    )
    for name, manifest in manifests.items():
        print(
            f"{args.output}/{name}: {manifest['samples']} sequences, {manifest['tokens']} tokens "
            f"({manifest['supervised_tokens']} trained) of "
            f"{sum(manifest['documents'].values())} documents, packing {manifest['packing']}, "
            f"{manifest['fill_rate']:.1%} full"
        )
    return 0
