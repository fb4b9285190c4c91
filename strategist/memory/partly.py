"""Layers of which full recompute runs only the first few of every chunk again: two sides, one behind the other in backward.

Forward ends and backward begins with the layers that keep everything; when they are through, what they kept is gone, and the others
are computed again one by one (NVIDIA/Megatron-LM: megatron/core/transformer/transformer_block.py, recompute_method "block").
So each instant of a layer is one of its own side, beside what both sides still keep; the instants of anything else are those
of a step without recomputation that keeps less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np

from strategist.columns import on_stages
from strategist.errors import InternalError
from strategist.facts.job import Job
from strategist.memory.instants import instants
from strategist.memory.step import NONE, Instant, Layers, Step, counted
from strategist.records import replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Elements, Group, elements


class KeptLayers(Layers):
    """The layers that keep everything. `every` is what all layers keep, also those that `again` knows, which are computed again."""

    def __init__(self, job: Job, group: Group) -> None:
        first = group.redone_SK
        super().__init__(job, replace(_without(group), layers_SK=group.layers_SK - first))
        self.again = Layers(job, replace(group, layers_SK=first, again_SK=None))

    @cached_property
    def own(self) -> Reals:
        """What they keep of one micro-batch, (C, S)."""
        return self.group.layers_of(self.one)

    @cached_property
    def every(self) -> Reals:
        """What all layers keep of one micro-batch, (C, S)."""
        return self.own + self.again.every

    @property
    def in_turn(self) -> tuple[tuple[Layers, Reals], ...]:
        """These, and then the others."""
        return (*super().in_turn, (self.again, self.own))

    @cached_property
    def let_go(self) -> Reals:
        """What the forward of a layer that is computed again leaves free is taken by those that are not."""
        return np.where(self.group.has_layers, 0.0, self.again.let_go)


def _without(group: Group) -> Group:
    """The same candidates without recomputation."""
    return replace(group, candidates=group.candidates.without("recompute"), again_SK=None)


class KeptStep(Step):
    """A step of which some layers keep everything, and the instants of these."""

    layers: KeptLayers
    is_side = True

    @cached_property
    def again(self) -> AgainStep:
        """The same pass when it comes to the layers that are computed again."""
        group = replace(self.group, candidates=self.layers.again.group.candidates)
        return AgainStep(self, group)

    @cached_property
    def own_layers(self) -> Reals:
        """How many layers of a chunk keep everything, (C, S)."""
        return on_stages(1.0 / self.chunks[:, 0], self.layers.group.layers_SK.sum(axis=1))

    def passed_layers(self, number: Column) -> Reals:
        """As `Step` has it, of these layers alone."""
        return counted(number, np.maximum(self.own_layers, 1.0))

    def let_go(self, passed: Reals, kept: Reals) -> Reals:
        """As `Step` has it."""
        share = passed / np.maximum(self.own_layers - 1.0, 1.0)
        return np.asarray(share * (self.layers.own / self.chunks - kept))

    def kept_by_last(self, number: float) -> Reals:
        """As `Step` has it; the second may be one that is computed again."""
        second = np.where(self.own_layers >= 2.0, self.layers.largest, self.layers.again.largest)
        return np.asarray(self.layers.largest + (number - 1.0) * second)

    def is_first_layer(self, passed: Reals) -> Mask:
        """As `Step` has it, where no others follow."""
        return np.asarray((passed >= np.maximum(self.own_layers, 1.0) - 1.0) & ~self.layers.again.group.has_layers)

    @cached_property
    def copies(self) -> Reals:
        """autocast's copies of these layers' weights."""
        return self._copied(elements(self.job.model, self.layers.group).layers) if self.has_copies else NONE

    def copies_left(self, passed: Reals) -> Reals:
        """As `Step` has it."""
        return self.copies * (1.0 - passed / np.maximum(self.own_layers, 1.0))

    @cached_property
    def cached(self) -> Reals:
        """autocast's copies of the others' weights, which are gone when forward is over."""
        if not self.has_copies:
            return NONE
        others = elements(self.job.model, self.layers.again.group)
        return np.where(self.plain, self.compute * (others.layers - others.experts), 0.0)

    @cached_property
    def _makes_copies(self) -> Reals:
        """Nothing of these layers is computed again."""
        return np.zeros((1, 1))


class AgainStep(Step):
    """The layers that are computed again, when those that keep everything are through."""

    def __init__(self, kept: KeptStep, group: Group) -> None:
        super().__init__(kept.job, group, kept.bare, kept.layers.again, kept.at_rest, kept.settled, kept.situation)
        self.kept = kept

    @cached_property
    def own_layers(self) -> Reals:
        """How many layers of a chunk are computed again, (C, S)."""
        return on_stages(1.0 / self.chunks[:, 0], self.layers.group.layers_SK.sum(axis=1))

    @cached_property
    def in_layers(self) -> Reals:
        """All that is kept when backward comes to these layers."""
        return self.kept.in_layers - self.kept.layers.own / self.chunks

    def passed_layers(self, number: Column) -> Reals:
        """The others, and of these as `Step` has it."""
        return np.asarray(self.kept.own_layers + counted(number, np.maximum(self.own_layers, 1.0)))

    def let_go(self, passed: Reals, kept: Reals) -> Reals:
        """As `Step` has it, of these layers alone."""
        share = (passed - self.kept.own_layers) / np.maximum(self.own_layers - 1.0, 1.0)
        return np.asarray(share * (self.layers.every / self.chunks - kept))


def partly_recomputed(
    job: Job, group: Group, counts: Elements, layers: Layers, at_rest: Reals, settled: Reals, *, at_loss: bool
) -> tuple[Instant, ...]:
    """The instants of a group some of whose layers are computed again, as `instants` has them. On stages that own too few layers all
    of them are."""
    found = instants(job, _without(group), counts, layers, at_rest, settled, at_loss=at_loss, made_of=KeptStep)
    keeps = layers.group.has_layers
    if keeps.all():
        return found
    whole = replace(group, again_SK=None)
    rest = instants(job, whole, counts, Layers(job, whole), at_rest, settled, at_loss=at_loss)
    return (*_on_some(found, keeps), *_on_some(rest, ~keeps))


def _on_some(found: Iterable[Instant], stages: Mask) -> Iterator[Instant]:
    """The same instants on some stages alone, (S,)."""
    for instant in found:
        yield replace(instant, terms={name: np.where(stages, held, 0.0) for name, held in instant.terms.items()})


def of_others(step: Step, instants_of: Callable[[Step], Iterable[Instant]]) -> Iterator[Instant]:
    """Instants of the layers that are computed again, on stages that have some."""
    if not isinstance(step, KeptStep):
        raise InternalError("INTERNAL", "A step has no layers apart.", hint="Please report this.")
    yield from _on_some(instants_of(step.again), step.again.layers.group.has_layers)
