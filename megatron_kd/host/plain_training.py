"""The host's own cross-entropy step on a recipe's configuration and data, beside which a whole
distillation step is measured: `torchrun … -m megatron_kd.host.plain_training RECIPE key=value …`.

It writes `metrics.jsonl` as a distillation does. Nothing of the loss is ours: the cache is read,
and its teacher's rows are left in host memory.
"""

import sys

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main(arguments: list[str]) -> None:
    """Train by a recipe with the host's forward step; call it on every rank.

    Args:
        arguments: The recipe and overrides. Samples of documents apart (packing block) are not for
            it: the host reads their bounds under other names.
    """
    cpu_backend.activate()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.host import train, versions
    from megatron_kd.host.callbacks.metrics import RunMetrics
    from megatron_kd.host.step.micro_batch import DataWait

    config = from_recipe(arguments[0], arguments[1:])
    container = train.prepare(config)
    versions.apply_patches()
    metrics = RunMetrics(config.output_dir, DataWait(), progress=False)
    pretrain(container, forward_step, callbacks=[metrics])


if __name__ == "__main__":
    main(sys.argv[1:])
