"""Turn another tool's captured teacher distributions into a cache: Megatron-LM's, DistillKit's."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.format import CacheError, CacheSpec
from megatron_kd.cache.writer import DEFAULT_SHARD_POSITIONS, CacheWriter
from megatron_kd.data.sequences import SequenceReader

CHECKED_POSITIONS = 2000  # after so many, rows that do not fit the tokens are found out


@dataclass
class Tally:
    """What had to be mended on the way; told at the end."""

    samples: int = 0
    padding_ids: int = 0
    """Candidates at or above the vocabulary size, which were dropped."""
    scaled_rows: int = 0
    """Rows whose approximated probabilities summed to more than one, which were scaled to one."""


class LabelCheck:
    """Counts how often the next token is among a row's candidates: at its place, and one place off.

    Files without tokens can be paired with the wrong ones unnoticed; then the rows know no more
    about their next token than about the one after.
    """

    def __init__(self):
        self.positions = 0
        self.hits = np.zeros(3, np.int64)  # the row before, the row itself, the row after

    def see(self, tokens: np.ndarray, topk_ids: np.ndarray) -> None:
        """tokens [n], topk_ids [n - 1, K]"""
        if self.positions >= CHECKED_POSITIONS or topk_ids.shape[0] < 3:
            return
        labels = tokens[2:-1, None]  # of the rows 1 to n - 3, which have neighbours
        for slot, rows in enumerate((topk_ids[:-2], topk_ids[1:-1], topk_ids[2:])):
            self.hits[slot] += int((rows == labels).any(axis=1).sum())
        self.positions += labels.size
        if self.positions >= CHECKED_POSITIONS:
            self.refuse_misfit()

    def refuse_misfit(self) -> None:
        before, own, after = self.hits.tolist()
        if own < self.positions and own <= 1.1 * max(before, after):
            raise CacheError(
                f"the rows do not fit the tokens: of {self.positions} next tokens {own} are among "
                f"their row's candidates, {before} among those of the row before and {after} of "
                "the row after; the data must hold the samples in the order the teacher saw them"
            )


def convert_megatron(folder: Path, data: Path, writer: CacheWriter) -> Tally:
    """Megatron-LM's tars, with the tokens they were made from.

    Args:
        data: A split of prepared sequences; sample i is the i-th that Megatron trained on.
    """
    from megatron_kd.data.convert.megatron import saved_samples  # loads PyTorch and pyarrow

    sequences, tally, check = SequenceReader(data), Tally(), LabelCheck()
    vocab_size, topk = writer.spec.vocab_size, writer.spec.topk
    for index, saved in enumerate(saved_samples(folder)):
        if index == len(sequences):
            raise CacheError(f"{folder} holds more samples than the {len(sequences)} of {data}")
        sequence = sequences[index]
        tokens = np.asarray(sequence.tokens)
        rows = saved.topk_ids.shape[0]
        if rows != tokens.size - 1 or saved.topk_ids.shape[1] > topk:
            raise CacheError(
                f"sample {index}: {rows} rows of {saved.topk_ids.shape[1]}, {tokens.size} tokens; "
                f"expected one row less than tokens and at most {topk} candidates"
            )
        padding = saved.topk_ids >= vocab_size
        tally.padding_ids += int(padding.sum())
        ids = np.where(padding, -1, saved.topk_ids)
        logprobs = np.where(padding, -np.inf, saved.topk_logprobs)
        check.see(tokens, ids)
        _append(writer, tokens, sequence.loss_mask, ids, logprobs, sequence.cu_seqlens)
        tally.samples += 1
    check.refuse_misfit()
    if tally.samples != len(sequences):
        raise CacheError(f"{folder} holds {tally.samples} samples, {data} {len(sequences)}")
    return tally


def convert_distillkit(folder: Path, compression, writer: CacheWriter) -> Tally:
    """DistillKit's Parquet files; every prediction is supervised.

    Args:
        compression: The `distillkit.Compression` that the capture's configuration states.
    """
    from megatron_kd.data.convert.distillkit import captured_samples  # loads pyarrow

    tally, check = Tally(), LabelCheck()
    for captured in captured_samples(folder, compression):
        logprobs = np.minimum(captured.topk_logprobs, 0.0)
        mass = np.exp(logprobs).sum(axis=1)
        over = mass > 1.0
        logprobs[over] -= np.log(mass[over])[:, None]
        tally.scaled_rows += int(over.sum())
        check.see(captured.tokens, captured.topk_ids)
        mask = np.ones(captured.tokens.size, bool)
        mask[-1] = False
        _append(writer, captured.tokens, mask, captured.topk_ids, logprobs, None)
        tally.samples += 1
    check.refuse_misfit()
    return tally


def _append(writer: CacheWriter, tokens, loss_mask, ids, logprobs, cu_seqlens) -> None:
    """Pads rows to the writer's width and to the last position, which has none."""
    missing = writer.spec.topk - ids.shape[1]
    widen = ((0, 1), (0, missing))
    writer.append(
        tokens,
        loss_mask,
        np.pad(ids, widen, constant_values=-1),
        np.pad(logprobs.astype(np.float64), widen, constant_values=-np.inf),
        cu_seqlens=cu_seqlens,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=CONVERTERS, help="whose capture it is")
    parser.add_argument("source", help="its directory")
    parser.add_argument("--output", required=True, help="the cache to make (a new directory)")
    parser.add_argument("--teacher", required=True, help="name of the teacher, for the manifest")
    parser.add_argument(
        "--data", help="megatron: the prepared split its samples came from, in order"
    )
    parser.add_argument(
        "--tokenizer", help="distillkit: the tokenizer's hash, as `prepare` writes it"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="default: that of the data or of the capture"
    )
    parser.add_argument("--license", help="the teacher's, for the manifest")
    parser.add_argument("--licence", dest="license", help=argparse.SUPPRESS)  # its older spelling
    parser.add_argument("--codec", choices=CODECS, default="compact")
    parser.add_argument("--shard-positions", type=int, default=DEFAULT_SHARD_POSITIONS)


def run(args: argparse.Namespace) -> int:
    source = Path(args.source)
    tally = CONVERTERS[args.format](args, source)
    print(f"{args.output}: {tally.samples} samples")
    if tally.padding_ids:
        print(
            f"{tally.padding_ids} candidates were padding rows of the vocabulary and were dropped"
        )
    if tally.scaled_rows:
        print(f"{tally.scaled_rows} rows summed to more than one and were scaled to one")
    return 0


def _run_megatron(args: argparse.Namespace, source: Path) -> Tally:
    if args.data is None:
        raise CacheError("Megatron's files hold no tokens: give the prepared split with --data")
    from megatron_kd.data.convert.megatron import read_meta

    data = SequenceReader(args.data).manifest
    saver = read_meta(source).get("saver", {})
    if "k" not in saver:
        raise CacheError(f"{source}: its _meta.json does not say how many candidates were kept")
    sampling = {"method": "topk"} | ({"top_p": saver["p"]} if saver.get("p") is not None else {})
    spec = CacheSpec(
        vocab_size=args.vocab_size or data["vocab_size"],
        topk=int(saver["k"]),
        tokenizer=data["tokenizer"],
        template=data.get("template"),
        packing=data["packing"],
        data={"fingerprint": data["fingerprint"], "seq_length": data["seq_length"]},
        engine={"name": "megatron-lm", "converted": True},
        sampling=sampling,
        teacher=args.teacher,
        licence=args.license,
        codec=args.codec,
    )
    with CacheWriter(args.output, spec, shard_positions=args.shard_positions) as writer:
        return convert_megatron(source, Path(args.data), writer)


def _run_distillkit(args: argparse.Namespace, source: Path) -> Tally:
    if args.tokenizer is None:
        raise CacheError(
            "DistillKit's files do not say which tokenizer made them: give --tokenizer"
        )
    from megatron_kd.data.convert.distillkit import CONFIG_NAME, Compression

    compression = Compression.read(source / CONFIG_NAME)
    spec = CacheSpec(
        vocab_size=args.vocab_size or compression.d,
        topk=compression.k,
        tokenizer=args.tokenizer,
        packing="none",
        engine={"name": "distillkit", "converted": True},
        teacher=args.teacher,
        licence=args.license,
        codec=args.codec,
    )
    with CacheWriter(args.output, spec, shard_positions=args.shard_positions) as writer:
        return convert_distillkit(source, compression, writer)


CONVERTERS = {"megatron": _run_megatron, "distillkit": _run_distillkit}
