"""Recipes as files: found, merged with what they include, overridden from the command line."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_kd.typed_mapping import ConfigError


def merged_recipe(path: str | Path, overrides: Sequence[str] = ()) -> dict:
    """The recipe as one plain, resolved mapping, before any check."""
    return resolved(unresolved_recipe(path, overrides), path)


def unresolved_recipe(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The recipe with its includes and overrides, its interpolations as they are written."""
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
        try:
            OmegaConf.from_dotlist([override])
        except YAMLError as error:
            remedy = 'quote what YAML reads otherwise: ["*.mlp.*"]'
            raise ConfigError(f"override {override!r} is not YAML ({error}); {remedy}") from error
    try:
        return OmegaConf.merge(
            _with_includes(find_recipe(path), ()), OmegaConf.from_dotlist(list(overrides))
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error


def resolved(recipe: DictConfig, path: str | Path, *, throw_on_missing: bool = True) -> dict:
    """A merged recipe as plain values; `path` is what an error names."""
    try:
        return OmegaConf.to_container(recipe, resolve=True, throw_on_missing=throw_on_missing)
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
