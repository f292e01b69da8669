"""What each kind of warm interpreter has imported (`server.py`)."""


def _torch() -> None:
    import torch.distributed.run
    import torch.multiprocessing  # noqa: F401


def _host() -> None:
    from megatron_kd.host.cpu import backend

    backend.activate()
    _torch()
    import megatron_kd.host.train  # noqa: F401


KINDS = {"torch": _torch, "host": _host}
