"""Show what a cache holds: manifest, mass, entropy, bytes and decoded samples; a PNG on request."""

import argparse
import os

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_kd.cache.format import CacheError
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.statistics import CacheStatistics, cache_statistics
from megatron_kd.cache.verify import find_caches
from megatron_kd.files import canonical_json

MASS_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
SHOWN_CANDIDATES = 5
LINE_WIDTH = 140  # of output that goes to no terminal
SHOWN_KEYS = (
    "teacher",
    "licence",
    "engine",
    "tokenizer",
    "template",
    "packing",
    "data",
    "vocab_size",
    "topk",
    "sampling",
    "codec",
    "temperatures",
    "hidden_size",
    "parameters",
    "samples",
    "positions",
    "fingerprint",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", help="a cache or the folder of its splits; also as an fsspec URL")
    parser.add_argument("--png", metavar="FILE", help="also draw mass, entropy, ranks and bytes")
    parser.add_argument("--samples", type=int, default=1, help="samples to decode (default 1)")
    parser.add_argument("--positions", type=int, default=12, help="positions of each (default 12)")
    parser.add_argument("--tokenizer", metavar="DIR", help="Hugging Face tokenizer, to show text")


def run(args: argparse.Namespace) -> int:
    if args.samples < 0 or args.positions < 1:
        raise CacheError("--samples must be at least 0 and --positions at least 1")
    caches = [os.fspath(cache) for cache in find_caches(args.cache)]
    decode = _token_names(args.tokenizer)
    console = Console()
    if not console.is_terminal:
        console = Console(width=LINE_WIDTH)
    for path in caches:
        reader = CacheReader(path)
        statistics = cache_statistics(reader)
        console.print(manifest_table(reader))
        console.print(statistics_table(statistics))
        console.print(mass_table(statistics))
        for index in _spread(len(reader), args.samples):
            console.print(sample_table(reader, index, args.positions, decode))
        if args.png:
            from megatron_kd.cache.figure import draw  # matplotlib is slow to import

            file = args.png if len(caches) == 1 else _beside(args.png, os.path.basename(path))
            draw(statistics, _title(reader), file)
            console.print(f"figure: {file}")
    return 0


def manifest_table(reader: CacheReader) -> Table:
    table = Table(title=f"{reader.path}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key in SHOWN_KEYS:
        value = reader.manifest[key]
        if value not in (None, [], {}):
            plain = isinstance(value, str) and value.isprintable()  # no escapes to the terminal
            table.add_row(key, Text(value if plain else canonical_json(value)))
    sizes = sum(entry.bytes for entry in reader.shards)
    table.add_row("shards", f"{len(reader.shards)}, {sizes / 2**20:.1f} MiB")
    return table


def statistics_table(statistics: CacheStatistics) -> Table:
    table = Table(
        title=f"Over {statistics.positions} positions of {statistics.samples} samples",
        title_justify="left",
    )
    for heading in ("", "mean", "5 %", "median", "95 %"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, values, digits in (
        ("mass kept", statistics.mass, 4),
        ("entropy, nats", statistics.entropy_nats, 3),
        ("top probability", statistics.top_probability, 4),
        ("candidates", statistics.candidates, 1),
        *(
            [("cross-entropy of the next token, nats", statistics.label_nats, 3)]
            if statistics.label_nats is not None
            else []
        ),
    ):
        low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
        table.add_row(name, *(f"{x:.{digits}f}" for x in (values.mean(), low, middle, high)))
    table.add_section()
    table.add_row("next token among the candidates", f"{statistics.label_kept:.2%}")
    table.add_row("next token is the first", f"{statistics.label_first:.2%}")
    if statistics.label_nats is not None:
        table.add_row("teacher's perplexity", f"{np.exp(statistics.label_nats.mean()):.2f}")
    table.add_section()
    for group, count in sorted(statistics.bytes_per_position.items(), key=lambda item: -item[1]):
        table.add_row(f"bytes/position: {group}", f"{count:.1f}")
    table.add_row("bytes/position", f"{statistics.total_bytes_per_position:.1f}")
    return table


def mass_table(statistics: CacheStatistics) -> Table:
    table = Table(title="Mass kept", title_justify="left")
    for heading in ("from", "to", "positions", "share", ""):
        table.add_column(heading, justify="right" if heading else "left")
    # the last bin takes in what rounds to 1
    slots = np.digitize(statistics.mass, MASS_EDGES[1:-1])
    counts = np.bincount(slots, minlength=len(MASS_EDGES) - 1)
    for low, high, count in zip(MASS_EDGES, MASS_EDGES[1:], counts, strict=False):
        share = count / statistics.positions
        table.add_row(f"{low}", f"{high}", f"{count}", f"{share:.1%}", "█" * round(40 * share))
    return table


def sample_table(reader: CacheReader, index: int, positions: int, decode) -> Table:
    """The first supervised positions of a sample with the teacher's first choices."""
    rows, tokens = reader.rows(index), reader.tokens(index)
    table = Table(
        title=f"Sample {index}: {tokens.size} tokens, {rows.positions.size} supervised",
        title_justify="left",
    )
    for heading in ("position", "token", "next", "rank of next", "mass"):
        table.add_column(heading, overflow="fold")
    table.add_column("first candidates", overflow="fold", ratio=1, min_width=40)
    for row, position in enumerate(rows.positions[:positions]):
        following = int(tokens[position + 1])
        rank = np.flatnonzero(rows.topk_ids[row] == following)
        shown = [
            f"{decode(int(token))} {np.exp(logprob):.3f}"
            for token, logprob in zip(
                rows.topk_ids[row, :SHOWN_CANDIDATES],
                rows.topk_logprobs[row, :SHOWN_CANDIDATES],
                strict=True,
            )
            if token >= 0
        ]
        table.add_row(
            str(position),
            Text(decode(int(tokens[position]))),
            Text(decode(following)),
            str(rank[0] + 1) if rank.size else "off",
            f"{rows.mass[row]:.4f}",
            Text("  ".join(shown)),
        )
    return table


def _token_names(tokenizer: str | None):
    if tokenizer is None:
        return str
    from transformers import AutoTokenizer  # slow to import, and only wanted here

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda token: repr(loaded.decode([token]))


def _spread(size: int, wanted: int) -> list[int]:
    return sorted({int(x) for x in np.linspace(0, size - 1, min(wanted, size)).round()})


def _beside(file: str, split: str) -> str:
    stem, ending = os.path.splitext(file)
    return f"{stem}-{split}{ending}"


def _title(reader: CacheReader) -> str:
    teacher = reader.manifest["teacher"]
    name = teacher if isinstance(teacher, str) else teacher.get("name", "")
    what = f"top-{reader.topk} of {reader.vocab_size}, {reader.spec.codec}"
    return " · ".join(part for part in (os.path.basename(reader.path), str(name), what) if part)
