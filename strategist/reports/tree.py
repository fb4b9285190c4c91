"""A Plan as one generic tree of terms: predicted values, and beside them what other rungs saw. Renderers draw the tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS
from strategist.document.plan import Costed
from strategist.facts.hardware import Basis
from strategist.records import dataclass
from strategist.units import format_seconds

COMPUTE = ("matmul", "attention", "elementwise", "loss", "moe_dispatch", "host")
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")

MEANING: Mapping[str, str] = {
    "parameters": "weights as stored between steps",
    "gradients": "gradients, accumulation included",
    "optimizer": "moments and master weights",
    "activations": "tensors kept for backward",
    "logits": "vocabulary-sized tensors of the loss",
    "gather_buffers": "gathered weights and gradients in flight",
    "bucket_buffers": "reduction buckets and casts",
    "pipeline_buffers": "received activations and gradients",
    "temporaries": "workspace inside an operation",
    "runtime": "context, communicators, libraries",
    "slack": "reserved minus allocated",
    "matmul": "matrix products",
    "attention": "softmax attention",
    "elementwise": "norms, activations, residuals, rotary",
    "loss": "cross-entropy over the vocabulary",
    "moe_dispatch": "routing tokens to experts",
    "host": "launching kernels",
    "tp": "tensor parallel collectives",
    "cp": "context parallel collectives",
    "ep": "expert parallel collectives",
    "pp": "pipeline sends",
    "dp": "data parallel collectives",
    "bubble": "idle pipeline",
    "optimizer_step": "weight update",
    "offload": "host link and host update",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """One term: its value in `unit` (B, ns or "" for groups without one), the value other rungs saw, and its parts."""

    name: str
    unit: str
    predicted: float | None
    observed: tuple[float | None, ...] = ()
    basis: Basis | None = None
    note: str = ""
    children: tuple[Tree, ...] = ()


def plan_tree(plan: Costed) -> Tree:
    """The time of a step and the memory of its worst stage, term by term."""
    return Tree("plan", "", None, children=(time_tree(plan), memory_tree(plan)))


def time_tree(plan: Costed) -> Tree:
    """The step: compute, exposed communication, and the rest. Exposed nanoseconds add up to the step."""
    present = {term.name for term in plan.time.terms}
    rest = [name for name in TIME_TERMS if name in present and name not in (*COMPUTE, *COMMUNICATION)]
    groups = (
        ("compute", [n for n in COMPUTE if n in present]),
        ("exposed communication", [n for n in COMMUNICATION if n in present]),
    )
    children = tuple(_time_group(plan, label, names) for label, names in groups if names)
    return Tree(
        "step",
        "ns",
        plan.time.step_ns,
        basis=plan.time.step.basis,
        children=(*children, *(_time_leaf(plan, n) for n in rest)),
    )


def _time_group(plan: Costed, label: str, names: Sequence[str]) -> Tree:
    leaves = tuple(_time_leaf(plan, name) for name in names)
    return Tree(label, "ns", sum(leaf.predicted or 0 for leaf in leaves), children=leaves)


def _time_leaf(plan: Costed, name: str) -> Tree:
    term = next(term for term in plan.time.terms if term.name == name)
    parts = []
    if term.hidden_ns:
        parts.append(f"{format_seconds(term.hidden_ns / 1e9)} more hidden behind compute")
    if term.recomputed_ns:
        parts.append(f"{format_seconds(term.recomputed_ns / 1e9)} of it run again")
    meaning = MEANING["optimizer_step" if name == "optimizer" else name]
    return Tree(name, "ns", term.exposed_ns, basis=term.basis, note="; ".join([meaning, *parts]))


def memory_tree(plan: Costed) -> Tree:
    """The worst stage at its worst moment. The terms add up to what is missing from the device."""
    worst = plan.memory.worst
    by_name = {term.name: term for term in worst.terms}
    leaves = tuple(
        Tree(name, "B", by_name[name].bytes, basis=by_name[name].basis, note=MEANING[name])
        for name in MEMORY_TERMS
        if name in by_name
    )
    label = "peak memory" if plan.mesh.pp == 1 else f"peak memory, stage {worst.stage}"
    return Tree(label, "B", worst.device, basis=plan.memory.peak.basis, note=f"at: {worst.moment}", children=leaves)
