"""Responses of a Hugging Face model in this process: what can be set, and its batches.

`decoding` holds the model itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_kd.models.fingerprint import model_directory
from megatron_kd.teacher.engines.base import RowRequest, TeacherDocument, option
from megatron_kd.teacher.engines.batches import batches
from megatron_kd.teacher.engines.transformers import (
    TransformersEngine,
    TransformersModelOptions,
)
from megatron_kd.teacher.generators.base import Generator, Prompt, Response, Sampling, asked


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(TransformersModelOptions):
    """How the model runs in this process."""

    batch_tokens: int = option(
        32768,
        "tokens of one batch, with padding and with the new ones; a longer prompt runs alone",
        shapes_rows=True,
        recorded_at_default=True,
        minimum=1,
    )


class TransformersGenerator(Generator):
    """Runs a causal LM of the transformers library, batches of like length at a time."""

    Options = GenerationOptions
    gives_rows = True
    describe = TransformersEngine.describe

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        ends: Sequence[int],
        vocab_size: int,
        request: RowRequest | None,
        options: GenerationOptions,
    ):
        from megatron_kd.teacher.generators.decoding import DecodedModel

        self.options, self.sampling = options, sampling
        path = model_directory(model)
        self._model = DecodedModel(path, sampling, ends, vocab_size, request, options)

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Response]]:
        wanted = asked(prompts, self.sampling)
        documents = [
            TeacherDocument(prompts[i].tokens, np.array([len(prompts[i].tokens) - 1]))
            for i, _ in wanted
        ]
        added = self.sampling.max_new_tokens
        for batch in batches(documents, self.options.batch_tokens, added=added):
            places = [wanted[index] for index in batch]
            responses = self._model.run([(prompts[i], j) for i, j in places])
            for (index, sample), response in zip(places, responses, strict=True):
                yield index, sample, response

    def close(self) -> None:
        self._model = None
