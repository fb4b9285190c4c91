"""From a record to the Plan's terms: what each allocation was for, and what was alive when.

An allocation is judged by its whole life, afterwards, in this order:

1. what the program said (parameters, gradients, optimizer) or the operation (gathered weights, received messages);
2. a gradient of a whole unit that outlives a backward pass is accumulated there: `gradients`;
3. shaped like the logits and made outside the blocks: `logits`;
4. a parameter in another number format, kept for backward: `bucket_buffers` (autocast's copies);
5. made in forward and alive when a backward pass runs: `activations`; made before the step: its inputs, likewise;
6. everything else is gone before its pass is over: `temporaries`, what recomputation brings back included.

Each byte has one home, so the terms add up to the bytes alive at every instant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from strategist.document.estimate import MOMENTS, MemoryTerm
from strategist.document.observed import ModulePeak, MomentBytes, Pass
from strategist.measure.caching_allocator import CachingAllocator
from strategist.measure.messages import REDUCTION, UNSHARDED_GRADIENT
from strategist.measure.recorder import SUM, Allocation, Record
from strategist.records import dataclass

HOST = "host"
"""The role of what rests in the host's memory and is no byte of the device."""
DRIVE = "drive"
"""The role of what rests in files, and is a byte of neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a record does not know of the model: its blocks by name, how wide logits are on this rank, and how long: as all of a
    micro-batch's tokens, or, where the loss is `chunked`, as a chunk of them and as the last one."""

    blocks: tuple[str, ...]
    vocabulary: int
    tokens: tuple[int, ...]
    chunked: bool

    def block_of(self, module: str) -> str:
        """The block that a module is or lies in; "" outside all of them."""
        return next((name for name in self.blocks if module == name or module.startswith(f"{name}.")), "")


GRADIENTS = (UNSHARDED_GRADIENT, "gradients")


class Timeline:
    """The bytes of the step that counts. Every allocation of the record gets its role here."""

    def __init__(self, record: Record, outline: Outline) -> None:
        self.record, self.outline = record, outline
        self._blocks = {name: outline.block_of(name) for name in set(record.modules)}
        self._backward = [i for i, what in enumerate(record.passes) if what in ("backward", "recompute")]
        self._last_of_graph = {graph: i for i, graph in enumerate(record.graphs) if graph >= 0}
        self._in_graphs = [i for i, graph in enumerate(record.graphs) if graph >= 0]
        self._name_summands()
        for allocation in record.allocations.values():
            allocation.role = self._role(allocation)

    def _name_summands(self) -> None:
        """Parts of a shared weight's unsharded gradient are what their sum is; so is a rank's term of any gradient."""
        for allocation in reversed(list(self.record.allocations.values())):
            is_sum = allocation.role == UNSHARDED_GRADIENT and allocation.made_by == SUM
            is_term = allocation.role in GRADIENTS and allocation.made_by == REDUCTION
            summands = allocation.made_from if is_sum or is_term else ()
            if allocation.role == UNSHARDED_GRADIENT:
                summands += allocation.grew_by
            for number in summands:
                part = self.record.allocations.get(number)
                if part is not None and not part.role:
                    part.role = allocation.role

    def _role(self, allocation: Allocation) -> str:
        if allocation.role == UNSHARDED_GRADIENT:
            return "gradients" if self._accumulates(allocation) else "gather_buffers"
        if allocation.role:
            return allocation.role
        born = self._pass_at(allocation.operation)
        if born in ("forward", "backward") and self._is_logits(allocation):
            return "logits"
        if born == "setup":
            return "activations"
        if born != "forward" or not self._sees_backward(allocation) or self._is_early_gradient(allocation):
            return "temporaries"
        sources = [self.record.allocations.get(number) for number in allocation.made_from]
        is_cast = allocation.made_by == "aten::_to_copy"
        from_weights = any(source is not None and source.role == "parameters" for source in sources)
        return "bucket_buffers" if is_cast and from_weights else "activations"

    def _pass_at(self, operation: int) -> Pass:
        return self.record.passes[operation] if operation >= 0 else "setup"

    def _accumulates(self, allocation: Allocation) -> bool:
        """Whether a later backward pass finds the gradient again."""
        if allocation.graph < 0:
            return False
        at = bisect_right(self._in_graphs, self._last_of_graph[allocation.graph])
        return at < len(self._in_graphs) and self._in_graphs[at] <= self._end_of(allocation)

    def _end_of(self, allocation: Allocation) -> int:
        return len(self.record.passes) if allocation.ended is None else allocation.ended

    def _is_logits(self, allocation: Allocation) -> bool:
        if not allocation.is_floating or not allocation.shape or allocation.shape[-1] != self.outline.vocabulary:
            return False
        rows = 1
        for size in allocation.shape[:-1]:
            rows *= size
        return rows in self.outline.tokens and not self._blocks.get(allocation.module, "")

    def _is_early_gradient(self, allocation: Allocation) -> bool:
        """The gradient of the head's weight, which a chunked loss works out in forward."""
        return self.outline.chunked and allocation.shape[:1] == (self.outline.vocabulary,)

    def _sees_backward(self, allocation: Allocation) -> bool:
        """Whether a backward operation runs during the allocation's life."""
        at = bisect_right(self._backward, allocation.operation)
        return at < len(self._backward) and self._backward[at] <= self._end_of(allocation)

    def moments(self) -> tuple[MomentBytes, ...]:
        """The worst instant of each of the Plan's moments that the step has."""
        worst: dict[str, tuple[int, int, Counter[str]]] = {}
        named = self._moments()
        for operation, total, terms in self.instants():
            moment = named[operation]
            if total > worst.get(moment, (-1, 0, terms))[0]:
                worst[moment] = (total, operation, Counter(terms))
        return tuple(self._snapshot(name, *worst[name][1:]) for name in MOMENTS if name in worst)

    def _moments(self) -> list[str]:
        """The Plan's moment of every operation. Forward, and backward as long as there are logits (a chunked loss leaves
        none), belong to the first; the rest of the head's backward and that of all blocks to the second; what backward does behind the blocks to the third;
        everything after it to the last."""
        named: list[str] = []
        is_behind = False  # what follows a backward pass belongs to its end, until a module works again
        logits = [self._end_of(a) for a in self.record.allocations.values() if a.role == "logits"]
        for run in self._runs():
            inside = [operation for operation in run if self._blocks[self.record.modules[operation]]]
            first, last = (inside[0], inside[-1]) if inside else (run[-1] + 1, run[-1] + 1)
            until = run[0] if self.outline.chunked else first
            first = max((end + 1 for end in logits if run[0] <= end < first), default=until)
            for operation in run:
                what = self.record.passes[operation]
                is_backward = what in ("backward", "recompute")
                is_behind = is_backward or (is_behind and not self.record.modules[operation])
                if what == "update":
                    named.append(MOMENTS[3])
                elif is_backward:
                    named.append(MOMENTS[0] if operation < first else MOMENTS[1] if operation <= last else MOMENTS[2])
                else:
                    named.append(MOMENTS[2] if is_behind else MOMENTS[0])
        return named

    def _runs(self) -> Iterator[list[int]]:
        """Operations in order, cut wherever one backward pass ends and something else begins or follows."""
        run: list[int] = []
        before: tuple[bool, int] = (False, -1)
        for operation, (what, graph) in enumerate(zip(self.record.passes, self.record.graphs, strict=True)):
            is_backward = what in ("backward", "recompute")
            now = (is_backward, graph if graph >= 0 or not is_backward else before[1])
            if run and now != before:
                yield run
                run = []
            run.append(operation)
            before = now
        if run:
            yield run

    def _module_at(self, operation: int) -> str:
        return self.record.modules[operation] if operation >= 0 else ""

    def _snapshot(self, moment: str, operation: int, terms: Counter[str]) -> MomentBytes:
        return MomentBytes(
            moment=moment,
            module=self._module_at(operation),
            during=self._pass_at(operation),
            operator=self.record.operators[operation] if operation >= 0 else "",
            terms=tuple(MemoryTerm(name, size, "traced") for name, size in sorted(terms.items()) if size),
        )

    def modules(self) -> tuple[ModulePeak, ...]:
        """The most bytes alive during the work of each block, and of each module outside the blocks, pass by pass."""
        most: dict[tuple[str, Pass], int] = {}
        for operation, total, _ in self.instants():
            module = self._module_at(operation)
            key = (self._blocks.get(module) or module, self._pass_at(operation))
            most[key] = max(total, most.get(key, 0))
        return tuple(
            ModulePeak(module=module, during=during, allocated=size)
            for (module, during), size in most.items()
            if module
        )

    def instants(self) -> Iterator[tuple[int, int, Counter[str]]]:
        """(operation, bytes alive, bytes by term) after each change of the step that counts; the counter is reused."""
        terms: Counter[str] = Counter()
        total = 0
        first = self.record.begin[1]
        for place, (operation, number, change) in enumerate(self.record.changes):
            role = self.record.allocations[number].role
            if role not in (HOST, DRIVE):
                terms[role] += change
                total += change
            if place >= first:
                yield operation, total, terms

    def resting(self) -> Sequence[Allocation]:
        """What is alive when the step is over."""
        return [allocation for allocation in self.record.allocations.values() if allocation.size]

    def host_bytes(self) -> int:
        """The most bytes that rested in the host's memory at once."""
        held = most = 0
        for _, number, change in self.record.changes:
            if self.record.allocations[number].role == HOST:
                held += change
                most = max(most, held)
        return most

    def reserved_bytes(self, capacity: int | None) -> int:
        """What a caching allocator would hold at most, the preparation of the step included."""
        allocator = CachingAllocator(capacity)
        for _, number, change in self.record.changes:
            allocation = self.record.allocations[number]
            if allocation.role in (HOST, DRIVE):
                continue
            if change > 0:
                allocator.allocate(number, change, allocation.stream)
            else:
                allocator.free(number)
        return allocator.peak.reserved
