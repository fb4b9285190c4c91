"""The factor that keeps gradients in float16 from vanishing (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

The loss is multiplied by it before backward, gradients are divided by it before the update. When a gradient overflowed, no
weight is changed and the factor is halved; after many steps without that it is doubled. The overflow shows in the norm of all
gradients, which every rank knows, so all ranks decide alike without a word.
"""

from __future__ import annotations

from strategist.records import dataclass

FIRST, FACTOR, INTERVAL = 2.0**16, 2.0, 2000
"""First value, what it grows and shrinks by, and steps before it grows (PyTorch 2.13 torch/amp/grad_scaler.py, defaults)."""
LEAST = 1.0
"""Below this, an overflow is not the factor's doing."""


@dataclass(slots=True)
class LossScale:
    """The factor in use, and how many steps in a row it has gone well."""

    value: float = FIRST
    interval: int = INTERVAL
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller factor may help."""
        return self.value > LEAST

    def overflowed(self) -> None:
        """A gradient was not finite."""
        self.value, self.good_steps = self.value / FACTOR, 0

    def went_well(self) -> None:
        """All gradients were finite."""
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * FACTOR, 0
