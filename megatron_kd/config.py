"""The configuration of a distillation run: one dataclass tree, read from a YAML recipe and checked.

A recipe may list fragments under `include`; they are merged in order, the recipe's own keys last.
Overrides are OmegaConf dot syntax (`loss.impl=dense bridge.train.train_iters=100`). The `bridge`
section is passed on to the host (`megatron_kd.host.container`), which checks it against
Megatron-Bridge's own dataclasses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, model_validator

from megatron_kd import sections, typed_mapping
from megatron_kd.losses.divergence import Divergence
from megatron_kd.recipe_file import merged_recipe
from megatron_kd.sections import Count, Flag, Integer, NotNegative, Number, config_section
from megatron_kd.typed_mapping import ConfigError

Mode = Literal["offline", "online"]
OFFLINE_IMPLS = ("dense", "sparse_chunked", "fused_chunked")
ONLINE_IMPLS = ("dense", "fused_online")
FINAL_NORM = "final_norm"
NO_PEFT = (
    "peft needs the base model as a Megatron checkpoint; remove it and set student.lora, which "
    "puts the same adapters on the Hugging Face student"
)


@config_section
class LoraConfig:
    """Low-rank adapters beside frozen weights."""

    dim: Count = 16
    """Rank of the adapters; a multiple of the tensor-parallel size."""

    alpha: Count = 32
    """The adapters' output is multiplied by alpha / dim."""

    dropout: Annotated[NotNegative, Field(lt=1)] = 0.0
    """On the adapters' input."""

    target_modules: list[str] = field(
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    """Megatron-Core's names of the layers that get adapters, or patterns such as
    `*.layers.0.*.linear_qkv`."""

    def __post_init__(self):
        if not self.target_modules:
            raise ConfigError("student.lora.target_modules must name a layer, such as linear_qkv")


@config_section
class StudentConfig:
    hf_path: str
    """Hugging Face directory of the student: configuration, tokenizer and, with `load_weights`, its
    weights.
    """

    load_weights: Flag = True
    """Start from the directory's weights; false starts from random ones."""

    check_parity: Flag = True
    """Refuse to train where the host computes another model than transformers does from the same
    configuration: compared on a small copy of it with random weights, in seconds."""

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


@config_section
class TeacherConfig:
    hf_path: str | None = None
    """Hugging Face directory of the teacher. Online only: offline runs never load it."""


@config_section
class MixtureEntry:
    """One cache of a mixture."""

    path: str
    """Its directory, as `cache.path`."""

    weight: Annotated[Number, Field(gt=0)]
    """Its share, by the sum of all weights; of what, `cache.share_by` says."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What its own curve is called: "kd loss/NAME", in training and validation. All caches of a
    mixture have one, or none."""

    loss: dict[str, Any] = field(default_factory=dict)
    """Where its loss differs from the section `loss`: keys of that section, such as temperature or
    objective. Micro-batches must then be of one sample, so that each is of one cache."""


@config_section
class FilterConfig:
    """Which training samples of a cache are used, by what the teacher thought of them."""

    min_mass: Annotated[Number, Field(ge=0, le=1)] | None = None
    """The least mean mass of a sample's rows: below it the teacher was unsure beyond its K."""

    min_perplexity: Annotated[Number, Field(ge=1)] | None = None
    """The least perplexity of the teacher on a sample's supervised tokens; needs a cache captured
    with --label-logprob."""

    max_perplexity: Annotated[Number, Field(ge=1)] | None = None
    """The largest; above it the text is noise to the teacher."""


@config_section
class CacheConfig:
    path: str | None = None
    """Directory made by `megatron-kd capture`, with `train` and, for evaluation, `validation`.
    Offline only.
    """

    mixture: list[MixtureEntry] = field(default_factory=list)
    """Several caches instead of `path`: [{path: …, weight: …}, …]. All give training samples in
    these shares; each with a `validation` split gives validation samples too."""

    share_by: Literal["samples", "tokens"] = "samples"
    """What the weights of a mixture are shares of: training samples, or supervised tokens, on the
    average of each cache."""

    filter: FilterConfig | None = None
    """Train on some of the samples alone, for example {max_perplexity: 50}. Validation has all."""

    topk: Count | None = None
    """Use only this many of each position's cached entries, the most likely ones; null uses all."""

    check_checksums: Flag = True
    """Verify each shard's checksum on first use. Every sample's token hash is always checked."""

    def __post_init__(self):
        names = self.names()
        if None in names and set(names) != {None}:
            raise ConfigError("cache.mixture: give every cache a name, or none of them")
        if None not in names and len(set(names)) < len(names):
            raise ConfigError(f"cache.mixture: names must differ, got {', '.join(names)}")
        for number, entry in enumerate(self.mixture):
            if "ce_weight" in entry.loss:
                raise ConfigError(
                    f"cache.mixture[{number}].loss.ce_weight: the share of cross-entropy is one "
                    "for all caches; set loss.ce_weight"
                )

    def names(self) -> list[str | None]:
        """What the caches of a mixture are called."""
        return [entry.name for entry in self.mixture]

    @property
    def differ(self) -> bool:
        """Whether a cache of the mixture has a loss of its own."""
        return any(entry.loss for entry in self.mixture)

    def sources(self) -> list[tuple[str, float]]:
        """(directory, weight) of every cache."""
        if self.path is not None:
            return [(self.path, 1.0)]
        return [(entry.path, entry.weight) for entry in self.mixture]


@config_section
class DataConfig:
    path: str | None = None
    """Directory made by `megatron-kd prepare`. Online: the training data. Offline: optional, the
    tokens come from the cache; where it is given, the cache must have been captured from exactly
    this data."""

    shuffle: Flag = True
    """Draw every epoch in a new order, by seed. The cache is keyed by sample, so any order reads
    the right rows."""

    seed: Integer = 1234
    """Seed of the order."""

    dataloader: Literal["single", "cyclic", "batch"] = "single"
    """Megatron-Bridge's data loader. `single` with `shuffle` repeats and shuffles epochs by
    itself.
    """

    num_workers: Annotated[Integer, Field(ge=0)] = 2
    """Loader processes per rank; 0 loads in the training process."""


@config_section
class LossConfig:
    impl: Literal["dense", "sparse_chunked", "fused_chunked", "fused_online"] = "fused_chunked"
    """Which implementation computes the loss; it changes memory and time, not the result."""

    divergence: InstanceOf[Divergence] = field(
        default_factory=Divergence, metadata={"flat": Divergence}
    )
    """What the loss is. A recipe gives its fields as keys of this section: `loss.objective`,
    `loss.tail`, `loss.temperature`, `loss.temperature_squared`, `loss.beta`, `loss.ce_weight`."""

    gradient: Literal["auto", "in_forward", "recompute"] = "auto"
    """Fused losses: form gradients in the forward pass (three matrix products) or recompute (four).
    Online the teacher's product comes to them, once or twice.
    """

    chunk_size: Count | Literal["auto"] = "auto"
    """Sequence positions whose logits exist at one time."""

    @model_validator(mode="before")
    @classmethod
    def _gather_divergence(cls, given: Any) -> Any:
        """Make the divergence from the keys of a recipe's section, which `Divergence` checks."""
        if not isinstance(given, Mapping):
            return given  # made in Python, by keyword arguments
        own = {f.name for f in fields(Divergence)}
        rest = {key: value for key, value in given.items() if key not in own}
        if "divergence" in rest:
            raise typed_mapping.unknown_key("loss.divergence", sections.keys_of(cls))
        options = {key: value for key, value in given.items() if key in own}
        return rest | {"divergence": typed_mapping.build(Divergence, options, "loss")}


Layer = Integer | Literal["final_norm"]


@config_section
class HiddenStatesConfig:
    """A loss between hidden states beside the one between logits; no pairs, no such loss."""

    pairs: list[Annotated[list[Layer], Field(min_length=2, max_length=2)]] = field(
        default_factory=list
    )
    """[[student's layer, teacher's layer], …]: indices of decoder layers (−1 is the last), or
    final_norm, which the output layer reads. Their losses are averaged. Offline: [[final_norm,
    final_norm]] alone, with a cache that holds the teacher's last hidden state."""

    loss: Literal["mse", "cosine"] = "mse"
    """Mean squared error over the hidden size, or 1 − cosine. Where the widths differ, a trained
    projection takes the student's states to the teacher's width."""

    weight: NotNegative = 1.0
    """Multiplies the hidden-state loss."""

    balance: Flag = False
    """Scale the hidden-state loss to `weight` × the logits loss, by the step before."""

    logits_weight: NotNegative = 1.0
    """Multiplies the loss between logits; 0 trains on hidden states alone."""

    def __post_init__(self):
        if not self.pairs and self.logits_weight == 0:
            raise ConfigError("hidden_states.logits_weight=0 without pairs leaves nothing to learn")


@config_section
class LaunchConfig:
    """The ranks a recipe is meant for. The SLURM launcher starts them; plan, dry run and doctor
    count with them. A run that starts has the ranks it was started with: torchrun's, or one.
    """

    nodes: Count = 1
    """Machines."""

    ranks_per_node: Count | None = None
    """Processes, and GPUs, of each; null leaves both to whoever starts the run."""

    def __post_init__(self):
        if self.nodes > 1 and self.ranks_per_node is None:
            raise ConfigError("launch.nodes needs launch.ranks_per_node")

    @property
    def ranks(self) -> int | None:
        """Of the whole run; None where the recipe does not say."""
        return None if self.ranks_per_node is None else self.nodes * self.ranks_per_node


@config_section
class ExportConfig:
    hf_path: str | None = None
    """Where the trained student is written as a Hugging Face directory at the end; null writes
    none.
    """


@config_section
class SelectionConfig:
    keep_best: Flag = False
    """Write down which checkpoint has the lowest validation KD loss (`best_checkpoint.json`);
    `megatron-kd export --best` takes it."""

    patience: Count | None = None
    """Stop after this many evaluations in a row without a new best; null trains to the end."""

    min_improvement: NotNegative = 0.0
    """Nats by which a new best must be lower."""

    def __post_init__(self):
        if self.patience is not None and not self.keep_best:
            raise ConfigError("selection.patience needs selection.keep_best=true")


@config_section
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
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    selection: SelectionConfig = field(default_factory=SelectionConfig)

    profile: Literal["nsys", "memory"] | None = None
    """Run 15 iterations and profile the 10th to the 13th: for Nsight Systems, or as CUDA memory
    histories below output_dir. Needs a GPU."""

    progress: Flag = True
    """Show a progress bar on standard error."""

    bridge: dict[str, Any] = field(default_factory=dict)
    """Any field of Megatron-Bridge's ConfigContainer, by its own names: train, model, optimizer,
    scheduler, …
    """

    def __post_init__(self):
        if "peft" in self.bridge:
            raise ConfigError(f"bridge.{NO_PEFT}")
        if self.mode == "offline":
            self._check_offline()
        else:
            self._check_online()

    def divergences(self) -> tuple[Divergence, ...]:
        """The loss of each cache of the run, in the order of `cache.sources()`."""
        common = self.loss.divergence
        return tuple(
            typed_mapping.build(
                Divergence,
                {f.name: getattr(common, f.name) for f in fields(Divergence)} | entry.loss,
                f"cache.mixture[{number}].loss",
            )
            for number, entry in enumerate(self.cache.mixture)
        ) or (common,)

    def _check_offline(self):
        self.divergences()
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
        if self.hidden_states.logits_weight != 1 and not self.hidden_states.pairs:
            raise ConfigError(
                "hidden_states.logits_weight weighs the loss between logits against one between "
                "hidden states, and hidden_states.pairs is empty: leave it at 1, or set "
                f"hidden_states.pairs=[[{FINAL_NORM},{FINAL_NORM}]]"
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
    recipe = merged_recipe(path, overrides)
    if "stages" in recipe:
        raise ConfigError(
            f"{path} is a run in stages, which distill, plan and doctor take; give this command a "
            "recipe without `stages`"
        )
    return sections.build(DistillConfig, recipe)
