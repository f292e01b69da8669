"""Documents in batches of like length, for engines that run the model themselves."""

from collections.abc import Iterator, Sequence

from megatron_kd.teacher.engines.base import TeacherDocument


def batches(documents: Sequence[TeacherDocument], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of documents that run together: of like length, longest first, at most batch_tokens
    with padding.

    The order comes from the documents' tokens alone, so the same set of documents runs in the same
    batches in whatever order it is given, and gives the same bits.
    """
    order = sorted(
        range(len(documents)),
        key=lambda i: (-documents[i].run_tokens, documents[i].tokens.astype(">i4").tobytes()),
    )
    batch, width = [], 0
    for index in order:
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        if not batch:
            width = documents[index].run_tokens
        batch.append(index)
    if batch:
        yield batch
