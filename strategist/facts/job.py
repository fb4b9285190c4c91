"""Everything given about one job, in one argument: machines, model, workload, framework, and how much room to leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strategist.columns import Column
from strategist.facts.calibration import Factor, Near, Part, on_parts
from strategist.facts.hardware import Cluster
from strategist.facts.model import ModelShape
from strategist.facts.parameters import count, hidden_matrices
from strategist.facts.profile import BYTES, Formats, Kernels, Profile, of_modules
from strategist.facts.workload import Precision, Workload
from strategist.records import dataclass

MAX_HEADROOM = 0.5


SCALED_FP8 = 1.0 + 4.0 / 128.0
"""Bytes of an element in fp8 beside those of its scale: one in fp32 for 128 of them (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2), or a byte for
32 of them (MXFP8)."""
CAST_WIDTHS: Mapping[str, float] = {"fp8": 1.0, "fp4": 0.5625}
"""Bytes per element: four bits and a scale of one byte for 16 elements in fp4 (NVIDIA 2025, arXiv 2509.25149, section 3)."""


ByLayout = tuple[tuple[Profile, Column], ...]
"""Profiles, and the rows of layouts that run under each: every row once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A question to the memory and time models. `headroom` is the share of each device that must stay free,
    `frontend` the framework whose limits count (catalogue: frontends), `trainable` the share of the weights that is
    trained: the rest has no gradient, no optimizer state and no product for its gradient; with `adapters` the
    trained ones stand beside the matrices of attention (Hu et al. 2021, arXiv 2106.09685, section 4.2). `factors` of a
    calibration multiply the seconds of parts of a step (timing/calibrated.py), those that are for its slowest device and its framework,
    and `near` holds how far runs of its owner lie from predictions under them. `split` states the layers of every pipeline
    stage where somebody chose them (space/stages.py has the rule otherwise), `recompute_layers` how many of each stage full recompute runs
    again where that is not all of them nor as many everywhere. `overlap` multiplies the share of compute that
    collectives may run behind. With an uneven batch `cluster` is the nodes of one kind, and replicas meet over the links of `all_machines`.
    With `by_layout` layouts run under profiles of their own (space/engines.py), and `profile` is that of whatever is said of none."""

    cluster: Cluster
    model: ModelShape
    workload: Workload
    profile: Profile
    headroom: float = 0.05
    frontend: str = "any"
    trainable: float = 1.0
    adapters: bool = False
    factors: tuple[Factor, ...] = ()
    near: tuple[Near, ...] = ()
    split: tuple[int, ...] = ()
    recompute_layers: tuple[int, ...] = ()
    overlap: float = 1.0
    all_machines: Cluster | None = None
    by_layout: Callable[[Job, Any], ByLayout] | None = None

    @property
    def factors_that_apply(self) -> tuple[Factor, ...]:
        """Those of the factors that move the times of some device of the machines under its framework."""
        devices = {group.node.gpu.name for group in self.cluster.groups}
        return tuple(
            factor for factor in self.factors if any(factor.applies(gpu, self.profile.name) for gpu in devices)
        )

    @property
    def on_parts(self) -> dict[Part, float]:
        """What the seconds of every part that is moved are multiplied by."""
        return on_parts(self.factors, self.cluster.slowest.gpu.name, self.profile.name)

    @property
    def overlaps(self) -> float:
        """What the share of compute that collectives may run behind is multiplied by, under a calibration too."""
        return self.overlap * self.on_parts.get("overlap", 1.0)

    @property
    def formats(self) -> Formats:
        """Number formats of this job's precision under this framework."""
        return self.profile.formats_for(self.workload.precision)

    @property
    def kernels(self) -> Kernels:
        """How memory-bound work of this job's model is cut into kernels."""
        return of_modules(self.profile.kernels, self.model, self.formats)

    @property
    def cast_width(self) -> float:
        """Bytes that one element of a matrix' input takes once it is cast to fp8 or fp4; 0 where nothing is cast."""
        return CAST_WIDTHS.get(self.workload.precision, 0.0) if self.profile.casts_fp8 else 0.0

    @property
    def head_precision(self) -> Precision:
        """The number format in which the output head multiplies: what matrices inside the layers are cast from where these are in fp8 or fp4."""
        precision = self.workload.precision
        if precision not in CAST_WIDTHS:
            return precision
        return "fp16" if self.formats.compute == "float16" else "bf16"

    @property
    def exchange_width(self) -> float:
        """Bytes of one element of a token on its way to an expert or back, on average: half of the ways lead there, in forward and in backward, and
        may be in fp8 with a scale for every few elements (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.3: both, and results as they are)."""
        width = BYTES[self.formats.compute]
        return (min(width, SCALED_FP8) + width) / 2.0 if self.profile.dispatches_fp8 else width

    @property
    def casts_apart(self) -> bool:
        """Whether the matrices are linear layers of torchao's that cast on their own, as strategist's executor has them in fp8: those of
        dense models, all of which is trained."""
        is_whole = self.model.moe is None and self.model.adapters is None
        return is_whole and self.workload.precision == "fp8" and self.profile.casts_apart

    @property
    def gathers_cast(self) -> bool:
        """Whether inputs and gradients of cut matrices are cast before tensor-parallel ranks gather them; adapters beside a
        matrix need its input as it is (NVIDIA/TransformerEngine: layernorm_linear.py, return_layernorm_output_gathered)."""
        return self.cast_width > 0 and self.profile.gathers_fp8 and not self.adapters

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per trained parameter: under Muon one momentum for matrices inside the layers, AdamW's two
        moments for all else, on average over the model."""
        own, precision = self.workload.optimizer, self.workload.precision
        each = self.profile.state_bytes(own, precision)
        if own != "muon":
            return each
        inside = hidden_matrices(self.model) / count(self.model).total
        return inside * each + (1.0 - inside) * self.profile.state_bytes("adamw", precision)

    @property
    def usable_bytes(self) -> int:
        """Bytes per device that a plan may use, runtime included: the smallest device less the headroom."""
        return int(self.cluster.smallest.memory_bytes * (1 - self.headroom))
