"""Evaluate before the first step, so that a run shows where it started. The host begins with its
first interval.
"""

import torch
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import DatasetBuildContext
from megatron.bridge.training.eval import evaluate
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config

from megatron_kd.host import versions
from megatron_kd.host.callbacks.metrics import RunMetrics, writes_metrics


class FirstEvaluation(Callback):
    """One evaluation on the validation samples when a run starts from iteration 0.

    Args:
        forward_step: The run's forward step.
        metrics: Where the result is recorded.
    """

    def __init__(self, forward_step, metrics: RunMetrics):
        self.forward_step = forward_step
        self.metrics = metrics

    def on_train_start(self, context: CallbackContext) -> None:
        state = context.state
        provider, train = state.cfg.dataset, state.cfg.train
        if state.train_state.step > 0 or not provider.evaluation_samples:
            return
        samples = provider.evaluation_samples
        _, dataset, _ = provider.build_datasets(DatasetBuildContext(1, samples, 0))
        groups = get_pg_collection(context.model)
        loader = build_pretraining_data_loader(
            dataset,
            0,
            provider.dataloader_type,
            train.micro_batch_size,
            0,
            provider.data_sharding,
            pin_memory=False,
            data_parallel_rank=groups.dp.rank(),
            data_parallel_size=groups.dp.size(),
            global_batch_size=train.global_batch_size,
        )
        # A loader draws its base seed from the default generator; training must not notice.
        with torch.random.fork_rng(devices=[]):
            # A virtual pipeline reads every batch once for each chunk of the model.
            readers = 1 if versions.current().shares_data_iterators else len(context.model)
            iterators = [RerunDataIterator(iter(loader)) for _ in range(readers)]
        consumed = state.train_state.consumed_valid_samples
        losses, _, _ = evaluate(
            state,
            self.forward_step,
            iterators if len(iterators) > 1 else iterators[0],
            context.model,
            None,
            get_model_config(context.model[0]),
        )
        state.train_state.consumed_valid_samples = consumed
        if losses and writes_metrics(context.model):
            self.metrics.record_validation(0, losses)
