"""Rehearse one rank of many layouts on the GPU in this machine, and hold its bytes against their traces.

Three steps, since a GPU is dear and traces need none: plans and traces are made anywhere, rehearsals run where the GPU is,
and the comparison is made anywhere again.

    python -m benchmarks.device.rehearse_gpu prepare FOLDER --gpu h100-sxm-80gb
    python -m benchmarks.device.rehearse_gpu run FOLDER --out rehearsed.jsonl
    python -m benchmarks.device.rehearse_gpu compare FOLDER --rehearsed rehearsed.jsonl --out rows.jsonl

A configuration that cannot be planned or does not fit is a line that says why; `run` leaves out, and says so, what it does
not get to in `--seconds`. On the CPU, to see that it works: `prepare FOLDER --cpu --models llama-debug`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import strategist
from benchmarks.record import circumstances
from strategist.document.estimate import TimeLedger
from strategist.document.load import load_observed, load_plan, observed_from
from strategist.document.observed import ObservedTime, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import as_document, dump
from strategist.errors import StrategistError
from strategist.planner.predict import layout_of

MODELS = ("gpt2-large", "llama-3.2-1b", "llama-3.1-8b", "olmoe-1b-7b")
LAYOUTS = (
    "dp_shard=8,zero=3",
    "dp_replicate=8",
    "dp_shard=8,zero=3,recompute=full",
    "pp=2,dp_shard=4,zero=3,schedule=1f1b",
    "dp_shard=4,tp=2,zero=3,sequence_parallel=1",
    "dp_shard=8,zero=3,recompute=selective",
    "dp_shard=8,zero=1",
)
"""Layouts of eight ranks; those that a shape cannot take are refused, and their lines say so."""
SEQ_LEN, MICRO_BATCH, GLOBAL_BATCH = 4096, 1, 24
BARS = {"allocated": 0.02, "reserved": 0.06}
"""How far rehearsed may be from traced."""

Row = dict[str, Any]


def main() -> None:
    """One of the three steps."""
    asked = _arguments()
    asked.step(asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    before = steps.add_parser("prepare", help="write plans and their traces")
    place = before.add_mutually_exclusive_group(required=True)
    place.add_argument("--gpu", help="the catalogue's name of the GPU")
    place.add_argument("--cpu", action="store_true", help="CPU ranks instead, to try the script")
    before.add_argument("--models", default=",".join(MODELS))
    before.add_argument("--layouts", default=";".join(LAYOUTS), help="in the grammar of --pin, semicolons between")
    before.add_argument("--ranks", type=int, default=8)
    before.add_argument(
        "--seq-len", type=int, default=SEQ_LEN, help="at most; shorter for models that have fewer positions"
    )
    before.set_defaults(step=prepare)
    run = steps.add_parser("run", help="rehearse the plans of a folder, line by line")
    run.add_argument("--out", required=True, help="a new file for the lines")
    run.add_argument("--steps", type=int, default=3)
    run.add_argument("--seconds", type=float, default=3600.0, help="after which no further plan is begun")
    run.set_defaults(step=rehearse_all)
    after = steps.add_parser("compare", help="lines of traces beside rehearsals")
    after.add_argument("--rehearsed", required=True)
    after.add_argument("--out", required=True, help="a new file for the lines")
    after.set_defaults(step=compare)
    for each in (before, run, after):
        each.add_argument("folder", type=Path)
    return parser.parse_args()


def prepare(asked: argparse.Namespace) -> None:
    """NN.plan.json and NN.traced.json for every model and layout, or NN.refused.json."""
    asked.folder.mkdir(parents=True)
    hardware: Any = f"cpu:{asked.ranks}" if asked.cpu else {"gpu": asked.gpu, "gpus_per_node": asked.ranks, "nodes": 1}
    for number, (layout, model) in enumerate(product(asked.layouts.split(";"), asked.models.split(","))):
        seq_len = min(asked.seq_len, strategist.load_model(model).max_seq or asked.seq_len)
        try:
            plan = strategist.recommend(
                model, hardware, seq_len=seq_len, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, pin=layout, top=1
            )
            traced = strategist.trace(plan, ranks="first,last")
        except StrategistError as refusal:
            text = json.dumps({"model": model, "asked": layout, **refused(refusal)})
            (asked.folder / f"{number:02}.refused.json").write_text(text, encoding="utf-8")
            continue
        (asked.folder / f"{number:02}.plan.json").write_text(dump(plan), encoding="utf-8")
        (asked.folder / f"{number:02}.traced.json").write_text(dump(traced), encoding="utf-8")


def refused(refusal: StrategistError) -> Row:
    """What a row says of a plan that there is none of, or that cannot be run."""
    return {"refused": f"E_{refusal.code}", "why": refusal.message}


def rehearse_all(asked: argparse.Namespace) -> None:
    """One line for each plan of the folder; written at once, so that what was measured stays when something fails."""
    from benchmarks.device.older_torch import know_older_names  # loads torch, which readers of rows do not need

    know_older_names()
    about, begin = circumstances(("torch", "numpy")), time.perf_counter()
    with open(asked.out, "x", encoding="utf-8") as file:
        for path in sorted(asked.folder.glob("*.plan.json")):
            is_late = time.perf_counter() - begin > asked.seconds
            row = {"left_out": "no time"} if is_late else rehearsed(path, asked.steps)
            file.write(json.dumps({**about, "plan": path.name, **row}) + "\n")
            file.flush()


def rehearsed(path: Path, steps: int) -> Row:
    """What a rehearsal of the plan in a file saw, or why there is none."""
    try:
        return {"observed": as_document(strategist.rehearse(load_plan(str(path)), ranks="first,last", steps=steps))}
    except StrategistError as refusal:
        return refused(refusal)


def compare(asked: argparse.Namespace) -> None:
    """One line for each rank that was rehearsed; and for each plan that was not, why."""
    with open(asked.out, "x", encoding="utf-8") as file:
        for path in sorted(asked.folder.glob("*.refused.json")):
            file.write(path.read_text(encoding="utf-8") + "\n")
        for line in Path(asked.rehearsed).read_text(encoding="utf-8").splitlines():
            for row in rows(asked.folder, json.loads(line)):
                file.write(json.dumps(row) + "\n")


def rows(folder: Path, seen: Row) -> Iterator[Row]:
    """The ranks of one rehearsed plan beside their traces."""
    plan = load_plan(str(folder / seen["plan"]))
    about = {"model": plan.model.name, "layout": layout_of(plan), "seq_len": plan.workload.seq_len}
    circumstance = {name: seen[name] for name in ("date", "commit", "versions", "machine")}
    if "observed" not in seen:
        yield {**circumstance, **about, **{name: seen[name] for name in ("refused", "why", "left_out") if name in seen}}
        return
    traced = load_observed(str(folder / seen["plan"].replace(".plan.", ".traced.")))
    observed = observed_from(seen["observed"], "rehearsed")
    for before, after in zip(traced.ranks, observed.ranks, strict=True):
        ranks = {"device": observed.device, "traced_with": traced.torch, "kind": after.kind}
        yield {**circumstance, **about, **ranks, **compared(plan, before, after)}


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


def exposed_ns(time: TimeLedger | ObservedTime) -> dict[str, int]:
    """Nanoseconds that a step waits for each term, planned or measured."""
    return {term.name: term.exposed_ns for term in time.terms}


def _step(plan: Plan, rehearsed: RankObservation) -> Mapping[str, Any]:
    clock = rehearsed.time
    if clock is None:
        return {}
    return {
        "predicted_ns": exposed_ns(plan.time),
        "rehearsed_ns": exposed_ns(clock),
        "step_ns": clock.step_ns,
        "launches": clock.launches,
        "launch_ns": clock.launch_ns,
        "stand_in_ns": clock.stand_in_ns,
    }


if __name__ == "__main__":
    main()
