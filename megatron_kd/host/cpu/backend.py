"""Run the real Megatron-Bridge loop on a CPU, with gloo in the place of NCCL.

Megatron-Core and Megatron-Bridge name CUDA in many places: devices, streams, events, random state,
memory figures and the process-group backend. This module answers each of them from the CPU. It is
for tests, for trying a recipe and for teaching: what runs here is the host's own training loop,
optimizer, checkpointing and parallelism, not a mock.

The one switch is the environment variable `MEGATRON_KD_BACKEND`: `auto` (default: CPU where there
is no GPU), `cpu` or `cuda`. With `cuda`, or with a CUDA device and `auto`, nothing in this file is
active. `auto` refuses a machine with a GPU that PyTorch cannot use: of several nodes, the one whose
driver failed would train on its CPU, and the others would wait for it.

`activate` must run before anything named `megatron` is imported: Megatron-Core decides at import
which optional packages it uses. Checked with the hosts that `host.versions` describes, PyTorch
2.13.
"""

import contextlib
import os
import resource
import sys

import torch
from torch.overrides import TorchFunctionMode

from megatron_kd.host import host_warnings
from megatron_kd.host.cpu import import_stand_ins
from megatron_kd.host.cpu import layers as cpu_layers
from megatron_kd.host.cpu.visible_gpu import visible_gpu

SWITCH = "MEGATRON_KD_BACKEND"
CHOICES = ("auto", "cpu", "cuda")

_active = False


def is_active() -> bool:
    """Whether the CPU backend has been activated in this process."""
    return _active


def activate() -> bool:
    """Activate the CPU backend where the switch asks for it, and say so in one line on rank 0.

    Returns:
        Whether the backend is active. Calling it again returns the first answer.

    Raises:
        ValueError: `MEGATRON_KD_BACKEND` holds something else than auto, cpu or cuda, or asks for
            cuda without a device; or it is auto, and there is a GPU that PyTorch cannot use.
        RuntimeError: Megatron was imported first.
    """
    global _active
    if _active:
        return True
    choice = os.environ.get(SWITCH, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{SWITCH} must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{SWITCH}=cuda, but PyTorch finds no CUDA device; unset it or use cpu")
    on_cpu = choice == "cpu" or (choice == "auto" and not torch.cuda.is_available())
    host_warnings.hide(on_cpu)
    if not on_cpu:
        return False
    seen = visible_gpu() if choice == "auto" else None
    if seen is not None:
        raise ValueError(
            f"{seen}, but PyTorch finds no CUDA device: install PyTorch's CUDA build for this "
            f"driver, look at CUDA_VISIBLE_DEVICES, or set {SWITCH}=cpu to run on the CPU"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before the CPU backend was activated; call "
            "megatron_kd.host.cpu.backend.activate() first"
        )
    if os.environ.get("RANK", "0") == "0":
        reason = "no GPU found" if choice == "auto" else f"{SWITCH}=cpu"
        print(f"megatron_kd: CPU backend with gloo ({reason})", file=sys.stderr, flush=True)
    # Core decorates its fusions with torch.compile. On a CPU each would cost minutes of C++
    # compilation. Read when torch._dynamo is first imported, which nothing has done yet.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    import_stand_ins.install()
    _replace_cuda()
    _replace_distributed()
    CudaToCpu().__enter__()
    _replace_in_core()
    _active = True
    return True


class CudaToCpu(TorchFunctionMode):
    """Redirects every PyTorch call that names a CUDA device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads and the distributed optimizer compare this string with
            # 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            kwargs = dict(kwargs)
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if any(_names_cuda(argument) for argument in args):
            args = tuple("cpu" if _names_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _names_cuda(value) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _Stream:
    """Work on a CPU is in order, so a stream has nothing to do."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def wait_stream(self, stream):
        return None

    def wait_event(self, event):
        return None

    def synchronize(self):
        return None

    def record_event(self, event=None):
        return event or _Event()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        return None

    def wait(self, stream=None):
        return None

    def synchronize(self):
        return None

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


def resident_bytes() -> int:
    """This process's resident memory in bytes, the CPU's answer to
    `torch.cuda.memory_allocated`.
    """
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _replace_cuda() -> None:
    def nothing():
        # A new function each time: Dynamo's rule table refuses one object under two names.
        return lambda *args, **kwargs: None

    def total_bytes():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_stats(*args, **kwargs):
        stats = dict.fromkeys(_MEMORY_STATS, 0)
        stats["allocated_bytes.all.current"] = resident_bytes()
        stats["allocated_bytes.all.peak"] = peak_resident_bytes()
        return stats

    def device_properties(*args):
        return type(
            "Properties", (), {"name": "cpu", "total_memory": total_bytes(), "major": 0, "minor": 0}
        )()

    replacements = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing(),
        "_lazy_init": nothing(),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "set_device": nothing(),
        "current_device": lambda: torch.device("cpu"),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "ipc_collect": nothing(),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "set_stream": nothing(),
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_capability": lambda *args: (0, 0),
        "get_device_name": lambda *args: "cpu",
        "get_device_properties": device_properties,
        "mem_get_info": lambda *args: (total_bytes() - resident_bytes(), total_bytes()),
        "memory_stats": memory_stats,
        "memory_allocated": lambda *args: resident_bytes(),
        "max_memory_allocated": lambda *args: peak_resident_bytes(),
        "memory_reserved": lambda *args: resident_bytes(),
        "max_memory_reserved": lambda *args: peak_resident_bytes(),
        "reset_peak_memory_stats": nothing(),
        "FloatTensor": torch.FloatTensor,
        "DoubleTensor": torch.DoubleTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "LongTensor": torch.LongTensor,
        "IntTensor": torch.IntTensor,
        "ByteTensor": torch.ByteTensor,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push = lambda *args: 0
    torch.cuda.nvtx.range_pop = lambda *args: 0
    torch.nn.Module.cuda = lambda self, device=None: self


# The entries that Bridge's memory report reads.
_MEMORY_STATS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "active_bytes.all.current",
    "active_bytes.all.peak",
    "inactive_split_bytes.all.current",
    "inactive_split_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def _replace_distributed() -> None:
    distributed = torch.distributed
    init_process_group, new_group = distributed.init_process_group, distributed.new_group
    barrier, scatter = distributed.barrier, distributed.scatter
    all_gather, reduce_scatter = distributed.all_gather, distributed.reduce_scatter
    all_to_all_single = distributed.all_to_all_single

    def gloo(backend):
        return "gloo" if backend is None or "nccl" in backend else backend

    def init_process_group_gloo(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return init_process_group(gloo(backend), *args, **kwargs)

    def new_group_gloo(*args, backend=None, **kwargs):
        kwargs.pop("pg_options", None)
        return new_group(*args, backend=gloo(backend), **kwargs)

    def barrier_without_devices(*args, device_ids=None, **kwargs):
        return barrier(*args, **kwargs)

    def scatter_contiguous(tensor, scatter_list=None, *args, **kwargs):
        # gloo reads a non-contiguous tensor as raw storage: row-parallel weights arrived scrambled,
        # with no error.
        if scatter_list is not None:
            scatter_list = [part.contiguous() for part in scatter_list]
        return scatter(tensor, scatter_list, *args, **kwargs)

    def all_to_all_single_lists(
        output, input, output_split_sizes=None, input_split_sizes=None, **kwargs
    ):
        # Core converts the split sizes on their way from a GPU, so from the CPU they stay tensors.
        splits = [
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all_single(output, input, *splits, **kwargs)

    # Experts with tensor parallelism share uneven numbers of tokens, which gloo's own operations
    # take for an error.
    def all_gather_uneven(tensor_list, tensor, group=None, async_op=False):
        if len({part.shape for part in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[distributed.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            distributed.broadcast(part, group=group, group_src=rank)

    def reduce_scatter_uneven(output, input_list, op=distributed.ReduceOp.SUM, group=None, **kw):
        if len({part.shape for part in input_list}) == 1:
            return reduce_scatter(output, input_list, op=op, group=group, **kw)
        total = torch.cat(input_list)
        distributed.all_reduce(total, op=op, group=group)
        sizes = [len(part) for part in input_list]
        output.copy_(total.split(sizes)[distributed.get_rank(group)])

    distributed.all_gather = all_gather_uneven
    distributed.reduce_scatter = reduce_scatter_uneven
    distributed.all_to_all_single = all_to_all_single_lists
    distributed.init_process_group = init_process_group_gloo
    distributed.new_group = new_group_gloo
    distributed.barrier = barrier_without_devices
    distributed.scatter = scatter_contiguous


def _replace_in_core() -> None:
    """Import Megatron-Core and answer the few names that bypass `torch.cuda`."""
    import megatron.core.fusions.fused_softmax as core_softmax
    import megatron.core.tensor_parallel.random as core_random
    import megatron.core.transformer.attention as core_attention
    import megatron.core.transformer.moe.moe_utils as core_moe

    def get_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    def redirected(make):
        def made(*args):
            with CudaToCpu():
                return make(*args)

        return made

    cpu_layers.install()
    # Layers recomputed in a backward pass make their masks anew, and PyTorch leaves the function
    # mode before it runs the backward pass.
    for name in ("get_default_causal_mask", "get_sliding_window_causal_mask"):
        setattr(core_softmax, name, redirected(getattr(core_softmax, name)))
    core_random._get_cuda_rng_state = get_state
    core_random._set_cuda_rng_state = set_state
    # The router asks whether it is None, but without Transformer Engine there is no such name.
    core_moe.te_general_gemm = getattr(core_moe, "te_general_gemm", None)
    # Without Transformer Engine it is None, which isinstance refuses.
    if core_attention.TELinear is None:
        core_attention.TELinear = type("TELinear", (torch.nn.Module,), {})


def provider_settings() -> dict:
    """Fields a Megatron-Bridge GPT provider needs on this backend: PyTorch layers, no fused CUDA
    kernels.

    The local layer specification runs on plain PyTorch; each fusion below has a CUDA kernel or, for
    `cross_entropy_loss_fusion`, rounds gradients to bf16.
    """
    from megatron.bridge.models.gpt_provider import local_layer_spec

    return {
        "transformer_layer_spec": local_layer_spec,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        # The host frees what it is still sending, which streams make safe on GPUs only.
        "deallocate_pipeline_outputs": False,
    }
