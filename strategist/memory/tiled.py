"""The instants of a step whose matrices are tiled: slices are units, gathered, used, reduced and given back one by one.

Beside the block's unit of what is no matrix there are, while a slice works backward, it and the slice before it in forward,
gathered; its gradient; and in reduction the slice that backward went through last. A matrix in several slices adds up what
they say about its input: beside the sum of some there is that of the next. Source: PyTorch 2.13
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (pre_backward, post_backward), as for units of whole layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from strategist.facts.layers import Layer
from strategist.memory.backward import Rows, is_brought_back, is_kept, is_used_up, residual_C
from strategist.memory.instant import LAYERS, Instant, added
from strategist.memory.saved import Part
from strategist.memory.step import Step
from strategist.records import cached_property, dataclass
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.shares import layers, state_shards, tokens
from strategist.space.tiles import largest_CM, matrices_CM, rest_C, slices_CM


@dataclass(frozen=True, slots=True, eq=False)
class SliceAt:
    """One instant of a layer's backward, (C, 1): bytes of temporaries and of kept activations that are freed by then;
    elements of the slice that gets its `gradient`, with padding and without, of the one that is gathered next and of the one in
    reduction; `done`: elements of the layer whose gradients are reduced. `is_there`: layouts that have such an instant; `is_last`: of the layer's last matrix, so
    that what lies above the layer is in reduction."""

    temporaries: Reals
    freed: Reals
    own: Reals
    gradient: Reals
    below: Reals
    above: Reals
    done: Reals
    is_there: Mask | bool = True
    is_last: bool = False


class TiledStep(Step):
    """A step in which only what a layer has beside its matrices is gathered as long as the layer works backward."""

    def _gathered_layers(self, layers: int | Column, own: Reals, experts: Reals | float) -> Reals:
        return np.minimum(np.minimum(layers, 1) * self.dense, own)

    @property
    def last_unit(self) -> Reals:
        """Elements of the unit that a layer's forward gathers last, (C, 1)."""
        return self.widest

    @cached_property
    def dense(self) -> Reals:
        """Elements of a layer's unit of what is no matrix, (C, 1)."""
        return rest_C(self.job.model, self.c, state_shards(self.c))[:, None]


class Slices:
    """Elements by the name of a matrix of one layer, (C, 1): of its largest slice with all padding and without, and of all of it; and
    how many slices it has. Nothing of a matrix that the layer has not."""

    def __init__(self, c: Candidates, layer: Layer) -> None:
        shards = state_shards(c)
        self._names = [matrix.name for matrix in layer.matrices]
        self._largest, self._slices = largest_CM(layer, c, shards), slices_CM(layer, c)
        self._bare = largest_CM(layer, c, np.ones_like(shards))
        self._whole = matrices_CM(layer, c, shards) * shards[:, None]

    def _of(self, name: str, column_CM: Column) -> Reals:
        if name not in self._names:
            return np.zeros((len(column_CM), 1))
        return column_CM[:, self._names.index(name)][:, None].astype(np.float64)

    def largest(self, name: str) -> Reals:
        """Elements of the largest slice."""
        return self._of(name, self._largest)

    def bare(self, name: str) -> Reals:
        """The same without padding."""
        return self._of(name, self._bare)

    def whole(self, name: str) -> Reals:
        """Elements of all slices."""
        return self._of(name, self._whole)

    def count(self, name: str) -> Reals:
        """How many slices."""
        return self._of(name, self._slices)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One matrix at work in backward, (C, 1): what there is beside the gradient of its input, of which one takes `adds` bytes, and
    what is gone."""

    name: str
    beside: Reals
    adds: Reals
    freed: Reals


def in_slices(step: Step) -> Iterator[Instant]:
    """Every instant of a layer's backward that can be its worst, of each sort of layer."""
    for sort, layer in enumerate(layers(step.job.model)):
        own = Sort(step, sort)
        for at in _of_layer(own, Slices(step.c, layer)):
            yield _in_layer(step, at, own.of(step.layers.one))


class Sort:
    """What is asked of one sort of layer, (C, 1) each."""

    def __init__(self, step: Step, sort: int) -> None:
        self.step, self.sort = step, sort

    def of(self, part_CK: Reals) -> Reals:
        """The column of this sort."""
        return part_CK[:, [self.sort if part_CK.shape[1] > 1 else 0]]

    def rows(self, wanted: Rows, *parts: Part) -> Reals:
        """Some rows of what the layer keeps or computes again."""
        return self.of(self.step.layers.kept.rows(wanted, *parts))

    def instant(self, number: int) -> tuple[Reals, Reals]:
        """Temporaries and freed bytes of an instant of a layer in one piece (memory/backward.py, layer_instants)."""
        at = self.step.layers.by_sort
        return self.of(at.temporaries[number]), self.of(at.freed[number])


def _of_layer(own: Sort, slices: Slices) -> Iterator[SliceAt]:
    """The instants of a layer, from its last matrix to its first: some slice is the first to say something about the input; others
    add to that in place, the last one beside the next matrix. Behind two of the matrices there is work without weights."""
    works = list(_works(own))
    names = [work.name for work in works]
    none: Reals = np.zeros((len(own.step.c), 1))
    done, above = none, none
    for work, following in zip(works, (*names[1:], ""), strict=True):
        slice_, count, below = slices.largest(work.name), slices.count(work.name), slices.largest(following)
        bare, later = slices.bare(work.name), done + slices.whole(work.name) - slice_
        first, second = work.beside + work.adds, work.beside + 2.0 * work.adds
        is_last, freed = work is works[0], work.freed
        yield SliceAt(first, freed, slice_, bare, np.where(count > 1, slice_, below), above, done, is_last=is_last)
        for follows, reduced, least in ((below, later, 1), (slice_, later - slice_, 2)):
            yield SliceAt(second, freed, slice_, bare, follows, slice_, reduced, is_there=count > least)
        done, above = done + slices.whole(work.name), slice_
        if work.name in BEHIND:
            yield SliceAt(*own.instant(BEHIND[work.name]), none, none, below, above, done)


BEHIND: Mapping[str, int] = {"down": 1, "o": 3}
"""The number of the instant that follows a matrix, among those of a layer in one piece: the activation's and attention's."""


def _works(own: Sort) -> Iterator[Work]:
    """The matrices of a layer in the order of backward. In forward a gate comes behind the matrix that it lets through."""
    job, c = own.step.job, own.step.c
    shape = job.model
    per_head = (tokens(job, c) * shape.head_dim * own.step.compute / c["tp"])[:, None]
    queries, keys = per_head * shape.heads, per_head * shape.kv_heads
    whole = (tokens(job, c) * shape.hidden * own.step.compute)[:, None]
    product = own.rows(is_kept, "product") + own.rows(is_brought_back, "product")
    (last, last_freed), (inputs, inputs_freed), (first, first_freed) = (own.instant(number) for number in (0, 2, 4))
    yield Work("down", last - product, product, last_freed)
    if shape.mlp_gated:
        yield Work("gate", inputs + product - 2.0 * whole, whole, inputs_freed)
    yield Work("up", inputs - whole, whole, inputs_freed)
    beside = residual_C(job, c, whole=False)[:, None] + own.rows(is_brought_back, "mixer", "exchanged")
    freed = own.rows(is_kept, "ffn", "inside", "product") + own.rows(is_used_up, "mixer")
    yield Work("o", beside, queries, freed)
    yield Work("v", first - 2.0 * whole + 2.0 * keys, whole, first_freed)
    yield Work("k", first - whole + keys, whole, first_freed)
    yield Work("q", first - whole, whole, first_freed)


def _in_layer(step: Step, at: SliceAt, kept: Reals) -> Instant:
    """The instant in the last layer (behind the head), in the one before it, in the second and in the first, (4, C, S); such a layer
    keeps so much."""
    number = np.array((0, 1, -2, -1))[:, None, None]
    here = np.maximum(step.layers_of_chunk, 1.0)
    passed = np.where(number < 0, np.maximum(here + number, 0.0), np.minimum(number, here - 1.0))
    behind = step.passed_head
    done = behind + passed * step.counts.layers / here + at.done
    above = np.where(passed > 0, step.dense, behind) if at.is_last else at.above
    in_reduction = step.compute * at.gradient + step.reduce * above
    weights = np.where(step.managed, step.compute * (at.own + at.below) + step.trained * in_reduction, 0.0)
    let_go = passed / np.maximum(here - 1.0, 1.0) * (step.layers.every - kept)
    joins = np.where(step.at_once & step.stands, step.stored * at.own, 0.0)
    terms = {
        "gradients": step.earlier + step.fresh(done + np.where(step.at_once, at.own, 0.0)) + step.growing_head,
        "activations": np.maximum(step.inputs, step.in_layers - at.freed - let_go),
        "gather_buffers": added(step.gathered(layers=1, head=False), weights, step.waiting),
        "temporaries": added(at.temporaries, step.old_head, joins),
    }
    return Instant(LAYERS, {name: np.where(at.is_there, held, 0.0) for name, held in terms.items()})
