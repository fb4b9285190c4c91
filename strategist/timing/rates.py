"""Rates that a device really reaches: matmuls by shape from measured rows, attention, memory traffic."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from strategist.catalog import Row, rows
from strategist.columns import clamped
from strategist.errors import ImpossibleError
from strategist.facts.gpus import gpu_by_id
from strategist.facts.hardware import Basis, Cluster, Gpu
from strategist.facts.job import Job
from strategist.facts.workload import PRECISIONS
from strategist.records import dataclass
from strategist.space.candidates import Reals

LIKE_CHIP = {
    "8.0": "a100-sxm-80gb",
    "8.6": "rtx-a6000",
    "8.9": "l40s",
    "9.0": "h100-sxm-80gb",
    "10.0": "b200-sxm-180gb",
    "10.3": "b300-sxm-288gb",
    "12.0": "rtx-pro-6000-blackwell-server",
    "gfx942": "mi300x",
    "gfx950": "mi355x",
}
"""Device whose large products, measured under its power limit, stand for others of the same process, by compute capability."""

_LIKE = {
    "Ampere": "a100-sxm-80gb",
    "Hopper": "h100-sxm-80gb",
    "Ada": "l40s",
    "Blackwell": "b200-sxm-180gb",
    "Blackwell Ultra": "b300-sxm-288gb",
    "Xe2": "arc-pro-b60",
    "CDNA4": "mi355x",
}
"""Device whose measured rows, as shares of peak, stand for others of the same architecture."""


_SCALED = {"fp8": "bf16", "fp4": "fp8", "tf32": "bf16"}
"""Precisions whose rates are those of another, at the ratio of the peaks and of the shares that products reach of them."""


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
    index = clamped(np.searchsorted(grid, value, side="right") - 1, 0, len(grid) - 2)
    part: Reals = clamped((value - grid[index]) / (grid[index + 1] - grid[index]), 0.0, 1.0)
    return index, part


def peak_FLOPs(gpu: Gpu, precision: str) -> float | None:
    """Dense peak that matmuls of a precision run at; None when the device cannot."""
    peaks = {
        "bf16": gpu.bf16_FLOPs,
        "fp16": gpu.fp16_FLOPs,
        "fp8": gpu.fp8_FLOPs,
        "fp4": gpu.fp4_FLOPs,
        "fp32": gpu.fp32_FLOPs,
        "tf32": gpu.tf32_FLOPs,
    }
    return peaks[precision]


def without_rate(cluster: Cluster, precision: str) -> Gpu | None:
    """A device that does not multiply in a number format; none where all do."""
    return next((g.node.gpu for g in cluster.groups if not peak_FLOPs(g.node.gpu, precision)), None)


def shared_precisions(cluster: Cluster) -> str:
    """The number formats in which all devices multiply, as words to choose from."""
    return " or ".join(word for word in PRECISIONS if without_rate(cluster, word) is None)


def require_rate(job: Job) -> None:
    """Raises ImpossibleError HARDWARE_FEATURE for a number format in which some device does not multiply: no step of it has a length."""
    precision = job.workload.precision
    lacking = without_rate(job.cluster, precision)
    if lacking is not None:
        raise ImpossibleError(
            "HARDWARE_FEATURE",
            f"{lacking.title} does not multiply in {precision}.",
            flag="--precision",
            value=precision,
            hint=f"Use --precision {shared_precisions(job.cluster)}.",
        )


@cache
def matmul_rates(gpu: Gpu, precision: str) -> MatmulRates:
    """The rate grid of a device and precision: its own measured rows, else shares of peak of its architecture's rows,
    else one assumed share."""
    peak = peak_FLOPs(gpu, precision) or 0.0
    if not peak:
        return _flat(0.0, "assumed", "no rate in this format")
    if precision == "fp32":
        is_cpu = gpu.vendor == "CPU"  # whose units multiply in fp32 as in bf16
        half = peak if is_cpu else max(gpu.bf16_FLOPs or 0.0, gpu.fp16_FLOPs or 0.0, peak)
        return _flat(peak * share("fp32_matmul_share", gpu), "assumed", "catalogue: fp32_matmul_share", peak / half)
    if precision in _SCALED:
        known = _SCALED[precision]
        grid = matmul_rates(gpu, known)
        scale = peak / (peak_FLOPs(gpu, known) or peak) * share(f"{precision}_relative_share", gpu)
        return MatmulRates(grid.log_m, grid.log_nk, grid.rate * scale, "derived", grid.source)
    large = peak * large_share(gpu)
    row = _measured_row(gpu.name) or _measured_row(_LIKE.get(gpu.arch, ""))
    if row is None:
        basis: Basis = "measured" if gpu.matmul_measured_FLOPs else "assumed"
        return _flat(large, basis, "catalogue: largest measured matmul or matmul_share")
    if row["gpu"] == gpu.name:
        return _own_grid(row, large / share("sustained_share", gpu), share("sustained_share", gpu))
    return _grid_of_another(row, peak / _row_peak(row), large)


@cache
def large_share(gpu: Gpu) -> float:
    """Share of the half-precision peak that large products on random data reach in a long run: as measured; else what a
    measured device of the same process reaches, more or less by the power that each has for its peak, up to what products
    reach that power does not limit; else an assumed share."""
    peak, sustained = gpu.bf16_FLOPs or gpu.fp16_FLOPs or 0.0, share("sustained_share", gpu)
    if gpu.matmul_measured_FLOPs and peak:
        return gpu.matmul_measured_FLOPs / peak * sustained
    name = LIKE_CHIP.get(gpu.compute_capability or "", "")
    if not name or not gpu.tdp_W or not peak:
        return share("matmul_share", gpu) * sustained
    other = gpu_by_id(name)
    theirs = other.bf16_FLOPs or 0.0
    power = gpu.tdp_W / peak / ((other.tdp_W or 0.0) / theirs)
    return min(share("cool_share", gpu), large_share(other) * power ** share("power_exponent", gpu))


def _measured_row(name: str) -> Row | None:
    return next((row for row in rows("matmul_rates") if row["gpu"] == name and row["dtype"] == "bfloat16"), None)


def _row_peak(row: Row) -> float:
    return gpu_by_id(row["gpu"]).bf16_FLOPs or 0.0


def _flat(rate: float, basis: Basis, source: str, scale: float = 1.0) -> MatmulRates:
    """One rate for large products, less for small ones; units of `scale` times the matrix units' peak reach theirs with smaller ones."""
    grid = np.array([7.0, 14.0]) + _moved(scale)
    floor = np.array([[0.35, 0.8], [0.8, 1.0]])
    return MatmulRates(grid, grid, rate * floor, basis, source)


def _moved(scale: float) -> float:
    """How far a grid of rows and widths moves, in log2 of each, on units of `scale` times the peak: what a product costs besides its
    FLOP does not grow with them, so that a quarter of the peak is reached with half the rows and half the width."""
    return math.log2(scale) / 2.0


def _table(row: Row) -> tuple[Reals, Reals, Reals]:
    """FLOP/s of a row's buckets, empty ones filled along `m`, and their centres in log2."""
    table = np.array(row["median_TFLOPs"], dtype=np.float64) * 1e12
    log_m, log_nk = _centres(row["m_edges"]), _centres(row["min_nk_edges"])
    for column in table.T:
        known = np.isfinite(column)
        column[~known] = np.interp(log_m[~known], log_m[known], column[known])
    return table, log_m, log_nk


def _of_large(table: Reals, log_m: Reals, log_nk: Reals) -> float:
    """The upper median of large products."""
    large = table[np.ix_(log_m >= 11, log_nk >= 12)]
    return float(np.sort(large, axis=None)[large.size // 2])


def _own_grid(row: Row, measured: float, sustained: float) -> MatmulRates:
    """The device's own rows, scaled down from constant data to what it reaches on random data, and to what it sustains."""
    table, log_m, log_nk = _table(row)
    table *= min(1.0, measured / _of_large(table, log_m, log_nk)) * sustained
    return MatmulRates(log_m, log_nk, table, "measured", str(row["source"]))


def _grid_of_another(row: Row, scale: float, large: float) -> MatmulRates:
    """Rows of another device, scaled to what this one reaches with large products and moved to its peak."""
    table, log_m, log_nk = _table(row)
    table *= large / _of_large(table, log_m, log_nk)
    moved = _moved(scale)
    return MatmulRates(log_m + moved, log_nk + moved, table, "derived", str(row["source"]))


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
    """What a device keeps of a share of peak that short benchmarks on the device of its row (`gpu`) reached: as much less as
    its own products reach less of its peak in a long run than that device's did in short ones; 1 for a share without a
    device."""
    row = rate_row(name, gpu.name, gpu.arch)
    return min(1.0, large_share(gpu) / _measured_share(row["gpu"])) if "gpu" in row else 1.0


def _measured_share(name: str) -> float:
    """Share of peak that products on random data reach on a device of the catalogue that says so."""
    gpu = gpu_by_id(name)
    return (gpu.matmul_measured_FLOPs or 0.0) / (gpu.bf16_FLOPs or 1.0)


def memory_Bps(gpu: Gpu) -> float:
    """Memory traffic that elementwise kernels reach."""
    return gpu.memory_Bps * share("memory_share", gpu)
