"""The teacher as a Hugging Face model in this process: what can be set, and its batches.

`transformers_model` holds the model itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_kd.models.fingerprint import model_directory
from megatron_kd.teacher.engines.base import (
    RowRequest,
    TeacherDescription,
    TeacherDocument,
    TeacherEngine,
    TeacherRows,
    option,
)
from megatron_kd.teacher.engines.batches import BatchedModelOptions, batches
from megatron_kd.teacher.engines.model_directory import (
    ModelDirectoryOptions,
    describe_directory,
)


@dataclass(frozen=True, kw_only=True)
class TransformersModelOptions(ModelDirectoryOptions):
    """How the model is held in this process."""

    device_map: str | None = option(
        None,
        "auto, or a JSON object, spreads the model by accelerate; left out: one device, this "
        "rank's GPU where there is one",
    )
    attention: str | None = option(
        None, "its attn_implementation; left out: its own choice", shapes_rows=True
    )


@dataclass(frozen=True, kw_only=True)
class TransformersOptions(TransformersModelOptions, BatchedModelOptions):
    """How the model runs in this process."""


class TransformersEngine(TeacherEngine):
    """Runs a causal LM of the transformers library."""

    Options = TransformersOptions

    @classmethod
    def describe(cls, teacher: str, options: TransformersModelOptions) -> TeacherDescription:
        import torch
        import transformers

        return describe_directory(
            teacher,
            f"transformers {transformers.__version__}, torch {torch.__version__}",
            trust_remote_code=options.trust_remote_code,
        )

    def __init__(self, teacher: str, request: RowRequest, options: TransformersOptions):
        from megatron_kd.teacher.engines.transformers_model import LoadedModel

        self.options = options
        self.loaded = LoadedModel(model_directory(teacher), request, options)

    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
        for batch in batches(documents, self.options.batch_tokens):
            rows = self.loaded.run([documents[index] for index in batch])
            yield from zip(batch, rows, strict=True)

    def close(self) -> None:
        self.loaded = None
