"""Formulas held against traces: `python -m benchmarks.bench_memory [COUNT]` over the grid, writing results/memory.json;
`python -m benchmarks.bench_memory drawn COUNT` over scenarios drawn from all that is legal, writing results/memory_drawn.json.

COUNT scenarios (the whole grid without it), the first and the last stage of each, as many at a time as there are cores. One row per
term and moment, per term at the peak, and two per axis and operation, bytes sent and number of collectives: in how many scenarios
it was there, in how many it was within a thousandth and within two hundredths, the mean and the worst of |predicted / traced - 1|,
and the scenario of the worst.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import mean

import torch

from benchmarks.record import circumstances, write
from strategist.measure.child import in_child
from strategist.measure.kinds import Kind, chosen_kinds
from strategist.measure.models import shape_model
from strategist.measure.trace_rank import trace_rank
from tests.measure.drawn import drawn
from tests.measure.grid import Difference, Scenario, differences, plan_of, scenarios

SEED = 1
"""Of what is drawn; tests draw others."""
WEIGHTY = 1 << 20
"""Bytes below which a difference is not worth a row of its own: counters, scalars."""


def main() -> None:
    """Trace, compare, write, print."""
    if sys.argv[1:2] == ["drawn"]:
        compare("memory_drawn", tuple(drawn(SEED, int(sys.argv[2]))))
    else:
        compare("memory", scenarios()[: int(sys.argv[1])] if len(sys.argv) > 1 else scenarios())


def compare(name: str, chosen: Sequence[Scenario]) -> None:
    """Some scenarios, into a file of results."""
    begin = time.perf_counter()
    found: list[Difference] = []
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for number, (scenario, own) in enumerate(zip(chosen, pool.map(compared, chosen), strict=True), 1):
            found.extend(own)
            if number % 10 == 0:
                save(name, found, number, time.perf_counter() - begin)
            print(f"{number}/{len(chosen)} {time.perf_counter() - begin:.0f} s {scenario.name}", flush=True)
    rows = save(name, found, len(chosen), time.perf_counter() - begin)
    for row in rows:
        print(row)


def save(name: str, found: Iterable[Difference], scenarios_done: int, seconds: float) -> list[dict[str, object]]:
    """Write what is known so far; its rows."""
    rows = list(summary(found))
    about = circumstances(("torch", "numpy"))
    write(name, {**about, "scenarios": scenarios_done, "seconds": round(seconds, 1), "rows": rows})
    return rows


def compared(scenario: Scenario) -> list[Difference]:
    """Every figure of the first and the last stage of one scenario."""
    plan = plan_of(scenario)
    return [
        difference
        for kind in chosen_kinds(plan, "first,last")
        for difference in differences(scenario, in_child(partial(_traced, scenario, kind), scenario.name))
    ]


def _traced(scenario: Scenario, kind: Kind) -> object:
    torch.set_num_threads(1)
    plan = plan_of(scenario)
    return trace_rank(plan, kind, shape_model(plan.model))


def summary(found: Iterable[Difference]) -> Iterator[dict[str, object]]:
    """One row per sort of figure."""
    sorts: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
    for difference in found:
        least = 1 if difference.kind == "count" else WEIGHTY
        if max(difference.predicted, difference.traced) >= least:
            sorts[difference.kind, difference.place, difference.name].append(difference)
    for (kind, place, name), some in sorted(sorts.items()):
        errors = [min(abs(each.ratio - 1), 9.99) for each in some]
        worst = some[errors.index(max(errors))]
        yield {
            "kind": kind, "place": place, "name": name, "cases": len(some),
            "within_0.1_percent": sum(error <= 0.001 for error in errors),
            "within_2_percent": sum(error <= 0.02 for error in errors),
            "mean_error": round(mean(errors), 5), "worst_error": round(max(errors), 5),
            "worst": worst.scenario, "worst_stage": worst.stage,
            "worst_predicted": worst.predicted, "worst_traced": worst.traced,
        }  # fmt: skip


if __name__ == "__main__":
    main()
