#!/usr/bin/env python
"""Train a student: torchrun [--nproc-per-node N] scripts/distill.py --config recipes/NAME.yaml
key=value …
"""

import argparse
import sys

import yaml
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_kd.config import from_recipe
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
    try:
        config = from_recipe(args.config, args.overrides)
        from megatron_kd.integration import cpu_backend

        cpu_backend.activate()  # before anything named megatron is imported
        from megatron_kd.integration import bridge

        container = bridge.prepare(config)
    except (ConfigError, ValueError, OSError) as error:
        print(f"distill: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        print(yaml.safe_dump(bridge.resolved(config, container), sort_keys=False), end="")
        return 0
    bridge.run(config, container)
    return 0


# Checkpoint saving starts processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
