"""The instants of a step at which memory can peak, and what each term holds there.

The order of work is torch's: at the loss every activation is kept; the head's gradient comes first and, under fully_shard,
its unit is reduced first; then the layers backwards, one unit reduced behind the next; last the embedding. A unit's gradient
exists in the compute format and, while it is reduced, as a copy in the reduce format that lives until the next unit is
reduced. Source: PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward and foreach_reduce.
A pipeline keeps weights gathered and gradients unsharded until a chunk's last backward pass is over, and reduces then
(torch/distributed/pipelining/stage.py, backward_maybe_with_nosync and perform_reduce_grad).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from strategist.facts.job import Job
from strategist.memory.at_end import during_reductions, end_of_pass, ending, hooked, summed, updating
from strategist.memory.at_experts import during_experts
from strategist.memory.at_forward import (
    adding_up,
    beginning,
    casting_beside_passes,
    casting_in_forward,
    during_forward,
    gathering,
    under_autocast,
)
from strategist.memory.at_layers import during_layers, layer_reduced
from strategist.memory.at_loss import during_head, during_loss, head_accumulated, head_reduced
from strategist.memory.instant import Instant
from strategist.memory.layers import Layers
from strategist.memory.situations import Schedule, Situation, distinct_situations, one_pass
from strategist.memory.sorts import sorts_of
from strategist.memory.step import Step
from strategist.space.candidates import Column, Reals
from strategist.space.shares import Elements, Group, holds_early_C


def instants(
    job: Job,
    group: Group,
    counts: Elements,
    layers: Layers,
    at_rest: Reals,
    settled: Reals,
    *,
    at_loss: bool = False,
    made_of: type[Step] = Step,
) -> tuple[Instant, ...]:
    """Every instant at which some candidate can peak, or only the fullest two of the loss. `at_rest` are gradients while
    micro-batches follow each other, `settled` those that the update finds, (C, S) each."""

    def in_situation(situation: Situation, at: Column | None = None) -> Step:
        own = _tiled_step() if group.is_tiled else made_of
        return own(job, group, counts, layers, at_rest, settled, situation, at)

    if group.pp == 1:
        return _of_one_pass(in_situation(one_pass(group.candidates["accumulation"])), at_loss=at_loss)
    if group.is_v_shaped:
        from strategist.memory.vee import v_instants, v_loss  # of a schedule that is rarely asked for

        if at_loss:
            return tuple(v_loss(job, group, in_situation, during_loss))
        return tuple(v_instants(job, group, in_situation, _before_layers, _through_layers, updating))
    return _of_pipeline(job, group, in_situation, at_loss=at_loss)


def _of_one_pass(step: Step, *, at_loss: bool) -> tuple[Instant, ...]:
    """Without a pipeline."""
    if at_loss:
        return during_loss(step.unsorted())
    candidates = step.group.candidates
    return (
        *gathering(step),
        *(under_autocast(step) if step.has_copies else ()),
        *(adding_up(step) if step.cuts_sequences else ()),
        *((casting_in_forward(step),) if step.job.casts_apart else ()),
        *during_loss(step),
        *during_head(step),
        head_reduced(step),
        *_layers_or_slices(step),
        *(during_experts(step) if step.has_apart else ()),
        *ending(step),
        *((summed(step),) if candidates.in_threads else ()),
        *(hooked(step) if "compression" in candidates.columns else ()),
        updating(step),
    )


def _of_pipeline(job: Job, group: Group, in_situation: Callable[..., Step], *, at_loss: bool) -> tuple[Instant, ...]:
    """In a pipeline whose stages have one run of layers, or chunks in turn."""
    sorts = sorts_of(job, group, "schedule")
    schedule, at = (Schedule(group), None) if sorts is None else (Schedule(sorts.group), sorts.place)
    if at_loss:
        at_most = during_loss(in_situation(schedule.at(schedule.second_of_last_chunk()), at).unsorted())
        return _in_two_parts(job, group, in_situation, at_most, at_loss=True) if schedule.splits else at_most
    if schedule.has_chunks:
        heads, bodies, forwards = _in_chunks(group, schedule, at, in_situation)
    else:
        firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
        (every,), place = _distinct([schedule.at(*firsts)], at)
        heads = bodies = forwards = in_situation(every, place)
    passes = (
        *during_loss(heads),
        *during_head(heads),
        head_accumulated(heads),
        *during_forward(forwards),
        *((casting_beside_passes(forwards),) if job.casts_apart else ()),
        beginning(bodies),
        *during_layers(bodies),
        *((layer_reduced(heads),) if schedule.has_chunks else ()),
        *(during_experts(bodies) if bodies.has_apart else ()),
        *end_of_pass(bodies),
        *during_reductions(bodies),
    )
    if schedule.splits:
        from strategist.memory.weight_passes import split_end

        return (*_in_two_parts(job, group, in_situation, passes), *split_end(bodies, updating(bodies)))
    return (*passes, updating(bodies))


def _in_chunks(
    group: Group, schedule: Schedule, at: Column | None, in_situation: Callable[..., Step]
) -> tuple[Step, Step, Step]:
    """The passes to look at where stages have several runs of layers: until the layers' backward begins, from there on, and forward."""
    firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
    every = schedule.at(schedule.first_pass(), schedule.second_of_last_chunk(), *firsts, schedule.fullest())
    holds_early = holds_early_C(group.candidates)
    if not holds_early.any():
        both, at = _distinct([every.of(slice(2)), every.of(slice(1, None))], at)
        until, behind = (in_situation(passes, at) for passes in both)
        return until, behind, behind
    from strategist.memory.early import in_company  # rarely asked for

    *looked_at, at = in_company(in_situation(every, at), every, at, np.flatnonzero(holds_early))
    three, at = _distinct(looked_at, at)
    heads, bodies, forwards = (in_situation(passes, at) for passes in three)
    return heads, bodies, forwards


def _distinct(situations: Sequence[Situation], at: Column | None) -> tuple[Sequence[Situation], Column | None]:
    """No situation twice, where they are those of sorts of candidates."""
    return (situations, None) if at is None else distinct_situations(situations, at)


def _before_layers(step: Step) -> Iterator[Instant]:
    """Of one backward pass of a pipeline, until the layers' begins."""
    yield from (*during_loss(step), *during_head(step), head_accumulated(step))


def _through_layers(step: Step) -> Iterator[Instant]:
    """From there on."""
    yield from (*during_layers(step), *end_of_pass(step))


def _in_two_parts(
    job: Job,
    group: Group,
    in_situation: Callable[[Situation], Step],
    whole: tuple[Instant, ...],
    *,
    at_loss: bool = False,
) -> tuple[Instant, ...]:
    """Where backward passes come in two parts their instants, elsewhere those of `whole` ones."""
    from strategist.memory.weight_passes import split_instants, whole_instants  # of a schedule that is rarely asked for

    parts = tuple(split_instants(job, group, in_situation))
    return (*whole_instants(group, whole), *(part for part in parts if part.is_loss or not at_loss))


def _tiled_step() -> type[Step]:
    """What instants are made of where matrices are tiled."""
    from strategist.memory.tiled import TiledStep  # most searches look at no tiles

    return TiledStep


def _layers_or_slices(step: Step) -> Iterable[Instant]:
    """The instants of the layers in one piece, or slice by slice."""
    if not step.group.is_tiled:
        return during_layers(step)
    from strategist.memory.tiled import in_slices

    return in_slices(step)
