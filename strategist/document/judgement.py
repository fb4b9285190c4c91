"""A Judgement: what somebody else's configuration says, and what is wrong with it."""

from __future__ import annotations

from typing import Literal

from strategist.document.prediction import Prediction
from strategist.records import dataclass

Said = int | float | bool | str
"""A value as a configuration says it, in the Plan's words: numbers of ranks and sequences, names of formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault: the rule that found it, where it stands, a sentence, and the smallest change that removes it.

    A failure stops the job or makes another one of it; a warning costs time or surprises.
    """

    rule: str
    kind: Literal["failure", "warning"]
    place: str
    sentence: str
    fix: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One file, judged. `says` holds what it decides, in the Plan's words; `prediction` is there when model and machines
    were named and the file says enough of a layout."""

    format: Literal["strategist-judgement/1"] = "strategist-judgement/1"
    file: str
    framework: str
    title: str
    says: tuple[tuple[str, Said], ...]
    findings: tuple[Finding, ...]
    prediction: Prediction | None = None

    @property
    def passes(self) -> bool:
        """True when nothing is worse than a warning."""
        return all(finding.kind == "warning" for finding in self.findings)
