"""Online distillation: the teacher resident beside the student, in ModelOpt's DistillationModel,
with our criteria.

ModelOpt builds both models, keeps the teacher out of checkpoints and widens pipeline messages to
carry both. What is ours: the losses (exact under tensor parallelism) and how they are weighed, the
teacher's weights proven loaded and frozen, and reports that the host adds up correctly.
"""

from functools import partial

import megatron.core.parallel_state as parallel_state
from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig

from megatron_kd.config import DistillConfig, HiddenStatesConfig
from megatron_kd.host import versions
from megatron_kd.host.container import model_provider
from megatron_kd.host.online import teacher_check
from megatron_kd.host.online.criteria import HiddenStateCriterion, OnlineLoss, OutputLayerCriterion
from megatron_kd.host.online.hidden_layers import layer_name
from megatron_kd.host.step import hidden_states
from megatron_kd.typed_mapping import ConfigError

OUTPUT_LAYERS = ("output_layer", "output_layer")

# Fields that both models share: the ranks they live on and the numbers they compute with.
SHARED_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "seq_length",
    "pipeline_dtype",
    "params_dtype",
    "autocast_dtype",
    "bf16",
    "fp16",
    "calculate_per_token_loss",
    "make_vocab_size_divisible_by",
)


class OnlineConfig(ModelOptDistillConfig):
    """ModelOpt's configuration with a criterion made when the model is: only the last pipeline
    stage has one.

    A criterion handed over beforehand would be emptied by the host's configuration overrides.
    """

    def __init__(self, hidden: HiddenStatesConfig, student, teacher):
        self._hidden = hidden
        self._student, self._teacher = student, teacher
        super().__init__(skip_lm_loss=True)

    @property
    def criterion(self):
        if not parallel_state.is_initialized() or not parallel_state.is_pipeline_last_stage():
            return {}
        criteria = {OUTPUT_LAYERS: OutputLayerCriterion(self._student)}
        for student_layer, teacher_layer in self._hidden.pairs:
            names = (
                layer_name(student_layer, self._student),
                layer_name(teacher_layer, self._teacher),
            )
            criteria[names] = HiddenStateCriterion(self._student)
        return criteria

    @criterion.setter
    def criterion(self, value):
        if value:
            raise ConfigError("the criterion is made with the model; it cannot be set")


def attach_when_built(config: DistillConfig, container, weights: hidden_states.LossWeights) -> None:
    """Make the container's model a student with its teacher beside it, the loss attached when the
    host builds them.
    """
    student, teacher = container.model, model_provider(config.teacher.hf_path, load_weights=True)
    for name in SHARED_FIELDS:
        of_experts = name.startswith("expert_") and not teacher.num_moe_experts
        if hasattr(student, name) and not of_experts:  # the host refuses them without experts
            setattr(teacher, name, getattr(student, name))
    teacher.register_pre_wrap_hook(
        partial(teacher_check.weights_are_loaded, hf_path=config.teacher.hf_path)
    )
    # The converted provider copies later writes from student to teacher. Finalised providers have
    # no field left to derive, so the student's sizes cannot overwrite the teacher's.
    for provider in (student, teacher):
        provider.finalize()
    expected = teacher_check.shape_of(teacher)
    attach = partial(
        _attach, config=config.loss, vocab_size=container.model.vocab_size, weights=weights
    )
    container.model = versions.current().convert_to_distillation(
        student, teacher, OnlineConfig(config.hidden_states, student, teacher), attach
    )
    teacher.register_pre_wrap_hook(
        partial(teacher_check.has_shape, provider=teacher, expected=expected)
    )


def _attach(model: list, *, config, vocab_size, weights) -> list:
    """Pre-wrap hook, after the weights: attach the loss, check that the teacher is frozen."""
    for chunk in model:
        teacher_check.is_frozen(chunk.teacher_model)
        if not getattr(chunk, "post_process", False):
            continue
        OnlineLoss(chunk, config, vocab_size, weights)
        if weights.config.pairs:
            sizes = chunk.config.hidden_size, chunk.teacher_model.config.hidden_size
            hidden_states.add_projection(chunk, *sizes)
    return model
