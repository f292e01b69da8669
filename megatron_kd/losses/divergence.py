"""Which divergence to take: the options of every loss, their one check, and the objectives.

Nothing here imports torch, nor do this library's units, so that a recipe is refused before anything
heavy is loaded.
"""

import difflib
import importlib
from dataclasses import dataclass, field
from typing import Any

OBJECTIVES: dict[str, Any] = {
    "forward_kl": "megatron_kd.losses.objectives.forward_kl:FORWARD_KL",
    "reverse_kl": "megatron_kd.losses.objectives.reverse_kl:REVERSE_KL",
    "jsd": "megatron_kd.losses.objectives.jsd:JSD",
}
"""Name → unit, an `Objective` of `megatron_kd.losses.objectives`, or where it is imported from on
first use, "module:attribute"."""

TAILS = ("none", "renormalize", "bucket")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The loss between teacher and student, per position.

    Raises:
        ValueError: A value is unknown or out of range; the message begins with the field's name.
    """

    objective: str = "forward_kl"
    """The divergence between teacher and student: forward_kl, reverse_kl or jsd, or the name of
    another entry of `OBJECTIVES`."""

    tail: str = field(default="none", metadata={"formerly": {"renormalise": "renormalize"}})
    """What becomes of the teacher's mass M outside its top K. none: it is left out, so that the
    loss is a sum over the support alone and may be negative. renormalize: the teacher is divided by
    M; the student stays over the whole vocabulary. bucket: everything off the support is one more
    outcome. Offline only."""

    temperature: float = 1.0
    """Divides both models' logits."""

    temperature_squared: bool = False
    """Multiply the divergence (not the cross-entropy) by temperature², so that gradients keep their
    size."""

    beta: float = 0.5
    """The teacher's share of the mixture of `jsd`."""

    ce_weight: float = 0.0
    """α in (1 − α) · divergence + α · cross-entropy to the label, which is at temperature 1."""

    def __post_init__(self) -> None:
        _check_one_of("objective", self.objective, OBJECTIVES)
        _check_one_of("tail", self.tail, TAILS)
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be greater than 0 and finite, not {self.temperature}"
            )
        for name in ("beta", "ce_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        unit = objective_unit(self.objective)
        if unit.check is not None:
            unit.check(self)

    def check_target(self, target: Any, labels: Any) -> None:
        """Refuse what a truncated teacher (a `TopKTarget`) and these labels cannot give.

        Raises:
            ValueError: Names what is missing, and the remedy.
        """
        if self.tail == "bucket" and self.temperature != 1 and target.log_z_tau is None:
            raise ValueError(
                f"tail bucket at temperature {self.temperature} needs the teacher's normalizer at "
                "that temperature (TopKTarget.log_z_tau): capture it with the cache, or use tail "
                "none or renormalize"
            )
        self.check_labels(labels)

    def check_labels(self, labels: Any) -> None:
        """Refuse a share of cross-entropy without labels.

        Raises:
            ValueError: There are no labels.
        """
        if self.ce_weight and labels is None:
            raise ValueError(f"ce_weight {self.ce_weight} needs labels [s, b]; got None")

    def check_online(self) -> None:
        """Refuse an objective that has no form over a full vocabulary.

        Raises:
            ValueError: Begins with the field's name, objective.
        """
        unit = objective_unit(self.objective)
        if unit.row_sums is None or unit.gradient is None:
            raise ValueError(
                f"objective {self.objective} is defined for a truncated teacher only: its unit has "
                "no row_sums and gradient over a full vocabulary. Distill offline, or use another "
                "objective online"
            )


def objective_unit(name: str) -> Any:
    """The unit of a name that `Divergence` has accepted, imported where it has not been yet.

    Raises:
        KeyError: There is no such name.
        ImportError, AttributeError: The entry's module or attribute does not exist.
    """
    entry = OBJECTIVES[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = OBJECTIVES[name] = getattr(importlib.import_module(module), attribute)
    return entry


def _check_one_of(name: str, value: Any, allowed: Any) -> None:
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}{hint}")
