"""Distil with a ConfigContainer that is written out here, as a user of the host would write it, or
with a recipe: own_container.py RECIPE OUTPUT container|recipe [key=value …]

Prints, as one line of JSON, how often each manifest of the cache was opened on the way.
"""

import collections
import dataclasses
import json
import os
import sys
from pathlib import Path

from megatron_kd.config import DistillConfig, from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def users_container(student: str):
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config as host
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    model = AutoBridge.from_hf_pretrained(student).to_megatron_provider(load_weights=True)
    model.seq_length = 32
    return host.ConfigContainer(
        model=model,
        train=host.TrainingConfig(
            train_iters=6, global_batch_size=4, micro_batch_size=1, eval_interval=3, eval_iters=2
        ),
        optimizer=host.OptimizerConfig(
            optimizer="sgd", lr=1e-2, min_lr=1e-2, weight_decay=0.0, clip_grad=1.0
        ),
        scheduler=host.SchedulerConfig(lr_decay_style="constant", lr_warmup_iters=0),
        ddp=host.DistributedDataParallelConfig(),
        dataset=None,
        logger=host.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=499),
        checkpoint=host.CheckpointConfig(save=None, load=None),
        rng=host.RNGConfig(seed=1234),
    )


def main() -> None:
    recipe, output, way = sys.argv[1:4]
    opened = collections.Counter()

    def count(event, arguments) -> None:
        if event == "open" and str(arguments[0]).endswith("/manifest.json"):
            opened[Path(arguments[0]).parent.name] += 1

    sys.addaudithook(count)
    cpu_backend.activate()
    from megatron_kd.host import train

    config: DistillConfig = from_recipe(recipe, [f"output_dir={output}", *sys.argv[4:]])
    if way == "recipe":
        train.run(config, train.prepare(config))
    else:
        kd = dataclasses.replace(config, bridge={})
        train.distill(users_container(kd.student.hf_path), kd)
    print(f"\nOPENED {json.dumps(opened)}", flush=True)
    os._exit(0)  # taking thousands of modules down takes as long as the run


if __name__ == "__main__":
    main()
