"""What the committed rows of GPUs say: rehearsed bytes beside traced ones, measured kernels beside the rates we plan with, and runs
beside today's plans.

python -m benchmarks.device.report
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import strategist
from benchmarks.device.rehearse_gpu import BARS, exposed_ns
from benchmarks.device.run_gpu import Case, planned
from strategist.facts.gpus import gpu_by_id
from strategist.timing.rates import matmul_rates

ROWS = Path(__file__).parent / "rows"
CARDS = {"h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb"}
"""The catalogue's names of the cards that files are named after."""

Row = dict[str, Any]


def main() -> None:
    """Print the report."""
    print("\n".join(lines()))


def lines() -> Iterator[str]:
    """The report."""
    ranks = rehearsed_ranks()
    for name, bar in BARS.items():
        errors = [abs(row["bytes"][name]["ratio"] - 1) for row in ranks]
        outside = [
            f"{row['model']}, {row['layout']}, {row['kind']}" for row in ranks if not row["bytes"][name]["within"]
        ]
        yield (
            f"{name}: {len(errors)} ranks, rehearsed beside traced off by {statistics.median(errors):.2%} at the median and "
            f"{max(errors):.2%} at most; {len(outside)} by more than {bar:.0%}"
        )
        yield from (f"  {who}" for who in sorted(set(outside)))
    for card in CARDS:
        ratios = [planned / measured for measured, planned in products(card)]
        yield (
            f"products on {card}: {len(ratios)} shapes, rates we plan with are {statistics.median(ratios):.2f} of those of "
            f"short runs at the median, {min(ratios):.2f} to {max(ratios):.2f}"
        )
    for row in kernels("h100", "sustained"):
        short = "" if "TFLOPs" not in row else f", {row['TFLOPs'][-1]} TFLOP/s"
        yield f"{row['work']} on h100 in the last of {len(row['us'])} seconds: {row['us'][-1]} us{short}, {row['power_W']} W"
    for row, ratio in rehearsed_steps():
        yield f"{row['model']}, {row['layout']}, {row['kind']}: predicted over rehearsed step {ratio:.2f}"
    for card in CARDS:
        for run in runs(card):
            yield (
                f"{run.case.model}, sequences of {run.case.seq_len}, {run.layout}, on {card}: planned over measured step {run.ratio:.2f}, "
                f"loss {run.term_ratio('loss'):.2f}, update {run.term_ratio('optimizer'):.2f}"
            )
    for row, ratio in images():
        yield f"{row['model']}, {row['images']} images, {row['order']}, {row['format']}: planned over measured passes {ratio:.2f}"


class Run(NamedTuple):
    """A run of a card: what was asked, its layout, and nanoseconds of the step and by term, as planned today and as measured."""

    case: Case
    layout: str
    planned_ns: Mapping[str, int]
    measured_ns: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Planned over measured step."""
        return self.term_ratio("step")

    def term_ratio(self, name: str) -> float:
        """The same of one term."""
        return self.planned_ns[name] / self.measured_ns[name]


def runs(card: str) -> Iterator[Run]:
    """Runs beside plans that are made now."""
    hardware = {"gpu": CARDS[card], "gpus_per_node": 1, "nodes": 1}
    for row in rows_of(f"{card}-runs"):
        if "run" in row:
            case, seen = Case(row["model"], row["seq_len"], *row["asked"]), row["run"]
            time = planned(case, hardware).time
            own = {"step": time.step_ns, **exposed_ns(time)}
            yield Run(case, row["layout"], own, {"step": seen["step_ns"], **seen["terms_ns"]})


FORMATS = {"bfloat16": "bf16", "float32": "fp32", "tf32": "tf32"}


def images() -> Iterator[tuple[Row, float]]:
    """Networks of convolutions that an H200 trained, and what planned passes over their images are of those."""
    hardware = {"gpu": CARDS["h200"], "gpus_per_node": 1, "nodes": 1}
    for row in rows_of("h200-convolutions"):
        if row["what"] == "convolutions":
            count, measured = row["images"], row["forward"]["device_us"] + row["backward"]["device_us"]
            time = strategist.recommend(
                row["model"], hardware, precision=FORMATS[row["format"]], micro_batch=count, global_batch=count, top=1
            ).time
            yield row, (time.step_ns - exposed_ns(time)["optimizer"]) / 1e3 / measured


def rehearsed_steps() -> Iterator[tuple[Row, float]]:
    """Ranks that were rehearsed, and what today's prediction of their step, without waiting for other stages, is of what they took; all were
    planned for one node of 8 H100."""
    hardware = {"gpu": CARDS["h100"], "gpus_per_node": 8, "nodes": 1}
    for row in rehearsed_ranks():
        strategy = row["layout"].replace(" ", "")
        numbers = dict(pair.split("=") for pair in strategy.split(","))
        words = ("dp_replicate", "dp_shard", "micro_batch", "accumulation")
        batch = math.prod(int(numbers.get(word, 1)) for word in words)
        plan = strategist.predict(row["model"], hardware, strategy=strategy, seq_len=row["seq_len"], global_batch=batch)
        yield row, (plan.time.step_ns - exposed_ns(plan.time).get("bubble", 0)) / row["step"]["step_ns"]


def rows_of(name: str) -> list[Row]:
    """The lines of a file of rows."""
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def rehearsed_ranks() -> list[Row]:
    """Every rank that was rehearsed on a GPU."""
    return [row for path in sorted(ROWS.glob("*-rehearsals.jsonl")) for row in rows_of(path.stem) if "bytes" in row]


def kernels(card: str, what: str) -> list[Row]:
    """The measured kernels of a sort that did not fail."""
    return [row for row in rows_of(f"{card}-kernels") if row["what"] == what and "failed" not in row]


def products(card: str) -> Iterator[tuple[float, float]]:
    """Measured and planned FLOP/s of products of half-precision random numbers whose rows fill whole lines."""
    rates = matmul_rates(gpu_by_id(CARDS[card]), "bf16")
    for row in kernels(card, "matmul"):
        m, n, k = row["m"], row["n"], row["k"]
        is_plain = row["dtype"] == "bfloat16" and not row["zeros"] and n % 64 == 0 and k % 64 == 0
        if is_plain and min(m, n, k) >= 512:
            yield row["TFLOPs"] * 1e12, float(rates.at(m, min(n, k)))


if __name__ == "__main__":
    main()
