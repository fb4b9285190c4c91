"""What differs between frameworks that run the same layout: number formats, buffers, kernels. One data row each."""

from __future__ import annotations

from functools import cache
from typing import Any

from strategist.catalog import rows
from strategist.errors import InputError, did_you_mean
from strategist.facts.hardware import Basis
from strategist.records import dataclass

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
"""Bytes of one number by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats of numbers at rest (parameter, gradient, master), on the wire (reduce) and in matmuls (compute)."""

    parameter: str
    gradient: str
    reduce: str
    compute: str
    master: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One framework's habits. `gathered_blocks` full blocks are in flight at once under ZeRO-3."""

    name: str
    title: str
    formats: tuple[tuple[str, Formats], ...]
    optimizer_state_bytes: tuple[tuple[str, float], ...]
    ddp_bucket_bytes: int
    gathered_blocks: int
    kernels_per_layer_forward: int
    kernels_per_layer_backward: int
    host_s_per_kernel: float
    basis: Basis
    source: str

    def formats_for(self, precision: str) -> Formats:
        """Number formats of a precision policy."""
        return dict(self.formats)[precision]

    def state_bytes(self, optimizer: str) -> float:
        """Bytes of optimizer state per parameter, master copies left out."""
        return dict(self.optimizer_state_bytes)[optimizer]


def frontends() -> tuple[str, ...]:
    """Names of the frameworks whose limits are known; `any` stands for what holds everywhere."""
    return tuple(row["name"] for row in rows("frontends"))


@cache
def find_profile(name: str = "strategist") -> Profile:
    """The profile of that name. Raises InputError CHOICE with the known names."""
    known: dict[str, dict[str, Any]] = {row["name"]: row for row in rows("profiles")}
    if name not in known:
        raise InputError(
            "CHOICE", f"There is no framework profile {name!r}.", value=name, hint=did_you_mean(name, known)
        )
    row = known[name]
    return Profile(
        name=name,
        title=row["title"],
        formats=tuple((precision, Formats(**formats)) for precision, formats in row["formats"].items()),
        optimizer_state_bytes=tuple(row["optimizer_state_bytes"].items()),
        ddp_bucket_bytes=row["ddp_bucket_MiB"] * 2**20,
        gathered_blocks=row["gathered_blocks"],
        kernels_per_layer_forward=row["kernels_per_layer_forward"],
        kernels_per_layer_backward=row["kernels_per_layer_backward"],
        host_s_per_kernel=row["host_us_per_kernel"] * 1e-6,
        basis=row["basis"],
        source=row["source"],
    )
