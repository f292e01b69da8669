"""Tokenised documents on disk while they wait to be packed: no corpus sits in memory."""

from pathlib import Path

import numpy as np

from megatron_kd.data.prepare.documents import TokenizedDocument


class DocumentStore:
    """Appends documents to two files, then maps them. In memory: some 40 bytes for each document.

    Args:
        folder: An existing folder for the files; `remove` deletes them.
    """

    def __init__(self, folder: Path):
        self._paths = (folder / "store-tokens.bin", folder / "store-wanted.bin")
        self._files = [open(path, "wb") for path in self._paths]
        self._maps: list[np.ndarray] = []
        self._offsets = [0]
        self.kinds: list[str] = []
        self.digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def append(self, document: TokenizedDocument) -> None:
        self._files[0].write(document.tokens.astype("<i4").tobytes())
        self._files[1].write(document.wanted.astype(np.uint8).tobytes())
        self._offsets.append(self._offsets[-1] + len(document.tokens))
        self.kinds.append(document.kind)
        self.digests.append(document.digest())

    def finish(self) -> None:
        """Ends writing; documents can be read from here on."""
        for file in self._files:
            file.close()
        if self.tokens:
            dtypes = (np.dtype("<i4"), np.uint8)
            self._maps = [
                np.memmap(p, d, mode="r") for p, d in zip(self._paths, dtypes, strict=True)
            ]

    def length(self, document: int) -> int:
        return self._offsets[document + 1] - self._offsets[document]

    def part(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [m], wanted [m] bool) of the document's tokens start to end."""
        base = self._offsets[document]
        tokens, wanted = (values[base + start : base + end] for values in self._maps)
        return np.asarray(tokens), np.asarray(wanted) != 0

    def remove(self) -> None:
        self._maps = []
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)
