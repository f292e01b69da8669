#!/usr/bin/env python
"""Train a student: torchrun [--nproc-per-node N] scripts/distill.py --config recipes/NAME.yaml
key=value …
"""

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import yaml
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_kd.config import from_recipe
from megatron_kd.full_disk import full_disk
from megatron_kd.typed_mapping import ConfigError


# A rank that fails leaves its traceback to torchrun, whose summary then names the first failure.
@record
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="the recipe, a YAML file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the fully resolved configuration and stop"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="OmegaConf dot syntax")
    args = parser.parse_args()
    # What the host says while it is imported (0.6 on stdout) must not mix with the configuration.
    aside = redirect_stdout(sys.stderr) if args.dry_run else nullcontext()
    try:
        with aside:
            config = from_recipe(args.config, args.overrides)
            from megatron_kd.host.cpu import backend as cpu_backend

            cpu_backend.activate()  # before anything named megatron is imported
            from megatron_kd.host import train as bridge

            container = bridge.prepare(config)
    except (ConfigError, ValueError, OSError) as error:
        print(f"distill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("distill: stopped before training began", file=sys.stderr)
        return 130
    if args.dry_run:
        print(yaml.safe_dump(bridge.resolved(config, container), sort_keys=False), end="")
        return 0
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"distill: output_dir cannot be made: {error}", file=sys.stderr)
        return 2
    try:
        bridge.run(config, container)
    except ConfigError as error:  # what shows only in the built model, such as a parameter's name
        print(f"distill: {error}", file=sys.stderr)
        return 2
    except BaseException as error:
        said = full_disk(error)
        if said is None:
            raise
        print(
            f"distill: {said}. Make room for {config.output_dir} and start the same command "
            "again: it goes on from the last complete checkpoint; "
            "bridge.checkpoint.most_recent_k=1 keeps one",
            file=sys.stderr,
        )
        return 1
    return 0


# Checkpoint saving starts processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
