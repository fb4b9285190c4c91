"""What a device reaches: matmuls by shape, memory, attention (docs/time_model.md, Compute). One product at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log2

from strategist.catalog import Row, rows
from strategist.facts.gpus import gpu_by_id
from strategist.facts.hardware import Gpu
from strategist.facts.profile import BYTES
from strategist.timing.rates import LIKE_CHIP

REFERENCE = {
    "Ampere": "a100-sxm-80gb",
    "Hopper": "h100-sxm-80gb",
    "Ada": "l40s",
    "Blackwell": "b200-sxm-180gb",
    "Blackwell Ultra": "b300-sxm-288gb",
    "Xe2": "arc-pro-b60",
    "CDNA4": "mi355x",
}
"""The device whose measured rows, as shares of peak, stand for others of its architecture."""


@dataclass(frozen=True)
class Grid:
    """Rates over bucket centres: `rate[i][j]` at log2 M = m[i] and log2 min(n, k) = nk[j]."""

    m: tuple[float, ...]
    nk: tuple[float, ...]
    rate: tuple[tuple[float, ...], ...]


def share(name: str, gpu: Gpu) -> float:
    """A rate or share of the catalogue for a device, an architecture, or its default."""
    named = {row["arch"]: row["value"] for row in rows("rates") if row["name"] == name}
    return float(named.get(gpu.name, named.get(gpu.arch, named["default"])))


def large_share(gpu: Gpu) -> float:
    """Share of peak that large products reach in a long run: measured, by power from a measured device, or assumed."""
    peak, sustained = peak_FLOPs(gpu, "bf16") or peak_FLOPs(gpu, "fp16"), share("sustained_share", gpu)
    if not peak:
        return share("matmul_share", gpu) * sustained
    if gpu.matmul_measured_FLOPs:
        return gpu.matmul_measured_FLOPs / peak * sustained
    if gpu.compute_capability not in LIKE_CHIP or not gpu.tdp_W:
        return share("matmul_share", gpu) * sustained
    other = gpu_by_id(LIKE_CHIP[gpu.compute_capability])
    per_peak, theirs = gpu.tdp_W / peak, (other.tdp_W or 0.0) / peak_FLOPs(other, "bf16")
    limited = large_share(other) * (per_peak / theirs) ** share("power_exponent", gpu)
    return min(limited, share("cool_share", gpu))


def kept(name: str, gpu: Gpu) -> float:
    """A share of peak in a long run: what short runs reached on the device of its row, less as this device's products reach
    less of its peak than those of that device did."""
    named = {row["arch"]: row for row in rows("rates") if row["name"] == name}
    row = named.get(gpu.name, named.get(gpu.arch, named["default"]))
    if "gpu" not in row:
        return float(row["value"])
    other = gpu_by_id(row["gpu"])
    theirs = (other.matmul_measured_FLOPs or 0.0) / (other.bf16_FLOPs or 1.0)
    return float(row["value"]) * min(1.0, large_share(gpu) / theirs)


def memory_Bps(gpu: Gpu) -> float:
    """B: what elementwise kernels reach."""
    return gpu.memory_Bps * share("memory_share", gpu)


def peak_FLOPs(gpu: Gpu, precision: str) -> float:
    """P: the dense peak of a precision; 0 where the device has none."""
    peaks = {
        "bf16": gpu.bf16_FLOPs,
        "fp16": gpu.fp16_FLOPs,
        "fp32": gpu.fp32_FLOPs,
        "tf32": gpu.tf32_FLOPs,
        "fp8": gpu.fp8_FLOPs,
        "fp4": gpu.fp4_FLOPs,
    }
    return peaks[precision] or 0.0


def attention_peak_FLOPs(gpu: Gpu, precision: str) -> float:
    """Attention runs in half precision, or in fp32 or tf32 when asked."""
    return peak_FLOPs(gpu, precision) if precision in ("fp32", "tf32") else gpu.bf16_FLOPs or gpu.fp16_FLOPs or 0.0


@cache
def grid_of(gpu: Gpu, precision: str) -> Grid:
    """The rates of one device and precision."""
    if precision == "fp32":
        peak = peak_FLOPs(gpu, "fp32")
        units = max(peak, *(0.0 if gpu.vendor == "CPU" else peak_FLOPs(gpu, half) for half in ("bf16", "fp16")))
        return _flat(peak * share("fp32_matmul_share", gpu), 7 + (log2(peak / units) / 2 if peak else 0))
    if precision == "tf32":
        slower = peak_FLOPs(gpu, "tf32") / (peak_FLOPs(gpu, "bf16") or peak_FLOPs(gpu, "tf32"))
        return _times(grid_of(gpu, "bf16"), slower * share("tf32_relative_share", gpu))
    if precision == "fp8":
        faster = peak_FLOPs(gpu, "fp8") / (peak_FLOPs(gpu, "bf16") or peak_FLOPs(gpu, "fp8"))
        return _times(grid_of(gpu, "bf16"), faster * share("fp8_relative_share", gpu))
    if precision == "fp4":
        faster = peak_FLOPs(gpu, "fp4") / (peak_FLOPs(gpu, "fp8") or peak_FLOPs(gpu, "fp4"))
        return _times(grid_of(gpu, "fp8"), faster * share("fp4_relative_share", gpu))
    measured = {row["gpu"]: row for row in rows("matmul_rates") if row["dtype"] == "bfloat16"}
    reference, large = (
        gpu.name if gpu.name in measured else REFERENCE.get(gpu.arch),
        peak_FLOPs(gpu, precision) * large_share(gpu),
    )
    if reference not in measured:
        return _flat(large)
    grid = _table(measured[reference])
    if reference != gpu.name:
        return _moved(_times(grid, large / _large(grid)), gpu_by_id(reference), peak_FLOPs(gpu, precision))
    sustained = share("sustained_share", gpu)
    return _times(grid, min(1.0, large / sustained / _large(grid)) * sustained)


def _flat(rate: float, first: float = 7.0) -> Grid:
    edges = (first, first + 7)
    return Grid(edges, edges, ((0.35 * rate, 0.8 * rate), (0.8 * rate, 1.0 * rate)))


def _table(row: Row) -> Grid:
    m = _centres(row["m_edges"])
    columns = [_filled(m, column) for column in zip(*row["median_TFLOPs"], strict=True)]
    rate = tuple(tuple(value * 1e12 for value in line) for line in zip(*columns, strict=True))
    return Grid(m, _centres(row["min_nk_edges"]), rate)


def _centres(edges: Sequence[float]) -> tuple[float, ...]:
    """The geometric middle of each bucket, as its logarithm."""
    return tuple((log2(low) + log2(high)) / 2 for low, high in pairwise(edges))


def _filled(m: Sequence[float], column: Sequence[float | None]) -> list[float]:
    """Empty buckets lie on the line between their nearest full neighbours along log2 M; beyond the ends the end holds."""
    full = [(at, value) for at, value in zip(m, column, strict=True) if value is not None]
    return [_on_line(full, at) for at in m]


def _on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]


def _times(grid: Grid, factor: float) -> Grid:
    return Grid(grid.m, grid.nk, tuple(tuple(value * factor for value in line) for line in grid.rate))


def _moved(grid: Grid, other: Gpu, peak: float) -> Grid:
    """The rows of another device at the sizes whose FLOP take as long here: half the difference in either direction."""
    half = log2(peak / peak_FLOPs(other, "bf16")) / 2
    return Grid(tuple(at + half for at in grid.m), tuple(at + half for at in grid.nk), grid.rate)


def _large(grid: Grid) -> float:
    """The upper median of large products."""
    large = sorted(
        value
        for at_m, line in zip(grid.m, grid.rate, strict=True)
        for at_nk, value in zip(grid.nk, line, strict=True)
        if at_m >= 11 and at_nk >= 12
    )
    return large[len(large) // 2]


def rate_at(grid: Grid, m: float, narrow: float) -> float:
    """R(M, min(n, k)) by bilinear interpolation in the logarithms, falling in proportion below the first centres."""
    along_m = [_on_line(list(zip(grid.nk, line, strict=True)), log2(narrow)) for line in grid.rate]
    inside = _on_line(list(zip(grid.m, along_m, strict=True)), log2(m))
    small = min(1.0, m / 2 ** grid.m[0]) * min(1.0, narrow / 2 ** grid.nk[0])
    return inside * max(small, 1e-4)


def alignment(gpu: Gpu, n: float, k: float) -> float:
    """What a product keeps of its rate when its rows do not fill lines of 64 numbers; CPUs do not mind."""
    if gpu.vendor == "CPU" or n % 64 == k % 64 == 0:
        return 1.0
    return share("misaligned_share" if n % 8 == k % 8 == 0 else "unaligned_share", gpu)


def matmul_seconds(gpu: Gpu, precision: str, compute: str, size: tuple[float, float, float]) -> float:
    """One (M x k)(k x n) product: its FLOP at the measured rate, or its bytes."""
    m, n, k = size
    kept = 1.0 if precision == "fp32" else alignment(gpu, n, k)
    flops = 2 * m * n * k / (rate_at(grid_of(gpu, precision), m, min(n, k)) * kept)
    moved = BYTES[compute] * (m * k + k * n + m * n) / memory_Bps(gpu)
    return max(flops, moved)
