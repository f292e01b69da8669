"""Whether a host's model is transformers' model, in words."""

from dataclasses import dataclass

ON_CPU = 1e-4
ON_GPU = 2e-2
"""Largest departure that is taken for rounding, relative to the size of what is compared. On GPUs
Transformer Engine multiplies fp32 matrices in TF32, which keeps 10 bits of a factor."""


@dataclass(frozen=True)
class Comparison:
    """The departures of one comparison, and what they mean."""

    departures: list[float]
    """Of what the first layer reads, of what each layer returns, of the logits."""

    layer_kinds: list[str]
    """One word for each layer."""

    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        return max(self.departures)

    def where(self) -> str:
        """The place where the two part, in words."""
        *inside, _ = self.departures
        parted = [number for number, value in enumerate(inside) if value > self.tolerance]
        if not parted:
            return "every layer agrees, the output layer does not"
        if parted[0] == 0:
            return "they part in the embedding"
        kind = self.layer_kinds[parted[0] - 1]
        name = f"layer {parted[0]} of {len(self.layer_kinds)}" + (f" ({kind})" if kind else "")
        return f"they part in {name}"

    def fault(self) -> str:
        """One sentence on a comparison that does not agree."""
        return (
            f"they differ by {self.largest:.1e} of the values' size, where rounding explains "
            f"{self.tolerance:.0e}; {self.where()}"
        )
