"""Measure what one CPU core gives to training: matmul rates, memory bandwidth, and gloo all-reduce over 2 and 4 ranks.

Prints JSON lines in the shape of the catalogue: one row for `cpus.jsonl`, then rows for `collective_curves.jsonl`.

    python benchmarks/device/measure_cpu.py --machine "2-core x86-64 virtual machine"

Every figure is the best of several repeats: on a shared machine the slower ones measure the neighbours.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MATMUL_SIZE = 1024
STREAM_BYTES = 256 * 2**20
REDUCE_BYTES = tuple(2**power for power in range(10, 25, 2))
RANKS = (2, 4)


def best_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of some timed calls, after one that is not timed."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_GFLOPs(dtype: torch.dtype) -> float:
    """Rate of a square matmul on one thread, random data."""
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
    return 2 * MATMUL_SIZE**3 / best_seconds(lambda: left @ right) / 1e9


def copy_GBps() -> float:
    """Memory traffic of a copy on one thread: bytes read plus bytes written."""
    source = torch.ones(STREAM_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * STREAM_BYTES / best_seconds(lambda: target.copy_(source)) / 1e9


def reduce_worker(rank: int, ranks: int, rendezvous: str, results: str) -> None:
    """One gloo rank: time an all-reduce of every size; rank 0 writes the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    times = [reduce_us(size) for size in REDUCE_BYTES]
    if rank == 0:
        with open(results, "w", encoding="utf-8") as file:
            json.dump(times, file)
    dist.barrier()
    dist.destroy_process_group()


def reduce_us(size: int) -> float:
    """Median microseconds of one all-reduce of `size` bytes of float32."""
    data = torch.ones(size // 4)
    times = []
    for _ in range(40 if size < 2**20 else 12):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times[2:]) * 1e6, 1)


def all_reduce_times(ranks: int) -> list[float]:
    """Median times of all sizes over `ranks` local processes."""
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "times.json")
        mp.start_processes(reduce_worker, (ranks, os.path.join(folder, "store"), results), nprocs=ranks)
        with open(results, encoding="utf-8") as file:
            times: list[float] = json.load(file)
    return times


def curve_row(ranks: int, source: str) -> dict[str, object]:
    """One row of collective_curves: a line latency + bytes / rate through the smallest and the largest size."""
    times = all_reduce_times(ranks)
    traffic = 2 * (ranks - 1) / ranks
    rates = [traffic * size / (us * 1e-6) / 1e9 for size, us in zip(REDUCE_BYTES, times, strict=True)]
    latency_us = min(times)
    fit_GBps = traffic * REDUCE_BYTES[-1] / ((times[-1] - latency_us) * 1e-6) / 1e9
    fitted = [latency_us + traffic * size / fit_GBps / 1e3 for size in REDUCE_BYTES]
    errors = [abs(f - t) / t * 100 for f, t in zip(fitted, times, strict=True)]
    return {
        "gpu": "cpu", "library": f"gloo (torch {torch.__version__.split('+')[0]})", "op": "all_reduce", "gpus": ranks,
        "latency_us": round(latency_us, 1), "busbw_fit_GBps": round(fit_GBps, 3),
        "busbw_peak_GBps": round(max(rates), 3), "fit_median_error_pct": round(statistics.median(errors), 1),
        "bytes": list(REDUCE_BYTES), "time_us": times, "basis": "measured", "source": source,
    }  # fmt: skip


def memory_MiB() -> int:
    """Total memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a generic description, without names of hosts or people")
    machine = parser.parse_args().machine
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    source = f"ours: benchmarks/device/measure_cpu.py on a {machine}, {date}, torch {torch.__version__}"
    row = {
        "name": "cpu", "title": "CPU rank (one core)", "aliases": [], "vendor": "CPU", "arch": "x86-64",
        "cores": os.cpu_count(), "memory_MiB": memory_MiB(), "memory_GBps": round(copy_GBps(), 2),
        "fp32_GFLOPs": round(matmul_GFLOPs(torch.float32), 1),
        "bf16_GFLOPs": round(matmul_GFLOPs(torch.bfloat16), 1),
        "basis": "measured", "source": source,
    }  # fmt: skip
    print(json.dumps(row))
    for ranks in RANKS:
        print(json.dumps(curve_row(ranks, source)))


if __name__ == "__main__":
    main()
