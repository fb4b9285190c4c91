"""What the committed rows of GPUs say: rehearsed bytes beside traced ones, and measured kernels beside the rates we plan with.

python -m benchmarks.device.report
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.device.rehearse_gpu import BARS
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


def rows_of(name: str) -> list[Row]:
    """The lines of a file of rows."""
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def rehearsed_ranks() -> list[Row]:
    """Every rank that was rehearsed on a GPU."""
    return [row for card in CARDS for row in rows_of(f"{card}-rehearsals") if "bytes" in row]


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
