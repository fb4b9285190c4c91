"""Which pins and forbidden techniques no layout has together: the fewest of them, and what each leaves open of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from strategist.errors import ImpossibleError
from strategist.records import dataclass, replace
from strategist.space.candidates import LAYERS_OF, OF_STAGE, Candidates, code
from strategist.space.enumerate import Limits, divisors, enumerate_candidates
from strategist.space.grammar import BALANCED, RULED, Pin
from strategist.units import counted

MOST_VALUES = 12
"""Values of a choice that are listed."""
OF_BATCH = ("micro_batch", "accumulation", "dp", "dp_shard", "dp_replicate")
"""Choices whose product is the global batch."""


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that was asked for, in its words: the choice that it fixes with its pins, several where numbers are given stage by stage; or
    a technique that is left out."""

    words: str
    key: str = ""
    pins: tuple[Pin, ...] = ()
    forbid: str = ""


def contradiction(limits: Limits) -> ImpossibleError:
    """The error for a space that has no layout at all."""
    if limits.pinned("stage_split") == code("stage_split", BALANCED) and not limits.pinned("recompute_depth"):
        return _stages_alone(limits)
    core = _fewest(limits, _everything_said(limits))
    if not core:
        return ImpossibleError("NO_PLAN", f"No layout of {counted(limits.world, 'device')} exists for this request.", flag="--pin", hint="Use another number of devices.")  # fmt: skip
    batch = next((said for said in core if said.key in OF_BATCH[:2]), None)
    if batch is not None and all(said.key in OF_BATCH for said in core):
        return _no_batch(limits, batch, core)
    return ImpossibleError(
        "NO_PLAN",
        f"No layout of {counted(limits.world, 'device')} {_having(core)}.",
        flag="--pin" if any(said.pins for said in core) else "--forbid",
        value=", ".join(said.words for said in core),
        hint=" ".join((*_left_open(limits, core), "Drop one of them." if len(core) > 1 else "Leave it out.")),
    )


def _stages_alone(limits: Limits) -> ImpossibleError:
    """The error for stages that are chosen together with what they run again where nothing is said of that."""
    split = next(said for said in _everything_said(limits) if said.key == "stage_split")
    words = "A/B with a number for every stage" if limits.split else RULED
    return ImpossibleError(
        "NO_PLAN",
        f"{split.words} goes with the layers that each stage runs again, and nothing says them.",
        flag="--pin",
        value=split.words,
        hint=f"Add recompute={words} to --pin.",
    )


def _everything_said(limits: Limits) -> list[Said]:
    together: dict[str, list[Pin]] = {}
    for pin in limits.pins:
        together.setdefault(_choice(limits, pin), []).append(pin)
    pinned = [Said(f"{key}={_word(limits, key, pins)}", key, tuple(pins)) for key, pins in together.items()]
    return [*pinned, *(Said(f"no {word}", forbid=word) for word in limits.forbids)]


def _choice(limits: Limits, pin: Pin) -> str:
    """The choice that a pin is part of: which layers run again, and how many each stage owns, may take several."""
    if pin.key.startswith((OF_STAGE, "recompute_depth")):
        return "recompute"
    return "stage_split" if pin.key.startswith(LAYERS_OF) else pin.key


def _word(limits: Limits, key: str, pins: Sequence[Pin]) -> str:
    numbers = {"recompute": limits.depths, "stage_split": limits.split}.get(key, ())
    return "/".join(map(str, numbers)) or pins[-1].word


def _no_batch(limits: Limits, batch: Said, core: Sequence[Said]) -> ImpossibleError:
    alone = f"Values that divide the batch: {', '.join(str(d) for d in divisors(limits.global_batch)[:MOST_VALUES])}."
    return ImpossibleError(
        "BATCH_SPLIT",
        f"{_and([said.words for said in core])} cannot make up the global batch of {counted(limits.global_batch, 'sequence')} on {counted(limits.world, 'device')}: global batch = micro-batch x accumulation x data-parallel ranks.",
        flag="--micro-batch" if batch.key == "micro_batch" else "--grad-accum",
        value=batch.pins[0].word,
        hint=" ".join(_left_open(limits, core)) if len(core) > 1 else alone,
    )


def _having(core: Sequence[Said]) -> str:
    if not any(said.pins for said in core):
        return f"does without {_and([said.forbid for said in core])}"
    return f"has {_and([said.words for said in core])}{' together' if len(core) > 1 else ''}"


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


def _space(limits: Limits, every: Sequence[Said]) -> Candidates:
    """The layouts with some of what was said; balanced stages are looked at without a pin of the layers that they run again, too."""
    pins = tuple(pin for said in every for pin in said.pins)
    forbids = tuple(said.forbid for said in every if said.forbid)
    keys = {said.key for said in every}
    is_alone = "stage_split" in keys and not limits.split and "recompute" not in keys
    also = (*limits.also, "balanced_stages") if is_alone else limits.also
    return enumerate_candidates(replace(limits, pins=pins, forbids=forbids, also=also))


def _left_open(limits: Limits, core: Sequence[Said]) -> Iterator[str]:
    """Which values every pin may have beside the others."""
    if limits.split and sum(limits.split) != limits.layers:
        yield f"The stages own {counted(sum(limits.split), 'layer')} so, and the model has {limits.layers}."
        return
    for said in (said for said in core if said.pins):
        others = [other for other in core if other is not said]
        values = _values(_space(limits, others), said.key)
        if values:
            beside = f"With {_and([other.words for other in others])}" if others else "Here"
            yield f"{beside} {said.key} is {values}."


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
