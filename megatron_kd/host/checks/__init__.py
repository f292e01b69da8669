"""Every refusal that needs no process group, in one place: `distill`, its dry run and the doctor
check alike, before anything starts.

`layout`: the host's settings and the ranks. `data`: cache, prepared data, student and loss.
`features`: adapters, the best checkpoint, profiling. `online`: a resident teacher. `identity`: an
earlier checkpoint. `by_host`: what the host itself refuses. (`config` refuses what a recipe alone
shows to be wrong, `typed_mapping` unknown keys and wrong types.)
"""

import os

from megatron_kd.config import DistillConfig
from megatron_kd.host.checks.by_host import check_by_host
from megatron_kd.host.checks.data import check_data
from megatron_kd.host.checks.features import check_features
from megatron_kd.host.checks.identity import check_identity
from megatron_kd.host.checks.layout import check_layout, check_required
from megatron_kd.host.checks.online import check_online


def check(config: DistillConfig, container, *, on_cpu: bool, asked: dict | None = None) -> None:
    """Check everything that can be checked without a process group.

    Args:
        config: The run.
        container: The host's configuration of it, datasets included.
        on_cpu: Whether it is for the CPU backend.
        asked: Section → field → value, what the user set by hand; None takes the recipe's section
            `bridge`.

    Raises:
        ConfigError: Two parts do not fit; the message names both and the remedy.
    """
    ranks = world_size(config)
    check_required(config.bridge if asked is None else asked)
    check_features(config, container, on_cpu=on_cpu)
    check_layout(config, container, ranks)
    check_data(config, container)
    if config.mode == "online":
        check_online(config, container)
    check_identity(config, container)
    check_by_host(container, ranks)


def world_size(config: DistillConfig) -> int | None:
    """How many ranks the run has: those that were started, else those its recipe names; None where
    neither says it.
    """
    started = os.environ.get("WORLD_SIZE")
    return int(started) if started else config.launch.ranks
