"""What a resident teacher asks of the student beside it."""

import copy

from megatron_kd.config import FINAL_NORM, DistillConfig, HiddenStatesConfig
from megatron_kd.host import versions
from megatron_kd.host.container import model_provider
from megatron_kd.host.online.hidden_layers import layer_name
from megatron_kd.host.online.modelopt import SHARED_FIELDS
from megatron_kd.host.output_layer import later_multiplier
from megatron_kd.typed_mapping import ConfigError


def check_online(config: DistillConfig, container) -> None:
    """Refuse what cannot stand beside this student, before any process group starts.

    Raises:
        ConfigError: The vocabularies differ, or the host cannot lay both models out like this.
    """
    student, teacher = container.model, model_provider(config.teacher.hf_path, load_weights=True)
    if teacher.vocab_size != student.vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.vocab_size} ids, the student {student.vocab_size}; online "
            "distillation needs one vocabulary. Distil offline: `megatron-kd capture --vocab-size` "
            "masks the teacher's padding rows"
        )
    for model, whose in ((student, "student"), (teacher, "teacher")):
        _check_logits(model, whose)
    evaluates_pipelines = versions.current().evaluates_online_pipelines
    if (
        student.pipeline_model_parallel_size > 1
        and container.train.eval_iters
        and not evaluates_pipelines
    ):
        raise ConfigError(
            "this host evaluates a distillation model with messages sized for the student alone, "
            "so pipeline parallelism and evaluation exclude each other online; set "
            "bridge.train.eval_iters=0"
        )
    if student.pipeline_model_parallel_size > 1 and config.export.hf_path:
        raise ConfigError(
            "the host cannot export out of a distillation model on several pipeline stages; remove "
            "export.hf_path, and export a checkpoint afterwards with `megatron-kd export`"
        )
    if student.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            "ModelOpt's distillation has no virtual pipeline; unset it, or distil offline"
        )
    _check_layers(config.hidden_states, student, teacher)
    _check_stages(config.hidden_states, student, teacher)
    tp = student.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups"):
        if getattr(teacher, name) % tp:
            raise ConfigError(
                f"the teacher's {name} of {getattr(teacher, name)} cannot be split over "
                f"bridge.model.tensor_model_parallel_size={tp}, which both models share online; "
                "use another size, or distil offline"
            )


def _check_logits(model, whose: str) -> None:
    """Refuse a model that multiplies its logits where ModelOpt has compared them already.

    Raises:
        ConfigError: Names the field.
    """
    found = later_multiplier(model)
    if found is not None:
        name, factor = found
        raise ConfigError(
            f"the {whose} multiplies its logits by {name}={factor} behind its output layer; "
            "online, both models are compared by what their output layers return: distil offline"
        )


def _check_layers(config: HiddenStatesConfig, student, teacher) -> None:
    """Refuse layers that do not exist, and recomputation that would detach them.

    Raises:
        ConfigError: Names the pair.
    """
    for pair in config.pairs:
        for layer, provider, whose in zip(
            pair, (student, teacher), ("student", "teacher"), strict=True
        ):
            count = provider.num_layers
            if layer != FINAL_NORM and not -count <= layer < count:
                raise ConfigError(
                    f"hidden_states.pairs: {list(pair)} names layer {layer} of the {whose}, which "
                    f"has {count} layers (0 … {count - 1}, or -1 for the last)"
                )
        if pair[0] != FINAL_NORM and student.recompute_granularity == "full":
            raise ConfigError(
                "bridge.model.recompute_granularity=full runs the student's layers without a "
                f"graph, so a loss on layer {pair[0]} would have no gradient; use {FINAL_NORM}, or "
                "recompute_granularity=selective"
            )


def _check_stages(config: HiddenStatesConfig, student, teacher) -> None:
    """Refuse layers of an earlier pipeline stage. A layout that is spelled out stage by stage is
    known only when the model is built; there `layer_name` refuses the same.

    Raises:
        ConfigError: Names the layer.
    """
    stages = student.pipeline_model_parallel_size
    if stages == 1 or student.pipeline_model_parallel_layout:
        return
    teacher = copy.copy(teacher)
    for name in SHARED_FIELDS:
        setattr(teacher, name, getattr(student, name))
    for pair in config.pairs:
        for layer, provider in zip(pair, (student, teacher), strict=True):
            layer_name(layer, provider, stage=stages - 1)
