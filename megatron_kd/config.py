"""The configuration of a distillation run: one dataclass tree, read from a YAML recipe and checked.

A recipe may list fragments under `include`; they are merged in order, the recipe's own keys last.
Overrides are OmegaConf dot syntax (`loss.impl=dense bridge.train.train_iters=100`). The `bridge`
section is passed on to the host (`megatron_kd.host.container`), which checks it against
Megatron-Bridge's own dataclasses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_kd import typed_mapping
from megatron_kd.losses.divergence import Divergence
from megatron_kd.typed_mapping import ConfigError

Mode = Literal["offline", "online"]
OFFLINE_IMPLS = ("dense", "sparse_chunked", "fused_chunked")
ONLINE_IMPLS = ("dense", "fused_online")
FINAL_NORM = "final_norm"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights."""

    dim: int = 16
    """Rank of the adapters; a multiple of the tensor-parallel size."""

    alpha: int = 32
    """The adapters' output is multiplied by alpha / dim."""

    dropout: float = 0.0
    """On the adapters' input."""

    target_modules: list[str] = field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    """Megatron-Core's names of the layers that get adapters, or patterns such as
    `*.layers.0.*.linear_qkv`."""

    def __post_init__(self):
        for name in ("dim", "alpha"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"student.lora.{name} must be 1 or more, not {getattr(self, name)}"
                )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"student.lora.dropout must lie in [0, 1), not {self.dropout}")
        if not self.target_modules:
            raise ConfigError("student.lora.target_modules must name a layer, such as linear_qkv")


@dataclass(kw_only=True)
class StudentConfig:
    hf_path: str
    """Hugging Face directory of the student: configuration, tokenizer and, with `load_weights`, its
    weights.
    """

    load_weights: bool = True
    """Start from the directory's weights; false starts from random ones."""

    train_only: list[str] = field(default_factory=list)
    """Freeze every parameter whose name matches none of these patterns, such as `*.mlp.*`; empty
    trains all."""

    lora: LoraConfig | None = None
    """Train adapters instead of the weights, for example {dim: 16}; the export has them merged in.
    Offline only."""

    def __post_init__(self):
        if self.lora is not None and self.train_only:
            raise ConfigError(
                "student.lora freezes all weights and student.train_only some of them: set one"
            )


@dataclass(kw_only=True)
class TeacherConfig:
    hf_path: str | None = None
    """Hugging Face directory of the teacher. Online only: offline runs never load it."""


@dataclass(kw_only=True)
class CacheConfig:
    path: str | None = None
    """Directory made by `megatron-kd capture`, with `train` and, for evaluation, `validation`.
    Offline only.
    """

    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Several caches instead of `path`: [{path: …, weight: …}, …]. All give training samples in
    these shares; each with a `validation` split gives validation samples too."""

    topk: int | None = None
    """Use only this many of each position's cached entries, the most likely ones; null uses all."""

    check_checksums: bool = True
    """Verify each shard's checksum on first use. Every sample's token hash is always checked."""

    def __post_init__(self):
        if self.topk is not None and self.topk < 1:
            raise ConfigError(f"cache.topk must be 1 or more, or null, not {self.topk}")
        for index, entry in enumerate(self.mixture):
            if set(entry) != {"path", "weight"}:
                raise ConfigError(
                    f"cache.mixture[{index}] must have the keys path and weight, not "
                    f"{sorted(entry)}"
                )

    def sources(self) -> list[tuple[str, float]]:
        """(directory, weight) of every cache."""
        if self.path is not None:
            return [(self.path, 1.0)]
        return [(str(entry["path"]), float(entry["weight"])) for entry in self.mixture]


@dataclass(kw_only=True)
class DataConfig:
    path: str | None = None
    """Directory made by `megatron-kd prepare`. Online: the training data. Offline: optional, the
    tokens come from the cache; where it is given, the cache must have been captured from exactly
    this data."""

    shuffle: bool = True
    """Draw every epoch in a new order, by seed. The cache is keyed by sample, so any order reads
    the right rows."""

    seed: int = 1234
    """Seed of the order."""

    dataloader: Literal["single", "cyclic", "batch"] = "single"
    """Megatron-Bridge's data loader. `single` with `shuffle` repeats and shuffles epochs by
    itself.
    """

    num_workers: int = 2
    """Loader processes per rank; 0 loads in the training process."""

    def __post_init__(self):
        if self.num_workers < 0:
            raise ConfigError(f"data.num_workers must be 0 or more, not {self.num_workers}")


@dataclass(kw_only=True)
class LossConfig:
    impl: Literal["dense", "sparse_chunked", "fused_chunked", "fused_online"] = "fused_chunked"
    """Which implementation computes the loss; it changes memory and time, not the result."""

    divergence: Divergence = field(default_factory=Divergence, metadata={"flat": True})
    """What the loss is. A recipe gives its fields as keys of this section: `loss.objective`,
    `loss.tail`, `loss.temperature`, `loss.temperature_squared`, `loss.beta`, `loss.ce_weight`."""

    gradient: Literal["auto", "in_forward", "recompute"] = "auto"
    """`fused_chunked`: form gradients in the forward pass (three matrix products) or recompute
    (four).
    """

    chunk_size: int | Literal["auto"] = "auto"
    """Sequence positions whose logits exist at one time."""

    def __post_init__(self):
        if self.chunk_size != "auto" and self.chunk_size < 1:
            raise ConfigError(f"loss.chunk_size must be 1 or more, or auto, not {self.chunk_size}")


@dataclass(kw_only=True)
class HiddenStatesConfig:
    """A loss between hidden states beside the one between logits; no pairs, no such loss."""

    pairs: list[Any] = field(default_factory=list)
    """[[student's layer, teacher's layer], …]: indices of decoder layers (−1 is the last), or
    final_norm, which the output layer reads. Their losses are averaged. Offline: [[final_norm,
    final_norm]] alone, with a cache that holds the teacher's last hidden state."""

    loss: Literal["mse", "cosine"] = "mse"
    """Mean squared error over the hidden size, or 1 − cosine. Where the widths differ, a trained
    projection takes the student's states to the teacher's width."""

    weight: float = 1.0
    """Multiplies the hidden-state loss."""

    balance: bool = False
    """Scale the hidden-state loss to `weight` × the logits loss, by the step before."""

    logits_weight: float = 1.0
    """Multiplies the loss between logits; 0 trains on hidden states alone."""

    def __post_init__(self):
        for pair in self.pairs:
            fits = isinstance(pair, list) and len(pair) == 2
            if not fits or not all(type(layer) is int or layer == FINAL_NORM for layer in pair):
                raise ConfigError(
                    "hidden_states.pairs must be a list of [student layer, teacher layer], each an "
                    f"index or {FINAL_NORM}; {pair!r} is not"
                )
        for name in ("weight", "logits_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"hidden_states.{name} must be 0 or more, not {getattr(self, name)}"
                )
        if not self.pairs and self.logits_weight == 0:
            raise ConfigError("hidden_states.logits_weight=0 without pairs leaves nothing to learn")


@dataclass(kw_only=True)
class ExportConfig:
    hf_path: str | None = None
    """Where the trained student is written as a Hugging Face directory at the end; null writes
    none.
    """


@dataclass(kw_only=True)
class SelectionConfig:
    keep_best: bool = False
    """Write down which checkpoint has the lowest validation KD loss (`best_checkpoint.json`);
    `megatron-kd export --best` takes it."""

    patience: int | None = None
    """Stop after this many evaluations in a row without a new best; null trains to the end."""

    min_improvement: float = 0.0
    """Nats by which a new best must be lower."""

    def __post_init__(self):
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"selection.patience must be 1 or more, not {self.patience}")
        if self.patience is not None and not self.keep_best:
            raise ConfigError("selection.patience needs selection.keep_best=true")
        if not self.min_improvement >= 0:
            raise ConfigError(
                f"selection.min_improvement must be 0 or more, not {self.min_improvement}"
            )


@dataclass(kw_only=True)
class DistillConfig:
    """A whole run. `from_recipe` reads and checks it."""

    mode: Mode = "offline"
    """`offline`: the teacher's cached top-K rows. `online`: the teacher itself, resident beside the
    student.
    """

    output_dir: str
    """Checkpoints, logs, metrics and the resolved configuration go here; a rerun resumes from
    it.
    """

    student: StudentConfig
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    selection: SelectionConfig = field(default_factory=SelectionConfig)

    profile: Literal["nsys", "memory"] | None = None
    """Run 15 iterations and profile the 10th to the 13th: for Nsight Systems, or as CUDA memory
    histories below output_dir. Needs a GPU."""

    progress: bool = True
    """Show a progress bar on standard error."""

    bridge: dict[str, Any] = field(default_factory=dict)
    """Any field of Megatron-Bridge's ConfigContainer, by its own names: train, model, optimizer,
    scheduler, …
    """

    def __post_init__(self):
        if "peft" in self.bridge:
            raise ConfigError(
                "bridge.peft needs the base model as a Megatron checkpoint; remove it and set "
                "student.lora, which puts the same adapters on the Hugging Face student"
            )
        if self.mode == "offline":
            self._check_offline()
        else:
            self._check_online()

    def _check_offline(self):
        if self.cache.path is not None and self.cache.mixture:
            raise ConfigError("set cache.path or cache.mixture, not both")
        if self.cache.path is None and not self.cache.mixture:
            raise ConfigError(
                "cache.path is required with mode=offline: run `megatron-kd capture` first"
            )
        if self.loss.impl not in OFFLINE_IMPLS:
            raise ConfigError(
                f"loss.impl={self.loss.impl} needs the teacher resident (mode=online); with "
                f"mode=offline use one of {', '.join(OFFLINE_IMPLS)}"
            )

        if self.hidden_states.pairs not in ([], [[FINAL_NORM, FINAL_NORM]]):
            raise ConfigError(
                "with mode=offline the cache holds the teacher's last hidden state only: set "
                f"hidden_states.pairs=[[{FINAL_NORM},{FINAL_NORM}]], or use mode=online"
            )

    def _check_online(self):
        if self.student.lora is not None:
            raise ConfigError(
                "student.lora is for mode=offline: with the teacher resident the host would put "
                "adapters on it too. Capture the teacher's rows first, or use student.train_only"
            )
        if self.teacher.hf_path is None:
            raise ConfigError("teacher.hf_path is required with mode=online")
        if self.data.path is None:
            raise ConfigError(
                "data.path is required with mode=online: run `megatron-kd prepare` first"
            )
        if self.loss.impl not in ONLINE_IMPLS:
            raise ConfigError(
                f"loss.impl={self.loss.impl} reads a top-K cache (mode=offline); with mode=online "
                f"use one of {', '.join(ONLINE_IMPLS)}"
            )
        tail = self.loss.divergence.tail
        if tail != "none":
            raise ConfigError(
                f"loss.tail={tail} concerns a truncated teacher; mode=online sees the "
                "full vocabulary, so leave it at none"
            )
        try:
            self.loss.divergence.check_online()
        except ValueError as error:
            raise ConfigError(f"loss.{error}") from error


def from_recipe(path: str | Path, overrides: Sequence[str] = ()) -> DistillConfig:
    """Read a recipe, merge its includes and the overrides, resolve interpolations, check everything
    of ours.

    Args:
        path: The YAML file.
        overrides: `key=value` strings, OmegaConf dot syntax.

    Raises:
        ConfigError: Names the key, the allowed values and the nearest match.
    """
    return typed_mapping.build(DistillConfig, merged_recipe(path, overrides))


def merged_recipe(path: str | Path, overrides: Sequence[str] = ()) -> dict:
    """The recipe as one plain, resolved mapping, before any check."""
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
        try:
            OmegaConf.from_dotlist([override])
        except YAMLError as error:
            remedy = 'quote what YAML reads otherwise: ["*.mlp.*"]'
            raise ConfigError(f"override {override!r} is not YAML ({error}); {remedy}") from error
    try:
        merged = OmegaConf.merge(
            _with_includes(find_recipe(path), ()), OmegaConf.from_dotlist(list(overrides))
        )
        return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file of a recipe, or of a fragment, that a user or an `include` names.

    Args:
        name: A path. Where it leads to no file and begins with `recipes/` or `configs/`, before
            which `..` may stand, it is looked for among those that come with this package.
        folder: What a relative path starts from: the working directory, or an including recipe's.

    Returns:
        The file; where there is none, the path as it was given.
    """
    asked = folder / name
    parts = [part for part in Path(name).parts if part != ".."]
    if asked.exists() or not parts or parts[0] not in ("recipes", "configs"):
        return asked
    package = Path(__file__).parent
    for shipped in (package, package.parent):  # in an installed package; in a checkout
        candidate = shipped.joinpath(*parts)
        if candidate.is_file():
            return candidate
    return asked


def _with_includes(path: Path, above: tuple):
    if path in above:
        raise ConfigError(f"{path} includes itself, through {', '.join(map(str, above))}")
    if not path.is_file():
        by = f", included by {above[-1]}" if above else ""
        raise ConfigError(f"no recipe at {path}{by}")
    try:
        own = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's errors share no base class with OmegaConf's
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not OmegaConf.is_dict(own):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    includes = own.pop("include", [])
    if isinstance(includes, str) or not all(isinstance(entry, str) for entry in includes):
        raise ConfigError(f"{path}: include must be a list of file names")
    found = [find_recipe(entry, path.parent).resolve() for entry in includes]
    parts = [_with_includes(file, (*above, path)) for file in found]
    return OmegaConf.merge(*parts, own)
