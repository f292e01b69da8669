"""A teacher over tensor- and pipeline-parallel ranks, forward only, with its top-K merged over the
vocabulary shards.

The leader (first tensor rank of the last stage, where the rows come out) sends each step to all
ranks as one object; every rank then runs the same schedule. No rank ever holds the logits of a
whole sequence, or of the whole vocabulary.

Letters: m micro-batches, b documents of one, s padded tokens, r asked rows, n rows of a chunk, h
hidden size, vp this rank's part of the vocabulary.
"""

import datetime
import os

import numpy as np
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from megatron_kd.host.container import correct_conversion
from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.output_layer import OutputLayerTap
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherRows
from megatron_kd.teacher.engines.sharded_topk import select_sharded
from megatron_kd.teacher.engines.topk import Selected, chunk_rows, select_by_chunks
from megatron_kd.typed_mapping import ConfigError

# A follower waits while the leader encodes and writes a shard.
_PATIENCE = datetime.timedelta(days=2)

Work = list[list[tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]]]
"""[m][b] (tokens, rows, draws, labels)"""


class Ranks:
    """All ranks of one teacher: the leader's `load`, `run` and `dismiss` happen on each of them.

    Args:
        options: The Options of the engine that this is the second half of.
    """

    def __init__(self, options):
        self.options = options
        if not dist.is_initialized():
            if not cpu_backend.is_active():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("nccl")
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._leader = dist.get_world_size() - options.tensor_parallel
        self.leads = dist.get_rank() == self._leader
        self._stage: _Stage | None = None
        self._busy = False

    def load(self, path, request: RowRequest) -> None:
        self._send(("load", (path, request)))

    def run(self, work: Work) -> list[TeacherRows]:
        """Rows of every document of every micro-batch, in order."""
        return self._send(("run", (work,)))

    def dismiss(self) -> None:
        """Lets the followers go, unless they are in the middle of a step that failed here."""
        if not self._busy:
            self._send(("end", ()))

    def follow(self) -> None:
        """Does what the leader sends until it ends the session."""
        while True:
            step = [None]
            dist.broadcast_object_list(step, src=self._leader, group=self._control)
            if step[0][0] == "end":
                return
            self._do(step[0])

    def close(self) -> None:
        self._stage = None
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _send(self, step: tuple) -> list[TeacherRows] | None:
        self._busy = True
        dist.broadcast_object_list([step], src=self._leader, group=self._control)
        result = self._do(step)
        self._busy = False
        return result

    def _do(self, step: tuple) -> list[TeacherRows] | None:
        name, arguments = step
        if name == "load":
            self._stage = _Stage(*arguments, self.options)
        elif name == "run":
            return self._stage.run(*arguments)
        return None


class _Stage:
    """This rank's part of the teacher."""

    def __init__(self, path, request: RowRequest, options):
        self.request = request
        self.model = _build(path, options)
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._tap = OutputLayerTap.install(self.model[0]) if self._last else None
        if self._last:
            rows = self._tap.layer.output_size_per_partition
            self._first_id = rows * self._tp.rank()
            self._chunk_rows = chunk_rows(options.head_chunk_bytes, rows)
            self._transform = _logit_transform(self._tap)
        self._check_head()

    def run(self, work: Work) -> list[TeacherRows]:
        """Rows of all documents on the last stage, nothing elsewhere."""
        found = self._forward(work, self._select)
        return [rows for batch in found for rows in batch]

    @torch.inference_mode()
    def _forward(self, work: Work, finish) -> list:
        width = max(len(tokens) for batch in work for tokens, *_ in batch)
        lines = max(len(batch) for batch in work)
        device = "cpu" if cpu_backend.is_active() else torch.cuda.current_device()

        def step(data, model):
            batch = next(data)
            ids = torch.zeros(lines, width, dtype=torch.long)  # [b, s]
            for line, (tokens, *_) in zip(ids, batch, strict=False):
                line[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            positions = torch.arange(width).expand(lines, width)
            output = model(ids.to(device), positions.to(device), None)
            return output, lambda output, non_loss_data: finish(output, batch)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(work),
            model=self.model,
            num_microbatches=len(work),
            seq_length=width,
            micro_batch_size=lines,
            forward_only=True,
            collect_non_loss_data=True,
        )

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, h] → [n, vp], fp32 where the model caps them."""
        weight = self._tap.weight
        x = torch.nn.functional.linear(hidden_states.to(weight.dtype), weight, self._tap.bias)
        return x if self._transform is None else self._transform.logits(x.float())

    def _select(self, hidden_states: torch.Tensor, batch: list) -> list[TeacherRows]:
        """hidden_states: [b, s, h], what the output layer reads."""
        results = []
        for line, (_, rows, uniforms, labels) in zip(hidden_states, batch, strict=False):
            asked = line[torch.from_numpy(rows).to(line.device)]  # [r, h]
            results.append(
                select_by_chunks(
                    asked, self.request, uniforms, self._chunk_rows, self._select_chunk, labels
                )
            )
        return results

    def _select_chunk(
        self,
        hidden_states: torch.Tensor,
        uniforms: np.ndarray | None,
        labels: np.ndarray | None,
    ) -> Selected:
        logits = self._logits(hidden_states)
        return select_sharded(logits, self._first_id, self.request, uniforms, self._tp, labels)

    def _check_head(self) -> None:
        """Refuses an architecture that does more with its logits than the output layer does."""
        tokens = np.random.default_rng(0).integers(0, self.request.vocab_size, 8, dtype=np.int32)
        work = [[(tokens, np.arange(8), None, None)]]
        want = self._forward(work, lambda output, batch: output[0].float())  # [s, vp]
        if self._last:
            self._tap.hands_input_through = True
        got = self._forward(work, lambda output, batch: self._logits(output[0]).float())
        wrong = torch.zeros(1)
        if self._last:
            scale = want[0].abs().max().clamp(min=1.0)
            wrong[0] = float((got[0] - want[0]).abs().max() > 0.02 * scale)
        if not cpu_backend.is_active():
            wrong = wrong.cuda()
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        if wrong.item():
            raise EngineError(
                f"{type(unwrap_model(self.model[0])).__name__} changes its logits after the output "
                "layer; capture with another engine (transformers, vllm, sglang)"
            )


def _logit_transform(tap: OutputLayerTap) -> LogitTransform | None:
    try:
        options = tap.logit_options()
    except ValueError as error:
        raise EngineError(str(error)) from error
    return LogitTransform.of(1.0, options["logit_softcap"])


def _build(path, options) -> list[torch.nn.Module]:
    bridge = AutoBridge.from_hf_pretrained(str(path), trust_remote_code=options.trust_remote_code)
    provider = bridge.to_megatron_provider(load_weights=True)
    if cpu_backend.is_active():
        for name, value in cpu_backend.provider_settings().items():
            setattr(provider, name, value)
    try:
        correct_conversion(provider, bridge.hf_pretrained.config)
    except ConfigError as error:
        raise EngineError(f"{path}: {error}") from error
    if options.dtype != "auto":
        provider.params_dtype = getattr(torch, options.dtype)
        provider.bf16 = provider.params_dtype == torch.bfloat16
        provider.fp16 = False
    provider.pipeline_dtype = provider.autocast_dtype = provider.params_dtype
    provider.tensor_model_parallel_size = options.tensor_parallel
    provider.pipeline_model_parallel_size = options.pipeline_parallel
    provider.parallel_output = True
    if provider.vocab_size % options.tensor_parallel:
        raise EngineError(
            f"the teacher's {provider.vocab_size} output rows cannot be shared out over "
            f"{options.tensor_parallel} ranks; choose a --tensor-parallel that divides them, or "
            "pad the teacher once with transformers' "
            "resize_token_embeddings(pad_to_multiple_of=…): rows beyond the tokenizer's are masked"
        )
    try:
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
    except AssertionError as error:  # the host's word for a split that does not come out even
        raise EngineError(
            f"Megatron cannot spread this teacher over {options.tensor_parallel} × "
            f"{options.pipeline_parallel} ranks (tensor × pipeline): {error}"
        ) from error
    for chunk in model:
        chunk.eval()
    return model
