"""What each kind of warm interpreter has imported (`server.py`)."""

import importlib

TORCH = (
    "torch.distributed.run",
    "torch.multiprocessing",
    "pytest",
    "transformers",
    "megatron_kd.losses",
    "megatron_kd.losses.reference",
    "megatron_kd.cli",
)
HOST = ("megatron_kd.host.train", "megatron_kd.host.export")


def _torch() -> None:
    for name in TORCH:
        importlib.import_module(name)


def _host() -> None:
    from megatron_kd.host.cpu import backend

    backend.activate()
    _torch()
    for name in HOST:
        importlib.import_module(name)


KINDS = {"torch": _torch, "host": _host}
