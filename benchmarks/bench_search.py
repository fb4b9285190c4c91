"""How much is searched, and how fast: `make bench-search` runs this and writes results/search.json.

Every job is a search in a process of its own: the first one there counts, what it loads included. Beside its seconds stand what
became of its layouts and which values of which choices were looked at; a job that looks at less than its floor fails, so that
nothing becomes fast by leaving out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.record import ROOT, circumstances, write
from strategist.ask import Given, complete
from strategist.planner.certify import certificate
from strategist.planner.search import search


class Job(NamedTuple):
    """A question with its bars: CPU seconds, which other work on the machine moves least, and where it has one bytes of the
    largest resident set."""

    question: Mapping[str, Any]
    seconds: float
    peak_bytes: float = math.inf


GALVATRON = {"model": "llama-2-7b", "gpu": "a100-sxm-80gb", "gpus_per_node": 8, "nodes": 1, "seq_len": 2048, "global_batch": 64}  # fmt: skip
LARGE_HEAD = "Llama-3.2-1B, 16 H100"
JOBS: Mapping[str, Job] = {
    "calculon J1: GPT-3 13B, 64 A100, batch 64": Job({"model": "gpt3-13b", "hardware": "dgx-a100-80gb:8", "seq_len": 2048, "global_batch": 64, "precision": "fp16"}, 1.0),
    "galvatron J6: Llama-2-7B, 8 GPUs of 24 GB": Job({**GALVATRON, "gpu_memory_bytes": 24 * 10**9}, 0.5),
    "galvatron J6: Llama-2-7B, 8 GPUs of 38 GB": Job({**GALVATRON, "gpu_memory_bytes": 38 * 10**9}, 0.5),
    "galvatron J6: Llama-2-7B, 8 GPUs of 78 GB": Job({**GALVATRON, "gpu_memory_bytes": 78 * 10**9}, 0.5),
    "Llama-3.1-405B, 16,384 H100": Job({"model": "llama-3.1-405b", "hardware": "dgx-h100:2048", "seq_len": 8192, "global_batch": 16384}, 3.0, 1e9),
    "DeepSeek-V3, 2,048 H800": Job({"model": "deepseek-v3", "hardware": "hgx-h800-8:256", "seq_len": 4096, "global_batch": 15360}, 3.0),
    LARGE_HEAD: Job({"model": "llama-3.2-1b", "hardware": "dgx-h100:2", "seq_len": 2048, "global_batch": 64}, 0.5),
}  # fmt: skip
"""What other searches were measured on, the largest published runs, and a model whose vocabulary outweighs its layers."""

FIRST = "calculon J1: GPT-3 13B, 64 A100, batch 64"
MANY = "Llama-3.1-8B, 1,024 H100"
MORE = "Llama-3.1-8B, 8,192 H100"
EVERYTHING: Mapping[str, Mapping[str, Any]] = {
    **{name: JOBS[name].question for name in (FIRST, LARGE_HEAD)},
    MANY: {"model": "llama-3.1-8b", "hardware": "dgx-h100:128", "seq_len": 8192, "global_batch": 1024},
    MORE: {"model": "llama-3.1-8b", "hardware": "dgx-h100:1024", "seq_len": 8192, "global_batch": 8192},
}
"""Jobs of which all that fits is weighed and timed: some thousand layouts, and some ten thousands."""

CANDIDATE_SECONDS = 5e-6
"""The bar on a layout that is weighed in full and timed, all else of a search included that leaves none out for being slow."""

SCALING = tuple(2**power for power in range(6, 18))
"""Devices of the same job, from 64 to 131,072; a sequence for each."""
SCALING_SECONDS = 10.0

WORDS: Mapping[str, frozenset[str]] = {
    "zero": frozenset("0123"),
    "schedule": frozenset({"none", "1f1b", "interleaved"}),
    "context_parallel": frozenset({"none", "ring", "all-to-all"}),
    "recompute": frozenset({"none", "selective", "full"}),
    "offload": frozenset({"none", "optimizer", "parameters", "nvme"}),
    "sequence_parallel": frozenset("01"),
}
"""Values of choices that every job looks at."""
FLOORS: Mapping[str, Mapping[str, int]] = {
    FIRST: {"enumerated": 12483, "pp": 6, "dp_replicate": 7, "dp_shard": 7, "cp": 2, "tp": 4, "virtual_stages": 4, "micro_batch": 7, "accumulation": 7},
    **{
        f"galvatron J6: Llama-2-7B, 8 GPUs of {size} GB": {"enumerated": 4314, "pp": 4, "dp_replicate": 4, "dp_shard": 4, "cp": 2, "tp": 4, "virtual_stages": 4, "micro_batch": 7, "accumulation": 7}
        for size in (24, 38, 78)
    },
    "Llama-3.1-405B, 16,384 H100": {"enumerated": 89409, "pp": 7, "dp_replicate": 15, "dp_shard": 15, "cp": 4, "tp": 4, "virtual_stages": 3, "micro_batch": 8, "accumulation": 13},
    LARGE_HEAD: {"enumerated": 8826, "pp": 5, "dp_replicate": 5, "dp_shard": 5, "cp": 2, "tp": 4, "virtual_stages": 4, "micro_batch": 7, "accumulation": 7},
    "DeepSeek-V3, 2,048 H800": {"enumerated": 1261677, "pp": 6, "dp_replicate": 12, "dp_shard": 12, "cp": 3, "tp": 4, "ep": 9, "etp": 4, "micro_batch": 23, "accumulation": 41},
}  # fmt: skip
"""How many values of other choices, and how many layouts, a job looks at least at: as many as when the bars were set."""
OWN_WORDS: Mapping[str, Mapping[str, frozenset[str]]] = {
    LARGE_HEAD: {"stage_split": frozenset({"even", "weighted"})},
    "DeepSeek-V3, 2,048 H800": {"schedule": frozenset({"none", "1f1b"})},
}
"""Where a job looks at more values than others, or at fewer: 61 layers are no multiple of anything that could be interleaved."""


def question_of(fields: Mapping[str, Any]) -> Any:
    """The complete question."""
    return complete(Given(**fields)).question


def scaled(gpus: int) -> dict[str, Any]:
    """The job that grows: a 70B model on more and more nodes."""
    return {"model": "llama-3.1-70b", "hardware": f"dgx-h100:{gpus // 8}", "seq_len": 8192, "global_batch": gpus}


def searched(fields: Mapping[str, Any], again: int = 0, *, bests: bool = True) -> dict[str, Any]:
    """The first search of this process, and the median of some more of the same: seconds, what became of its layouts, which
    values were looked at, and the process's largest resident set. It is the search of `plan`, for the best of every family, or
    without `bests` one of everything that fits."""
    seconds, cpu = [], []
    for _ in range(1 + again):
        start, busy = time.perf_counter(), time.process_time()
        found = search(question_of(fields), bests=bests)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    account = certificate(found, (), whole_sequences=False)
    return {
        "seconds": round(seconds[0], 4),
        "cpu_seconds": round(cpu[0], 4),
        "again_seconds": round(median(cpu[1:]), 4) if again else None,
        "peak_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
        "enumerated": account.enumerated,
        "refused": sum(rule.count for rule in account.refused),
        "slower": account.slower,
        "pruned": account.bounded,
        "weighed": account.weighed,
        "evaluated": account.evaluated,
        "best": account.best_layout,
        "dimensions": {dimension.name: list(dimension.values) for dimension in account.dimensions},
    }


def alone(fields: Mapping[str, Any], again: int = 0, *, bests: bool = True) -> dict[str, Any]:
    """The same in a process of its own. Raises CalledProcessError when it fails."""
    words = ("--fields", json.dumps(fields), "--again", str(again), *(() if bests else ("--everything",)))
    command = (sys.executable, "-m", "benchmarks.bench_search", *words)
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def dropped(name: str, found: Mapping[str, Any]) -> list[str]:
    """What a job should have looked at and did not."""
    values = found["dimensions"]
    words = {**WORDS, **OWN_WORDS.get(name, {})}
    gone = [f"{choice}={word}" for choice in words for word in sorted(words[choice] - set(values.get(choice, ())))]
    counted = {choice: len(every) for choice, every in values.items()} | {"enumerated": found["enumerated"]}
    floors = FLOORS[name].items()
    return gone + [
        f"{what}: {counted.get(what, 0)} of {least}" for what, least in floors if counted.get(what, 0) < least
    ]


def figures(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Every figure and its bar."""
    jobs, scaling = result["jobs"], result["scaling"]
    first, largest = scaling[0], scaling[-1]
    seconds = {f"{name}, CPU seconds": (found["cpu_seconds"], JOBS[name].seconds) for name, found in jobs.items()}
    room = {f"{name}, peak MB": (found["peak_MB"], JOBS[name].peak_bytes / 1e6) for name, found in jobs.items() if JOBS[name].peak_bytes < math.inf}  # fmt: skip
    galvatron = [found["again_seconds"] for name, found in jobs.items() if name.startswith("galvatron")]
    every = result.get(
        "everything", result["jobs"]
    )  # a search of before there was a bound on time evaluated all that fits
    logarithms = math.log2(largest["gpus"]) / math.log2(first["gpus"])
    return {
        **seconds,
        **room,
        "galvatron J6, CPU seconds of 78 GB / of 24 GB": (round(galvatron[-1] / galvatron[0], 3), 1.0),
        "microseconds per evaluated layout, best job": (round(min(1e6 * found["again_seconds"] / found["evaluated"] for found in every.values()), 2), 1e6 * CANDIDATE_SECONDS),
        "slowest of 64 to 131,072 GPUs, CPU seconds": (max(found["cpu_seconds"] for found in scaling), SCALING_SECONDS),
        "131,072 GPUs / 64 GPUs, CPU seconds": (round(largest["cpu_seconds"] / first["cpu_seconds"], 3), round(logarithms**3, 2)),
    }  # fmt: skip


def missed(result: Mapping[str, Any]) -> list[str]:
    """Bars that are missed and values that were dropped."""
    over = [name for name, (value, bar) in figures(result).items() if value > bar]
    return over + [f"{name} dropped {gone}" for name, found in result["jobs"].items() for gone in dropped(name, found)]


def measured(repeats: int) -> dict[str, Any]:
    """All jobs, one process each."""
    return {
        **circumstances(("strategist", "numpy")),
        "load_before": round(os.getloadavg()[0], 2),
        "jobs": {name: alone(job.question, repeats) for name, job in JOBS.items()},
        "everything": {name: _brief(alone(question, repeats, bests=False)) for name, question in EVERYTHING.items()},
        "scaling": [{"gpus": gpus, **_brief(alone(scaled(gpus)))} for gpus in SCALING],
        "load_after": round(os.getloadavg()[0], 2),
    }


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: found[name] for name in ("cpu_seconds", "seconds", "again_seconds", "enumerated", "evaluated", "peak_MB")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; exit 1 when a bar is missed or a value dropped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", type=int, default=5, help="further searches in each process (5)")
    parser.add_argument("--fields", help="one question as JSON: print what its search did, and write nothing")
    parser.add_argument("--everything", action="store_true", help="with --fields: leave out nothing for being slow")
    options = parser.parse_args(arguments)
    if options.fields is not None:
        print(json.dumps(searched(json.loads(options.fields), options.again, bests=not options.everything)))
        return 0
    result = measured(options.again)
    for name, found in result["jobs"].items():
        counts = ", ".join(
            f"{found[what]:,} {what}" for what in ("enumerated", "refused", "slower", "pruned", "evaluated")
        )
        print(f"{name}: {found['cpu_seconds']} s; {counts}")
    for name, (value, bar) in figures(result).items():
        print(f"{name:60} {value:10g}   bar {bar:g}")
    wrong = missed(result)
    print(f"missed: {'; '.join(wrong) or 'none'}; written to {write('search', result)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
