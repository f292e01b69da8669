"""Where documents come from: pydoc, JSONL, Parquet, Hugging Face datasets; record by record."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("text", "messages", "tokens")
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Record:
    """One document as it was found."""

    where: str
    """File and line or row, for messages."""
    kind: str
    """One of FIELDS."""
    values: dict[str, Any]
    """The record's own keys."""


def read_records(
    inputs: Iterable[str],
    *,
    field: str | None = None,
    hf_split: str | None = None,
    skip_invalid: Callable[[str], None] | None = None,
) -> Iterator[Record]:
    """Yields the documents of every input in order; files are read as they are consumed.

    Args:
        inputs: "pydoc", .jsonl or .jsonl.gz or .parquet files, folders of these, or folders that
            `datasets` saved to disk.
        field: Which of FIELDS to read; None takes the only one present.
        hf_split: The split of a saved DatasetDict.
        skip_invalid: Called with the message about each record that is left out; None stops at the
            first one.

    Raises:
        ValueError: An input of another kind; or a record that cannot be read or has no document in
            it, and `skip_invalid` is None.
        FileNotFoundError: An input is not there.
    """
    for source in inputs:
        for where, values in _rows(source, hf_split):
            try:
                if isinstance(values, ValueError):
                    raise values
                yield _record(where, values, field)
            except ValueError as error:
                if skip_invalid is None:
                    raise
                skip_invalid(str(error))


def _rows(source: str, hf_split: str | None) -> Iterator[tuple[str, Any]]:
    """(where, values) of each record; a ValueError in place of what cannot be read."""
    if source == "pydoc":
        yield from _pydoc()
        return
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"no input {source}; expected pydoc, a .jsonl, .jsonl.gz or .parquet file, a folder of "
            "these, or a dataset saved by Hugging Face datasets"
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield from _saved_dataset(path, hf_split)
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if _reader(file) is not None)
        if not files:
            raise ValueError(f"the folder {source} holds no .jsonl, .jsonl.gz or .parquet files")
        for file in files:
            yield from _reader(file)(file)
    elif (reader := _reader(path)) is not None:
        yield from reader(path)
    else:
        raise ValueError(f"{source} is no .jsonl, .jsonl.gz or .parquet file")


def _reader(path: Path):
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines
    return _parquet if path.suffix == ".parquet" else None


def _pydoc() -> Iterator[tuple[str, Any]]:
    """The language reference that every Python carries: one plain-text document for each topic."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield f"pydoc topic {topic}", {"text": topics[topic].strip() + "\n"}


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    # A byte that is no UTF-8 becomes a surrogate, which no line has otherwise.
    with opener(path, "rt", encoding="utf-8", errors="surrogateescape") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path.name}:{number}", _json_line(f"{path.name}:{number}", line)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            remedy = "copy it again" if number or _is_gzip(path) else "rename it to .jsonl"
            yield (
                path.name,
                ValueError(
                    f"{path.name} cannot be unpacked after line {number}: {error}; {remedy} (what "
                    "follows that line is lost)"
                ),
            )


def _json_line(where: str, line: str) -> Any:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        return ValueError(
            f"{where} is not UTF-8: the byte 0x{ord(line[error.start]) - 0xDC00:02x} after "
            f"{error.start} characters; write the file as UTF-8"
        )
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of too many digits
        return ValueError(f"{where} is not a JSON object on one line: {error}")


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [c for c in (*FIELDS, "loss_mask", "tools") if c in file.schema_arrow.names]
            if not set(columns) & set(FIELDS):
                raise ValueError(
                    f"{path.name} has the columns {', '.join(file.schema_arrow.names)}; expected "
                    f"one named {', '.join(FIELDS)}"
                )
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for values in _python_rows(batch):
                    where = f"{path.name} row {row}"
                    if isinstance(values, UnicodeDecodeError):
                        values = ValueError(f"{where} is not UTF-8: {values}")
                    yield where, values
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        message = f"{path.name} cannot be read from row {row} on: {error}; copy it again"
        yield path.name, ValueError(message)


def _python_rows(batch) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # in one of them: the others can be read
        for row in range(len(batch)):
            try:
                yield from batch.slice(row, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield error


def _saved_dataset(path: Path, hf_split: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if hf_split is None and len(data) == 1:
            (hf_split,) = data
        if hf_split not in data:
            raise ValueError(
                f"{path.name} holds the splits {', '.join(data)}; choose one with --hf-split, "
                f"got {hf_split}"
            )
        data = data[hf_split]
    elif hf_split is not None:
        raise ValueError(f"{path.name} is a single dataset without splits; leave out --hf-split")
    for row, values in enumerate(data):
        yield f"{path.name} row {row}", values


def _record(where: str, values: Any, field: str | None) -> Record:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object with one of {', '.join(FIELDS)}")
    present = [name for name in FIELDS if values.get(name) is not None]
    kind = field or (present[0] if len(present) == 1 else None)
    if kind is None or kind not in present:
        found = ", ".join(map(str, values)) or "nothing"
        raise ValueError(
            f"{where}: expected {field or 'exactly one of ' + ', '.join(FIELDS)}, found {found}"
            + ("; choose with --field" if len(present) > 1 else "")
        )
    return Record(where, kind, values)
