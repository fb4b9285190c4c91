"""Who failed first, and why: a judgement from exit codes, the ranks' own words, and how far each got.

torchrun names the rank that ends first, which is often one that waited for another. Here a rank that lost its peers is
a victim as long as there is anybody else to ask.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Literal

from strategist.records import dataclass
from strategist.runs.beats import Beat

Outlook = Literal["may succeed", "will fail again", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank said about its end. `collateral` marks one that only lost its peers, `deterministic` an end that the
    same step would come to again."""

    rank: int
    collateral: bool
    text: str
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of ranks that came to grief.

    `ends` maps a rank to its exit code (minus the signal's number) if it ended before we ended it, `stacks` to the file
    and function that its main thread was in, `stopped` lists ranks that a signal had halted.
    """

    world: int
    beats: Mapping[int, Beat]
    ends: Mapping[int, int]
    failures: Mapping[int, Failure]
    silent_seconds: float | None = None
    stopped: tuple[int, ...] = ()
    stacks: Mapping[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is written down: the rank that failed first, the others' ends, how we know, and what to expect of a retry."""

    attempt: int
    rank: int | None
    step: int | None
    cause: str
    evidence: Literal["observed", "inferred", "unknown"]
    domain: Literal["workload", "infrastructure", "unknown"]
    retry: Outlook
    last_events: dict[str, str]
    victims: tuple[int, ...]
    action: str = ""
    checkpoint: str | None = None
    steps_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause before it is written down."""

    rank: int | None
    cause: str
    evidence: Literal["observed", "inferred", "unknown"] = "observed"
    domain: Literal["workload", "infrastructure", "unknown"] = "unknown"
    retry: Outlook = "may succeed"


def judge(seen: Evidence, attempt: int) -> Verdict:
    """The verdict on one attempt that failed."""
    found = _own_words(seen) or _killed(seen) or _left(seen) or _silent(seen) or _odd_end(seen) or _nobody(seen)
    beat = seen.beats.get(found.rank) if found.rank is not None else None
    return Verdict(
        attempt=attempt,
        rank=found.rank,
        step=beat.step if beat else None,
        cause=found.cause,
        evidence=found.evidence,
        domain=found.domain,
        retry=found.retry,
        last_events={str(rank): beat.place for rank, beat in sorted(seen.beats.items())},
        victims=tuple(rank for rank in range(seen.world) if rank != found.rank),
    )


def _at(seen: Evidence, rank: int) -> str:
    beat = seen.beats.get(rank)
    return f" in {beat.place}" if beat else ""


def _own_words(seen: Evidence) -> Finding | None:
    """A rank that broke says so itself."""
    own = sorted((f for f in seen.failures.values() if not f.collateral), key=lambda failure: failure.rank)
    if not own:
        return None
    first, everybody = own[0], len(own) == seen.world
    retry: Outlook = "will fail again" if first.deterministic else "may succeed"
    who = "All ranks" if everybody and seen.world > 1 else f"Rank {first.rank}"
    return Finding(rank=first.rank, cause=f"{who} failed{_at(seen, first.rank)}: {first.text}", domain="workload", retry=retry)  # fmt: skip


def _killed(seen: Evidence) -> Finding | None:
    """A rank that a signal ended. One that aborted itself may be a victim: torch does so when peers are gone."""
    killed = sorted(rank for rank, code in seen.ends.items() if code < 0)
    hard = [rank for rank in killed if seen.ends[rank] != -signal.SIGABRT] or killed
    if not hard:
        return None
    rank = hard[0]
    number = -seen.ends[rank]
    words = f"Rank {rank} was killed by signal {number} ({signal.Signals(number).name}){_at(seen, rank)}"
    if number != signal.SIGKILL:
        place = (seen.stacks or {}).get(rank)
        return Finding(rank=rank, cause=f"{words}: {place}." if place else f"{words}.")
    beat = seen.beats.get(rank)
    held = f" It held {beat.resident_bytes / 2**30:.2f} GiB." if beat and beat.resident_bytes else ""
    return Finding(
        rank=rank, cause=f"{words}, from outside or by the kernel for want of memory.{held}", domain="infrastructure"
    )


def _left(seen: Evidence) -> Finding | None:
    """A rank that ended well before its work was done."""
    early = sorted(
        r for r, code in seen.ends.items() if code == 0 and r in seen.beats and seen.beats[r].phase != "done"
    )
    if not early:
        return None
    return Finding(
        rank=early[0], cause=f"Rank {early[0]} left{_at(seen, early[0])}, before the end.", domain="workload"
    )


def _silent(seen: Evidence) -> Finding | None:
    """Of ranks that say nothing, the one that the others wait for."""
    if seen.silent_seconds is None:
        return None
    said = f"said nothing for {seen.silent_seconds:.0f} s"
    if seen.stopped:
        rank = seen.stopped[0]
        return Finding(rank=rank, cause=f"Rank {rank} was stopped by a signal{_at(seen, rank)} and {said}.", domain="infrastructure")  # fmt: skip
    mute = [rank for rank in range(seen.world) if rank not in seen.beats]
    if mute and len(mute) < seen.world:
        return Finding(rank=mute[0], cause=f"Rank {mute[0]} never said anything, and the others waited for it.")
    behind = _last(seen.beats)
    if behind is not None:
        return Finding(rank=behind, cause=f"Rank {behind} {said}{_at(seen, behind)}; the others waited for it.")
    busy = [rank for rank, place in (seen.stacks or {}).items() if "/torch/" not in place]
    if len(busy) == 1 and seen.world > 1:
        place = (seen.stacks or {})[busy[0]]
        return Finding(
            rank=busy[0],
            cause=f"Rank {busy[0]} {said}{_at(seen, busy[0])}, at {place}; the others waited in torch.",
            evidence="inferred",
        )
    return Finding(rank=None, cause=f"No rank got further: all {said}.", evidence="unknown", retry="unknown")


def _last(beats: Mapping[int, Beat]) -> int | None:
    """The one rank that is behind all others; None when several are."""
    if len(beats) < 2:
        return next(iter(beats), None)
    ordered = sorted(beats.values(), key=lambda beat: beat.progress)
    return ordered[0].rank if ordered[0].progress < ordered[1].progress else None


def _odd_end(seen: Evidence) -> Finding | None:
    """A rank that ended with an exit code and no word of its own."""
    odd = sorted(rank for rank, code in seen.ends.items() if code > 0 and rank not in seen.failures)
    if not odd:
        return None
    return Finding(rank=odd[0], cause=f"Rank {odd[0]} ended with exit status {seen.ends[odd[0]]}{_at(seen, odd[0])}.")


def _nobody(seen: Evidence) -> Finding:
    """Only victims are left to ask."""
    told = sorted(seen.failures.values(), key=lambda failure: failure.rank)
    words = f": {told[0].text}" if told else ""
    return Finding(
        rank=None, cause=f"Ranks lost each other, and none says why{words}.", evidence="unknown", retry="unknown"
    )
