"""docs/accuracy.md and its scatter plot from benchmarks/results/accuracy.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.record import ROOT
from docs.accuracy_bars import bar_rows
from docs.accuracy_bars import percent as _percent
from strategist.accuracy.judge import judge
from strategist.accuracy.scores import grouped
from strategist.accuracy.table import read_runs

SIDE, EDGE = 480, 40


def accuracy_page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    everything = result["all"]
    return "\n".join(
        [
            "# How far predictions lie from published runs",
            "",
            "Runs that other people measured and published (`benchmarks/truth/`), predicted by the formulas of",
            "[time_model.md](time_model.md) and [memory_model.md](memory_model.md) under the calibration that ships: a few factors near 1 per",
            "device and framework (`strategist/catalog/data/calibration.jsonl`; results/calibration.json names the runs they rest on). Every",
            "source is judged under factors fitted to all the others. Constants of the catalogue that were set with runs in sight are",
            "listed at the end; of those no figure is held out. The terms themselves were chosen with all of these",
            "runs in sight, so nothing here promises the same error on new sources.",
            "",
            f"{result['date']}, commit {result['commit'][:12]}: {everything['covered']} of {everything['rows']} rows of quality A and B",
            f"predicted, {result['seconds_per_1000_rows']:g} s of processor time per 1,000 rows.",
            "",
            "![predicted over measured seconds per step](accuracy.svg)",
            "",
            "## Bars",
            "",
            "| bar | today | met |",
            "|---|---|---|",
            *bar_rows(result),
            "",
            "One efficiency per GPU and precision, fitted on such rows, reaches a factor of 1.25, 28 % within 10 % and 60 % within 25 %.",
            "",
            "## By source",
            "",
            "| source | rows | predicted | median factor | within 10 % | within 25 % | bias | MAPE | median error, uncalibrated |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(source["source"], source, _percent(result["uncalibrated"]["sources"][source["source"]], 1)) for source in result["sources"] if source["time"]),
            *(_row(f"vtrain, {name}", result[key], "") for name, key in (("one node", "vtrain_single_node"), ("several nodes", "vtrain_multi_node"))),
            "",
            "bias: exp(median ln(predicted / measured)) - 1; above 0 predictions are too slow.",
            "",
            "| averaged over sources | median factor | within 10 % | within 25 % |",
            "|---|---|---|---|",
            _averages("factors of all other sources", result["over_sources"]),
            _averages("the formulas alone (`--uncalibrated`)", result["uncalibrated"]["over_sources"]),
            _averages("factors that ship, which these runs are in", result["in_sight"]["over_sources"]),
            "",
            *_later(result["later"]),
            "## Order of layouts",
            "",
            "Groups of at least three runs that vary only the layout. Regret: measured time of the run ranked first, over the",
            "measured best, less one.",
            "",
            "| source | groups | mean Spearman | worst | mean regret | worst |",
            "|---|---|---|---|---|---|",
            *_orders(result),
            "",
            "## Intervals",
            "",
            "Factors on a predicted step that hold the middle 80 % of errors depend on what it is made of (catalogue: `intervals`). A step that were all",
            "of one part (time_model.md, the last section) would have these; the logarithms of any other's are the mean of its parts', weighted by seconds:",
            "",
            "| part | low | high |",
            "|---|---|---|",
            *(f"| {part} | {low:.2f} | {high:.2f} |" for part, (low, high) in result["intervals"]["parts"].items()),
            "",
            "Both logarithms are multiplied by how many times as far as usual the runs of its device and of its framework lie (catalogue: `distances`): as far as",
            f"the runs say, the nearer to 1 the fewer of them there are, and a little more for what they leave open; {result['intervals']['unknown']:.2f} for one without any.",
            "`explain` says whose a plan's width is.",
            "",
            "| chip or framework | times as far | runs | sources |",
            "|---|---|---|---|",
            *(f"| {name} | {times:.2f} | {runs} | {sources} |" for _, name, times, runs, sources in result["intervals"]["distances"]),
            "",
            "How they hold, made without a run's own source, and on runs collected later (decision 0210; the score is the interval score of Gneiting and Raftery",
            "2007: width, and ten times what lies outside):",
            "",
            "| runs | inside | inside, over sources | median half-width | score, over sources |",
            "|---|---|---|---|---|",
            _held("of the table, without their source", result["held_out"]),
            _held("collected later", result["later"]["held"]),
            "",
            f"Of {result['memory_held_out']['rows']} measured peaks {_percent(result['memory_held_out']['coverage'])} lie inside the interval of peaks, the middle 80 % of those of all other sources.",
            "",
            "| source with at least 20 runs | inside |",
            "|---|---|",
            *(f"| {name} | {_percent(share)} |" for name, share in result["held_out"]["sources"].items()),
            "",
            "## Out of memory, and peak memory",
            "",
            _verdicts(result["verdicts"]),
            "",
            "Peak memory, like beside like; mean, median, p90 and max of |predicted / measured - 1|. Sources whose rows were all left out",
            "are listed with the reason.",
            "",
            "| source | what its figure counts | rows | predicted | mean | median | p90 | max | bias |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_memory_row(own) for own in result["memory"]),
            "",
            *(f"- {own['source']}, {number} rows without a prediction: {reason}." for own in result["memory"] for reason, number in own["skipped"].items()),
            "",
            "## Networks of convolutions",
            "",
            "ResNets (`benchmarks/truth/convolutions.csv`, images in place of tokens) by the formulas alone; nothing was fitted to them, and they are in none",
            "of the figures above.",
            "",
            "| source | rows | predicted | median factor | within 10 % | within 25 % | bias | MAPE |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(own["key"]["source"], own) for own in _of_images()),
            "",
            "## Rows without a prediction",
            "",
            "| rows | missing |",
            "|---|---|",
            *(f"| {number} | {reason} |" for reason, number in everything["skipped"].items()),
            "",
            "## Constants set with runs in sight",
            "",
            "| constant | runs of |",
            "|---|---|",
            *(f"| {name} | {source} |" for name, source in result["fitted"].items()),
            "",
        ]
    )  # fmt: skip


FIRST = (
    ("small cards and encoders", 147, 1.301, 0.44, 0.46, "0197-runs-of-small-cards-and-encoders"),
    ("thin frameworks", 386, 1.203, 0.60, 0.57, "0198-runs-of-thin-frameworks"),
    ("other pages of known frameworks", 762, 1.121, 0.88, 0.58, "0201-runs-of-known-sources"),
    ("MLPerf, BERT from round 0.7 on among it", 326, 1.332, 0.38, 0.23, "0202-runs-of-mlperf"),
    ("other devices", 305, 1.211, 0.55, 0.38, "0203-runs-of-other-devices"),
    (
        "adapters and whole weights in Hugging Face's trainer, BERT in TensorFlow 1",
        323,
        1.061,
        0.80,
        0.76,
        "0218-what-a-trainer-holds",
    ),
)
"""What was collected, runs, median factor, within 25 %, inside their interval, and the decision that has the first result."""


def _later(found: Mapping[str, Any]) -> Iterator[str]:
    """Runs that were collected after the formulas."""
    oom = found["verdicts"]
    yield from (
        "## Runs collected later",
        "",
        f"{found['all']['rows']} runs of {len(found['sources'])} sources that nobody here had seen (`benchmarks/truth/later.csv`), written down before they were predicted. No factor and no",
        "interval rests on them, and they are in none of the figures above. Predicted for the first time they lay so far off, which is what to expect of a source",
        "like these; intervals are those of the table, and hold less often on sources that nobody looked at:",
        "",
        "| collected | predicted | median factor | within 25 % | inside intervals of 80 % | first result |",
        "|---|---|---|---|---|---|",
        *(f"| {what} | {predicted} | {factor:.2f} | {_percent(near)} | {_percent(inside)} | [{page[:4]}](decisions/{page}.md) |" for what, predicted, factor, near, inside, page in FIRST),
        "",
        "What they pointed at was then looked up in other sources and changed (decisions 0197 to 0203, 0218), after which they lie as below.",
        "",
        "| source | rows | predicted | median factor | within 10 % | within 25 % | bias | MAPE |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(own["source"], own) for own in found["sources"] if own["time"]),
        _row("all of them", found["all"]),
        "",
        f"Averaged over sources: factor {found['over_sources']['factor']:.3f}, {_percent(found['over_sources']['within_10'])} within 10 %, {_percent(found['over_sources']['within_25'])} within 25 %."
        f" {_percent(found['held']['coverage'])} lie inside their interval of 80 %. Of those that ran, {oom['fits_and_ran']} are predicted to fit and {oom['refused_but_ran']} are not; of those that went",
        f"out of memory, {oom['refused_and_oom']} are predicted to and {oom['fits_but_oom']} are not.",
        "",
        "| rows | missing |",
        "|---|---|",
        *(f"| {number} | {reason} |" for reason, number in found["all"]["skipped"].items()),
        "",
    )  # fmt: skip


def _held(what: str, held: Mapping[str, float]) -> str:
    """How intervals hold on some runs."""
    shares = " | ".join(_percent(held[name]) for name in ("coverage", "coverage_over_sources", "median_half_width"))
    return f"| {what} | {shares} | {held['score_over_sources']:.3f} |"


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _averages(name: str, own: Mapping[str, float]) -> str:
    return f"| {name} | {own['factor']:.3f} | {_percent(own['within_10'], 1)} | {_percent(own['within_25'], 1)} |"


def _of_images() -> Iterator[dict[str, Any]]:
    """The scores of runs of ResNets by source."""
    runs = read_runs(str(ROOT / "benchmarks/truth/convolutions.csv"))
    yield from (asdict(group) for group in grouped(judge(runs), ("source",)) if group.key)


def _row(name: str, group: Mapping[str, Any], *more: str) -> str:
    """A source's row, and the cells of further columns."""
    t = group["time"]
    cells = (name, group["rows"], group["covered"], f"{t['factor']:.3f}", _percent(t["within_10"]), _percent(t["within_25"]), _signed(t["bias"]), f"{100 * t['mape']:.1f} %", *more)  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _memory_row(own: Mapping[str, Any]) -> str:
    errors = (own.get(name) for name in ("mean", "median", "p90", "max"))
    shown = [f"{100 * error:.1f} %" if error is not None else "" for error in errors]
    bias = f"{100 * own['bias']:+.1f} %" if "bias" in own else ""
    kind = own["kind"].replace("|", "/")
    return f"| {own['source']} | {kind} | {own['rows']} | {own['runs']} | {' | '.join((*shown, bias))} |"


def _orders(result: Mapping[str, Any]) -> Iterator[str]:
    named = {source["source"]: source for source in result["sources"]} | {
        "vtrain, one node": result["vtrain_single_node"],
        "vtrain, several nodes": result["vtrain_multi_node"],
    }
    for name, group in named.items():
        r = group["ranking"]
        if r["groups"]:
            yield f"| {name} | {r['groups']} | {r['correlation']:.2f} | {r['worst_correlation']:.2f} | {_percent(r['mean_regret'])} | {_percent(r['worst_regret'])} |"


def _verdicts(oom: Mapping[str, int]) -> str:
    return (
        f"Of the runs that ran, {oom['fits_and_ran']} are predicted to fit and {oom['refused_but_ran']} are not; of those that went "
        f"out of memory, {oom['refused_and_oom']} are predicted to and {oom['fits_but_oom']} are not. The whole device counts as usable, "
        "without the headroom that plans leave; the allocator's slack counts where its segments cannot shrink. "
        f"{oom['assumed']} runs of frameworks whose recipes pick a recompute policy state none and fit only with one: the first of selective "
        "and full that fits is assumed, for memory alone."
    )


def scatter(points: Sequence[Sequence[float]]) -> str:
    """Predicted over measured seconds, both logarithmic, as SVG: the diagonal, and the lines a quarter off it."""
    low = math.floor(math.log10(min(min(pair) for pair in points)))
    high = math.ceil(math.log10(max(max(pair) for pair in points)))
    scale = (SIDE - 2 * EDGE) / (high - low)

    def x(value: float) -> str:
        return f"{EDGE + scale * (math.log10(value) - low):.1f}"

    def y(value: float) -> str:
        return f"{SIDE - EDGE - scale * (math.log10(value) - low):.1f}"

    least, most = 10.0**low, 10.0**high
    lines = [
        f'<line x1="{x(least)}" y1="{y(least * f)}" x2="{x(most)}" y2="{y(most * f)}" stroke="{colour}"/>'
        for f, colour in ((1.0, "#444"), (1.25, "#bbb"), (0.8, "#bbb"))
    ]
    ticks = [
        f'<text x="{x(10.0**n)}" y="{SIDE - EDGE / 3:.0f}" text-anchor="middle">{10.0**n:g}</text>'
        f'<text x="{EDGE - 6}" y="{y(10.0**n)}" text-anchor="end">{10.0**n:g}</text>'
        for n in range(low, high + 1)
    ]
    dots = [f'<circle cx="{x(a)}" cy="{y(b)}" r="1.6" fill="#1f5fa8" fill-opacity="0.5"/>' for a, b in points]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" font-family="sans-serif" font-size="10">'
    )
    names = f'<text x="{SIDE / 2}" y="{SIDE - 2}" text-anchor="middle">measured, s per step</text><text x="4" y="14">predicted, s per step</text>'
    ground = f'<rect width="{SIDE}" height="{SIDE}" fill="white"/>'
    return "\n".join([head, ground, *lines, *ticks, *dots, names, "</svg>", ""])
