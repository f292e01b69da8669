"""What a student keeps: layers, key/value groups, feed-forward and hidden channels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_kd.models.parameter_axes import SUPPORTED

Channels = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TeacherShape:
    """The dimensions of a teacher that can be cut."""

    layers: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn_size: int
    hidden_size: int

    @classmethod
    def of(cls, config) -> "TeacherShape":
        """Reads a transformers configuration.

        Raises:
            ValueError: The architecture is not one that can be cut.
        """
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"the teacher is a {config.model_type} model; expected one of "
                f"{', '.join(SUPPORTED)}. Make the student's directory with another tool "
                "(ModelOpt's Minitron pruning covers more architectures)"
            )
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_groups=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            ffn_size=config.intermediate_size,
            hidden_size=config.hidden_size,
        )

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_groups


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The kept indices, ascending. Every layer has groups and feed-forward channels of its own."""

    layers: Channels
    """Teacher layers, in the student's order."""
    kv_groups: tuple[Channels, ...]
    """For each kept layer, the key/value groups it keeps, with all their query heads."""
    ffn: tuple[Channels, ...]
    """For each kept layer, the feed-forward channels it keeps."""
    hidden: Channels
    """The hidden channels, the same in every layer."""
    norm_gains: Mapping[str, float] = field(default_factory=dict)
    """Factor for each norm's weight, by the teacher's parameter name; others stay as they are."""


def evenly_spaced_layers(total: int, keep: int) -> Channels:
    """`keep` of `total` layers, the first and the last among them, in steps as equal as can be.

    Raises:
        ValueError: That many layers cannot be kept so.
    """
    if not 2 <= keep <= total:
        raise ValueError(
            f"--layers must lie between 2 and the teacher's {total} (first and last are kept), "
            f"got {keep}; a single layer is chosen with --layer-list"
        )
    # Integer rounding to the nearest: floating point would tie differently on other machines.
    return tuple((2 * i * (total - 1) + keep - 1) // (2 * (keep - 1)) for i in range(keep))


def checked_layers(total: int, layers: Sequence[int]) -> Channels:
    """An explicit list of layers, ascending.

    Raises:
        ValueError: The list is empty, repeated, unordered, or leaves the teacher's range.
    """
    layers = tuple(layers)
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= total:
        raise ValueError(
            f"--layer-list must be ascending numbers from 0 to {total - 1} without repetition, "
            f"got {','.join(map(str, layers)) or 'none'}"
        )
    return layers


def kept_groups(teacher: TeacherShape, heads: int | None, kv_groups: int | None) -> int:
    """How many key/value groups to keep, from either count or both.

    Raises:
        ValueError: The heads are not whole groups, or there are more than the teacher has.
    """
    per_group = teacher.heads_per_group
    possible = ", ".join(f"{g * per_group}/{g}" for g in range(1, teacher.kv_groups + 1)[-8:])
    if heads is None and kv_groups is None:
        return teacher.kv_groups
    groups = kv_groups if kv_groups is not None else heads // per_group
    wanted = heads if heads is not None else groups * per_group
    if not 1 <= groups <= teacher.kv_groups or wanted != groups * per_group:
        raise ValueError(
            f"heads are cut by whole key/value groups of {per_group}; got --heads {heads} "
            f"--kv-groups {kv_groups}, possible (heads/groups): {possible}"
        )
    return groups


def checked_size(name: str, wanted: int | None, available: int) -> int:
    """A width to keep; None keeps all.

    Raises:
        ValueError: The width does not lie between 1 and what the teacher has.
    """
    if wanted is None:
        return available
    if not 1 <= wanted <= available:
        raise ValueError(f"{name} must lie between 1 and the teacher's {available}, got {wanted}")
    return wanted


def select_leading(
    teacher: TeacherShape, layers: Channels, *, kv_groups: int, ffn_size: int, hidden_size: int
) -> Selection:
    """Keeps the first channels of each axis, which no measurement chose."""
    return Selection(
        layers=layers,
        kv_groups=(tuple(range(kv_groups)),) * len(layers),
        ffn=(tuple(range(ffn_size)),) * len(layers),
        hidden=tuple(range(hidden_size)),
    )


def select_weight(
    weight: torch.Tensor,
    axes: str,
    selection: Selection,
    teacher: TeacherShape,
    position: int | None,
) -> torch.Tensor:
    """The kept part of one parameter.

    Args:
        weight: The teacher's parameter, one axis per letter of `axes`.
        axes: Letters of `parameter_axes`.
        position: The student's layer number, None outside the layers.

    Returns:
        A contiguous tensor that shares nothing with `weight`.
    """
    for axis, letter in enumerate(axes):
        index = _index(letter, selection, teacher, position)
        if index is not None and len(index) != weight.shape[axis]:
            weight = weight.index_select(axis, torch.from_numpy(index))
    return weight.clone(memory_format=torch.contiguous_format)


def _index(
    letter: str, selection: Selection, teacher: TeacherShape, position: int | None
) -> np.ndarray | None:
    if letter == "h":
        return np.asarray(selection.hidden)
    if letter == "f":
        return np.asarray(selection.ffn[position])
    if letter in "gq":
        width = teacher.head_dim * (teacher.heads_per_group if letter == "q" else 1)
        groups = np.asarray(selection.kv_groups[position])
        return (groups[:, None] * width + np.arange(width)).reshape(-1)
    return None
