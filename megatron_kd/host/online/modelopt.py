"""Online distillation: the teacher resident beside the student, in ModelOpt's DistillationModel,
with our criteria.

ModelOpt builds both models, keeps the teacher out of checkpoints and widens pipeline messages to
carry both. What is ours: the losses (exact under tensor parallelism) and how they are weighed, the
teacher's weights proven loaded and frozen, and reports that the host adds up correctly.
"""

from functools import partial

import megatron.core.parallel_state as parallel_state
import torch
from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig
from megatron.bridge.training.state import GlobalState
from megatron.core.utils import unwrap_model

from megatron_kd.config import DistillConfig, HiddenStatesConfig, LossConfig
from megatron_kd.host.callbacks import profiling
from megatron_kd.host.callbacks.sample_guard import check_finite
from megatron_kd.host.container import model_provider
from megatron_kd.host.online import teacher_check
from megatron_kd.host.online.criteria import (
    FullVocabularyLogitsKLLoss,
    HiddenStateLoss,
    WeightedBalancer,
)
from megatron_kd.host.step import hidden_states
from megatron_kd.host.step.offline import (
    DataWait,
    attention_arguments,
    load_batch,
    sum_over_tokens,
    supervised_index,
)
from megatron_kd.host.versions import features as host_version
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

    def __init__(self, loss: LossConfig, hidden: HiddenStatesConfig, student, teacher):
        self._loss, self._hidden = loss, hidden
        self._student, self._teacher = student, teacher
        self._vocab_size = student.vocab_size
        super().__init__(skip_lm_loss=True)

    @property
    def criterion(self):
        if not parallel_state.is_initialized() or not parallel_state.is_pipeline_last_stage():
            return {}
        criteria = {
            OUTPUT_LAYERS: FullVocabularyLogitsKLLoss(self._student, self._loss, self._vocab_size)
        }
        for student_layer, teacher_layer in self._hidden.pairs:
            names = (
                hidden_states.layer_name(student_layer, self._student),
                hidden_states.layer_name(teacher_layer, self._teacher),
            )
            criteria[names] = HiddenStateLoss(self._student, self._hidden.loss)
        return criteria

    @criterion.setter
    def criterion(self, value):
        if value:
            raise ConfigError("the criterion is made with the model; it cannot be set")


def check(config: DistillConfig, container) -> None:
    """Refuse what cannot stand beside this student, before any process group starts.

    Raises:
        ConfigError: The vocabularies differ, or the host cannot lay both models out like this.
    """
    student, teacher = container.model, _teacher_provider(config)
    if teacher.vocab_size != student.vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.vocab_size} ids, the student {student.vocab_size}; online "
            "distillation needs one vocabulary. Distil offline: `megatron-kd capture --vocab-size` "
            "masks the teacher's padding rows"
        )
    evaluates_pipelines = host_version.evaluates_distillation_pipelines()
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
    hidden_states.check_layers(config.hidden_states, student, teacher)
    tp = student.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups"):
        if getattr(teacher, name) % tp:
            raise ConfigError(
                f"the teacher's {name} of {getattr(teacher, name)} cannot be split over "
                f"bridge.model.tensor_model_parallel_size={tp}, which both models share online; "
                "use another size, or distil offline"
            )


def set_up(config: DistillConfig, container, weights: hidden_states.Weights) -> "OnlineStep":
    """Turn the container's model into student and teacher, and return the forward step for them."""
    student, teacher = container.model, _teacher_provider(config)
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
    kd_config = OnlineConfig(config.loss, config.hidden_states, student, teacher)
    kd_config.loss_balancer = WeightedBalancer(weights)
    attach = partial(_attach, projects=bool(config.hidden_states.pairs))
    container.model = host_version.convert_to_distillation(student, teacher, kd_config, attach)
    teacher.register_pre_wrap_hook(
        partial(teacher_check.has_shape, provider=teacher, expected=expected)
    )
    return OnlineStep(weights)


def _teacher_provider(config: DistillConfig):
    return model_provider(config.teacher.hf_path, load_weights=True)


def _attach(model: list, *, projects: bool) -> list:
    """Pre-wrap hook, after the weights: connect criteria and layers, check that the teacher is
    frozen.
    """
    for chunk in model:
        teacher_check.is_frozen(chunk.teacher_model)
        chunk.compute_language_model_loss = _no_language_model_loss
        chunk.teacher_model.compute_language_model_loss = _no_language_model_loss
        for criterion in _criteria(chunk):
            criterion.attach(chunk, chunk.teacher_model)
        for criterion in _criteria(chunk, HiddenStateLoss):
            criterion.attach(chunk)
        if projects and getattr(chunk, "post_process", False):
            sizes = chunk.config.hidden_size, chunk.teacher_model.config.hidden_size
            hidden_states.add_projection(chunk, *sizes)
    return model


def _criteria(model, kind: type = FullVocabularyLogitsKLLoss) -> list:
    """Our criteria of a distillation model; ModelOpt's `loss_modules` lists only those with
    parameters.
    """
    return [loss for loss in model._layers_to_loss.values() if isinstance(loss, kind)]


def _no_language_model_loss(labels, output):
    """The criterion computes the loss to the label in the same pass; this one would need the
    logits.
    """
    return torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)


class OnlineStep:
    """Callable for `pretrain`: both models' forward; the losses are formed in the loss function.

    Args:
        weights: Of the logits loss and the hidden-state loss.
    """

    def __init__(self, weights: hidden_states.Weights):
        self.weights = weights
        self.data_wait = DataWait()

    def __call__(
        self, state: GlobalState, data_iterator, model, return_schedule_plan: bool = False
    ):
        state.timers("batch-generator", log_level=2).start()
        batch, host_mask = load_batch(
            data_iterator,
            model,
            self.data_wait,
            documents_apart=state.cfg.dataset.documents_apart,
        )
        state.timers("batch-generator").stop()
        distilled = unwrap_model(model)
        criteria = _criteria(distilled)
        for criterion in criteria:
            mask = batch["loss_mask"]
            criterion.begin(batch["labels"], mask, supervised_index(host_mask, mask.device))
        with profiling.stage("forward"):
            output = model(
                input_ids=batch.get("tokens"),
                position_ids=batch.get("position_ids"),
                attention_mask=None,
                labels=batch.get("labels"),
                **attention_arguments(batch),
            )
        check = state.cfg.rerun_state_machine.check_for_nan_in_loss
        return output, partial(
            _online_loss,
            model=distilled,
            weights=self.weights,
            loss_mask=batch.get("loss_mask"),
            sample_index=batch.get("sample_index") if check else None,
        )


def _online_loss(output, *, model, weights, loss_mask, sample_index):
    with profiling.stage("loss"):
        losses = model.compute_kd_loss(
            student_loss=output.new_zeros(()),
            loss_reduction_fn=partial(_masked_sum, loss_mask=loss_mask),
        )
    metrics = {n: value for loss in _criteria(model) for n, value in loss.metrics.items()}
    hidden = [loss.metrics[hidden_states.HIDDEN_LOSS] for loss in _criteria(model, HiddenStateLoss)]
    if hidden:
        metrics[hidden_states.HIDDEN_LOSS] = torch.stack(hidden).mean(dim=0)
        metrics[hidden_states.TOTAL_LOSS] = (
            weights.logits * metrics.get(hidden_states.TOTAL_LOSS, metrics["kd loss"])
            + weights.hidden * metrics[hidden_states.HIDDEN_LOSS]
        )
    _, tokens, reports = sum_over_tokens(
        output, loss_mask=loss_mask, metrics=metrics, sample_index=None
    )
    if sample_index is not None:
        check_finite(losses["kd_loss"], sample_index)
    return losses["kd_loss"], tokens, reports


def _masked_sum(loss, *, loss_mask):
    values, _, _ = loss
    return torch.sum(values.float() * loss_mask.float())
