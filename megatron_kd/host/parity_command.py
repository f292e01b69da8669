"""Show that the host computes a recipe's models as transformers does, with their own weights.

First on a small copy with random weights, as every run does before it trains, then on the weights
themselves in fp32, on the ranks it is started on and in the recipe's layout. What agrees is
recorded. Example:
  torchrun --nproc-per-node 2 -m megatron_kd parity recipes/quickstart.yaml
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")


def run(args: argparse.Namespace) -> int:
    """Compare, and print a line for each comparison on the first rank.

    Returns:
        0: the host computes what transformers does.

    Raises:
        ConfigError: It does not, or the recipe is wrong.
    """
    from megatron_kd.config import from_recipe

    config = from_recipe(args.recipe, args.overrides)

    from megatron_kd.host.cpu import backend as cpu_backend

    cpu_backend.activate()  # before anything named megatron is imported
    from megatron_kd.host import train
    from megatron_kd.host.parity import proof

    container = train.prepare(config)
    for line in proof.compare_weights(config, container):
        print(line, flush=True)
    return 0
