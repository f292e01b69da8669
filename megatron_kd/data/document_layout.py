"""Where the documents of a block-packed sample lie in a training sequence.

A document of m tokens has m − 1 inputs, each with the token after it as its label, exactly as if it
were trained alone. Documents follow one another; under context parallelism each is padded, because
every rank holds a part of every document.

D: documents, S: sequence length, r: inputs of a sample.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class DocumentLayout:
    """A sample's inputs and their places in a sequence."""

    rows: np.ndarray
    """[r] int64, the sample's tokens that are inputs: all but each document's last."""
    places: np.ndarray
    """[r] int64, where they go in the sequence; ascending."""
    bounds: np.ndarray
    """[D + 1] int32, from 0: where the documents lie in the sequence, padding included."""

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, multiple: int = 1) -> "DocumentLayout":
        """The layout of a sample.

        Args:
            cu_seqlens: [documents + 1], token bounds of the stored documents. A document of one
                token has nothing to predict and gets no place.
            multiple: What every document is padded to a multiple of.
        """
        lengths = np.diff(np.asarray(cu_seqlens, np.int64))
        starts = np.asarray(cu_seqlens, np.int64)[:-1][lengths > 1]
        inputs = lengths[lengths > 1] - 1
        bounds = np.concatenate([[0], np.cumsum(-(-inputs // multiple) * multiple)])
        within = np.arange(inputs.sum()) - np.repeat(np.cumsum(inputs) - inputs, inputs)
        return cls(
            rows=np.repeat(starts, inputs) + within,
            places=np.repeat(bounds[:-1], inputs) + within,
            bounds=bounds.astype(np.int32),
        )

    @staticmethod
    def positions(cu_seqlens: np.ndarray, multiple: int = 1) -> int:
        """How long a sequence must be to hold a sample: what `of` would give as bounds[-1]."""
        inputs = np.diff(cu_seqlens) - 1
        return int((-(-inputs // multiple)).sum()) * multiple

    def filled(self, S: int) -> np.ndarray:
        """The bounds of a whole sequence of S positions; what is left over is a document of its
        own, all padding. [D + 1] or [D + 2] int32.
        """
        return self.bounds if self.bounds[-1] == S else np.append(self.bounds, np.int32(S))


def position_ids(bounds: np.ndarray) -> np.ndarray:
    """[bounds[-1]] int64, counting from 0 in each document."""
    bounds = np.asarray(bounds, np.int64)
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))


def context_parallel_places(
    bounds: list[int], rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a context-parallel rank holds of a sequence of documents.

    Each document is cut into 2 · ranks chunks, and a rank holds chunk `rank` and, counted from the
    end, chunk `rank` again, so that all have the same work under a causal mask. It is the host's
    layout for one document, and Transformer Engine's for packed ones.

    Args:
        bounds: [D + 1] where documents begin and end; lengths are multiples of 2 · ranks.
        rank: This rank's number in its context-parallel group.
        ranks: The size of that group; with 1 everything is held, whatever the lengths.

    Returns:
        (place in the sequence, document), each [S / ranks] int64.

    Raises:
        ValueError: A document cannot be cut so.
    """
    places, documents = [], []
    for document, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if ranks == 1:
            held = [torch.arange(begin, end)]
        else:
            chunk, rest = divmod(end - begin, 2 * ranks)
            if rest:
                raise ValueError(
                    f"document {document} has {end - begin} positions, which {ranks} "
                    f"context-parallel ranks cannot share; pad it to a multiple of {2 * ranks}"
                )
            firsts = begin + rank * chunk, end - (rank + 1) * chunk
            held = [torch.arange(first, first + chunk) for first in firsts]
        places += held
        documents += [torch.full_like(part, document) for part in held]
    return torch.cat(places), torch.cat(documents)
