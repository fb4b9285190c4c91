"""The bars that predictions are held to, each beside today's figure, from benchmarks/results/accuracy.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

AVERAGED = {"factor": 1.12, "within_10": 0.50, "within_25": 0.75}
COVERED, MANY = 0.90, 8
"""The share of rows to predict, and rows from which on a source is held to bars of its own."""
ORDERED = {
    "vtrain": "vTrain",
    "bigscience-bloom-prequel": "BLOOM's trials",
    "internlm-internevo": "InternEvo",
    "mist-aceso-artifact": "Mist",
}
"""Sources whose groups vary only the layout."""


class Bar(NamedTuple):
    """A bar in words, what was measured, and whether it is met."""

    words: str
    measured: str
    is_met: bool


def bars(result: Mapping[str, Any]) -> tuple[Bar, ...]:
    """Every bar with its figure."""
    return (
        *_vtrain(result),
        *_sources(result),
        *_averaged(result),
        *_orders(result),
        *_intervals(result),
        *_rest(result),
    )


def bar_rows(result: Mapping[str, Any]) -> list[str]:
    """The bars as rows of a table in Markdown."""
    return [f"| {bar.words} | {bar.measured} | {'yes' if bar.is_met else 'no'} |" for bar in bars(result)]


def percent(share: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * share:.{digits}f} %"


def _vtrain(result: Mapping[str, Any]) -> Iterator[Bar]:
    several, one = result["vtrain_multi_node"], result["vtrain_single_node"]
    yield _most("vTrain, several nodes: MAPE at most 9 %", several["time"]["mape"], 0.09)
    yield _most("vTrain, several nodes: worst regret of a model at most 2 %", several["ranking"]["worst_regret"], 0.02)
    yield _most("vTrain, one node: MAPE at most 12 %", one["time"]["mape"], 0.12)


def _sources(result: Mapping[str, Any]) -> Iterator[Bar]:
    """A source that has the only rows of its devices or framework needs the wider of the two errors, and no bias."""
    timed = [source for source in result["sources"] if source["time"] and source["rows"] >= MANY]
    foundry, others = [], []
    for source in timed:
        (foundry if source["source"] == "mosaicml-llm-foundry" else others).append(source)
    yield from (_most("llm-foundry: median error at most 8 %", own["time"]["median"], 0.08) for own in foundry)
    shared = [source for source in others if not source["is_alone"]]
    alone = [source for source in others if source["is_alone"]]
    yield _each(f"other sources of {MANY} rows or more: median error at most 15 %", shared, "median", 0.15)
    yield _each("the same: bias within 8 %", shared, "bias", 0.08)
    yield _each(
        "sources with the only rows of their devices or framework: median error at most 25 %", alone, "median", 0.25
    )


def _each(words: str, sources: Iterable[Mapping[str, Any]], name: str, limit: float) -> Bar:
    """A bar that every one of some sources is held to: the farthest, or all that miss it."""
    errors = sorted(((source["time"][name], source["source"]) for source in sources), key=lambda pair: -abs(pair[0]))
    shown = [pair for pair in errors if abs(pair[0]) > limit] or errors[:1]
    return Bar(words, ", ".join(f"{who} {percent(error)}" for error, who in shown), abs(errors[0][0]) <= limit)


def _averaged(result: Mapping[str, Any]) -> Iterator[Bar]:
    over, everything = result["over_sources"], result["all"]
    factor = f"median factor exp(median abs ln(predicted / measured)), geometric mean over {over['sources']} sources: at most"
    yield Bar(f"{factor} {AVERAGED['factor']:.2f}", f"{over['factor']:.3f}", over["factor"] <= AVERAGED["factor"])
    for name, words in (("within_10", "runs within 10 %"), ("within_25", "runs within 25 %")):
        yield _least(f"{words}, mean over sources: at least {percent(AVERAGED[name])}", over[name], AVERAGED[name])
    covered = everything["covered"] / everything["rows"]
    yield _least(f"rows predicted: at least {percent(COVERED)}", covered, COVERED)


def _orders(result: Mapping[str, Any]) -> Iterator[Bar]:
    found = {source["source"]: source["ranking"] for source in result["sources"]}
    for name, words in ORDERED.items():
        own = found[name]
        if own["groups"]:
            mean, worst = own["correlation"], own["worst_correlation"]
            measured = f"{mean:.2f}, worst {worst:.2f}, groups: {own['groups']}"
            yield Bar(
                f"order of layouts, {words}: mean Spearman at least 0.9, none below 0.7",
                measured,
                mean >= 0.9 and worst >= 0.7,
            )
        else:
            yield Bar(f"order of layouts, {words}", "no group of three runs is predicted", False)


def _intervals(result: Mapping[str, Any]) -> Iterator[Bar]:
    held, flagged = result["held_out"], result["flagged"]
    yield Bar(
        "80 % intervals without the source: 75 to 90 % of runs inside",
        percent(held["coverage"]),
        0.75 <= held["coverage"] <= 0.9,
    )
    off = {name: share for name, share in held["sources"].items() if not 0.65 <= share <= 0.95}
    shown = ", ".join(f"{name} {percent(share, 1)}" for name, share in off.items()) or "all"
    yield Bar("the same by source of 20 runs or more: 65 to 95 %", shown, not off)
    yield _most("median half-width at most 20 %", held["median_half_width"], 0.2)
    said = f"{percent(flagged['median'], 1)} of {flagged['rows']} runs; others {percent(flagged['others'], 1)}"
    yield Bar(
        "runs outside calibrated ground have the larger median error", said, flagged["median"] > flagged["others"]
    )


def _rest(result: Mapping[str, Any]) -> Iterator[Bar]:
    oom, seconds = result["verdicts"], result["seconds_per_1000_rows"]
    ran = oom["fits_and_ran"] + oom["refused_but_ran"]
    missed = f"{oom['fits_but_oom']} of {oom['fits_but_oom'] + oom['refused_and_oom']}"
    yield Bar("runs that went out of memory and are predicted to fit: none", missed, oom["fits_but_oom"] == 0)
    yield _most("runs that ran and are predicted not to fit: at most 5 %", oom["refused_but_ran"] / ran, 0.05)
    yield _most(
        "physics without a calibration (`--uncalibrated`): median error at most 25 %",
        result["uncalibrated"]["median"],
        0.25,
    )
    yield Bar("1,000 rows in at most 3 s of processor time", f"{seconds:g} s", seconds <= 3)


def _most(words: str, value: float, limit: float) -> Bar:
    return Bar(words, percent(value, 1), value <= limit)


def _least(words: str, value: float, limit: float) -> Bar:
    return Bar(words, percent(value), value >= limit)
