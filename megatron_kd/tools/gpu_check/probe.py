"""The first minute: does what a run stands on work at all?

The fp32-summing product of bf16 factors, Triton, Transformer Engine, collectives, and one bf16 step
of each head at a small shape, compared with the dense one.
"""

import importlib
import os
import platform

import torch

from megatron_kd.losses import kernels
from megatron_kd.tools.benchmark import environment
from megatron_kd.tools.benchmark.cases import Case
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.benchmark.inputs import Inputs
from megatron_kd.tools.benchmark.measure import WrongResult, check
from megatron_kd.tools.benchmark.sweep import run_case
from megatron_kd.tools.gpu_check.part import FAILED, Outcome, Settings, table

HEADS = (
    "sparse_chunked",
    "recompute",
    "in_forward",
    "auto",
    "fused_online_recompute",
    "fused_online",
    "labels_fused",
)


def probe(settings: Settings) -> Outcome:
    device = torch.device(settings.device)
    outcome, rows = Outcome(), []
    questions = {
        "machine": _machine,
        "fp32 sum of bf16 products in place": _addmm,
        "Triton": _triton,
        "Transformer Engine": _transformer_engine,
        "host": _host,
    }
    if settings.ranks > 1:
        questions["collectives"] = lambda device: _collectives(settings)
    questions |= {f"bf16 step, {name}": _step_of(name) for name in HEADS}
    for question, ask in questions.items():
        try:
            rows.append([question, ask(device)])
        except Exception as error:  # a probe reports whatever goes wrong, and goes on
            first = (str(error).strip().splitlines() or [""])[0][:300]
            rows.append([question, f"**{type(error).__name__}: {first}**"])
            outcome.worsen(FAILED)
    outcome.lines = table(["what", "answer"], rows)
    return outcome


def _machine(device) -> str:
    found = environment.describe(device, os.cpu_count() or 1)
    parts = [found["device"], found["versions"], f"elementwise {found['elementwise']}"]
    if device.type == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        major, minor = torch.cuda.get_device_capability()
        parts += [f"{torch.cuda.device_count()} GPUs of {gib:.0f} GiB, sm_{major}{minor}"]
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {torch.cuda.nccl.version()}"]
    return "; ".join([*parts, platform.platform()])


def _addmm(device) -> str:
    total = torch.zeros(16, 16, device=device)
    factor = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        return f"not taken here ({reason}); the losses have other ways"
    if not (total == 16).all():
        raise ArithmeticError("the product's sum is wrong")
    return "taken"


def _triton(device) -> str:
    if device.type != "cuda":
        return "not asked: its kernels are for CUDA"
    if not kernels.triton.available():
        return "not installed: the losses take PyTorch's own operations"
    with kernels.use_backend("triton"):
        check(IMPLEMENTATIONS["in_forward"], _inputs(device))
    if kernels.triton.refusal():
        return f"not used, the losses take PyTorch's own operations: {kernels.triton.refusal()}"
    return f"{importlib.import_module('triton').__version__}, its kernels compile and agree"


def _transformer_engine(device) -> str:
    try:
        module = importlib.import_module("transformer_engine.pytorch")
        version = importlib.import_module("transformer_engine").__version__
    except ImportError as error:
        if device.type == "cuda" and importlib.util.find_spec("megatron"):
            raise
        return f"not installed ({error})"
    if device.type == "cuda":
        layer = module.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
        layer(torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    return version


def _host(device) -> str:
    if importlib.util.find_spec("megatron") is None:
        return "not installed: parts that train are skipped"
    versions = importlib.import_module("megatron_kd.host.versions")
    found = ", ".join(f"{name} {version}" for name, version in versions.installed().items())
    return f"{found}; described by {versions.current().bridge}"


def _collectives(settings: Settings) -> str:
    """A bf16 step of the fused loss whose vocabulary all ranks share, beside the dense one."""
    case = Case(
        implementation="in_forward",
        seq_tokens=64,
        chunk_tokens=32,
        hidden=64,
        vocab=64 * settings.ranks,
        topk=16,
        dtype="bfloat16",
        device=settings.device,
        tp=settings.ranks,
        threads=1,
        warm_up_iterations=1,
        iterations=1,
        memory_limit_bytes=None,
    )
    found = run_case(case, timeout_s=120)
    if found["status"] != "ok":
        raise RuntimeError(f"{found['status']}: {found['note']}")
    return f"{'NCCL' if settings.device == 'cuda' else 'gloo'} over {settings.ranks} ranks"


def _inputs(device) -> Inputs:
    shape = dict(seq_tokens=96, hidden=64, vocab=1003, topk=16, chunk_tokens=40)
    return Inputs(**shape, dtype=torch.bfloat16, device=device)


def _step_of(name: str):
    def ask(device) -> str:
        try:
            check(IMPLEMENTATIONS[name], _inputs(device))
        except WrongResult as error:
            raise ArithmeticError(str(error)) from error
        return "agrees"

    return ask
