"""A real SLURM on one machine: munged, slurmctld and one slurmd per node, each with ports of its
own, everything below one directory. Needs root, and Debian's slurm-wlm and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
TERMINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"}

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MessageTimeout=100
SlurmctldTimeout=120
SlurmdTimeout=15
KillWait=10
MinJobAge=3600
ReturnToService=2
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be made here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}; apt install slurm-wlm munge"
    return None if os.geteuid() == 0 else "needs root"


class Cluster:
    """Nodes n1 and n2 on this machine; `environment` makes SLURM's commands talk to it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        host = socket.gethostname()
        text = CONFIGURATION.format(folder=self.folder, host=host, controller_port=_free_port())
        for node in ("n1", "n2"):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} "
                "CPUs=2 State=UNKNOWN\n"
            )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            *(f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")),
            f"--log-file={self.folder}/munge.log",
            f"--socket={self.folder}/munge.socket",
        )
        _wait_for(lambda: (self.folder / "munge.socket").exists(), 30, "munged's socket")
        self._daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        self._daemon(f"slurmd-{node}", "-D", "-N", node, program="slurmd")

    def kill_node(self, node: str) -> None:
        """The node loses power: its slurmd and everything that ran under it are gone at once."""
        daemon = self._processes.pop(f"slurmd-{node}")
        tasks = self._processes_of(node)
        keepers = {p for task in tasks for p in task.parents() if p.name().startswith("slurmstepd")}
        daemon.kill()
        daemon.wait()
        for process in [*keepers, *tasks]:
            _kill(process)

    def wait_until_idle(self, seconds: float = 60) -> None:
        def idle() -> bool:
            listed = self.command("sinfo", "-h", "-N", "-o", "%N %T", check=False)
            return sorted(listed.split()) == ["idle", "idle", "n1", "n2"]

        _wait_for(idle, seconds, "two idle nodes")

    def command(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        if check and done.returncode:
            raise AssertionError(f"{words}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts or ExitCode."""
        for word in self.command("scontrol", "show", "job", "-o", job).split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        raise AssertionError(f"job {job} has no field {name}")

    def wait_for_state(self, job: str, wanted: set[str], seconds: float) -> str:
        _wait_for(
            lambda: self.field(job, "JobState") in wanted | TERMINAL, seconds, f"{job} in {wanted}"
        )
        return self.field(job, "JobState")

    def stop(self) -> None:
        for node in ("n1", "n2"):
            if f"slurmd-{node}" in self._processes:
                self.kill_node(node)
        for process in reversed(list(self._processes.values())):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _processes_of(self, node: str) -> list[psutil.Process]:
        """What jobs of this cluster run on a node; another cluster's n1 is somebody else's."""
        wanted = {"SLURMD_NODENAME": node, "SLURM_CONF": self.environment["SLURM_CONF"]}
        return [p for p in psutil.process_iter() if wanted.items() <= _environment(p).items()]

    def _daemon(self, name: str, *arguments: str, program: str | None = None) -> None:
        with open(self.folder / f"{name}.log", "a") as log:
            self._processes[name] = subprocess.Popen(
                [program or name, *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} after {seconds:.0f} s")
        time.sleep(0.3)
