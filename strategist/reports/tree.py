"""A Plan as one generic tree of terms: predicted values, and beside them what other rungs saw; and the tree as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS, StageMemory
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Costed, Plan
from strategist.document.write import digest
from strategist.errors import StaleError, shown
from strategist.facts.hardware import Basis
from strategist.records import dataclass
from strategist.reports.lines import Line, Span, Style, hung, line, text_of, wrapped
from strategist.units import format_gib, format_seconds

VALUE_COLUMN = 12
RATIO_COLUMN = 8
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
    """One term: its value in `unit` (B, ns or "" for groups without one), the value other rungs saw, and its parts.

    `is_worst` marks the part whose bytes are furthest from what the first of them saw.
    """

    name: str
    unit: str
    predicted: float | None
    observed: tuple[float | None, ...] = ()
    basis: Basis | None = None
    note: str = ""
    children: tuple[Tree, ...] = ()
    is_worst: bool = False

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Predicted over observed, per rung; None where either is missing or nothing was seen."""
        return tuple(
            self.predicted / value if self.predicted is not None and value else None for value in self.observed
        )

    def __str__(self) -> str:
        """The tree as `strategist explain` prints it: 80 columns, without colour."""
        return text_of(tree_lines(self, 80))


def plan_tree(plan: Costed, observed: Sequence[Observed] = ()) -> Tree:
    """The time of a step and the memory of its worst stage, term by term; of every stage that was observed.

    Raises StaleError DIGEST for an observation of another plan.
    """
    for seen in observed:
        _require_same_plan(plan, seen)
    stages = [s for s in plan.memory.stages if any(seen.of_stage(s.stage) is not None for seen in observed)]
    ledgers = stages or [plan.memory.worst]
    return Tree(
        "plan", "", None, children=(time_tree(plan), *(memory_tree(plan, stage, observed) for stage in ledgers))
    )


def _require_same_plan(plan: Costed, seen: Observed) -> None:
    if not isinstance(plan, Plan) or seen.plan != digest(plan):
        raise StaleError(
            "DIGEST",
            f"The observation is of another plan ({shown(seen.plan)}).",
            flag="--with",
            value=seen.plan,
            hint="Trace this plan again.",
        )


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


def memory_tree(plan: Costed, ledger: StageMemory, observed: Sequence[Observed] = ()) -> Tree:
    """One stage at its worst moment. The terms add up to what is missing from the device.

    What was observed is what tensors held at the same moment, and at the peak wherever that was.
    """
    seen = [rung.of_stage(ledger.stage) for rung in observed]
    by_name = {term.name: term for term in ledger.terms}
    leaves = [
        Tree(
            name,
            "B",
            by_name[name].bytes if name in by_name else 0,
            tuple(_seen_bytes(rank, ledger.moment, name) for rank in seen),
            by_name[name].basis if name in by_name else None,
            MEANING[name],
        )
        for name in MEMORY_TERMS
        if name in by_name or any(_seen_bytes(rank, ledger.moment, name) for rank in seen)
    ]
    label = "peak memory" if plan.mesh.pp == 1 else f"peak memory, stage {ledger.stage}"
    return Tree(
        label,
        "B",
        ledger.allocated if observed else ledger.device,
        tuple(None if rank is None else rank.memory.peak.allocated for rank in seen),
        plan.memory.peak.basis,
        _places(ledger, seen),
        _marked(leaves),
    )


def _seen_bytes(rank: RankObservation | None, moment: str, name: str) -> int | None:
    """Bytes of a term at a moment; None where this rung cannot see them."""
    if rank is None or name == "runtime":
        return None
    if name == "slack":
        return rank.memory.reserved - rank.memory.peak.allocated
    found = next((m for m in rank.memory.moments if m.moment == moment), None)
    return None if found is None else found.term(name)


def _places(ledger: StageMemory, seen: Sequence[RankObservation | None]) -> str:
    """Where the peaks are: the predicted moment, and the traced module, pass and operation."""
    words = [f"at: {ledger.moment}"]
    for rank in seen:
        if rank is not None:
            peak = rank.memory.peak
            words.append(
                f"seen at: {peak.moment}, {peak.module or 'outside the blocks'}, {peak.during}, {peak.operator}"
            )
    return "; ".join(words)


def _marked(leaves: Sequence[Tree]) -> tuple[Tree, ...]:
    """The leaves, the one that is most bytes away from what the first rung saw marked."""

    def distance(leaf: Tree) -> float:
        seen = leaf.observed[0] if leaf.observed else None
        return 0.0 if seen is None else abs(seen - (leaf.predicted or 0.0))

    worst = max(leaves, key=distance, default=None)
    return tuple(replace(leaf, is_worst=leaf is worst and distance(leaf) > 0) for leaf in leaves)


def tree_lines(tree: Tree, width: int, rungs: Sequence[str] = ()) -> Iterator[Line]:
    """One line per term: its name, the predicted value, what each of `rungs` saw, the ratio to the first of them, and what
    it means. A root without a value only holds the others."""
    tops = (tree,) if tree.predicted is not None else tree.children
    seen_width = VALUE_COLUMN * len(rungs) + RATIO_COLUMN * bool(rungs)
    name_width = _name_width(tops, width - seen_width)
    if width >= NARROW:
        heads = "".join(word.rjust(VALUE_COLUMN) for word in ("predicted", *rungs))
        ratio = "ratio".rjust(RATIO_COLUMN) if rungs else ""
        yield line(Span(f"{' ' * name_width}{heads}{ratio}", "dim"))
    for top in tops:
        yield from _branch(top, width, name_width, 0, len(rungs))


def _name_width(tops: Sequence[Tree], width: int) -> int:
    """As wide as the longest name needs, but never so wide that the notes have less than half of the line."""
    return min(_longest(tops, 0) + 1, max(24, width // 2 - VALUE_COLUMN - 2))


def _longest(nodes: Sequence[Tree], depth: int) -> int:
    widths = [len("  " * depth + node.name) for node in nodes]
    return max([*widths, *(_longest(node.children, depth + 1) for node in nodes)], default=0)


def _branch(node: Tree, width: int, name_width: int, depth: int, rungs: int) -> Iterator[Line]:
    label = f"{'  ' * depth}{node.name}"
    figures = _figures(node, rungs)
    worst = "<- worst" if node.is_worst else ""
    if width < NARROW:
        yield from hung(" ".join(word for word in (label, *(f.strip() for f in figures), worst) if word), width)
    else:
        head = f"{label.ljust(name_width)[:name_width]}{''.join(figures)}  "
        note = node.note + (f" ({node.basis})" if node.basis not in (None, "derived") else "")
        style: Style = "title" if depth == 0 else "bad" if worst else "plain"
        yield from wrapped(head, f"{worst} {note}".strip(), width, indent=len(head), style="dim", label_style=style)
    for child in node.children:
        yield from _branch(child, width, name_width, depth + 1, rungs)


def _figures(node: Tree, rungs: int) -> list[str]:
    """The cells of one line: predicted, what each rung saw, and the ratio."""
    seen = [*node.observed, *[None] * (rungs - len(node.observed))]
    cells = [_value(value, node.unit).rjust(VALUE_COLUMN) for value in (node.predicted, *seen)]
    ratio = node.ratios[0] if node.ratios else None
    return [*cells, ("" if ratio is None else f"{ratio:.3f}").rjust(RATIO_COLUMN)] if rungs else cells


def _value(value: float | None, unit: str) -> str:
    """A figure and its unit, padded so that figures stand under figures."""
    if value is None:
        return ""
    figure, _, unit_word = (format_gib(value) if unit == "B" else format_seconds(value / 1e9)).partition(" ")
    return f"{figure} {unit_word:<3}"
