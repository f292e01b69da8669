"""Recognise a full disk behind whatever error a library makes of it."""

import contextlib
import errno
import os
from collections.abc import Iterator

NUMBERS = (errno.ENOSPC, errno.EDQUOT)
PHRASES = tuple(os.strerror(number) for number in NUMBERS)


def full_disk(error: BaseException) -> str | None:
    """The line that says a write found no room; None where the error is another.

    Libraries wrap it (safetensors, PyTorch's and the host's checkpoint writers), often as text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in NUMBERS:
            return str(error)
        for line in str(error).splitlines():
            if any(phrase in line for phrase in PHRASES):
                return line.strip()
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def explained_full_disk(shard: int, count: int, folder: str | os.PathLike) -> Iterator[None]:
    """While inside, a full disk is an OSError that names the shard and says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*NUMBERS, errno.EFBIG):
            raise
        raise OSError(
            f"{error}. Shard {shard} of {count} in {os.fspath(folder)} could not be written; the "
            "finished ones are kept. Make room and run the same command again to go on"
        ) from error
