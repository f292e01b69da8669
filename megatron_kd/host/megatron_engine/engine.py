"""The teacher in Megatron, sharded over the ranks of a torchrun: for teachers that only fit so.

`torchrun --nproc-per-node 8 -m megatron_kd.cli capture --engine megatron --tensor-parallel 8 …`.
All ranks hold one teacher together. One of them, the leader, runs the capture; the others follow
its batches.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import transformers

from megatron_kd.models.fingerprint import (
    licence_of,
    model_directory,
    model_fingerprint,
    tokenizer_of,
)
from megatron_kd.teacher.engines.base import Document, EngineError, RowRequest, Rows, Teacher
from megatron_kd.teacher.engines.topk import draws_of
from megatron_kd.teacher.engines.transformers import batches

# Micro-batches per pipeline stage that are under way together: enough to hide the filling of the
# pipeline.
_MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """How the teacher is spread over the ranks."""

    dtype: str = "auto"
    """"auto" (the checkpoint's), "float32" or "bfloat16"."""
    batch_tokens: int = 4096
    """Padded tokens of one micro-batch; a longer document runs alone."""
    tensor_parallel: int = 1
    """Ranks that share each layer."""
    pipeline_parallel: int = 1
    """Ranks that share the layers out."""
    trust_remote_code: bool = False
    head_chunk_bytes: int = 512 << 20
    """Bound on what the logits of one head chunk take on a rank, with their fp32 copies."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise EngineError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if min(self.batch_tokens, self.tensor_parallel, self.pipeline_parallel) < 1:
            raise EngineError(
                "batch_tokens, tensor_parallel and pipeline_parallel must be positive"
            )


class MegatronEngine:
    """A causal LM in Megatron-Core, loaded through Megatron-Bridge; see TeacherEngine for the
    interface."""

    Options = MegatronOptions
    spans_ranks = True
    _ranks = None  # what the running session holds

    @classmethod
    def describe(cls, teacher: str, options: MegatronOptions) -> Teacher:
        import megatron.bridge
        import megatron.core

        path = model_directory(teacher)
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=options.trust_remote_code
        ).get_text_config()
        return Teacher(
            version=f"megatron-core {megatron.core.__version__}, "
            f"megatron-bridge {megatron.bridge.__version__}",
            fingerprint=model_fingerprint(path),
            output_rows=config.vocab_size,
            hidden_size=config.hidden_size,
            max_tokens=getattr(config, "max_position_embeddings", None),
            tokenizer=tokenizer_of(path),
            licence=licence_of(path),
        )

    @classmethod
    @contextlib.contextmanager
    def session(cls, options: MegatronOptions) -> Iterator[bool]:
        """Joins the ranks. Yields whether this rank leads; the others have followed to the end by
        then.

        Raises:
            EngineError: the number of ranks is not tensor_parallel × pipeline_parallel.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        wanted = options.tensor_parallel * options.pipeline_parallel
        if world != wanted:
            raise EngineError(
                f"{world} ranks were started for a teacher over {options.tensor_parallel} × "
                f"{options.pipeline_parallel} (tensor × pipeline); start torchrun with "
                f"--nproc-per-node {wanted}. More ranks than that share the work as separate runs "
                "with --worker i/n"
            )
        from megatron_kd.host.cpu import backend as cpu_backend

        cpu_backend.activate()  # before anything named megatron is imported
        from megatron_kd.host.megatron_engine.model import Ranks

        cls._ranks = Ranks(options)
        try:
            if cls._ranks.leads:
                try:
                    yield True
                except (ValueError, OSError):
                    cls._ranks.dismiss()
                    raise
                cls._ranks.dismiss()
            else:
                cls._ranks.follow()
                yield False
        finally:
            cls._ranks.close()
            cls._ranks = None

    def __init__(self, teacher: str, request: RowRequest, options: MegatronOptions):
        if self._ranks is None:
            raise EngineError(
                "the megatron engine runs under torchrun only; make the missing shards with the "
                "command that made the cache (torchrun … -m megatron_kd.cli capture …)"
            )
        self.request = request
        self.options = options
        self._ranks.load(model_directory(teacher), request)

    def stream(self, documents: Sequence[Document]) -> Iterator[tuple[int, Rows]]:
        stages = self.options.pipeline_parallel
        together = _MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
        held: list[list[int]] = []
        for batch in batches(documents, self.options.batch_tokens):
            held.append(batch)
            if len(held) == together:
                yield from self._run(documents, held)
                held = []
        if held:
            yield from self._run(documents, held)

    def close(self) -> None:
        """The ranks keep the teacher until the session ends."""

    def _run(
        self, documents: Sequence[Document], held: list[list[int]]
    ) -> Iterator[tuple[int, Rows]]:
        work = [
            [
                (
                    document.tokens[: document.run_tokens],
                    document.rows,
                    draws_of(document.tokens, document.rows, self.request),
                )
                for document in (documents[index] for index in batch)
            ]
            for batch in held
        ]
        rows = self._ranks.run(work)
        yield from zip([index for batch in held for index in batch], rows, strict=True)
