"""The parts of the check, by name, in the order they run."""

from megatron_kd.tools.gpu_check import checkout_tests, measured, recipe_runs
from megatron_kd.tools.gpu_check.part import Part
from megatron_kd.tools.gpu_check.probe import probe

PARTS: dict[str, Part] = {
    "probe": Part("Probe", probe),
    "losses": Part("Losses against fp64", checkout_tests.losses),
    "paper-32k": Part("The paper's shape, 32K tokens", measured.paper(32768)),
    "paper-256k": Part("The paper's shape, 256K tokens", measured.paper(262144)),
    "peers": Part("Other packages' losses, 8K tokens", measured.peers),
    "ranks": Part("Vocabulary shards against one rank", checkout_tests.ranks, least_ranks=2),
    "tensor-parallel": Part(
        "The paper's shape on two ranks", measured.tensor_parallel, least_ranks=2
    ),
    "step": Part("A whole step beside the host's own", recipe_runs.whole_step),
    **{
        f"layouts-{n + 1}": Part(
            f"Layouts and features, {n + 1} of {checkout_tests.LAYOUT_PARTS}",
            checkout_tests.layouts(n),
        )
        for n in range(checkout_tests.LAYOUT_PARTS)
    },
    **{
        f"recipe-{name}": Part(f"20 steps of {name}", recipe_runs.recipe(name))
        for name in recipe_runs.names()
    },
}
