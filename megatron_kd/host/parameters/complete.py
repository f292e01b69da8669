"""Prove that loading a Hugging Face model filled every parameter.

The host skips the initialisation of a model whose weights it is going to load, so a parameter that
the directory does not hold (heads for multi-token prediction, a layer the host's converter does not
know) keeps whatever its memory held, with a warning in the log at most. Here it is marked before
loading and refused afterwards.
"""

import torch

LISTED = 4
TEACHER = "_teacher_model."


class MissingWeightsError(RuntimeError):
    """Parameters of the model are not in the directory it was loaded from."""


def check_loading(provider, hf_path: str) -> None:
    """Mark every parameter before the hook that loads the weights, and look for marks after it."""
    provider.register_pre_wrap_hook(_mark, prepend=True)
    provider.register_pre_wrap_hook(lambda model: _refuse_marks(model, hf_path))


@torch.no_grad()
def _mark(model: list) -> list:
    for _, parameter in _parameters(model):
        parameter.fill_(float("nan"))
    return model


@torch.no_grad()
def _refuse_marks(model: list, hf_path: str) -> list:
    missing = [name for name, parameter in _parameters(model) if parameter.isnan().any()]
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise MissingWeightsError(
            f"{hf_path} has no weights for {', '.join(missing[:LISTED])}{more}, which would start "
            "from uninitialised memory: change the model to what the directory holds (heads for "
            "multi-token prediction: bridge.model.mtp_num_layers=null), or set "
            "student.load_weights=false"
        )
    return model


def _parameters(model: list):
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.startswith(TEACHER):
                continue  # it is loaded, and checked, on its own
            if parameter.is_floating_point() and not parameter.is_meta and parameter.numel():
                yield name, parameter
