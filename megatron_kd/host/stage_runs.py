"""Go through the stages of a run: which one is next, and a fresh process for each.

A stage is a run of the host like any other, which goes on from the last stage's checkpoint. The
host keeps much of a run in global variables, so no process runs two: when a stage has ended, every
rank replaces itself by the same command again (`os.execv`), which finds the checkpoint and takes
the next stage. The process id stays, so torchrun, SLURM and signals notice nothing.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.bridge.training.config import ConfigContainer
from torch.distributed import TCPStore

from megatron_kd.host import train
from megatron_kd.host.callbacks.stage_start import last_iteration
from megatron_kd.host.checks.identity import STAGE_IDENTITY
from megatron_kd.stages import Stage
from megatron_kd.typed_mapping import ConfigError

AGENT = "MEGATRON_KD_AGENT_STORE"
"""Environment variable: HOST:PORT of torchrun's store, from the second stage on."""


def prepare(stages: Sequence[Stage]) -> tuple[Stage, ConfigContainer]:
    """The stage that is to run now and its host configuration; all later stages are checked too.

    Raises:
        ConfigError: As for `train.prepare`, with the name of the stage.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not _agent_holds_store():
        raise ConfigError(
            "a run in stages meets again between them, for which torchrun holds the rendezvous: "
            "start it with torchrun"
        )
    now = current(stages)
    containers = []
    for stage in stages[now.number - 1 :]:
        try:
            containers.append(train.prepare(stage.config, stage=stage))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{stage.name}: {error}") from error
    return now, containers[0]


def dry_run(stages: Sequence[Stage]) -> list[dict]:
    """The resolved configuration of every stage that is still to come.

    Raises:
        ConfigError: As for `train.dry_run`, with the name of the stage.
    """
    found = []
    for stage in stages[current(stages).number - 1 :]:
        try:
            found.append(train.dry_run(stage.config, stage))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{stage.name}: {error}") from error
    return found


def current(stages: Sequence[Stage]) -> Stage:
    """The stage that the last checkpoint belongs to, or, where it ends one, the stage after it.

    Raises:
        ConfigError: The checkpoint lies within a stage that has never begun: the recipe's stages
            have changed.
    """
    done = last_iteration(stages[0])
    stage = next((stage for stage in stages if done < stage.last), stages[-1])
    begun = Path(stage.config.output_dir) / STAGE_IDENTITY.format(stage.number)
    if stage.number > 1 and done > stage.first and not begun.exists():
        raise ConfigError(
            f"{stage.config.output_dir} holds a checkpoint of iteration {done}, which would lie "
            f"within {stage.name} (from {stage.first} to {stage.last}), but that has not begun: "
            "give back the iterations of the earlier stages, or choose another output_dir"
        )
    return stage


def go_on(stages: Sequence[Stage], ended: Stage, arguments: Sequence[str]) -> None:
    """Replace this process by the next stage's; returns after the last stage.

    Args:
        stages: Of the run.
        ended: The stage that `train.run` has just finished.
        arguments: What follows `megatron-kd distill` on the command line.
    """
    if ended.number == ended.count:
        return
    done = last_iteration(ended)
    if done != ended.last:
        raise RuntimeError(
            f"{ended.name} has ended, but its last checkpoint is of iteration {done}, not "
            f"{ended.last}: look for a checkpoint that could not be written"
        )
    # Children outlive the exchange: loader workers, and the process that writes checkpoints.
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        _meet_elsewhere(ended)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "megatron_kd", "distill", *arguments])


def _agent_holds_store() -> bool:
    return AGENT in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meet_elsewhere(ended: Stage) -> None:
    """Let the next process group meet at a port of rank 0's own, which all ranks learn from
    torchrun's store: that still holds the addresses of the stage that has ended.
    """
    address = os.environ["MASTER_ADDR"]
    agent = os.environ.setdefault(AGENT, f"{address}:{os.environ['MASTER_PORT']}")
    store = TCPStore(address, int(agent.rpartition(":")[2]), is_master=False)
    key = f"megatron_kd/after stage {ended.number}"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    os.environ["MASTER_PORT"] = store.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
