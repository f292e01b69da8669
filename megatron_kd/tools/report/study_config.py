"""The YAML file of a study: what is trained, over which seeds, and which runs are compared."""

from dataclasses import field
from pathlib import Path
from typing import Literal

from megatron_kd.recipe_file import merged_recipe
from megatron_kd.sections import Integer, Number, build, config_section
from megatron_kd.typed_mapping import ConfigError


@config_section
class StudyRun:
    overrides: list[str] = field(default_factory=list)
    """`key=value`, over the recipe's own values."""

    title: str | None = None
    """What tables and figures call the run; null takes its name."""

    series: str | None = None
    """Name of the line that the run is a point of, in a section of kind `lines`."""

    x: Number | None = None
    """The run's place on the horizontal axis, in a section of kind `lines`."""


@config_section
class StudySection:
    title: str
    kind: Literal["bars", "curves", "lines"] = "bars"
    """The figure: held-out scores as bars or over x, or loss curves."""

    x_label: str = ""
    runs: list[str]


@config_section
class StudyConfig:
    recipe: str
    command: str
    """The command that trains. It is given `--config RECIPE` and overrides, and must not return
    before training has ended.
    """

    output_dir: str
    """One folder per run and seed goes below it."""

    teacher: str
    """Hugging Face directory."""

    held_out: str
    """One split of prepared data that no run trains on."""

    held_out_sequences: Integer | None = None
    """Score on this many of its sequences, evenly spaced; null scores on all."""

    seeds: list[Integer]
    """Each sets the order of the data and the initialization of one run."""

    runs: dict[str, StudyRun]
    sections: dict[str, StudySection]

    def __post_init__(self):
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be distinct and at least one, not {self.seeds}")
        for name, section in self.sections.items():
            unknown = sorted(set(section.runs) - set(self.runs))
            if unknown:
                raise ConfigError(f"sections.{name}.runs: {unknown} are not among the study's runs")
            if section.kind == "lines" and any(self.runs[run].x is None for run in section.runs):
                raise ConfigError(f"sections.{name} draws lines: every run of it needs an x")

    def folder(self, run: str, seed: int) -> Path:
        return Path(self.output_dir) / run / str(seed)

    def title(self, run: str) -> str:
        return self.runs[run].title or run


def read_study(path: str | Path) -> StudyConfig:
    """The checked study.

    Raises:
        ConfigError: Names the key and what was expected.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no study at {path}")
    return build(StudyConfig, merged_recipe(path))
