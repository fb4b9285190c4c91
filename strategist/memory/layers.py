"""The layers of a rank in backward: what happens inside one of each sort, and which sort is worst on a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strategist.columns import on_stages, remembered, stage_by_stage
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.activations import whole_stream_C
from strategist.memory.backward import (
    Kept,
    again_at_experts,
    arrived_C,
    beside_decoder_CK,
    copies_C,
    given_to_experts,
    inside_forward_cast,
    is_any,
    is_brought_back,
    is_kept,
    is_last,
    is_made_behind_experts,
    is_made_by_experts,
    is_of_first_norm,
    is_routed,
    is_used_up_by_experts,
    is_worth_keeping,
    kept_behind,
    layer_instants,
    part_of_norm_C,
    residual_C,
)
from strategist.memory.saved import OURS
from strategist.memory.sorts import sorts_of_layers
from strategist.records import cached_property, dataclass, names_of
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.shares import Group, is_managed, routed_cut, sequence_cut, target_share
from strategist.space.stages import kinds


def _packed(job: Job) -> float:
    """What a gathered element of the layers holds, over the bytes of the compute format."""
    from strategist.space.adapters import gathered_bytes

    return gathered_bytes(job)


def joins_at_once(job: Job, group: Group) -> Mask:
    """Where a weight's gradient joins what stands, or becomes it, as soon as it is made, (C, 1): without units, and in a pipeline whose
    units need no other format (FSDPParam, to_accumulated_grad_if_needed)."""
    casts_not = BYTES[job.formats.compute] == BYTES[job.formats.reduce]
    return np.asarray(~is_managed(job, group.candidates)[:, None] | ((group.pp > 1) & casts_not), np.bool_)


class Layers:
    """The layers of a group's candidates in backward, the same in every pass. (C, S) each."""

    def __init__(self, job: Job, group: Group) -> None:
        self.job, self.group = job, group
        self.packed = 1.0 if job.model.adapters is None else _packed(job)
        self._inside = None if group.among is None else inside_of(job, group.among)
        alike = () if self._inside is None else (self._inside.kept, self._inside.place.take(group.rows))
        self.kept = Kept(job, group.candidates, *alike)

    @cached_property
    def one(self) -> Reals:
        """What one layer of each sort keeps, (C, K)."""
        return self.kept.rows(is_kept)

    @cached_property
    def every(self) -> Reals:
        """What all layers keep of one micro-batch; before the first adapter there is nothing to keep anything for."""
        every = self.group.layers_of(self.one)
        if self.job.model.adapters is None:
            return every
        return every - on_stages(self.kept.rows(is_of_first_norm)[:, 0], self.group.is_first)

    @property
    def in_turn(self) -> tuple[tuple[Layers, Reals], ...]:
        """The layers in the order of backward, with what those before them kept, where some are computed again and others are not."""
        return ((self, np.zeros((1, 1))),)

    @cached_property
    def have_experts(self) -> Mask:
        """Which sorts of layers have routed experts, (K,)."""
        return np.array([kind.ffn == "moe" for kind in kinds(self.job.model)])

    @property
    def are_mixed(self) -> bool:
        """Whether layers with experts stand beside others."""
        return _are_mixed(self.job)

    @cached_property
    def kept_with_experts(self) -> Reals:
        """What a layer with experts keeps, where they differ in their other parts on average, (C, S)."""
        with_experts = self.group.layers_SK[:, self.have_experts]
        every = with_experts.astype(np.float64) @ self.one.T[self.have_experts]
        return np.asarray((every / np.maximum(with_experts.sum(axis=1), 1)[:, None]).T)

    def let_go_with_experts(self, passed: Reals, number: Reals) -> Reals:
        """What `passed` layers with experts of `number` have kept: their share of the others, whatever their sort."""
        beyond = self.kept_with_experts - self._of_routed(self.one)
        return np.asarray(passed * self.kept_with_experts + passed / np.maximum(number - 1.0, 1.0) * beyond)

    @cached_property
    def made_by_experts(self) -> Reals:
        """What a layer keeps that its experts make of the tokens that came."""
        return self._of_routed(self.kept.rows(is_made_by_experts))

    @cached_property
    def largest(self) -> Reals:
        """What the layer keeps that keeps most."""
        return _of_worst(self.group, self.one, self.one)

    @cached_property
    def last_matrix(self) -> Reals:
        """Elements of the largest last matrix of a feed-forward part."""
        last = self.kept.weights(is_last)
        return _of_worst(self.group, last, last)

    @cached_property
    def final(self) -> Reals:
        """Elements of the largest weight that a layer lists last."""
        return _of_worst(self.group, self.kept.final, self.kept.final)

    @cached_property
    def result(self) -> Reals:
        """What the last matrix of a layer gives before it is added to the residual stream. Under sequence parallelism it is put in
        the order of the ranks and added up there, and the norm's result is still held; so is what goes into a ReLU."""
        job, c, longest = self.job, self.group.candidates, max(1.0, target_share(self.job))
        whole = whole_stream_C(job, c) * longest
        again = np.where(sequence_cut(c) > 1, whole + 2.0 * residual_C(job, c, whole=False) * longest, 0.0)
        given = (whole + again)[:, None]
        moe, is_ours = job.model.moe, job.profile.keeping.name == OURS
        if is_ours and moe is not None and not moe.shared_ffn:
            # Whole experts give each rank the sum for its own tokens.
            given = np.where(routed_cut(c) > 1, residual_C(job, c, whole=False), whole + again)[:, None]
        if not self._goes_into_relu:
            return given
        held = self.kept.rows(is_kept, "product")
        return given + _of_worst(self.group, held, held)

    @cached_property
    def while_added_up(self) -> Reals:
        """In forward of a dense layer, while ranks add up what its last matrix gave: that, and what lies in the frames of the functions at
        work though backward will compute it again: the norm's input, the gathered one, the product, and under full recompute the other
        factor of the product (executor/models: block.py, feed_forward.py). A gate's activation is there a little sooner, without what is
        added up."""
        job, c = self.job, self.group.candidates
        again, is_full = self.kept.rows(is_brought_back, "product"), c.is_word("recompute", "full")[:, None]
        adds = (2.0 * whole_stream_C(job, c) + residual_C(job, c, whole=False)) * max(1.0, target_share(job))
        sooner = np.maximum(0.0, again - adds[:, None]) * job.model.mlp_gated
        held = self.kept.rows(is_brought_back, "ffn") + again * (1.0 + is_full) + sooner
        return self.result + _of_worst(self.group, held, held)

    @cached_property
    def while_cast(self) -> Reals:
        """In forward of a dense layer, while its last matrix casts its input to fp8, then itself: that, what went into a ReLU, and what
        else lies there though backward will compute it again."""
        again, is_full = self.kept.rows(is_brought_back, "product"), self.group.candidates.is_word("recompute", "full")
        held = (
            self.kept.rows(is_brought_back, "ffn") + again * (1.0 + is_full[:, None]) + inside_forward_cast(self.kept)
        )
        held = held + (self.kept.rows(is_kept, "product") if self._goes_into_relu else 0.0)
        return _of_worst(self.group, held, held)

    @property
    def _goes_into_relu(self) -> bool:
        """Whether something goes into a ReLU that nothing keeps: its result tells the gradient."""
        shape = self.job.model
        return shape.mlp_act == "relu" and not shape.mlp_gated

    @cached_property
    def rest(self) -> Reals:
        """What the layer keeps of its last result, where that is most."""
        kept = self.kept.rows(is_kept, "rest")
        return _of_worst(self.group, kept, kept)

    @cached_property
    def transient(self) -> Reals:
        """What the feed-forward part computes again, of the layer where that is most. Where forward keeps nothing of it, a gate
        is gone before its product is there. The first blocks of convolutions hold most, when those behind them have yet to keep anything."""
        gone = self.group.candidates.is_word("recompute", "full")[:, None] & self.job.model.mlp_gated
        again = self.kept.rows(is_brought_back, "ffn", "inside", "product")
        again = again - np.where(gone, self.kept.rows(is_brought_back, "product"), 0.0)
        if self.job.model.is_convolutional:
            again = np.maximum(0.0, again - kept_behind(self.kept))
        return _of_worst(self.group, again, again)

    @cached_property
    def product(self) -> Reals:
        """What the last matrix of a feed-forward part is given, kept or not, of the layer where that is most."""
        size = self.kept.rows(is_kept, "product") + self.kept.rows(is_brought_back, "product")
        return _of_worst(self.group, size, size)

    @cached_property
    def let_go(self) -> Reals:
        """What a layer's forward holds for a while and does not keep: what it would keep if nothing were computed again, less what
        it keeps, of the layer where that is most."""
        gone = np.maximum(0.0, self.kept.rows(is_worth_keeping) - self.one)
        return _of_worst(self.group, gone, gone)

    @cached_property
    def by_sort(self) -> LayerInstants:
        """The instants of one layer that can be its worst, of every sort, and what such a layer keeps."""
        if self._inside is None:
            return _by_sort(self.kept)
        return self._inside.by_sort.each(self.kept.spread)

    @cached_property
    def experts_end(self) -> LayerInstants:
        """The last instant of a layer's experts, of the sort that has some: the gradients of all of them are there."""
        last = LAST_OF_EXPERTS
        return self.by_sort.each(lambda part: self._of_routed(part if part.ndim == 2 else part[last]))

    @cached_property
    def adds_shared_up(self) -> Mask:
        """Where ranks add up what shared experts gave beside whole ones, and forward keeps all else, (C, 1)."""
        moe, c = self.job.model.moe, self.group.candidates
        adds = (routed_cut(c) > 1) & c.is_word("recompute", "none")
        return np.asarray((adds & bool(moe and moe.shared_ffn))[:, None], np.bool_)

    @cached_property
    def in_forward(self) -> Reals:
        """Bytes beside what is kept and copies of tokens while forward is in a layer's experts: what its feed-forward part holds and
        does not keep."""
        return (
            self._of_routed(self.kept.rows(is_brought_back, "ffn"))
            + part_of_norm_C(self.job, self.group.candidates)[:, None]
        )

    @cached_property
    def at_experts(self) -> Reals:
        """The same while backward computes them again: all that is brought back until then."""
        return self._of_routed(again_at_experts(self.kept))

    @cached_property
    def sent(self) -> Reals:
        """Bytes of the tokens that a rank sends to experts, once for each that it chose, (C, 1)."""
        return copies_C(self.job, self.group.candidates)[:, None]

    @cached_property
    def arrived(self) -> Reals:
        """Bytes of those that come to the experts of the busiest rank, (C, 1)."""
        return arrived_C(self.job, self.group.candidates)[:, None]

    @cached_property
    def bare_experts(self) -> Reals:
        """Elements of the experts of a layer, without padding."""
        routed = self.kept.weights(is_routed)
        return _of_worst(self.group, routed, routed)

    @cached_property
    def given_to_experts(self) -> tuple[Reals, Reals]:
        """Gradients when backward enters a layer's experts, and what is gone of what it keeps, where nothing is computed again."""
        gradients, gone = given_to_experts(self.kept)
        return self._of_routed(gradients), self._of_routed(gone)

    @cached_property
    def behind_experts(self) -> Reals:
        """What a layer keeps and makes when its experts are through."""
        return self._of_routed(self.kept.rows(is_made_behind_experts))

    @cached_property
    def used_by_experts(self) -> Reals:
        """What it keeps in order to compute others again, and is gone when its experts are through once more."""
        return self._of_routed(self.kept.rows(is_used_up_by_experts))

    def _of_routed(self, part: Reals) -> Reals:
        """A column of the sort of layer that has experts, (C, K) or (1, 1) to (C, 1) or (1, 1), or (C, S) where sorts differ."""
        routed = self.kept.weights(is_routed)
        return _of_worst(self.group, routed, np.broadcast_to(part, np.broadcast_shapes(part.shape, routed.shape)))

    @cached_property
    def instants(self) -> LayerInstants:
        """The same on every stage, of the sort that is worst there."""
        ats = self.by_sort
        total = ats.temporaries - ats.freed + BYTES[self.job.formats.compute] * (ats.weights + ats.stacked)
        sort = worst_sort(self.group, total[..., None, :])
        return ats.each(lambda part: of_sort(self.group, np.broadcast_to(part, total.shape), sort))


def _are_mixed(job: Job) -> bool:
    return len({kind.ffn == "moe" for kind in kinds(job.model)}) > 1


class Inside:
    """What happens inside layers, whatever the pipeline: of one candidate of each sort, and the `place` of every candidate's sort."""

    def __init__(self, job: Job, c: Candidates, place: Column) -> None:
        self.job, self.kept, self.place = job, Kept(job, c), place

    @cached_property
    def by_sort(self) -> LayerInstants:
        """The instants of one layer that can be its worst, of every sort, and what such a layer keeps."""
        return _by_sort(self.kept)


@remembered
def inside_of(job: Job, c: Candidates) -> Inside | None:
    """The same of a whole list of candidates; None where it is asked of those of each group."""
    found = sorts_of_layers(job, c)
    return None if found is None else Inside(job, c.where(found[0]), found[1])


@dataclass(frozen=True, slots=True, eq=False)
class LayerInstants:
    """Instants as in LayerInstant, with axes of instants in front, and what the layer keeps, and `every`, the elements of its matrices where
    sorts differ: of every sort of layer, (C, K), or of the one that is worst on each stage, (C, S)."""

    temporaries: Reals
    freed: Reals
    weights: Reals
    stacked: Reals
    kept: Reals
    is_product: Mask
    is_early: Mask
    routed: Reals
    is_sooner: Mask
    every: Reals

    def each(self, function: Callable[[Any], Any]) -> LayerInstants:
        """The same of every column."""
        return LayerInstants(*(function(getattr(self, name)) for name in names_of(LayerInstants)))

    def some(self, which: slice) -> LayerInstants:
        """Only some of the instants along the first axis."""
        return self.each(lambda part: part if part.ndim == 2 else part[which])

    def unless(self, mask: Mask, others: LayerInstants) -> LayerInstants:
        """Where the mask is set the others."""
        pairs = ((getattr(others, name), getattr(self, name)) for name in names_of(LayerInstants))
        return LayerInstants(*(own if _is_same(theirs, own) else np.where(mask, theirs, own) for theirs, own in pairs))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arrays hold the same; those of several passes are not looked into."""
    return one is other or (one.ndim == 2 and np.array_equal(one, other))


LAST_OF_EXPERTS, EVERY = 1, slice(None)
BEFORE_ATTENTION, FROM_ATTENTION = slice(-2), slice(-2, None)
"""The place of that instant among those of a layer, and all of them; those before attention's backward, and the others
(memory/backward.py, layer_instants)."""
HARDLY_A_LAYER = 1e-6
"""A layer's number may be off by so much when it was a share."""


def _by_sort(kept: Kept) -> LayerInstants:
    """See `Layers.by_sort`."""
    are_unlike = _are_mixed(kept.job) or kept.job.model.enc_layers > 0
    ats = layer_instants(kept)
    temporaries, freed, weights = (
        np.stack(parts) for parts in zip(*((at.temporaries, at.freed, at.weights) for at in ats), strict=True)
    )
    stacked, is_product, is_early, is_sooner = (
        _together([getattr(at, name) for at in ats]) for name in ("stacked", "is_product", "is_early", "is_sooner")
    )
    parts = [at.routed for at in ats]
    routed = _together(parts) if any(isinstance(part, np.ndarray) for part in parts) else np.zeros((1, 1))
    flags = is_product > 0, is_early > 0
    temporaries = temporaries + beside_decoder_CK(kept.job, kept.c)
    every = kept.weights(is_any) if are_unlike else np.zeros((1, 1))
    return LayerInstants(temporaries, freed, weights, stacked, kept.rows(is_kept), *flags, routed, is_sooner > 0, every)


def counted(number: Column, layers: Reals) -> Reals:
    """How many of some layers are through at the `number`-th; negative numbers count from the last one."""
    return np.where(number < 0, np.maximum(layers + number, 0.0), np.minimum(number, layers - 1.0))


def _together(parts: list[Any]) -> Reals:
    """Numbers or arrays (C, K) of several instants in one, (T, C, K) or (T, 1, 1)."""
    if not any(isinstance(part, np.ndarray) for part in parts):
        return np.array(parts, np.float64)[:, None, None] if any(parts) else np.zeros((1, 1))
    return np.stack(np.broadcast_arrays(*(np.asarray(part, np.float64) for part in (*parts, np.zeros((1, 1))))))[:-1]


def _of_worst(group: Group, total: Reals, part: Reals) -> Reals:
    """`part` (..., C, K) of the sort of layer whose `total` is the largest on each stage, (..., C, S)."""
    return of_sort(group, part, worst_sort(group, total[..., None, :]))


def worst_sort(group: Group, total: Reals) -> Column:
    """The sort of layer whose `total` (..., C, S or 1, K) is the largest of those on each stage, (..., C, S)."""
    if total.shape[-1] == 1:
        return np.zeros((*total.shape[:-2], len(group.stages)), np.int64)
    return np.where(group.layers_SK > 0, total, -np.inf).argmax(axis=-1)


def of_sort(group: Group, part: Reals, sort: Column) -> Reals:
    """`part` (..., C, K) of one `sort` of layer on each stage, (..., C, S); nothing on stages without layers."""
    held = group.has_layers
    if part.shape[-1] == 1:
        return part if held.all() else np.multiply(part.swapaxes(-1, -2), held[:, None]).swapaxes(-1, -2)
    return (
        stage_by_stage(np.take_along_axis(np.broadcast_to(part, (*sort.shape[:-1], part.shape[-1])), sort, axis=-1))
        * held
    )
