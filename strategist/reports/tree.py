"""A Plan as one generic tree of terms: predicted values, and beside them what other rungs saw; and the tree as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS
from strategist.document.plan import Costed
from strategist.facts.hardware import Basis
from strategist.records import dataclass
from strategist.reports.lines import Line, Span, hung, line, text_of, wrapped
from strategist.units import format_gib, format_seconds

VALUE_COLUMN = 12
NARROW = 44
"""Below so many columns a value follows its name instead of standing in a column."""

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

    def __str__(self) -> str:
        """The tree as `strategist explain` prints it: 80 columns, without colour."""
        return text_of(tree_lines(self, 80))


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


def tree_lines(tree: Tree, width: int) -> Iterator[Line]:
    """One line per term: its name, the predicted value and what it means. A root without a value only holds the others."""
    tops = (tree,) if tree.predicted is not None else tree.children
    name_width = _name_width(tops, width)
    if width >= NARROW:
        yield line(Span(" " * name_width + "predicted".rjust(VALUE_COLUMN), "dim"))
    for top in tops:
        yield from _branch(top, width, name_width, 0)


def _name_width(tops: Sequence[Tree], width: int) -> int:
    """As wide as the longest name needs, but never so wide that the notes have less than half of the line."""
    return min(_longest(tops, 0) + 1, max(24, width // 2 - VALUE_COLUMN - 2))


def _longest(nodes: Sequence[Tree], depth: int) -> int:
    widths = [len("  " * depth + node.name) for node in nodes]
    return max([*widths, *(_longest(node.children, depth + 1) for node in nodes)], default=0)


def _branch(node: Tree, width: int, name_width: int, depth: int) -> Iterator[Line]:
    label = f"{'  ' * depth}{node.name}"
    value = _value(node.predicted, node.unit)
    if width < NARROW:
        yield from hung(f"{label} {value}".rstrip(), width)
    else:
        head = label.ljust(name_width)[:name_width] + value.rjust(VALUE_COLUMN) + "  "
        note = node.note + (f" ({node.basis})" if node.basis not in (None, "derived") else "")
        yield from wrapped(
            head, note, width, indent=len(head), style="dim", label_style="title" if depth == 0 else "plain"
        )
    for child in node.children:
        yield from _branch(child, width, name_width, depth + 1)


def _value(value: float | None, unit: str) -> str:
    """A figure and its unit, padded so that figures stand under figures."""
    if value is None:
        return ""
    figure, _, unit_word = (format_gib(value) if unit == "B" else format_seconds(value / 1e9)).partition(" ")
    return f"{figure} {unit_word:<3}"
