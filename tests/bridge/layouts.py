"""Runs that must be equal: students, data, loss implementations and parallel layouts, and which of
their combinations are tried.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.host import versions

_TP2 = ["bridge.model.tensor_model_parallel_size=2"]
_TP4 = ["bridge.model.tensor_model_parallel_size=4"]
_SP = ["bridge.model.sequence_parallel=true"]
_PP2 = ["bridge.model.pipeline_model_parallel_size=2"]
_CP2 = ["bridge.model.context_parallel_size=2"]
_EP2 = ["bridge.model.expert_model_parallel_size=2"]

LAYOUTS = {  # name → (ranks, overrides)
    "1": (1, []),
    "MBS 4": (1, ["bridge.train.micro_batch_size=4"]),
    "DP 2": (2, []),
    "TP 2": (2, _TP2),
    "TP 2 + SP": (2, _TP2 + _SP),
    "CP 2": (2, _CP2),
    "PP 2": (2, _PP2),
    "EP 2": (2, _EP2),
    "TP 4": (4, _TP4),
    "TP 2 × DP 2": (4, _TP2),
    "TP 2 × PP 2": (4, _TP2 + _PP2),
    "TP 2 × CP 2": (4, _TP2 + _CP2),
    "TP 2 + SP × CP 2": (4, _TP2 + _SP + _CP2),
    "CP 2 × PP 2": (4, _CP2 + _PP2),
    "TP 2 + SP × EP 2": (4, _TP2 + _SP + _EP2),
}

OFFLINE = {
    "fused": [],
    "recompute": ["loss.gradient=recompute", "loss.chunk_size=7"],
    "sparse": ["loss.impl=sparse_chunked"],
    "dense": ["loss.impl=dense"],
}
ONLINE = {"online fused": ["loss.impl=fused_online"], "online dense": ["loss.impl=dense"]}

EVALUATES_ONLINE_PIPELINES = versions.current().evaluates_online_pipelines


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        impl: A key of OFFLINE or ONLINE.
        layout: A key of LAYOUTS.
        student: "student", "tied" or "moe".
        data: "plain", "masked", "block", "naive" or "documents" (those of block, one per sample).
    """

    impl: str = "fused"
    layout: str = "1"
    student: str = "student"
    data: str = "plain"

    @property
    def name(self) -> str:
        words = f"{self.student} {self.data} {self.impl} {self.layout}"
        return words.replace("×", "x").replace(" + ", "+").replace(" ", "-")

    def __str__(self):
        return self.name

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    def overrides(self, directory: Path) -> list[str]:
        """Overrides of the small world's recipe."""
        folder = directory if self.data == "plain" else directory / self.data
        values = [f"student.hf_path={directory}/{self.student}"]
        if self.impl in OFFLINE:
            values += [f"cache.path={folder}/cache", *OFFLINE[self.impl]]
        else:
            values += ["mode=online", f"teacher.hf_path={directory}/teacher"]
            values += [f"data.path={folder}/data", *ONLINE[self.impl]]
            if "PP" in self.layout and not EVALUATES_ONLINE_PIPELINES:
                values.append("bridge.train.eval_iters=0")
        if self.data != "plain":
            values.append("data.shuffle=false")
        if self.data == "documents":
            values.append("bridge.train.global_batch_size=8")
        return values + LAYOUTS[self.layout][1]

    @property
    def exports(self) -> bool:
        """Whether the host can write the trained student (not a pipelined distillation model)."""
        return self.impl in OFFLINE or "PP" not in self.layout

    @property
    def reference(self) -> "Run":
        """The run it must equal."""
        impl = "fused" if self.impl in OFFLINE else "online dense"
        data = "documents" if self.data == "block" else self.data
        return Run(impl, "1", self.student, data)


def core() -> list[Run]:
    """What the core of the tests compares: every layout that differs in kind, every implementation,
    student and data at least once.
    """
    runs = [Run("sparse"), Run("dense"), Run("online fused")]
    runs += [Run("fused", "TP 2"), Run("recompute", "TP 2 + SP"), Run("sparse", "TP 2 + SP")]
    runs += [Run("dense", "TP 2 + SP")]
    runs += [Run("online fused", layout) for layout in ("DP 2", "TP 2 + SP", "CP 2", "PP 2")]
    runs += [Run("fused", layout) for layout in ("TP 4", "TP 2 × PP 2")]
    runs += [Run("fused", "TP 2", "tied"), Run("dense", "PP 2", "tied")]
    runs += [Run("fused", "EP 2", "moe"), Run("online fused", "EP 2", "moe")]
    runs += [Run("fused", layout, data="masked") for layout in ("MBS 4", "CP 2", "TP 2 × CP 2")]
    runs += [Run("sparse", "DP 2", data="masked")]
    runs += [Run("fused", "PP 2", data="block"), Run("dense", "CP 2", data="block")]
    return _with_references(runs)


def selection() -> list[Run]:
    """What the extended tests compare beside the core: implementations, layouts, students and data
    in pairs.
    """
    four = ("TP 4", "TP 2 × PP 2", "TP 2 × CP 2", "TP 2 + SP × CP 2")
    two = ("DP 2", "TP 2", "TP 2 + SP", "CP 2", "PP 2")
    runs = [Run("fused", layout) for layout in ("MBS 4", *two, *four)]
    runs += [Run(impl) for impl in (*OFFLINE, *ONLINE)]
    runs += [Run("recompute", "TP 2 + SP"), Run("sparse", "TP 2 + SP")]
    runs += [Run("dense", layout) for layout in ("TP 2 + SP", "CP 2", "TP 2 × DP 2")]
    runs += [Run("online fused", layout) for layout in two]
    runs += [Run("online dense", "TP 2 + SP")]
    runs += [Run("fused", layout, "tied") for layout in ("TP 2", "PP 2")]
    runs += [Run("dense", "PP 2", "tied")]
    runs += [Run("fused", layout, "moe") for layout in ("EP 2", "TP 2 + SP × EP 2")]
    runs += [Run("dense", "EP 2", "moe")]
    runs += [Run("fused", layout, data="masked") for layout in ("MBS 4", "DP 2", "CP 2")]
    runs += [Run("dense", "CP 2", data="masked"), Run("sparse", "DP 2", data="masked")]
    runs += [Run("online fused", "CP 2", data="masked")]
    ways = ("1", "CP 2", "PP 2", "TP 2 + SP", "CP 2 × PP 2")
    runs += [Run("fused", layout, data="block") for layout in ways]
    runs += [Run("dense", "CP 2", data="block")]
    runs += [Run("online fused", layout, data="block") for layout in ("1", "CP 2")]
    runs += [Run("fused", "CP 2", data="naive")]
    before = core()
    return [run for run in _with_references(runs) if run not in before]


def matrix() -> list[Run]:
    """Every combination of layouts and implementations on the plain data, and a good part of them
    with every other student and data.
    """
    runs = [Run(i, way) for i in (*OFFLINE, *ONLINE) for way in LAYOUTS if "EP" not in way]
    ways = ("1", "DP 2", "TP 2 + SP", "CP 2", "PP 2", "TP 2 + SP × CP 2")
    variants = [("tied", "plain"), ("moe", "plain")]
    variants += [("student", data) for data in ("masked", "block", "naive")]
    for student, data in variants:
        experts = ("EP 2", "TP 2 + SP × EP 2") if student == "moe" else ()
        for impl in ("fused", "sparse", "dense", "online fused"):
            runs += [Run(impl, way, student, data) for way in (*ways, *experts)]
    return _with_references(runs)


def by_ranks(runs: list[Run]) -> dict[int, list[Run]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run.ranks].append(run)
    return dict(sorted(groups.items()))


def _with_references(runs: list[Run]) -> list[Run]:
    return list(dict.fromkeys([*(run.reference for run in runs), *runs]))
