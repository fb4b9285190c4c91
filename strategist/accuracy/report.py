"""What `accuracy` shows: one document for programs, one table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strategist.accuracy.cells import unread_columns, with_near_names
from strategist.accuracy.judge import Judged
from strategist.accuracy.scores import BY, Group
from strategist.document.calibration import Calibration
from strategist.errors import InputError, did_you_mean, shown
from strategist.facts.calibration import Factor, Near, on_parts, shipped_factors
from strategist.planner.write import step_interval
from strategist.records import replace
from strategist.reports.lines import Line, Span, line, table, wrapped
from strategist.timing.intervals import Interval
from strategist.units import counted, plain_text

INDENT = 14
OF_A_ROW = (
    "predicted_step_s",
    "low_s",
    "high_s",
    "measured_step_s",
    "predicted_peak_bytes",
    "predicted_fits",
    "measured_oom",
)
"""What the document says of a run beside its name; null where it has no prediction, and `skipped` says why."""
REASONS = 24
"""How many reasons why rows have no prediction are told apart."""
LISTED = 5
"""How many of several things are named: runs that factors do not explain, and places that factors are about."""


def columns_of(text: str | None) -> tuple[str, ...]:
    """The columns of `--by`, `source` when it is not given. Raises InputError CHOICE, DUPLICATE_KEY."""
    if text is None:
        return BY[:1]
    names = tuple(part.strip(" ").lower() for part in plain_text(text, "--by").split(","))
    for name in names:
        if name not in BY:
            raise InputError("CHOICE", f"--by cannot group by {name!r}.", flag="--by", value=name, hint=f"{did_you_mean(name, BY)} Known: {', '.join(BY)}.")  # fmt: skip
        if names.count(name) > 1:
            raise InputError("DUPLICATE_KEY", f"--by names {name} twice.", flag="--by", value=text, hint="Name each column once.")  # fmt: skip
    return names


def accuracy_document(groups: Sequence[Group], judged: Sequence[Judged], near: tuple[Near, ...] = ()) -> dict[str, Any]:
    """Groups and rows, every row of the file in its order, with the intervals of a calibration's runs `near`, and the columns that
    nobody asks for."""
    return {
        "groups": list(groups),
        "rows": [_row(one, near) for one in judged],
        "unread_columns": list(_unread(judged)),
    }


def _unread(judged: Sequence[Judged]) -> tuple[str, ...]:
    return unread_columns(judged[0].run) if judged else ()


def _row(one: Judged, near: tuple[Near, ...]) -> dict[str, Any]:
    """One run: what is predicted, or null and the reason in `skipped`."""
    if one.case is None:
        return {"id": one.run["id"], **dict.fromkeys(OF_A_ROW), "skipped": one.skipped}
    bounds = _interval(one, near)
    return {
        "id": one.run["id"],
        "predicted_step_s": one.step_s,
        "low_s": one.step_s * bounds.low,
        "high_s": one.step_s * bounds.high,
        "measured_step_s": one.measured_s or None,
        "predicted_peak_bytes": one.peak_bytes,
        "predicted_fits": one.fits,
        "measured_oom": one.case.measured.is_oom,
        "skipped": None,
    }


def _interval(one: Judged, near: tuple[Near, ...]) -> Interval:
    """The interval of a run's step under a calibration that has its own."""
    return step_interval(replace(one.job, near=near), one.parts)


def accuracy_text(groups: Sequence[Group], listed: Sequence[Judged], width: int, *, quiet: bool) -> list[Line]:
    """The sum over everything and one block per group; `listed` runs are named one by one when they were skipped."""
    shown = groups[:1] if quiet else groups
    blocks = [piece for group in shown for piece in (*_block(group, width), line(""))]
    return [*blocks[:-1], *_skipped_rows(listed, width)]


def unread_text(judged: Sequence[Judged], width: int) -> list[Line]:
    """The columns of a table that were not read; nothing where all were."""
    names = _unread(judged)
    return wrapped("not read", f"columns {with_near_names(names)}", width, indent=INDENT, style="dim") if names else []


def inside_text(judged: Sequence[Judged], near: tuple[Near, ...], width: int) -> list[Line]:
    """How many runs took what the interval of their prediction says; nothing where none has a time."""
    timed = [(one.measured_s / one.step_s, _interval(one, near)) for one in judged if one.measured_s]
    if not timed:
        return []
    inside = sum(bounds.low <= ratio <= bounds.high for ratio, bounds in timed) / len(timed)
    words = f"{100 * inside:.0f} % of {counted(len(timed), 'run')} {'lies' if len(timed) == 1 else 'lie'} inside the interval of 80 % of {'its' if len(timed) == 1 else 'their'} prediction"
    return wrapped("interval", words, width, indent=INDENT)


def skipped_text(judged: Sequence[Judged], width: int) -> list[Line]:
    """How many rows teach nothing, by reason."""
    reasons = Counter(one.skipped or "no step time is stated" for one in judged if not one.measured_s)
    return list(_reasons(dict(reasons.most_common()), "skipped", width))


def _reasons(counts: Mapping[str, int], key: str, width: int) -> Iterator[Line]:
    """How many rows have no prediction, by reason, the most common first; where there are many, the rest together."""
    for reason, number in list(counts.items())[:REASONS]:
        yield from wrapped(key, f"{number}: {reason}", width, indent=INDENT, style="dim")
    rest = list(counts.values())[REASONS:]
    if rest:
        words = f"{sum(rest)}: {counted(len(rest), 'other reason')} (accuracy --verbose has every row's)"
        yield from wrapped(key, words, width, indent=INDENT, style="dim")


def _block(group: Group, width: int) -> Iterator[Line]:
    title = ", ".join(f"{value or '(not stated)'}" for value in group.key.values()) or "all rows"
    yield from wrapped("", title, width, indent=0, style="title")
    yield from wrapped("  covered", f"{group.covered} of {counted(group.rows, 'row')}", width, indent=INDENT)
    yield from _reasons(group.skipped, "  skipped", width)
    if group.time is not None:
        t = group.time
        words = f"median factor x{t.factor:.3f}, bias {100 * t.bias:+.1f} %, within 10 % {100 * t.within_10:.0f} %, within 25 % {100 * t.within_25:.0f} %"
        yield from wrapped("  step time", words, width, indent=INDENT)
        more = f"MAPE {100 * t.mape:.1f} %, median {100 * t.median:.1f} %, p90 {100 * t.p90:.1f} %, max {100 * t.max:.0f} % over {counted(t.runs, 'row')}"
        yield from wrapped("", more, width, indent=INDENT)
    yield from _orders(group, width)
    yield from _memory(group, width)


def _orders(group: Group, width: int) -> Iterator[Line]:
    r = group.ranking
    if r.correlation is None or r.worst_correlation is None or r.mean_regret is None or r.worst_regret is None:
        return
    words = f"Spearman {r.correlation:.2f} (worst {r.worst_correlation:.2f}), regret {100 * r.mean_regret:.1f} % (worst {100 * r.worst_regret:.1f} %) in {r.groups} groups that vary only the layout"
    yield from wrapped("  order", words, width, indent=INDENT)


def _memory(group: Group, width: int) -> Iterator[Line]:
    o = group.oom
    if o.fits_but_oom or o.refused_but_ran or o.refused_and_oom:
        words = f"ran: {o.fits_and_ran} predicted to fit, {o.refused_but_ran} not; out of memory: {o.refused_and_oom} predicted, {o.fits_but_oom} not"
        words += f"; {o.assumed} fit only with a recompute policy that is not stated" if o.assumed else ""
        words += (
            f"; {o.tight} verdicts lie within the interval of the peak, {o.tight_and_wrong} of them wrong"
            if o.tight
            else ""
        )
        yield from wrapped("  OOM", words, width, indent=INDENT)
    rows = [("", kind.kind, f"median {100 * kind.median:.1f} %, p90 {100 * kind.p90:.1f} %, max {100 * kind.max:.0f} %, bias {100 * kind.bias:+.1f} % over {counted(kind.runs, 'row')}") for kind in group.memory]  # fmt: skip
    if rows:
        yield from wrapped("  memory", "by what the figure counts", width, indent=INDENT)
        yield from table(rows, width, indent=4)


def _skipped_rows(judged: Sequence[Judged], width: int) -> Iterator[Line]:
    rows = [(one.run["id"], one.skipped) for one in judged if one.case is None]
    if rows:
        yield line("")
        yield from wrapped("", "rows without a prediction", width, indent=0, style="key")
        yield from table(rows, width)


def _strayed(found: Calibration, width: int) -> Iterator[Line]:
    """How far factors could stray; nothing of documents from before that was chosen."""
    if found.spread:
        how = f"{100 * found.spread:.0f} % from what ships, the width under which runs left out are predicted best"
        yield from wrapped("spread", how, width, indent=INDENT)


def _apart(found: Calibration, width: int) -> list[Line]:
    """The first runs that the factors do not explain."""
    shown_ones = [f"{shown(one.id)} takes {one.ratio:.3g} times what they say" for one in found.apart[:LISTED]]
    more = f", and {len(found.apart) - LISTED} more" if len(found.apart) > LISTED else ""
    text = f"{', '.join(shown_ones)}{more}: another unit, another layout, or a run that waited?"
    return wrapped("unexplained", text, width, indent=INDENT, style="warn") if found.apart else []


def calibration_text(found: Calibration, width: int) -> list[Line]:
    """Factors, and what they are worth on groups that were left out of the fit."""
    held = found.held_out
    worth = f"median factor x{held.before:.3f} before, x{held.after:.3f} after; within 25 % {100 * held.before_within_25:.0f} % before, {100 * held.after_within_25:.0f} % after"
    ships = frozenset(shipped_factors())
    own = [factor for factor in found.factors if factor not in ships]
    rows = [(factor.gpu or factor.framework or "all runs alike", factor.part, f"x{factor.value:.3f}") for factor in own]
    useless = "No factors help" if found.spread == 0 else "These factors do not help"
    better = "" if held.after < held.before else f" {useless} on runs left out: measure more, or do without."
    return [
        *wrapped("runs", f"{found.runs} in {found.groups} groups by {found.grouped_by}", width, indent=INDENT),
        *wrapped("left out", f"{worth}.{better}", width, indent=INDENT, style="plain" if not better else "warn"),
        *_strayed(found, width),
        *_apart(found, width),
        *_near(found, width),
        *([line(""), line(Span("factors on seconds", "key")), *table(rows, width)] if rows else ()),
        *_stayed(len(found.factors) - len(own), width),
        *_together(own, found, width),
    ]


def _near(found: Calibration, width: int) -> Iterator[Line]:
    """The intervals that plans have under the calibration."""
    if not found.near:
        return
    yield line("")
    yield from wrapped("", "intervals of a step, from runs left out", width, indent=0, style="key")
    rows = [(f"chip {one.chip}", one.framework or "any framework", f"{one.width or 'any'} width", f"x{one.low:.3f} to x{one.high:.3f}", f"{one.runs} runs") for one in found.near]  # fmt: skip
    yield from table(rows, width)


def _stayed(number: int, width: int) -> list[Line]:
    return wrapped("", f"{number} that ship stay as they are", width, indent=2, style="dim") if number else []  # fmt: skip


def _together(own: Sequence[Factor], found: Calibration, width: int) -> Iterator[Line]:
    """What the factors come to on each device and framework that runs are of, where these are a few."""
    gpus, frameworks = ([name for name in dict.fromkeys(names) if name] for names in ((one.gpu for one in own), (one.framework for one in own)))  # fmt: skip
    pairs = [(gpu, framework) for gpu in gpus for framework in frameworks]
    if not 0 < len(pairs) <= LISTED:
        return
    yield line("")
    yield line(Span("together", "key"))
    for gpu, framework in pairs:
        words = ", ".join(f"{part} x{value:.3f}" for part, value in on_parts(found.factors, gpu, framework).items())
        yield from wrapped("", f"{gpu}, {framework}: {words}", width, indent=2)
