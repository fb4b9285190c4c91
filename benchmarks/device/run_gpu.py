"""Train on the one GPU of this machine, and hold each plan's prediction against the run, term by term.

The last rung of the ladder where there are no peers: kernels, launches and updates are real, and nothing stands in for anything.

    python -m benchmarks.device.run_gpu --gpu h100-sxm-80gb --out rows.jsonl
    python -m benchmarks.device.run_gpu --cpu --out rows.jsonl     to try the script, on a small model

A run that fails leaves a line that says why, and the next one starts; what is not begun in `--seconds` says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import strategist
from benchmarks.device.rehearse_gpu import Row, exposed_ns, refused
from benchmarks.record import circumstances
from strategist.document.load import load_observed
from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import StrategistError
from strategist.planner.predict import layout_of
from strategist.records import replace


class Case(NamedTuple):
    """What is trained, and how; nothing predicts compiled blocks."""

    model: str
    seq_len: int
    micro_batch: int
    accumulation: int
    pin: str = ""
    is_compiled: bool = False


CASES: tuple[Case, ...] = (
    Case("llama-3.2-1b", 4096, 2, 2),
    Case("gpt2", 1024, 8, 4),
    Case("gpt2-large", 1024, 4, 4),
    Case("llama-3.2-1b", 4096, 2, 2, "recompute=full"),
    Case("gpt2", 1024, 1, 4),
    Case("qwen2.5-0.5b", 4096, 2, 4),
    Case("llama-3.2-1b", 4096, 2, 2, is_compiled=True),
    Case("opt-1.3b", 2048, 4, 4),
    Case("smollm2-360m", 2048, 8, 4),
    Case("qwen3-0.6b", 4096, 2, 4),
    Case("llama-3.2-1b", 1024, 4, 4),
    Case("gpt2-large", 1024, 4, 4, is_compiled=True),
    Case("tinyllama-1.1b", 2048, 4, 4),
    Case("llama-3.2-1b", 4096, 1, 4, "zero=3"),
    Case("qwen2.5-1.5b", 4096, 1, 4),
    Case("olmo-1b", 2048, 4, 4),
    Case("gpt2-medium", 1024, 8, 4),
    Case("qwen3-1.7b", 4096, 1, 4),
    Case("gpt3-1.3b", 2048, 4, 4),
    Case("smollm2-360m", 512, 2, 4),
    Case("smollm2-1.7b", 2048, 4, 4),
)
SMALL_CASES: tuple[Case, ...] = (Case("llama-debug", 64, 1, 4), Case("llama-debug", 64, 1, 4, "zero=3"))


def main() -> None:
    """Run every case, line by line, so that what was measured stays when something fails."""
    asked = _arguments()
    hardware: Any = "cpu:1" if asked.cpu else {"gpu": asked.gpu, "gpus_per_node": 1, "nodes": 1}
    about, begin = circumstances(("torch",)), time.perf_counter()
    with open(asked.out, "x", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate((SMALL_CASES if asked.cpu else CASES)[asked.first :]):
            is_late = time.perf_counter() - begin > asked.seconds
            row = {"left_out": "no time"} if is_late else ran(case, hardware, Path(folder) / str(number), asked.steps)
            file.write(
                json.dumps({**about, "model": case.model, "seq_len": case.seq_len, "asked": case[2:], **row}) + "\n"
            )
            file.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--gpu", help="the catalogue's name of the GPU")
    place.add_argument("--cpu", action="store_true", help="a CPU rank and small models, to try the script")
    parser.add_argument("--out", required=True, help="a new file for the lines")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--first", type=int, default=0, help="how many cases of the list to leave out")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further run is begun")
    return parser.parse_args()


def planned(case: Case, hardware: Any) -> Plan:
    """The plan of a case. Raises StrategistError where there is none."""
    return strategist.recommend(
        case.model, hardware, seq_len=case.seq_len, micro_batch=case.micro_batch,
        global_batch=case.micro_batch * case.accumulation, pin=case.pin or None, top=1,
    )  # fmt: skip


def ran(case: Case, hardware: Any, folder: Path, steps: int) -> Row:
    """One case, planned and run in a process of its own."""
    folder.mkdir()
    try:
        plan = planned(case, hardware)
    except StrategistError as refusal:
        return refused(refusal)
    if case.is_compiled:
        plan = replace(plan, strategy=replace(plan.strategy, compile=True))
    (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
    words = ("run", str(folder / "plan.json"), "--steps", str(steps), "--out", str(folder / "run"), "--observe")
    command = (sys.executable, "-m", "strategist", *words, "--accept-hardware", "--allow-edited", "--json")
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = {"layout": layout_of(plan), "seconds": round(time.perf_counter() - begin, 1)}
    if done.returncode:
        return {**took, "failed": done.returncode, "why": (done.stdout + done.stderr)[-1500:]}
    observed = load_observed(str(folder / "run" / "run.json"))
    return {**took, "device": observed.device, **beside(plan, observed.ranks[0])}


def beside(plan: Plan, seen: RankObservation) -> Row:
    """What the plan said of the step and its memory, and what was measured."""
    clock, memory = seen.time, plan.memory
    if clock is None:
        return {}
    return {
        "predicted": {
            "step_ns": plan.time.step_ns,
            "terms_ns": exposed_ns(plan.time),
            "peak_bytes": round(memory.peak.value),
        },
        "run": {
            "step_ns": clock.step_ns,
            "terms_ns": exposed_ns(clock),
            "launches": clock.launches,
            "launch_ns": clock.launch_ns,
            "allocated_bytes": seen.memory.peak_bytes,
            "reserved_bytes": seen.memory.reserved,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
