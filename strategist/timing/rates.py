"""Rates that a device really reaches: matmuls by shape from measured rows, attention, memory traffic."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from strategist.catalog import Row, rows
from strategist.facts.hardware import Basis, Gpu
from strategist.records import dataclass
from strategist.space.candidates import Reals

_LIKE = {
    "Ampere": "a100-sxm-80gb",
    "Hopper": "h100-sxm-80gb",
    "Ada": "l40s",
    "Blackwell": "b200-sxm-180gb",
    "Blackwell Ultra": "b300-sxm-288gb",
    "Xe2": "arc-pro-b60",
}
"""Device whose measured rows, as shares of peak, stand for others of the same architecture."""


@dataclass(frozen=True, slots=True, eq=False)
class MatmulRates:
    """Achieved FLOP/s over a grid of log2 rows `m` and log2 of the narrower of `n` and `k`."""

    log_m: Reals
    log_nk: Reals
    rate: Reals
    basis: Basis
    source: str

    def at(self, m: Reals, narrow: Reals) -> Reals:
        """FLOP/s by bilinear interpolation in the logarithms; outside the grid the edge holds for large shapes and the
        rate falls in proportion for small ones, shape of the inputs broadcast."""
        row, row_part = _locate(self.log_m, np.log2(np.maximum(m, 1.0)))
        column, column_part = _locate(self.log_nk, np.log2(np.maximum(narrow, 1.0)))
        low = self.rate[row, column] * (1 - column_part) + self.rate[row, column + 1] * column_part
        high = self.rate[row + 1, column] * (1 - column_part) + self.rate[row + 1, column + 1] * column_part
        inside = low * (1 - row_part) + high * row_part
        small = np.minimum(1.0, m / 2.0 ** self.log_m[0]) * np.minimum(1.0, narrow / 2.0 ** self.log_nk[0])
        value: Reals = inside * np.maximum(small, 1e-4)
        return value


def _locate(grid: Reals, value: Reals) -> tuple[np.ndarray, Reals]:
    index = np.clip(np.searchsorted(grid, value, side="right") - 1, 0, len(grid) - 2)
    part: Reals = np.clip((value - grid[index]) / (grid[index + 1] - grid[index]), 0.0, 1.0)
    return index, part


def peak_FLOPs(gpu: Gpu, precision: str) -> float | None:
    """Dense peak that matmuls of a precision run at; None when the device cannot."""
    peaks = {"bf16": gpu.bf16_FLOPs, "fp16": gpu.fp16_FLOPs, "fp8": gpu.fp8_FLOPs, "fp32": gpu.fp32_FLOPs}
    return peaks[precision]


@cache
def matmul_rates(gpu: Gpu, precision: str) -> MatmulRates:
    """The rate grid of a device and precision: its own measured rows, else shares of peak of its architecture's rows,
    else one assumed share."""
    peak = peak_FLOPs(gpu, precision) or 0.0
    if precision == "fp32":
        return _flat(peak * share("fp32_matmul_share", gpu), "assumed", "catalogue: fp32_matmul_share")
    if precision == "fp8":
        half = matmul_rates(gpu, "bf16")
        scale = peak / (gpu.bf16_FLOPs or peak) * share("fp8_relative_share", gpu)
        return MatmulRates(half.log_m, half.log_nk, half.rate * scale, "derived", half.source)
    sustained = share("sustained_share", gpu)
    row = _measured_row(gpu.name) or _measured_row(_LIKE.get(gpu.arch, ""))
    if row is None:
        measured = gpu.matmul_measured_FLOPs
        rate = (measured or peak * share("matmul_share", gpu)) * sustained
        return _flat(rate, "measured" if measured else "assumed", "catalogue: largest measured matmul or matmul_share")
    return _grid(row, 1.0 if row["gpu"] == gpu.name else peak / _row_peak(row), gpu, sustained)


def _measured_row(name: str) -> Row | None:
    return next((row for row in rows("matmul_rates") if row["gpu"] == name and row["dtype"] == "bfloat16"), None)


def _row_peak(row: Row) -> float:
    return float(_device(row)["bf16_TFLOPs"]) * 1e12


def _device(row: Row) -> Row:
    """The device that a row of rates was measured on."""
    return next(gpu for gpu in rows("gpus") if gpu["name"] == row["gpu"])


def _flat(rate: float, basis: Basis, source: str) -> MatmulRates:
    grid = np.array([7.0, 14.0])
    floor = np.array([[0.35, 0.8], [0.8, 1.0]])
    return MatmulRates(grid, grid, rate * floor, basis, source)


def _grid(row: Row, scale: float, gpu: Gpu, sustained: float) -> MatmulRates:
    """Bucket centres in log2; empty buckets are filled along `m`; rows from constant data are scaled down to what the
    device reaches on random data, and to what it sustains. Rows of another device are also scaled up to that, and moved:
    what a product costs besides its FLOP does not grow with the device, so that one of a quarter of the peak reaches at m
    rows what the other reaches at 4 m, and one of a quarter of the rate per processor at k what the other reaches at 4 k."""
    table = np.array(row["median_TFLOPs"], dtype=np.float64) * 1e12 * scale
    log_m, log_nk = _centres(row["m_edges"]), _centres(row["min_nk_edges"])
    for column in table.T:
        known = np.isfinite(column)
        column[~known] = np.interp(log_m[~known], log_m[known], column[known])
    if gpu.matmul_measured_FLOPs:
        large = table[np.ix_(log_m >= 11, log_nk >= 12)]
        reached = gpu.matmul_measured_FLOPs / float(np.sort(large, axis=None)[large.size // 2])
        table *= min(1.0, reached) if row["gpu"] == gpu.name else reached
    basis: Basis = "measured" if scale == 1.0 else "derived"
    log_m, log_nk = log_m + math.log2(scale), log_nk + math.log2(_per_processor(row, gpu, scale))
    return MatmulRates(log_m, log_nk, table * sustained, basis, str(row["source"]))


def _per_processor(row: Row, gpu: Gpu, scale: float) -> float:
    """The peak of one multiprocessor over that of the measured device."""
    measured = _device(row).get("sm_count")
    return scale * measured / gpu.sm_count if measured and gpu.sm_count else scale


def _centres(edges: object) -> Reals:
    log = np.log2(np.asarray(edges, dtype=np.float64))
    centres: Reals = (log[1:] + log[:-1]) / 2
    return centres


def share(name: str, gpu: Gpu) -> float:
    """A rate or share of the catalogue for a device or its architecture, or its default row."""
    return float(rate_row(name, gpu.name, gpu.arch)["value"])


@cache
def rate_row(name: str, device: str, arch: str) -> Row:
    """The row of `rates` by name for a device, its architecture, or the default one."""
    found = {row["arch"]: row for row in rows("rates") if row["name"] == name}
    return found.get(device, found.get(arch, found.get("default", {})))


@cache
def kept_share(name: str, gpu: Gpu) -> float:
    """What a device keeps of a share of peak that short benchmarks on the device of its row (`gpu`) reached: what power
    leaves of it in a long run, and as much less of its peak as its own products reach; 1 for a share without a device."""
    row = rate_row(name, gpu.name, gpu.arch)
    if "gpu" not in row:
        return 1.0
    own, other = gpu.matmul_measured_FLOPs, _measured_share(row["gpu"])
    reached = min(1.0, own / (gpu.bf16_FLOPs or own) / other) if own else 1.0
    return reached * share("sustained_share", gpu)


def _measured_share(name: str) -> float:
    """Share of peak that products on random data reach on a device of the catalogue that says so."""
    row = next(gpu for gpu in rows("gpus") if gpu["name"] == name)
    return float(row["matmul_bf16_measured_TFLOPs"]) / float(row["bf16_TFLOPs"])


def memory_Bps(gpu: Gpu) -> float:
    """Memory traffic that elementwise kernels reach."""
    return gpu.memory_Bps * share("memory_share", gpu)
