"""Documents in batches of like length, and the options of engines that run the model themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_kd.teacher.engines.base import TeacherDocument, option
from megatron_kd.teacher.engines.model_directory import ModelDirectoryOptions


@dataclass(frozen=True, kw_only=True)
class BatchedModelOptions(ModelDirectoryOptions):
    """How documents run through a model, and their rows through its output layer."""

    batch_tokens: int = option(
        4096,
        "padded tokens of one forward pass; a longer document runs alone",
        shapes_rows=True,
        recorded_at_default=True,
        minimum=1,
    )
    head_chunk_bytes: int = option(
        512 << 20,
        "bound on what the logits of one chunk of rows take, with their fp32 copies",
        shapes_rows=True,
        minimum=1,
    )


def batches(
    documents: Sequence[TeacherDocument], batch_tokens: int, *, added: int = 0
) -> Iterator[list[int]]:
    """Indices of documents that run together: of like length, longest first, at most batch_tokens
    with padding, and with the tokens `added` to each.

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
            width = documents[index].run_tokens + added
        batch.append(index)
    if batch:
        yield batch
