"""A Hugging Face model in this process, and the rows of documents under it.

The base model runs on whole documents; the output layer runs on the asked rows alone, a chunk at a
time, so logits of shape [b, s, v] never exist. The model's own code computes each chunk's logits
(its base model is made to hand back the chunk), so soft caps, logit scales and biases are whatever
the architecture says they are.

Letters: b documents of a batch, s padded tokens, r asked rows, n rows of a chunk, v vocabulary, h
hidden size.
"""

import copy
import json
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

from megatron_kd.models import transformers_faults
from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherDocument, TeacherRows
from megatron_kd.teacher.engines.draws import draws_of
from megatron_kd.teacher.engines.topk import chunk_rows, select, select_by_chunks


class LoadedModel:
    """The model of a directory, loaded to give the rows of one request.

    Args:
        options: The Options of the engine that this is the second half of.

    Raises:
        EngineError: Weights are missing, the vocabulary is too small, or the logits are not a
            function of single rows of the base model's output.
    """

    def __init__(self, path: Path, request: RowRequest, options):
        self.request = request
        self.options = options
        self.model = load_model(path, options)
        self.device = self.model.get_input_embeddings().weight.device
        self._base = self.model.base_model
        output_rows = self.model.get_output_embeddings().weight.shape[0]
        if output_rows < request.vocab_size:
            raise EngineError(
                f"{path} has {output_rows} output rows, fewer than the vocabulary size "
                f"{request.vocab_size}: this is not the teacher the data was tokenised for"
            )
        self._chunk_rows = chunk_rows(options.head_chunk_bytes, output_rows)
        self._check_head()

    @torch.inference_mode()
    def run(self, documents: list[TeacherDocument]) -> list[TeacherRows]:
        """Rows of each document, from one forward pass over all of them.

        Raises:
            EngineError: They do not fit into memory together, or the logits are no numbers.
        """
        try:
            return self._run(documents)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the teacher ran out of memory on a batch of {len(documents)} documents; lower "
                f"--batch-tokens (now {self.options.batch_tokens})"
            ) from error

    def _run(self, documents: list[TeacherDocument]) -> list[TeacherRows]:
        width = max(document.run_tokens for document in documents)
        # Right padding under a causal mask changes nothing before it, so no attention mask is
        # passed.
        ids = torch.zeros(len(documents), width, dtype=torch.long)  # [b, s]
        for line, document in zip(ids, documents, strict=True):
            count = document.run_tokens
            line[:count] = torch.from_numpy(document.tokens[:count].astype(np.int64))
        output = self._base(input_ids=ids.to(self.device), use_cache=False)
        hidden_states = output[0]  # [b, s, h]
        results = []
        for line, document in zip(hidden_states, documents, strict=True):
            asked = torch.from_numpy(document.rows).to(line.device)
            results.append(
                select_by_chunks(
                    line[asked],
                    self.request,
                    draws_of(document.tokens, document.rows, self.request),
                    self._chunk_rows,
                    lambda part, uniforms, labels: select(
                        self._logits(output, part), self.request, uniforms, labels
                    ),
                    document.labels() if self.request.labels else None,
                )
            )
        return results

    def _logits(self, output, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, h] → [n, v] by the model's own code after its base model."""
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


def load_model(path: Path, options) -> transformers.PreTrainedModel:
    """The model of a directory, on its device.

    Args:
        options: As TransformersModelOptions.

    Raises:
        EngineError: The directory does not hold all of its weights.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype_key = "dtype" if version >= (4, 56) else "torch_dtype"
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    device_map = options.device_map
    if device_map and device_map.startswith("{"):
        device_map = json.loads(device_map)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            **{dtype_key: dtype},
            device_map=device_map,
            attn_implementation=options.attention,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            local_files_only=True,
        )
    except ImportError as error:  # a package that --attention or the model's own code asks for
        raise EngineError(f"{path} cannot be loaded as asked: {error}") from error
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
    transformers_faults.mend(model)
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
