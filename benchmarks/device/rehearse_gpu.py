"""Rehearse one rank of many layouts on the GPU in this machine, and hold its bytes against their traces.

Writes JSON lines, one per configuration and kind of rank: what was traced, what the allocator measured, the step by
terms, date, commit and versions. A configuration that cannot be planned or does not fit is a line that says why.

    python -m benchmarks.device.rehearse_gpu --gpu h200-sxm-141gb --out rows.jsonl

Nothing of it has run on a GPU yet. On the CPU, to see that it works:

    python -m benchmarks.device.rehearse_gpu --cpu --models llama-debug --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import strategist
from benchmarks.record import circumstances
from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from strategist.errors import StrategistError
from strategist.planner.predict import layout_of

MODELS = ("gpt2-large", "llama-3.2-1b", "llama-3.1-8b", "olmoe-1b-7b")
LAYOUTS = (
    "dp_replicate=8",
    "dp_shard=8,zero=3",
    "dp_shard=8,zero=3,recompute=full",
    "dp_shard=4,tp=2,zero=3,sequence_parallel=1",
    "pp=2,dp_shard=4,zero=3,schedule=1f1b",
)
"""Layouts of eight ranks; those that a shape cannot take are refused, and their lines say so."""
SEQ_LEN, MICRO_BATCH, GLOBAL_BATCH = 4096, 1, 64
BARS = {"allocated": 0.02, "reserved": 0.06}
"""How far rehearsed may be from traced."""

Row = dict[str, Any]


def main() -> None:
    """Measure and write, line by line, so that what was measured stays when something fails."""
    asked = _arguments()
    hardware: Any = f"cpu:{asked.ranks}" if asked.cpu else {"gpu": asked.gpu, "gpus_per_node": asked.ranks, "nodes": 1}
    about = circumstances(("torch", "numpy"))
    with open(asked.out, "x", encoding="utf-8") as file:
        for model, layout in product(asked.models.split(","), asked.layouts.split(";")):
            for row in rows(model, hardware, layout, seq_len=asked.seq_len, steps=asked.steps):
                file.write(json.dumps({**about, "model": model, "asked": layout, **row}) + "\n")
                file.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--gpu", help="the catalogue's name of the GPU in this machine")
    place.add_argument("--cpu", action="store_true", help="CPU ranks instead, to try the script")
    parser.add_argument("--out", required=True, help="a new file for the lines")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="in the grammar of --pin, with semicolons between")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def rows(model: str, hardware: Any, layout: str, *, seq_len: int, steps: int) -> Iterator[Row]:
    """The lines of one configuration, one per kind of rank; one that says why where it cannot be."""
    try:
        plan = strategist.recommend(
            model, hardware, seq_len=seq_len, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, pin=layout, top=1
        )
        traced = strategist.trace(plan, ranks="first,last")
        rehearsed = strategist.rehearse(plan, ranks="first,last", steps=steps)
    except StrategistError as refusal:
        yield {"refused": f"E_{refusal.code}", "why": refusal.message}
        return
    for before, after in zip(traced.ranks, rehearsed.ranks, strict=True):
        yield {
            "device": rehearsed.device,
            "layout": layout_of(plan),
            "kind": after.kind,
            **compared(plan, before, after),
        }


def compared(plan: Plan, traced: RankObservation, rehearsed: RankObservation) -> Row:
    """Bytes on both rungs and whether they are within the bars; the step by terms beside the plan's."""
    pairs = {"allocated": (traced.memory.peak_bytes, rehearsed.memory.peak_bytes)}
    if rehearsed.memory.reserved:
        pairs["reserved"] = (traced.memory.reserved, rehearsed.memory.reserved)
    bytes_ = {
        name: {"traced": before, "rehearsed": after, "ratio": round(after / before, 5), "within": is_within(name, before, after)}
        for name, (before, after) in pairs.items()
    }  # fmt: skip
    return {"bytes": bytes_, "step": _step(plan, rehearsed)}


def is_within(name: str, traced: int, rehearsed: int) -> bool:
    """Whether a measurement keeps its bar."""
    return abs(rehearsed / traced - 1) <= BARS[name]


def _step(plan: Plan, rehearsed: RankObservation) -> Mapping[str, Any]:
    clock = rehearsed.time
    if clock is None:
        return {}
    return {
        "predicted_ns": {term.name: term.exposed_ns for term in plan.time.terms},
        "rehearsed_ns": {term.name: term.exposed_ns for term in clock.terms},
        "step_ns": clock.step_ns,
        "launches": clock.launches,
        "launch_ns": clock.launch_ns,
        "stand_in_ns": clock.stand_in_ns,
    }


if __name__ == "__main__":
    main()
