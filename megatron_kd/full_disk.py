"""Recognise a full disk behind whatever error a library makes of it."""

import errno
import os

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
