"""Layers of which full recompute runs only some of every chunk again: the first few, or every so-many-th. Two sides, in turn in backward.

The first few are computed again when the others, which forward ends and backward begins with, are through and what they kept is gone
(NVIDIA/Megatron-LM: megatron/core/transformer/transformer_block.py, recompute_method "block"). Every n-th layer, counted from 1, lies between
others, and is a chunk's last one where n divides its layers (pytorch/torchtitan v0.2.2: torchtitan/distributed/activation_checkpoint.py,
_apply_layer_sac). So each instant of a layer is one of its own side, beside what both sides still keep; the instants of anything else
are those of the side that a chunk's last layer is of, beside what both keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from strategist.errors import InternalError
from strategist.facts.job import Job
from strategist.memory.instant import NONE, Instant, only
from strategist.memory.instants import instants
from strategist.memory.layers import LayerInstants, Layers
from strategist.memory.step import Step
from strategist.records import cached_property, replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Elements, Group, elements


class Turns:
    """The layers of one chunk of each stage in the order of backward, as whole numbers by stage, and those of one side among them."""

    def __init__(self, group: Group, *, again: bool) -> None:
        """`group` holds all layers, and those that are computed `again`, whose side this is, or else the others'."""
        self._every = group.candidates.recompute_every
        chunks = int(group.candidates["virtual_stages"].max(initial=1))
        layers, redone = (own.sum(axis=1) // chunks for own in (group.layers_SK, group.redone_SK))
        passed = np.arange(max(1, int(layers.max(initial=1))))
        place = layers[:, None] - 1 - passed  # in forward
        is_again = (place + 1) % self._every == 0 if self._every else place < redone[:, None]
        self._layers, self.are_own = layers, (place >= 0) & (is_again == again)

    @property
    def is_last(self) -> Mask:
        """Where a chunk's last layer is of this side, (S,)."""
        return np.asarray(self.are_own[:, 0])

    @property
    def is_last_but_one(self) -> Mask:
        """The same of the layer before it."""
        return np.asarray(self.are_own[:, min(1, self.are_own.shape[1] - 1)])

    def looked_at(self, most: Column) -> Column:
        """Which of the first `most` layers of this side can be worst, as their numbers among them, (N, S). Between layers of the other
        side memory rises or falls alike, and from one run of them to the next: so those at both ends of the first runs and of the last."""
        n = self._every
        numbers = [0, 1, -2, -1]
        if n > 1:
            tail = self._layers % n  # behind the last that is computed again
            numbers += [-n, 1 - n, tail - 1, tail, tail + n - 2]
        found = np.array([np.where(np.asarray(own) < 0, most + own, own) * np.ones_like(most) for own in numbers])
        return np.clip(found, 0, np.maximum(most - 1, 0))

    def place(self, number: Column) -> Column:
        """Layers that are through at the so-many-th of this side, (N, S)."""
        before = np.cumsum(self.are_own, axis=1)
        return np.array(
            [[int(np.searchsorted(own, at + 1)) for own, at in zip(before, row, strict=True)] for row in number]
        )

    def before(self, passed: Reals) -> tuple[Reals, Reals]:
        """How many of this side and of the other one are through when `passed` layers are, (..., S)."""
        own = np.concatenate([np.zeros((len(self.are_own), 1)), np.cumsum(self.are_own, axis=1)], axis=1)
        place = np.clip(passed, 0, own.shape[1] - 1).astype(np.int64)
        found = own[np.arange(len(own)), place]
        return found, passed - found


class SideLayers(Layers):
    """The layers of one side: those that are computed `again`, or the others. `every` is what the layers of both keep."""

    def __init__(self, job: Job, whole: Group, *, again: bool) -> None:
        self.whole, self.is_again = whole, again
        side = whole if again else _without(whole)
        own = whole.redone_SK if again else whole.layers_SK - whole.redone_SK
        super().__init__(job, replace(side, layers_SK=own, again_SK=None))
        self.turns = Turns(whole, again=again)

    @cached_property
    def other_side(self) -> SideLayers:
        """The other side, whose other side is this one."""
        found = SideLayers(self.job, self.whole, again=not self.is_again)
        found.other_side = self
        return found

    @cached_property
    def own(self) -> Reals:
        """What they keep of one micro-batch, (C, S)."""
        return self.group.layers_of(self.one)

    @cached_property
    def every(self) -> Reals:
        """What all layers keep of one micro-batch, (C, S)."""
        return self.own + self.other_side.own

    @cached_property
    def number(self) -> Column:
        """How many there are in a chunk, (S,)."""
        return np.asarray(self.turns.are_own.sum(axis=1))

    @property
    def in_turn(self) -> tuple[tuple[Layers, Reals], ...]:
        """Both sides, and what was kept by the layers of the other one before the first of them, of all chunks."""
        return (self, self.other_side.before_first), (self.other_side, self.before_first)

    @cached_property
    def before_first(self) -> Reals:
        """What the layers keep that are through before the first of the other side, of all chunks."""
        turns = self.other_side.turns
        run = turns.place(np.zeros((1, len(self.number)), np.int64))[0]
        return self.own * np.minimum(run, self.number) / np.maximum(self.number, 1)

    @cached_property
    def let_go(self) -> Reals:
        """What the forward of a layer that is computed again leaves free is taken by those behind it that are not."""
        again = self if self.is_again else self.other_side
        return np.where(again.turns.is_last, super(SideLayers, again).let_go, 0.0)


def _without(group: Group) -> Group:
    """The same candidates without recomputation."""
    return replace(group, candidates=group.candidates.without("recompute"), again_SK=None, among=None)


class SideStep(Step):
    """A step of which some layers are computed again, and the instants of one side of its layers."""

    layers: SideLayers
    is_side = True

    @cached_property
    def other_side(self) -> SideStep:
        """The same pass when it comes to the layers of the other side."""
        side = self.layers.other_side
        group = replace(self.group, candidates=side.group.candidates)
        return SideStep(self.job, group, self.bare, side, self.at_rest, self.settled, self.situation)

    @cached_property
    def _looked_at(self) -> Column:
        return self.layers.turns.place(self.layers.turns.looked_at(self.layers.number))

    @property
    def numbers(self) -> tuple[int, ...]:
        """As `Step` has it, of these layers alone, by their place in `_looked_at`."""
        return tuple(range(len(self._looked_at)))

    def passed_layers(self, number: Column) -> Reals:
        """As `Step` has it, of these layers alone."""
        return self._looked_at[number[:, 0, 0, 0], None, None, :].astype(np.float64)

    def let_go(self, passed: Reals, kept: Reals) -> Reals:
        """As `Step` has it: the share of each side."""
        own, _ = self.layers.turns.before(passed)
        share = own / np.maximum(self.layers.number - 1.0, 1.0)
        return np.asarray(share * (self.layers.own / self.chunks - kept) + self._others_let_go(passed))

    def _others_let_go(self, passed: Reals) -> Reals:
        """What those of the other side kept that are through."""
        _, rest = self.layers.turns.before(passed)
        others = self.layers.other_side
        return np.asarray(rest / np.maximum(others.number, 1.0) * others.own / self.chunks)

    def experts_before(self) -> tuple[Reals, Reals, Reals]:
        """As `Step` has it, of these layers alone."""
        layers, turns = self.layers, self.layers.turns
        chunks = int(self.chunks.max())
        every = layers.group.layers_SK[:, layers.have_experts].sum(axis=1) // chunks
        own = turns.looked_at(every)
        before = turns.place(own)[:, None, None, :].astype(np.float64)
        number = own[:, None, None, :].astype(np.float64)
        let_go = layers.let_go_with_experts(number, every.astype(np.float64))
        return number, before, let_go + self._others_let_go(before)

    def in_given_layer(self, gone: Reals) -> LayerInstants:
        """As `Step` has it: nothing is given to another layer than a chunk's last one."""
        found = super().in_given_layer(gone)
        return found.unless(~self.layers.turns.is_last, self.in_layer(gone))

    def kept_by_last(self, number: float) -> Reals:
        """As `Step` has it; the second may be one of the other side."""
        side = self.layers
        second = np.where(side.turns.is_last_but_one, side.largest, side.other_side.largest)
        return np.asarray(side.largest + (number - 1.0) * second)

    @property
    def _kept_side(self) -> SideLayers:
        return self.layers.other_side if self.layers.is_again else self.layers

    @cached_property
    def copies(self) -> Reals:
        """autocast's copies of the weights of the layers that keep everything."""
        if not self.has_copies:
            return NONE
        kept = elements(self.job.model, self._kept_side.group).layers
        return np.where(self.plain, self.compute * kept, 0.0)

    def copies_left(self, passed: Reals) -> Reals:
        """As `Step` has it."""
        gone, _ = self._kept_side.turns.before(passed)
        return self.copies * (1.0 - gone / np.maximum(self._kept_side.number, 1.0))

    @cached_property
    def cached(self) -> Reals:
        """autocast's copies of the others' weights, which are gone when forward is over."""
        if not self.has_copies:
            return NONE
        again = elements(self.job.model, self._kept_side.other_side.group)
        return np.where(self.plain, self.compute * (again.layers - again.experts), 0.0)


def partly_recomputed(
    job: Job, group: Group, counts: Elements, layers: Layers, at_rest: Reals, settled: Reals, *, at_loss: bool
) -> tuple[Instant, ...]:
    """The instants of a group some of whose layers are computed again, as `instants` has them: of stages whose chunks end with one that
    is not, of those whose chunks end with one that is, and of stages whose layers all are."""
    kept = _side(layers)
    again, has_kept, whole = kept.other_side, kept.group.has_layers, replace(group, again_SK=None)
    parts = (
        (_without(group), kept, SideStep, has_kept & ~again.turns.is_last),
        (whole, again, SideStep, has_kept & again.turns.is_last),
        (whole, Layers(job, whole), Step, ~has_kept),
    )
    return tuple(
        instant
        for own, side, made_of, stages in parts
        if stages.any()
        for instant in only(
            stages, instants(job, own, counts, side, at_rest, settled, at_loss=at_loss, made_of=made_of)
        )
    )


def _side(layers: Layers) -> SideLayers:
    if not isinstance(layers, SideLayers):
        raise InternalError("INTERNAL", "Layers have no side.", hint="Please report this.")
    return layers


def of_others(step: Step, instants_of: Callable[[Step], Iterable[Instant]]) -> Iterator[Instant]:
    """Instants of the layers of the other side, on stages that have some."""
    if not isinstance(step, SideStep):
        raise InternalError("INTERNAL", "A step has no layers apart.", hint="Please report this.")
    yield from only(step.other_side.layers.group.has_layers, instants_of(step.other_side))
