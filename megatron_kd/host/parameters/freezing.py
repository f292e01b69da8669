"""Train a part of the student and keep the rest as it is."""

from fnmatch import fnmatchcase

import torch

from megatron_kd.typed_mapping import ConfigError


def train_only(model: list, *, patterns: list[str]) -> list:
    """Pre-wrap hook: freeze every parameter whose name matches no pattern.

    Args:
        model: Chunks of this pipeline stage.
        patterns: Shell-style, on Megatron-Core's parameter names: `*.mlp.*`, `output_layer.*`.

    Raises:
        ConfigError: A pattern matches no parameter of any stage, or a stage keeps nothing to train.
    """
    found, names, trainable = set(), [], 0
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.startswith("_teacher_model."):
                continue
            names.append(name)
            matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
            found |= matching
            parameter.requires_grad_(bool(matching))
            trainable += bool(matching)
    everywhere = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, (sorted(found), trainable))
    unmatched = set(patterns) - {pattern for matched, _ in everywhere for pattern in matched}
    if unmatched:
        raise ConfigError(
            f"student.train_only: {', '.join(sorted(unmatched))} matches no parameter; there are, "
            f"for example, {', '.join(names[:4])}"
        )
    if not all(count for _, count in everywhere):
        raise ConfigError(
            "student.train_only leaves a pipeline stage without a parameter to train, which the "
            "host's optimizer cannot hold; name parameters of every stage, or use fewer stages"
        )
    reach_recomputed_layers(model)
    return model


def reach_recomputed_layers(model: list) -> None:
    """Let gradients into layers that are recomputed below a frozen embedding.

    Recomputation runs a layer again when a gradient for its output is asked for, and autograd asks
    only where an input has a gradient. Without this such layers would learn nothing, with no error.
    """
    for chunk in model:
        if chunk.config.recompute_granularity is not None:
            chunk.decoder.register_forward_pre_hook(_require_gradient, with_kwargs=True)


def _require_gradient(decoder, arguments, keywords) -> None:
    hidden = arguments[0] if arguments else keywords["hidden_states"]
    if isinstance(hidden, torch.Tensor) and not hidden.requires_grad:
        hidden.requires_grad_()
