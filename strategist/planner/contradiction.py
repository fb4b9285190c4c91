"""Which pins and forbidden techniques no layout has together: the fewest of them, and what each leaves open of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from strategist.errors import ImpossibleError
from strategist.records import replace
from strategist.space.candidates import LAYERS_OF, OF_STAGE, Candidates
from strategist.space.enumerate import Limits, divisors, enumerate_candidates
from strategist.space.grammar import Pin
from strategist.units import counted

MOST_VALUES = 12
"""Values of a choice that are listed."""
OF_BATCH = ("micro_batch", "accumulation", "dp", "dp_shard", "dp_replicate")
"""Choices whose product is the global batch."""

Said = Pin | str
"""A pin, or a technique that is left out."""


def contradiction(limits: Limits) -> ImpossibleError:
    """The error for a space that has no layout at all."""
    core = _fewest(limits, [*limits.pins, *limits.forbids])
    if not core:
        return ImpossibleError("NO_PLAN", f"No layout of {counted(limits.world, 'device')} exists for this request.", flag="--pin", hint="Use another number of devices.")  # fmt: skip
    batch = next((said for said in core if isinstance(said, Pin) and said.key in OF_BATCH[:2]), None)
    if batch is not None and all(isinstance(said, Pin) and said.key in OF_BATCH for said in core):
        return _no_batch(limits, batch, core)
    return ImpossibleError(
        "NO_PLAN",
        f"No layout of {counted(limits.world, 'device')} {_having(limits, core)}.",
        flag="--pin" if any(isinstance(said, Pin) for said in core) else "--forbid",
        value=", ".join(_said(limits, core)),
        hint=" ".join(
            (*_left_open(limits, core), "Drop one of them." if len(_said(limits, core)) > 1 else "Leave it out.")
        ),
    )


def _no_batch(limits: Limits, batch: Pin, core: Sequence[Said]) -> ImpossibleError:
    alone = f"Values that divide the batch: {', '.join(str(d) for d in divisors(limits.global_batch)[:MOST_VALUES])}."
    return ImpossibleError(
        "BATCH_SPLIT",
        f"{_and(_said(limits, core))} cannot make up the global batch of {counted(limits.global_batch, 'sequence')} on {counted(limits.world, 'device')}: global batch = micro-batch x accumulation x data-parallel ranks.",
        flag="--micro-batch" if batch.key == "micro_batch" else "--grad-accum",
        value=batch.word,
        hint=" ".join(_left_open(limits, core)) if len(core) > 1 else alone,
    )


def _having(limits: Limits, core: Sequence[Said]) -> str:
    if not any(isinstance(said, Pin) for said in core):
        return f"does without {_and([str(said) for said in core])}"
    return f"has {_and(_said(limits, core))}{' together' if len(_said(limits, core)) > 1 else ''}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _fewest(limits: Limits, core: Sequence[Said]) -> list[Said]:
    """As few of what was said as leave no layout: without any one of them there are some."""
    needed = list(core)
    for said in core:
        others = [other for other in needed if other is not said]
        if not len(_space(limits, others)):
            needed = others
    return needed


def _space(limits: Limits, said: Sequence[Said]) -> Candidates:
    pins = tuple(each for each in said if isinstance(each, Pin))
    forbids = tuple(each for each in said if isinstance(each, str))
    return enumerate_candidates(replace(limits, pins=pins, forbids=forbids, also=_needed(limits, pins)))


def _needed(limits: Limits, pins: Collection[Pin]) -> tuple[str, ...]:
    """What else is looked at: balanced stages, which without a pin of the layers that they run again are only looked at where somebody asks."""
    keys = {pin.key for pin in pins}
    is_alone = "stage_split" in keys and "recompute_depth" not in keys
    return (*limits.also, "balanced_stages") if is_alone else limits.also


def _left_open(limits: Limits, core: Sequence[Said]) -> Iterator[str]:
    """Which values every pin may have beside the others."""
    if limits.split and sum(limits.split) != limits.layers:
        yield f"The stages own {counted(sum(limits.split), 'layer')} so, and the model has {limits.layers}."
        return
    for pin in core:
        if isinstance(pin, Pin):
            others = [said for said in core if _words(limits, said) != _words(limits, pin)]
            values = _values(_space(limits, others), pin.key)
            if values:
                beside = f"With {_and(_said(limits, others))}" if others else "Here"
                yield f"{beside} {pin.key} is {values}."


def _values(candidates: Candidates, key: str) -> str:
    """The values of a choice among some layouts, ascending; nothing for a choice that they do not have."""
    if key != "dp" and key not in candidates.columns:
        return ""
    column = candidates.data_parallel if key == "dp" else candidates[key]
    rows = np.unique(column, return_index=True)[1]
    words = [str(column[row] if key == "dp" else candidates.word(key, int(row))) for row in rows]
    few = words[:MOST_VALUES]
    last = "more" if len(words) > MOST_VALUES else few.pop()
    return f"{', '.join(few)} or {last}" if few else last


def _said(limits: Limits, core: Sequence[Said]) -> list[str]:
    """The words of what was said, each once: numbers for every stage are one pin."""
    return list(dict.fromkeys(_words(limits, said) for said in core))


def _words(limits: Limits, said: Said) -> str:
    if not isinstance(said, Pin):
        return f"no {said}"
    for key, of_all, start, numbers in (
        ("recompute", "recompute_depth", OF_STAGE, limits.depths),
        ("stage_split", "stage_split", LAYERS_OF, limits.split),
    ):
        if numbers and (said.key == of_all or said.key.startswith(start)):
            return f"{key}={'/'.join(map(str, numbers))}"
    return f"{said.key}={said.word}"
