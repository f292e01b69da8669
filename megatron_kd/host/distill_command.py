"""Train a student by a recipe: evaluate, checkpoint, resume, and export it at the end.

Start it on every rank with torchrun, or alone for one rank. The same command again goes on from the
last checkpoint. A recipe is a YAML file, or one that comes with the package, such as
recipes/quickstart.yaml; key=value changes any of its keys. A recipe with `stages` runs one after
another, each on every rank in a fresh process. Example:
  torchrun --nproc-per-node 2 -m megatron_kd distill recipes/quickstart.yaml loss.impl=dense
"""

import argparse
import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import yaml

from megatron_kd.full_disk import full_disk
from megatron_kd.stages import Stage, stages_of
from megatron_kd.typed_mapping import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="the YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as bridge.train.train_iters=100"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the whole configuration, the host's part too, and stop",
    )
    parser.add_argument(
        "--no-parity",
        action="store_true",
        help="train also where the host computes another model than transformers; the same as "
        "student.check_parity=false",
    )
    parser.add_argument("--config", metavar="RECIPE", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check the recipe, then train on this rank.

    Returns:
        0 the student is trained; 1 the disk is full; 2 the recipe, or what it names, is wrong; 130
        interrupted before training began. A rank that fails in training raises.
    """
    try:
        recipe, overrides = _recipe_and_overrides(args)
        unchecked = ["student.check_parity=false"] if args.no_parity else []
        overrides = [*overrides, *unchecked]
        stages = stages_of(recipe, overrides)
    except (ValueError, OSError) as error:
        return _refuse(error)
    # A rank that fails leaves its traceback to torchrun, whose summary then names the first
    # failure. Imported here because torch takes longer than reading a recipe, which may be wrong.
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_train)(stages, [recipe, *overrides], args.dry_run)


def _recipe_and_overrides(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The recipe's path and the overrides, also in the older spelling `--config RECIPE`."""
    if args.config is None:
        if args.recipe is None:
            raise ConfigError("which recipe? Give a YAML file, such as recipes/quickstart.yaml")
        return args.recipe, args.overrides
    first = [] if args.recipe is None else [args.recipe]
    if os.environ.get("RANK", "0") == "0":
        print("distill: --config RECIPE works, and can be just RECIPE", file=sys.stderr)
    return args.config, [*first, *args.overrides]


def _refuse(error: Exception) -> int:
    print(f"megatron-kd distill: {error}", file=sys.stderr)
    return 2


def _train(stages: list[Stage], arguments: list[str], dry_run: bool) -> int:
    # What the host says while it is imported (0.6 on stdout) must not mix with the configuration.
    aside = redirect_stdout(sys.stderr) if dry_run else nullcontext()
    try:
        with aside:
            from megatron_kd.host.cpu import backend as cpu_backend

            cpu_backend.activate()  # before anything named megatron is imported
            from megatron_kd.host import stage_runs, train

            stage = None
            if dry_run:
                resolved = _dry_run(stages)
            elif len(stages) == 1:
                config, container = stages[0].config, train.prepare(stages[0].config)
            else:
                stage, container = stage_runs.prepare(stages)
                config = stage.config
    except (ValueError, OSError) as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("megatron-kd distill: stopped before training began", file=sys.stderr)
        return 130
    if dry_run:
        print(yaml.safe_dump_all(resolved, sort_keys=False), end="")
        return 0
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"megatron-kd distill: output_dir cannot be made: {error}", file=sys.stderr)
        return 2
    try:
        train.run(config, container, stage)
        if stage is not None:
            stage_runs.go_on(stages, stage, arguments)
    except ConfigError as error:  # what shows only in the built model, such as a parameter's name
        return _refuse(error)
    except BaseException as error:
        message = full_disk(error)
        if message is None:
            raise
        print(
            f"megatron-kd distill: {message}. Make room for {config.output_dir} and start the same "
            "command again: it goes on from the last complete checkpoint; "
            "bridge.checkpoint.most_recent_k=1 keeps one",
            file=sys.stderr,
        )
        return 1
    return 0


def _dry_run(stages: list[Stage]) -> list[dict]:
    from megatron_kd.host import stage_runs, train

    if len(stages) == 1:
        return [train.dry_run(stages[0].config)]
    return stage_runs.dry_run(stages)
