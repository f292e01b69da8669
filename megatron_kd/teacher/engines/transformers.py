"""The teacher as a Hugging Face model in this process.

Letters: b documents of a batch, s padded tokens, r asked rows, c rows of a head chunk, V
vocabulary, D hidden size.

The base model runs on whole documents; the output layer runs on the asked rows alone, a chunk at a
time, so logits of shape [b, s, V] never exist. The model's own code computes each chunk's logits
(its base model is made to hand back the chunk), so soft caps, logit scales and biases are whatever
the architecture says they are.
"""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from megatron_kd.models.fingerprint import (
    licence_of,
    model_directory,
    model_fingerprint,
    tokenizer_of,
)
from megatron_kd.teacher.engines.base import Document, EngineError, RowRequest, Rows, Teacher
from megatron_kd.teacher.engines.topk import draws_of, select

# fp32 copies of a chunk of logits that live at once while it is selected from.
_CHUNK_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class TransformersOptions:
    """How the model runs here; `dtype` and `batch_tokens` change the last bits of the rows."""

    dtype: str = "auto"
    """"auto" (the checkpoint's), "float32", "bfloat16" or "float16"."""
    batch_tokens: int = 4096
    """Padded tokens of one forward pass; a longer document runs alone."""
    device_map: str | None = None
    """None: one device (this rank's GPU where there is one). "auto" or a JSON object: spread by
    accelerate."""
    attention: str | None = None
    """transformers' attn_implementation; None leaves the choice to it."""
    trust_remote_code: bool = False
    head_chunk_bytes: int = 512 << 20
    """Bound on what the logits of one head chunk take, with their fp32 copies."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise EngineError(
                f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        if self.batch_tokens < 1:
            raise EngineError(f"batch_tokens must be positive, got {self.batch_tokens}")


class TransformersEngine:
    """Runs a causal LM of the transformers library; see TeacherEngine for the interface."""

    Options = TransformersOptions

    @classmethod
    def describe(cls, teacher: str, options: TransformersOptions) -> Teacher:
        path = model_directory(teacher)
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=options.trust_remote_code
        ).get_text_config()
        return Teacher(
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            fingerprint=model_fingerprint(path),
            output_rows=config.vocab_size,
            hidden_size=config.hidden_size,
            max_tokens=getattr(config, "max_position_embeddings", None),
            tokenizer=tokenizer_of(path),
            licence=licence_of(path),
        )

    def __init__(self, teacher: str, request: RowRequest, options: TransformersOptions):
        self.path = model_directory(teacher)
        self.request = request
        self.options = options
        self.model = _load(self.path, options)
        self.device = self.model.get_input_embeddings().weight.device
        self._base = self.model.base_model
        head_rows = self.model.get_output_embeddings().weight.shape[0]
        if head_rows < request.vocab_size:
            raise EngineError(
                f"{self.path} has {head_rows} output rows, fewer than the vocabulary size "
                f"{request.vocab_size}: this is not the teacher the data was tokenised for"
            )
        self._chunk_rows = max(1, options.head_chunk_bytes // (head_rows * 4 * _CHUNK_COPIES))
        self._check_head()

    def close(self) -> None:
        self.model = self._base = None

    def stream(self, documents: Sequence[Document]) -> Iterator[tuple[int, Rows]]:
        for batch in batches(documents, self.options.batch_tokens):
            try:
                rows = self._run([documents[index] for index in batch])
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"the teacher ran out of memory on a batch of {len(batch)} documents; lower "
                    f"--batch-tokens (now {self.options.batch_tokens})"
                ) from error
            yield from zip(batch, rows, strict=True)

    @torch.inference_mode()
    def _run(self, documents: list[Document]) -> list[Rows]:
        width = max(document.run_tokens for document in documents)
        # Right padding under a causal mask changes nothing before it, so no attention mask is
        # passed.
        ids = torch.zeros(len(documents), width, dtype=torch.long)  # [b, s]
        for line, document in zip(ids, documents, strict=True):
            count = document.run_tokens
            line[:count] = torch.from_numpy(document.tokens[:count].astype(np.int64))
        output = self._base(input_ids=ids.to(self.device), use_cache=False)
        hidden_states = output[0]  # [b, s, D]
        results = []
        for line, document in zip(hidden_states, documents, strict=True):
            asked = torch.from_numpy(document.rows).to(line.device)
            results.append(self._rows(output, line[asked], document))
        return results

    def _rows(self, output, hidden_states: torch.Tensor, document: Document) -> Rows:
        """hidden_states: [r, D], what the output layer reads at the asked rows."""
        uniforms = draws_of(document.tokens, document.rows, self.request)
        ids, logprobs, log_z = [], [], []
        for start in range(0, len(document.rows), self._chunk_rows):
            part = slice(start, start + self._chunk_rows)
            logits = self._logits(output, hidden_states[part])  # [c, V]
            chunk = select(logits, self.request, None if uniforms is None else uniforms[part])
            for store, value in zip((ids, logprobs, log_z), chunk, strict=True):
                store.append(value)
        return Rows(
            topk_ids=torch.cat(ids).cpu().numpy(),
            topk_logprobs=torch.cat(logprobs).cpu().numpy(),
            log_z={
                tau: torch.cat([chunk[tau] for chunk in log_z]).cpu().numpy()
                for tau in self.request.temperatures
            },
            hidden=hidden_states.float().cpu().numpy() if self.request.hidden else None,
        )

    def _logits(self, output, hidden_states: torch.Tensor) -> torch.Tensor:
        """[c, D] → [c, V] by the model's own code after its base model."""
        stand_in = copy.copy(output)
        first = next(iter(stand_in.keys()))
        stand_in[first] = hidden_states[None]
        ids = torch.zeros(1, hidden_states.shape[0], dtype=torch.long, device=self.device)
        with _answers(self._base, stand_in):
            return self.model(input_ids=ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuses an architecture whose logits are not a function of the base model's output, row
        by row."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.request.vocab_size, (1, 8), generator=generator).to(self.device)
        want = self.model(input_ids=ids, use_cache=False).logits[0].float()
        output = self._base(input_ids=ids, use_cache=False)
        got = torch.cat([self._logits(output, row[None]).float() for row in output[0][0]])
        scale = want.abs().max().clamp(min=1.0)
        if got.shape != want.shape or bool((got - want).abs().max() > 0.02 * scale):
            raise EngineError(
                f"{type(self.model).__name__} does not compute its logits row by row from its base "
                "model's output; capture with another engine (vllm, sglang)"
            )


def batches(documents: Sequence[Document], batch_tokens: int) -> Iterator[list[int]]:
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


def _load(path: Path, options: TransformersOptions) -> transformers.PreTrainedModel:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype_key = "dtype" if version >= (4, 56) else "torch_dtype"
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    device_map = options.device_map
    if device_map and device_map.startswith("{"):
        device_map = json.loads(device_map)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        **{dtype_key: dtype},
        device_map=device_map,
        attn_implementation=options.attention,
        trust_remote_code=options.trust_remote_code,
        output_loading_info=True,
        local_files_only=True,
    )
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise EngineError(
            f"{path} does not hold all of the teacher's weights, so some would be random: missing "
            f"{missing[:5]}, of another shape {mismatched[:5]} ({len(missing) + len(mismatched)} "
            "in all)"
        )
    if device_map is None:
        if torch.cuda.is_available():
            model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    return model.eval()


@contextmanager
def _answers(module: torch.nn.Module, output):
    """While inside, calling `module` does nothing but return `output`."""
    had_own = "forward" in vars(module)  # accelerate's hooks put one on the instance
    before = module.forward
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if had_own:
            module.forward = before
        else:
            del module.forward
