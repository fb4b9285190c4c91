"""What `Session.step` costs beside a loop written by hand: the same model on two CPU ranks, block by block in turn."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from benchmarks.record import circumstances, write
from strategist.facts.models import load_model
from tests.executor.harness import run_ranks
from tests.plans import FLOAT32, make_plan

BAR = 1.02
PAIRS, STEPS, SEQ_LEN, SEQUENCES = 15, 3, 128, 4
LAYOUTS: dict[str, dict[str, Any]] = {"DDP": {"dp_replicate": 2}, "FSDP2": {"dp_shard": 2, "zero": 3}}


def measured(layout: dict[str, Any]) -> dict[str, float]:
    """Median over pairs of blocks of ours over theirs, on the clock and in CPU seconds, as the first rank has them."""
    from benchmarks.overhead_loop import timed

    shape = load_model("llama-debug")
    plan = make_plan(shape, **layout, micro_batch=SEQUENCES, seq_len=SEQ_LEN, formats=FLOAT32)
    ours, theirs = run_ranks(2, timed, plan, PAIRS, STEPS, timeout_s=3600.0)[0]
    clock, busy = ([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1))
    return {
        "ratio": round(median(clock), 4),
        "ratio_cpu": round(median(busy), 4),
        "step_s": round(median(block[0] for block in theirs) / STEPS, 4),
        "pairs": PAIRS,
        "bar": BAR,
    }


def main() -> None:
    load = os.getloadavg()[0]
    found = {name: measured(layout) for name, layout in LAYOUTS.items()}
    for name, row in found.items():
        print(f"{name}: {row['ratio']} on the clock, {row['ratio_cpu']} in CPU seconds")
    write(
        "overhead",
        circumstances(["torch"]) | {"load": [round(load, 2), round(os.getloadavg()[0], 2)], "layouts": found},
    )


if __name__ == "__main__":
    main()
