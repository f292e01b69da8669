"""The host's model of a directory on this run's ranks, and how far it departs from transformers'.

s: sequence positions on this rank (s / tp for hidden states under sequence parallelism), b:
sequences, h: hidden size, v: vocabulary, vp = v / tp.
"""

import copy
import dataclasses
import io
import math
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron_kd.host import versions
from megatron_kd.host.container import model_provider
from megatron_kd.host.parity.reference import Reference
from megatron_kd.typed_mapping import ConfigError

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "cp_comm_type",
    "moe_token_dispatcher_type",
)
"""Which ranks hold what of the model."""

# Sizes, which a shrunken copy has of its own; where its layers stand; what concerns training,
# communication or precision and does not change what the model computes in fp32.
NOT_CARRIED = {
    *LAYOUT,
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "seq_length",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "make_vocab_size_divisible_by",
    "should_pad_vocab",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "variable_seq_lengths",
    "deallocate_pipeline_outputs",
    "gradient_accumulation_fusion",
    "defer_embedding_wgrad_compute",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_input_jitter_eps",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "fp16",
    "bf16",
    "fp8",
    "fp4",
    "params_dtype",
    "pipeline_dtype",
    "autocast_dtype",
    "perform_initialization",
    "calculate_per_token_loss",
    "timers",
    "generation_config",
    "hf_model_id",
}
NOT_CARRIED_PREFIXES = (
    "_",
    "batch_p2p_",
    "cpu_offloading",
    "cuda_graph",
    "enable_cuda_graph",
    "fp4_",
    "fp8_",
    "overlap_",
    "recompute_",
    "tp_comm_",
)
NOT_COMPARED = -1.0
FUNCTIONS = (
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)


def carried_settings(model, hf_path: str, on_cpu: bool) -> dict:
    """Settings of a run's model provider that differ from what its directory alone makes, and that
    have a say in what the model computes: an override of the recipe, such as another window.
    """
    fresh = model_provider(hf_path, load_weights=False, on_cpu=on_cpu)
    changed = {}
    for field in dataclasses.fields(fresh):
        name = field.name
        if name in NOT_CARRIED or name in FUNCTIONS or name.startswith(NOT_CARRIED_PREFIXES):
            continue
        value, own = getattr(model, name, None), getattr(fresh, name, None)
        if not callable(value) and repr(value) != repr(own):
            changed[name] = value
    return changed


def layout_of(model) -> dict:
    """The parallel layout of a run's model provider."""
    return {name: getattr(model, name, None) for name in LAYOUT if hasattr(model, name)}


def build(folder: Path, layout: dict, settings: dict, length: int, groups=None) -> list:
    """The host's model of a directory with its weights, in fp32, for evaluation.

    Args:
        folder: The Hugging Face directory.
        layout: Field → value, as `layout_of`.
        settings: Field → value, as `carried_settings`.
        length: Positions of the sequences.
        groups: The run's process groups; None takes those that the host made last.

    Returns:
        The model's chunk on this rank, in a list.

    Raises:
        ConfigError: The host cannot convert the directory; the message has its own words.
    """
    try:
        with redirect_stdout(io.StringIO()):  # it counts parameters and draws bars for each model
            return _build(folder, layout, settings, length, groups)
    except ConfigError:
        raise
    except Exception as error:  # whatever the host fails with is why the student cannot be trained
        raise ConfigError(f"the host cannot convert it: {type(error).__name__}: {error}") from error


def _build(folder: Path, layout: dict, settings: dict, length: int, groups) -> list:
    provider = model_provider(str(folder), load_weights=True)
    for name, value in (settings | layout).items():
        if name.startswith("expert_") and not provider.num_moe_experts:
            continue  # the host refuses them without experts
        setattr(provider, name, copy.copy(value))
    provider.seq_length = length
    provider.mtp_num_layers = None
    provider.virtual_pipeline_model_parallel_size = None
    provider.fp16 = provider.bf16 = False
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.autocast_dtype = torch.float32
    provider.parallel_output = True
    provider.attention_dropout = provider.hidden_dropout = 0.0
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, pg_collection=groups)
    for chunk in model:
        chunk.eval()
    return model


def departures(model: list, reference: Reference, *, layer_by_layer: bool) -> list[float]:
    """How far the host's model departs from transformers', the same on every rank.

    Collective: every rank calls it.

    Args:
        model: What `build` returned.
        reference: transformers' results.
        layer_by_layer: Give each layer transformers' own input, and judge by all positions but the
            worst tenth. Where matrices are multiplied in TF32 a router chooses other experts for a
            few tokens, which is no fault, and would reach later layers.

    Returns:
        Largest difference of what the first layer reads, of what each layer returns, and of the
        logits, each over the root mean square of transformers' own; infinity where shapes differ or
        something is not a number.

    Raises:
        ConfigError: The host cannot run the model.
    """
    chunk = unwrap_model(model[0])
    config = chunk.config
    batch, lines = _batch_on_this_rank(reference, config)
    places = batch["places"]
    own_places = _places_of_hidden_states(places, config)
    seen, hooks = {}, []
    for layer in chunk.decoder.layers:
        number = layer.layer_number
        if number == 1:
            hooks.append(layer.register_forward_pre_hook(_keep(seen, 0), with_kwargs=True))
        if layer_by_layer:
            whole = reference.hidden_states[number - 1]
            hook = _replace_input(_at(whole.to(own_places.device), own_places).transpose(0, 1))
            hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.append(layer.register_forward_hook(_keep(seen, number), with_kwargs=True))
    try:
        # With gradients, though none is asked for: some of the host's layers fail only then.
        with torch.enable_grad():
            logits = _logits(model[0], batch, config, lines)
    except Exception as error:  # whatever the host fails with is why the student cannot be trained
        raise ConfigError(f"the host cannot run it: {type(error).__name__}: {error}") from error
    for hook in hooks:
        hook.remove()
    quantile = 0.9 if layer_by_layer else 1.0
    found = [NOT_COMPARED] * (len(reference.hidden_states) + 1)
    for number, hidden in seen.items():
        whole = reference.hidden_states[number]
        found[number] = _departure(hidden.transpose(0, 1), whole, own_places, quantile)
    if logits is not None:
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        whole = reference.logits[..., first : first + logits.shape[-1]]
        found[-1] = _departure(logits.detach(), whole, places, quantile)
    found = _largest_of_all_ranks(found)
    if NOT_COMPARED in found:
        raise ConfigError(
            f"of {len(found)} places in the model {found.count(NOT_COMPARED)} could not be compared"
        )
    return found


def _batch_on_this_rank(reference: Reference, config) -> tuple[dict, int]:
    """The sequences, and where in the whole they stand, as this context-parallel rank sees them."""
    lines, length = reference.input_ids.shape
    places = torch.arange(length).expand(lines, length).contiguous()
    batch = {
        "tokens": reference.input_ids.clone(),
        "position_ids": places,
        "places": places.clone(),
    }
    batch = {name: value.to(_device()) for name, value in batch.items()}
    if config.context_parallel_size > 1:
        group = parallel_state.get_context_parallel_group()
        batch = versions.current().batch_on_this_cp_rank(batch, group)
    return batch, lines


def _places_of_hidden_states(places: torch.Tensor, config) -> torch.Tensor:
    if not config.sequence_parallel:
        return places
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return places.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]


def _logits(model: torch.nn.Module, batch: dict, config, lines: int) -> torch.Tensor | None:
    """[b, s, vp] on the last pipeline stage, None on the others."""

    def step(data, chunk):
        micro_batch = next(data)
        output = chunk(micro_batch["tokens"], micro_batch["position_ids"], None)
        return output, lambda output, non_loss_data: output

    # Not the host's own choice, which takes a virtual pipeline's where the run has one.
    schedule = schedules.forward_backward_no_pipelining
    if config.pipeline_model_parallel_size > 1:
        schedule = schedules.forward_backward_pipelining_without_interleaving
    length = batch["tokens"].shape[1] * config.context_parallel_size
    results = schedule(
        forward_step_func=step,
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=lines,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return results[0] if results else None


def _keep(seen: dict, number: int):
    """A hook that keeps the hidden states that a layer reads (no output given) or returns."""

    def hook(module, args, kwargs, output=None):
        if output is None:
            output = args[0] if args else kwargs["hidden_states"]
        seen[number] = (output if isinstance(output, torch.Tensor) else output[0]).detach().clone()

    return hook


def _replace_input(hidden_states: torch.Tensor):
    def hook(module, args, kwargs):
        if args:
            return (hidden_states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden_states}

    return hook


def _at(whole: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """whole [b, all s, n] at the positions places [b, s] → [b, s, n]."""
    return whole.gather(1, places[..., None].expand(*places.shape, whole.shape[-1]))


def _departure(own, whole: torch.Tensor, places: torch.Tensor, quantile: float) -> float:
    """Of own [b, s, n] from the positions `places` [b, s] of whole [b, all s, n]."""
    expected = _at(whole.to(own.device), places)
    if own.shape != expected.shape:
        return math.inf
    difference = (own.float() - expected).abs().amax(-1).flatten()  # [b · s]
    size = expected.square().mean().sqrt().clamp(min=1e-12)
    worst = difference.quantile(quantile) / size
    return float(worst) if torch.isfinite(worst) else math.inf


def _largest_of_all_ranks(values: list[float]) -> list[float]:
    largest = torch.tensor(values, dtype=torch.float32, device=_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def _device():
    return torch.cuda.current_device()


def process_groups(model) -> "ProcessGroupCollection | None":
    """The process groups of a run's model provider, where the host has given it some."""
    return getattr(model, "_pg_collection", None)
