"""The teacher in Megatron, sharded over the ranks of a torchrun: for teachers that only fit so.

`torchrun --nproc-per-node 8 -m megatron_kd capture --engine megatron --tensor-parallel 8 …`.
All ranks hold one teacher together. One of them, the leader, runs the capture; the others follow
its batches.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_kd.models.fingerprint import model_directory
from megatron_kd.teacher.engines.base import (
    EngineError,
    RowRequest,
    TeacherDescription,
    TeacherDocument,
    TeacherEngine,
    TeacherRows,
    option,
)
from megatron_kd.teacher.engines.batches import BatchedModelOptions, batches
from megatron_kd.teacher.engines.draws import draws_of
from megatron_kd.teacher.engines.model_directory import describe_directory

# Micro-batches per pipeline stage that are under way together: enough to hide the filling of the
# pipeline.
_MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(BatchedModelOptions):
    """How the teacher is spread over the ranks."""

    dtype: str = option(
        "auto",
        "the weights' dtype; auto: the checkpoint's",
        shapes_rows=True,
        recorded_at_default=True,
        choices=("auto", "float32", "bfloat16"),
    )
    tensor_parallel: int = option(1, "ranks that share each layer", shapes_rows=True, minimum=1)
    pipeline_parallel: int = option(1, "ranks that share the layers out", minimum=1)


class MegatronEngine(TeacherEngine):
    """A causal LM in Megatron-Core, loaded through Megatron-Bridge."""

    Options = MegatronOptions
    spans_ranks = True
    _ranks = None  # what the running session holds

    @classmethod
    def describe(cls, teacher: str, options: MegatronOptions) -> TeacherDescription:
        cls._refuse_outside_session()
        import megatron.bridge
        import megatron.core

        return describe_directory(
            teacher,
            f"megatron-core {megatron.core.__version__}, "
            f"megatron-bridge {megatron.bridge.__version__}",
            trust_remote_code=options.trust_remote_code,
        )

    @classmethod
    def _refuse_outside_session(cls) -> None:
        if cls._ranks is None:
            raise EngineError(
                "the megatron engine runs under torchrun only; make the missing shards with the "
                "command that made the cache (torchrun … -m megatron_kd capture …)"
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
        self._refuse_outside_session()
        self.request = request
        self.options = options
        self._ranks.load(model_directory(teacher), request)

    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
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
        self, documents: Sequence[TeacherDocument], held: list[list[int]]
    ) -> Iterator[tuple[int, TeacherRows]]:
        work = [
            [
                (
                    document.tokens[: document.run_tokens],
                    document.rows,
                    draws_of(document.tokens, document.rows, self.request),
                    document.labels() if self.request.labels else None,
                )
                for document in (documents[index] for index in batch)
            ]
            for batch in held
        ]
        rows = self._ranks.run(work)
        yield from zip([index for batch in held for index in batch], rows, strict=True)
