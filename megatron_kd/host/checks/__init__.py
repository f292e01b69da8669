"""Every refusal that needs no process group, in one place: `distill`, its dry run and the doctor
check alike, before anything starts.

`layout`: the host's settings and the ranks. `data`: cache, prepared data, student and loss.
`features`: adapters, the best checkpoint, profiling, CUDA graphs. `gpu_software`: what the GPUs'
software cannot do. `online`: a resident teacher. `identity`: an earlier checkpoint. `by_host`: what
the host itself refuses. (`config` refuses what a recipe alone
shows to be wrong, `typed_mapping` unknown keys and wrong types.)
"""

import os

from megatron_kd.config import DistillConfig
from megatron_kd.host.checks.by_host import check_by_host
from megatron_kd.host.checks.data import check_data
from megatron_kd.host.checks.features import check_features
from megatron_kd.host.checks.gpu_software import check_gpu_software
from megatron_kd.host.checks.identity import check_identity
from megatron_kd.host.checks.layout import check_layout, check_required
from megatron_kd.host.checks.online import check_online
from megatron_kd.stages import Stage


def check(
    config: DistillConfig,
    container,
    *,
    on_cpu: bool,
    starts: bool,
    asked: dict | None = None,
    stage: Stage | None = None,
) -> None:
    """Check everything that can be checked without a process group.

    Args:
        config: The run.
        container: The host's configuration of it, datasets included.
        on_cpu: Whether it is for the CPU backend.
        starts: Whether the run starts next, on the ranks that are there.
        asked: Section → field → value, what the user set by hand; None takes the recipe's section
            `bridge`.
        stage: Which stage of a run in several it is; None in a run of one.

    Raises:
        ConfigError: Two parts do not fit; the message names both and the remedy.
    """
    ranks = world_size(config, starts=starts)
    check_required(config.bridge if asked is None else asked)
    check_features(config, container, on_cpu=on_cpu)
    check_layout(config, container, ranks)
    check_data(config, container)
    if not on_cpu:
        check_gpu_software(container)
    if config.mode == "online":
        check_online(config, container)
    check_identity(config, container, stage)
    check_by_host(container, ranks)


def world_size(config: DistillConfig, *, starts: bool) -> int | None:
    """How many ranks the run has.

    A run that starts has those that torchrun says it started, or one where the process was started
    alone. Where nothing starts (dry run, doctor) a process that was started alone stands for the
    ranks that the recipe names; None where it names none.
    """
    started = os.environ.get("WORLD_SIZE")
    if started:
        return int(started)
    return 1 if starts else config.launch.ranks
