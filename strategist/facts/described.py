"""What a hardware file may say about GPUs, links and nodes: the types of its door, and a described GPU as a fact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from strategist.errors import InputError, shown
from strategist.facts.flags import MAX_MEMORY_BYTES
from strategist.facts.hardware import Gpu, Topology
from strategist.facts.tier import Kind
from strategist.records import dataclass, field
from strategist.units import parse_bytes, parse_rate, plain_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGpu:
    """A device that is in no catalogue. Rates are dense peaks with fp32 accumulation."""

    name: str
    memory: str
    memory_bw: str
    bf16_TFLOPs: float | None = None
    fp16_TFLOPs: float | None = None
    fp32_TFLOPs: float | None = None
    tf32_TFLOPs: float | None = None
    fp8_TFLOPs: float | None = None
    fp4_TFLOPs: float | None = None
    host_bw: str | None = None
    scale_up_bw: str | None = None
    vendor: Literal["NVIDIA", "AMD"] = "NVIDIA"
    arch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedLink:
    """A link between two ids, `bw` in one direction."""

    a: str
    b: str
    bw: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedNode:
    """`count` equal nodes. `intra_bw` is one GPU's, `inter_bw` the whole node's rate, one direction; `matrix` is what `nvidia-smi topo -m`
    prints there."""

    gpu: str
    gpu_count: int | None = None
    count: int = 1
    name: str = ""
    topology: Topology | None = None
    intra_bw: str | None = None
    pair_bw: str | None = None
    inter_bw: str | None = None
    gpu_memory: str | None = None
    nics: int | None = None
    fabric: str | None = None
    rdma: bool | None = None
    ram: str | None = None
    links: tuple[DescribedLink, ...] = ()
    matrix: str | None = None


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the keys of a node stand in the document: a pattern, and other words for some keys."""

    pattern: str
    words: Mapping[str, str] = field(default_factory=dict)

    def of(self, index: int, key: str) -> str:
        """The JSON path of one key of one node."""
        return self.pattern.format(index=index, key=self.words.get(key, key))


def checked_name(name: str, path: str) -> str:
    """`name`, when it is one. Raises InputError NAME or CONTROL_CHAR."""
    if not NAME.fullmatch(plain_text(name, path)):
        raise InputError("NAME", f"{path} is not a name: {shown(name)}.", flag=path, value=name, hint="Use up to 64 letters, digits, dots, dashes and underscores.")  # fmt: skip
    return name


def gpu_from(said: DescribedGpu, path: str) -> Gpu:
    """A described device as a fact."""
    peaks = {k: getattr(said, f"{k}_TFLOPs") for k in ("bf16", "fp16", "fp32", "tf32", "fp8", "fp4")}
    for kind, value in peaks.items():
        if value is not None and not 0 < value < 1e6:
            raise InputError("RANGE", f"{path}.{kind}_TFLOPs must lie between 0 and 1e6.", flag=f"{path}.{kind}_TFLOPs", value=value, hint="Give dense TFLOP/s.")  # fmt: skip
    if peaks["bf16"] is None and peaks["fp16"] is None and peaks["fp32"] is None:
        raise InputError("MISSING", f"{path} has no peak rate.", flag=path, hint="Add bf16_TFLOPs.")
    FLOPs = {k: None if v is None else v * 1e12 for k, v in peaks.items()}
    scale_up = None if said.scale_up_bw is None else parse_rate(said.scale_up_bw, f"{path}.scale_up_bw")
    return Gpu(
        name=checked_name(said.name, f"{path}.name").lower(),
        title=said.name,
        vendor=said.vendor,
        arch=plain_text(said.arch, f"{path}.arch") if said.arch else "",
        memory_bytes=parse_bytes(said.memory, f"{path}.memory", high=MAX_MEMORY_BYTES),
        memory_Bps=parse_rate(said.memory_bw, f"{path}.memory_bw", example="3.35TB/s"),
        fp32_FLOPs=FLOPs["fp32"],
        tf32_FLOPs=FLOPs["tf32"],
        fp16_FLOPs=FLOPs["fp16"],
        bf16_FLOPs=FLOPs["bf16"],
        fp8_FLOPs=FLOPs["fp8"],
        fp4_FLOPs=FLOPs["fp4"],
        host_Bps=None if said.host_bw is None else parse_rate(said.host_bw, f"{path}.host_bw"),
        scale_up=("nvlink" if said.vendor == "NVIDIA" else "xgmi") if scale_up else "pcie",
        scale_up_Bps=scale_up,
        basis="assumed",
        source=f"stated by {path}",
    )
