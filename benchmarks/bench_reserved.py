"""Reserved memory that torchtitan published against our trace: `python -m benchmarks.bench_reserved`; writes results/reserved.json.

The two runs of benchmarks/llama3_h100_202412_torchtitan.md that were not compiled (their figure is the caching allocator's largest
reserved memory: torchtitan/components/metrics.py). The program is torchtitan's (torchtitan_model.py) under our executor's
fully_shard; its allocations go through the model of the allocator (strategist/measure/caching_allocator.py). Nothing is fitted.
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.record import circumstances, write
from benchmarks.torchtitan_model import make_model
from strategist import recommend, trace

RUNS = ("titan-0001", "titan-0004")
BAR = 0.015
TRUTH = Path(__file__).parent / "truth/training.csv"


def main() -> None:
    """Trace, compare, write, print."""
    rows = [compared(run) for run in RUNS]
    write("reserved", {**circumstances(("torch", "numpy")), "bar": BAR, "rows": rows})
    for row in rows:
        print(row)


def compared(run: str) -> dict[str, str | int | float]:
    """One published run beside its trace, in bytes: the larger device of the plan plays no part, fake ranks have no memory."""
    row = published(run)
    gpus, micro_batch = int(row["gpus_total"]), int(row["micro_batch_seqs"])
    plan = recommend(
        "llama-3.1-8b",
        f"dgx-b200:{gpus // 8}",
        seq_len=int(row["seq_len"]),
        global_batch=int(row["global_batch_seqs"]),
        pin=f"dp_shard={gpus},zero=3,micro_batch={micro_batch},recompute=none",
    )
    seen = trace(plan, make_model, ranks="first").ranks[0].memory
    said = float(row["peak_mem_gb"]) * 1e9
    return {
        "run": run,
        "gpus": gpus,
        "published_bytes": round(said),
        "traced_reserved_bytes": seen.reserved,
        "traced_allocated_bytes": seen.peak.allocated,
        "error": round(seen.reserved / said - 1, 5),
    }


def published(run: str) -> dict[str, str]:
    """The row of a run in the table of truth."""
    with TRUTH.open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == run)


if __name__ == "__main__":
    main()
