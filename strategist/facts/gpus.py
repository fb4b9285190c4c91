"""Catalogue rows -> Gpu, and the lookup by name. CPU ranks are devices here like any other."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Literal

from strategist.catalog import Row, rows
from strategist.errors import ImpossibleError
from strategist.facts.hardware import Basis, Gpu
from strategist.facts.lookup import Found, Names, fold, possible, resolve, words
from strategist.units import MIB

REPORTED_SHARE = 0.98
"""Share of the marketing size, read as GiB, taken as usable where nobody wrote down what the driver reports.

In the rows that have both it lies between 0.93 and 1.00.
"""

_VENDOR_BACKENDS: dict[str, Literal["nccl", "gloo"]] = {"NVIDIA": "nccl", "AMD": "nccl", "CPU": "gloo"}
"""ROCm builds of torch answer to the name nccl and call RCCL."""
LIBRARIES = {"NVIDIA": "NCCL", "AMD": "RCCL", "CPU": "gloo"}
"""What the collectives of a vendor's devices are made by; ranks of one group have the same."""


_BRANDS = {"nvidia": "NVIDIA", "geforce": "NVIDIA", "tesla": "NVIDIA", "amd": "AMD", "instinct": "AMD", "radeon": "AMD"}
"""What may stand before a card's name, and the vendor that it is a brand of."""


def find_gpu(name: str, flag: str = "--gpu") -> Found[Gpu]:
    """The device called `name`, with or without its vendor's brands. Raises InputError UNKNOWN_GPU, AMBIGUOUS, EMPTY or CONTROL_CHAR."""
    names = gpu_names(flag)
    found = resolve(_as_listed(name, names), names)
    return Found(gpu_by_id(found.value), found.assumed)


@lru_cache(maxsize=1024)  # tables say the same few names in every row
def possible_gpus(name: str) -> tuple[str, ...]:
    """The devices that `name` may stand for: one where `find_gpu` finds it, several where it is not clear which, none where it is unknown."""
    names = gpu_names("--gpu")
    return possible(_as_listed(name, names), names)


def _as_listed(name: str, names: Names) -> str:
    """`name`, without the brands that it begins with where no row is called so; with them where its only row is another vendor's."""
    bare, vendors = _without_brands(name)
    if not (bare and vendors) or possible(name, names):
        return name
    found = possible(bare, names)
    return name if len(found) == 1 and vendors != {gpu_row(found[0])["vendor"]} else bare


def _without_brands(name: str) -> tuple[str, set[str]]:
    """`name` without the brands that it begins with, and their vendors."""
    said = re.split(r"[\s_-]+", name.strip())
    count = next((i for i, word in enumerate(said) if word.lower() not in _BRANDS), len(said))
    return " ".join(said[count:]), {_BRANDS[word.lower()] for word in said[:count]}


@cache
def gpu_by_id(name: str) -> Gpu:
    """The device with this canonical name, which must exist."""
    row = gpu_row(name)
    return _cpu(row) if row["vendor"] == "CPU" else _gpu(row)


def gpu_row(name: str) -> Row:
    """What the catalogue says of the device with this canonical name, which must exist."""
    return _rows()[name]


def pair_Bps(gpu: Gpu) -> float | None:
    """What two of these devices have between them where each pair has links of its own, by the catalogue; None where it does not say."""
    return _scaled(_rows().get(gpu.name, {}).get("scaleup_pair_GBps"), 9)


def gpus() -> tuple[Gpu, ...]:
    """Every device of the catalogue, in file order, the CPU last."""
    return tuple(gpu_by_id(name) for name in _rows())


@cache
def _rows() -> dict[str, Row]:
    return {row["name"]: row for table in ("gpus", "cpus") for row in rows(table)}


@cache
def gpu_names(flag: str) -> Names:
    """The names that `find_gpu` knows."""
    listed = _rows().values()
    return Names(
        exact={fold(said): row["name"] for row in listed for said in (row["name"], *row.get("aliases", ()))},
        short={fold(row["name"]): row["gpu"] for row in rows("shorthands")},
        parts={row["name"]: (words(row["name"]),) for row in listed},
        flag=flag,
        unknown="UNKNOWN_GPU",
        noun="GPU",
        table="gpus",
    )


def backend_of(gpu: Gpu) -> Literal["nccl", "gloo"]:
    """The torch.distributed backend that drives this device.

    Raises ImpossibleError UNSUPPORTED_DEVICE for devices that torch reaches neither through NCCL / RCCL nor gloo.
    """
    backend = _VENDOR_BACKENDS.get(gpu.vendor)
    if backend is None:
        raise ImpossibleError(
            "UNSUPPORTED_DEVICE",
            f"{gpu.title} ({gpu.vendor}) cannot be planned for: torch.distributed drives it through neither NCCL, RCCL nor gloo.",
            flag="--gpu",
            value=gpu.name,
            hint="Its facts can be looked up; for a plan name an NVIDIA or AMD GPU, or cpu.",
        )
    return backend


def _gpu(row: Row) -> Gpu:
    return Gpu(
        name=row["name"],
        title=row["title"],
        vendor=row["vendor"],
        arch=row["arch"],
        memory_bytes=_memory_bytes(row),
        memory_Bps=_scaled(row["memory_GBps"], 9) or 0.0,
        fp32_FLOPs=_scaled(row.get("fp32_TFLOPs"), 12),
        tf32_FLOPs=_scaled(row.get("tf32_TFLOPs"), 12),
        fp16_FLOPs=_scaled(row.get("fp16_TFLOPs"), 12),
        bf16_FLOPs=_scaled(row.get("bf16_TFLOPs"), 12),
        fp8_FLOPs=_scaled(row.get("fp8_TFLOPs"), 12),
        fp4_FLOPs=_scaled(row.get("fp4_TFLOPs"), 12),
        matmul_measured_FLOPs=_scaled(row.get("matmul_bf16_measured_TFLOPs"), 12),
        host_Bps=_scaled(row.get("pcie_GBps"), 9),
        shares_host=row.get("shares_host", False),
        sm_count=row.get("sm_count"),
        compute_capability=row.get("compute_capability"),
        tdp_W=row.get("tdp_W"),
        scale_up=row["scaleup"],
        scale_up_Bps=_scaled(row.get("scaleup_GBps"), 9),
        basis=_basis(row),
        source=row["source"],
    )


def _cpu(row: Row) -> Gpu:
    """One core of the measured machine; its memory is the whole machine's, to be shared by the ranks."""
    return Gpu(
        name=row["name"],
        title=row["title"],
        vendor=row["vendor"],
        arch=row["arch"],
        memory_bytes=row["memory_MiB"] * MIB,
        memory_Bps=row["memory_GBps"] * 1e9,
        fp32_FLOPs=_scaled(row["fp32_GFLOPs"], 9),
        bf16_FLOPs=_scaled(row["bf16_GFLOPs"], 9),
        matmul_measured_FLOPs=_scaled(row["bf16_GFLOPs"], 9),
        shares_host=True,
        scale_up="shared memory",
        scale_up_Bps=_scaled(row["memory_GBps"], 9),
        basis=row["basis"],
        source=row["source"],
    )


def _memory_bytes(row: Row) -> int:
    """What the driver reports; where nobody wrote that down, 98 % of the marketing size read as GiB."""
    if "memory_MiB" in row:
        return int(row["memory_MiB"]) * MIB
    return int(row["memory_marketing_GB"] * 1024 * REPORTED_SHARE) * MIB


def _basis(row: Row) -> Basis:
    derived = "memory_MiB" not in row or row["status"] == "derived"
    return "derived" if derived else "datasheet"


def _scaled(value: float | None, power: int) -> float | None:
    """`value` times 10**power, exact for the digits that were printed."""
    return None if value is None else float(round(value * 10**power))
