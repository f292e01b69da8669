"""Stand-ins for CUDA-only packages that the host imports without a guard.

Megatron-Bridge and Megatron-Core import Transformer Engine, Triton and NVRx in a few modules at
module level. On a machine without CUDA those packages are absent. `install` hands a stand-in to
exactly the modules that the description of this host version lists (`host.versions`) and to nobody
else: nothing enters `sys.modules`, so every guarded `try: import transformer_engine` and every
`importlib.util.find_spec` keeps saying "not installed", and Megatron-Core settles on its PyTorch
code paths.

A package that is really installed is always used instead of its stand-in.
"""

import builtins
import importlib.util
import sys
import types

from megatron_kd.host import versions


def install() -> None:
    """Start handing out stand-ins; calling it again does nothing."""
    if getattr(builtins.__import__, "is_stand_in_hook", False):
        return
    host = versions.current()
    host.prepare_python()
    original_import = builtins.__import__
    stand_ins = {}

    def import_with_stand_ins(name, globals=None, locals=None, fromlist=(), level=0):
        package, _, rest = name.partition(".")
        importers = host.cpu_stand_ins.get(package, ()) if level == 0 else ()
        if package not in sys.modules and (globals or {}).get("__name__") in importers:
            if package not in stand_ins:
                installed = importlib.util.find_spec(package) is not None
                stand_ins[package] = None if installed else _BUILDERS[package]()
            module = stand_ins[package]
            if module is not None:
                if fromlist and rest:
                    for part in rest.split("."):
                        module = getattr(module, part)
                return module
        return original_import(name, globals, locals, fromlist, level)

    import_with_stand_ins.is_stand_in_hook = True
    builtins.__import__ = import_with_stand_ins


def _module(name: str, **attributes) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(attributes)
    return module


def _unusable(qualified_name: str, *bases: type) -> type:
    """A class that may be named, subclassed and tested with isinstance, but not built."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            f"{qualified_name} is not installed; this machine runs the CPU backend, so choose a "
            "layer specification and options that do not need it"
        )

    module, _, name = qualified_name.rpartition(".")
    return type(name, bases, {"__init__": __init__, "__module__": module})


def _transformer_engine() -> types.ModuleType:
    import torch

    prefix = "transformer_engine.pytorch"
    layers = {
        name: _unusable(f"{prefix}.{name}", torch.nn.Module)
        for name in ("Linear", "LayerNormLinear", "TransformerLayer")
    }
    ops = _module(f"{prefix}.ops", Sequential=_unusable(f"{prefix}.ops.Sequential"))
    pytorch = _module(prefix, ops=ops, **layers)
    return _module("transformer_engine", __version__="0.0.0", pytorch=pytorch)


def _triton() -> types.ModuleType:
    class Kernel:
        def __init__(self, function):
            self.function, self.__name__ = function, getattr(function, "__name__", "kernel")

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **kwargs):
            raise RuntimeError(f"Triton kernel {self.__name__} cannot run: Triton is not installed")

    class Language(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    def jit(function=None, **options):
        return Kernel if function is None else Kernel(function)

    def decorator(*args, **options):
        return lambda function: function

    return _module(
        "triton",
        __version__="0.0.0",
        jit=jit,
        autotune=decorator,
        heuristics=decorator,
        Config=type("Config", (), {"__init__": lambda self, *args, **kwargs: None}),
        cdiv=lambda numerator, denominator: -(-numerator // denominator),
        next_power_of_2=lambda number: 1 << max(0, (number - 1).bit_length()),
        language=Language("triton.language"),
    )


def _nvidia_resiliency_ext() -> types.ModuleType:
    name = "nvidia_resiliency_ext.inprocess"
    inprocess = _module(name, CallWrapper=_unusable(f"{name}.CallWrapper"))
    return _module("nvidia_resiliency_ext", __version__="0.0.0", inprocess=inprocess)


_BUILDERS = {
    "transformer_engine": _transformer_engine,
    "triton": _triton,
    "nvidia_resiliency_ext": _nvidia_resiliency_ext,
}
