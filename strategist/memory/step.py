"""What the instants of a step are made of: kept activations, gradients that stand, gathered weights, units in reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from strategist.columns import entries, on_stages, rows_of
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.runs import BREADTH_FIRST
from strategist.memory.activations import edges_CS, encoded_C, memory_C, step_inputs_C, tables_C, whole_stream_C
from strategist.memory.backward import residual_C
from strategist.memory.instant import LAYERS, NONE, NOWHERE, Instant, Part, Terms, added
from strategist.memory.layers import (
    BEFORE_ATTENTION,
    EVERY,
    FROM_ATTENTION,
    HARDLY_A_LAYER,
    LayerInstants,
    Layers,
    counted,
    joins_at_once,
    of_sort,
    worst_sort,
)
from strategist.memory.logits import held_logits_CS, waiting_logits_CS
from strategist.memory.model_states import shards_state
from strategist.memory.saved import OURS
from strategist.memory.situations import NEVER, Situation, SpreadSituation
from strategist.memory.sorts import NOT_READ, Read, sorts_of
from strategist.records import cached_property
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import (
    Elements,
    Group,
    decodes_K,
    dense_CK,
    expert_CK,
    expert_shards,
    is_managed,
    is_plain_data_parallel,
    near_turn,
    part_of,
    pieces_C,
    sequence_cut,
    state_shards,
    target_share,
    vocabulary_elements,
)
from strategist.space.stages import kinds


def once_for(read: Read) -> Callable[[Callable[[Any], Any]], cached_property[Any]]:
    """A property of a step that is worked out once for each sort of candidates that agree in what it reads."""

    def asked(formula: Callable[[Any], Any]) -> cached_property[Any]:
        @wraps(formula)
        def spread(step: Step) -> Any:
            return step.once(read, lambda own: formula(own) if own is step else getattr(own, formula.__name__))

        return cached_property(spread)

    return asked


def _kept_beside(s: Situation, chunk: Reals, embedded: Reals, headed: Reals) -> Reals:
    """What other passes in flight keep, of one micro-batch inside a chunk, and more in those with the ends."""
    return np.asarray(s.others * chunk + s.others_first * embedded + s.others_last * headed)


def _standing(s: Situation, counts: Elements, at_rest: Reals, settled: Reals) -> Reals:
    """Gradients of a pipeline's chunks that stand, or are reduced."""
    whole = np.maximum(counts.whole, 1.0)
    standing = counts.layers * s.standing + counts.before * s.first_stands + counts.behind * s.last_stands
    reduced = counts.layers * s.reduced + counts.behind * s.last_reduced
    return at_rest * (standing / whole) + settled * (reduced / whole)


def _early_units(
    job: Job, group: Group, s: Situation, layer: Reals, behind: Reals, layers: Reals, *, finds: bool
) -> Reals:
    """Elements that ZeRO-3 gathered too early in a pipeline: of other chunks, or, where a forward pass at work `finds` them, of its own.
    A chunk's last layer, or norm and head; a root unit is gathered whenever its chunk works, so where ends are tied theirs is none; and so
    is an only layer when it would be gathered, but for an embedding's."""
    found = s.finds_early * 1.0
    any_chunk, at_first, at_last = (
        (found, found * s.is_first, found * s.is_last) if finds else (s.early, s.early_first, s.early_last)
    )
    at_first, at_last = at_first * group.is_first[None, :], at_last * group.is_last[None, :]
    ends: Reals = at_last * behind + at_first * layer
    inside = (any_chunk - at_first - at_last) * np.where(layers > 1, layer, 0.0)
    return np.asarray(inside if job.model.tied else inside + ends)


class Step:
    """Backward passes of a group's candidates, one per situation. Bytes are (P, C, S), or (C, S) where all passes are alike,
    unless they say otherwise."""

    def __init__(
        self,
        job: Job,
        group: Group,
        counts: Elements,
        layers: Layers,
        at_rest: Reals,
        settled: Reals,
        situation: Situation,
        at: Column | None = None,
    ) -> None:
        """`at_rest` are gradients while micro-batches follow each other, `settled` those that the update finds. `at` is the place of
        every candidate among those of the situation, where these are others. Elements are those with padding where weights are sharded, `bare` ones those that the gradients of a backward pass have."""
        self.job, self.group, self.at_rest, self.settled = job, group, at_rest, settled
        self.layers, self._situations, self._at = layers, situation, at
        self.c, self.bare, self.packed = group.candidates, counts, layers.packed
        formats = job.formats
        self.compute, self.reduce, self.stored = (
            BYTES[f] for f in (formats.compute, formats.reduce, formats.parameter)
        )
        self.piped, self.casts = group.pp > 1, self.compute != self.stored
        self.tied, self.trained = bool(job.model.tied and not self.piped), job.trainable
        self.ends = 0.0 if job.model.adapters is not None else 1.0 if job.model.frozen else job.trainable
        # of embedding and head: none beside adapters, and where some weights are frozen an end may be one that is trained whole
        self._of_sorts: dict[Read, tuple[Step, Column] | None] = {}

    @cached_property
    def counts(self) -> Elements:
        """Elements with padding where weights are sharded."""
        return self.bare.padded(self.shards_gradients)

    @cached_property
    def plain(self) -> Mask:
        """Where plain data parallelism or nothing runs the model, (C, 1), as all of these are."""
        return is_plain_data_parallel(self.job, self.c)[:, None]

    @cached_property
    def managed(self) -> Mask:
        """Where weights lie in units."""
        return is_managed(self.job, self.c)[:, None]

    @cached_property
    def reshards(self) -> Mask:
        """Where weights are sharded again behind a pass."""
        return shards_state(self.c, 3)[:, None]

    @cached_property
    def shards_gradients(self) -> Mask:
        """Where ranks share gradients."""
        return shards_state(self.c, 2)[:, None]

    @cached_property
    def buckets(self) -> Mask:
        """Where DDP's buckets are."""
        several_ranks = (self.c.data_parallel * self.c["cp"] > 1) & (not self.c.in_threads)
        return self.plain & several_ranks[:, None]

    @cached_property
    def shards(self) -> Column:
        """Ranks that share the state of the weights."""
        return state_shards(self.c)[:, None]

    @cached_property
    def chunks(self) -> Column:
        """Runs of layers of a rank."""
        return self.c["virtual_stages"][:, None]

    @cached_property
    def has_copies(self) -> bool:
        """Whether autocast makes copies of weights."""
        return self.casts and bool(self.plain.any())

    @cached_property
    def has_apart(self) -> bool:
        """Whether experts are units of their own."""
        job = self.job
        return job.model.moe is not None and job.profile.keeping.name == OURS and bool((self.c["ep"] > 1).any())

    @cached_property
    def apart(self) -> Mask:
        """Where they are."""
        return self.managed & (self.c["ep"] > 1)[:, None] if self.has_apart else NOWHERE

    @cached_property
    def situation(self) -> Situation:
        """How far the rank is in its schedule."""
        return self._situations if self._at is None else SpreadSituation(self._situations, self._at)

    @property
    def several(self) -> Mask:
        """Where gradients of earlier micro-batches stand."""
        return self.situation.stands

    def once(self, read: Read, formula: Callable[[Any], Any]) -> Any:
        """What a formula says of the step, worked out once for each sort of candidates that agree in what it reads."""
        alike = self._alike(read)
        return formula(self) if alike is None else rows_of(formula(alike[0]), alike[1])

    def parts(self, read: Read, formula: Callable[[Any], Sequence[Terms]]) -> tuple[Part, ...]:
        """The same of terms at some instants, spread only when an instant's bytes are added up."""
        alike = self._alike(read)
        step, place = (self, None) if alike is None else alike
        return tuple(Part(terms, place) for terms in formula(step))

    def part(self, read: Read, formula: Callable[[Any], Terms]) -> Part:
        """The same of one set of terms."""
        return self.parts(read, lambda own: (formula(own),))[0]

    def _alike(self, read: Read) -> tuple[Step, Column] | None:
        """A step that holds one candidate of each sort, and the place of every candidate's."""
        if read not in self._of_sorts:
            self._of_sorts[read] = self._of_sort(read)
        return self._of_sorts[read]

    def unsorted(self) -> Step:
        """The same, every formula asked of all candidates: sooner for a few formulas."""
        self._of_sorts = dict.fromkeys(NOT_READ)
        return self

    def of_state(self, formula: Callable[[Any], Any]) -> Any:
        """The same of a formula that reads how weights, gradients and buffers are shared, and not how much a rank works on."""
        return self.once("state", formula)

    def of_work(self, formula: Callable[[Any], Any]) -> Any:
        """The same of a formula that reads how much a rank works on and how, and not how many ranks share state."""
        return self.once("work", formula)

    def _of_sort(self, read: Read) -> tuple[Step, Column] | None:
        sorts = sorts_of(self.job, self.group, read, self._at)
        if sorts is None:
            return None
        group, firsts = sorts.group, sorts.firsts
        at = firsts if self._at is None else self._at[firsts]
        found = self._of(group, firsts, self._situations, at).unsorted()
        work = self._alike("work") if read == "layer" else None
        if work is not None:  # which is the same in several of these
            found._of_sorts["work"] = work[0], work[1].take(firsts)
        return found, sorts.place

    def among(self, rows: Column, situation: Situation, at: Column) -> Step:
        """Other passes of some of the candidates."""
        return self._of(part_of(self.group, rows), rows, situation, at)

    def _of(self, group: Group, rows: Column, situation: Situation, at: Column) -> Step:
        """Passes of some candidates, which are a group; what is the same in all passes is taken from the others once, and kept beside these: with
        the group itself it would be a circle, whose memory nobody gives back soon. The layers hold their group, so no other gets its number."""
        key = "shared", id(group)
        if key not in self.group.known:
            resting = rows_of(self.at_rest, rows), rows_of(self.settled, rows)
            self.group.known[key] = self.bare.of(rows), Layers(self.job, group), *resting
        bare, layers, at_rest, settled = self.group.known[key]
        return type(self)(self.job, group, bare, layers, at_rest, settled, situation, at)

    @cached_property
    def unpacked(self) -> float:
        """A quantised matrix in the compute format, as a product needs it."""
        from strategist.space.adapters import unpacked_bytes

        return unpacked_bytes(self.job)

    @cached_property
    def at_once(self) -> Mask:
        """See joins_at_once."""
        return joins_at_once(self.job, self.group)

    @once_for("state")
    def layers_of_chunk(self) -> Reals:
        """How many layers a pass goes through, (C, S)."""
        return on_stages(1.0 / self.chunks[:, 0], self.group.layers_S)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layers of a chunk that are looked at, counted from its end: the last one, the one before it and the first; under ZeRO-3
        without a pipeline, which has nothing to gather beside the first, the second too; of an encoder behind whose decoder backward comes
        to it its own last two. Of convolutions the instant itself knows where its block lies."""
        if self.job.model.is_convolutional and not self.piped:
            return (0,)
        halves = (0, 1, self.job.model.layers, self.job.model.layers + 1) if self.in_halves else (0, 1)
        return (*halves, -2, -1) if self.reshards.any() and not self.piped else (*halves, -1)

    def passed_layers(self, number: Column) -> Reals:
        """Layers of the chunk that are through when backward is in the `number`-th from its end; -1 is its first layer, -2 its second."""
        return counted(number, np.maximum(self.layers_of_chunk, 1.0))

    def let_go(self, passed: Reals, kept: Reals) -> Reals:
        """What `passed` layers have kept, where the layer at work keeps `kept`: their share of the others, whatever their sort; less than nothing where
        they keep the input that they were computed again from, and its gradient."""
        share = passed / np.maximum(np.maximum(self.layers_of_chunk, 1.0) - 1.0, 1.0)
        found = np.asarray(share * (self.layers.every / self.chunks - kept))
        if not self.job.profile.holds_passed or self.job.recompute_layers:
            return found
        return np.where(self.c.is_word("recompute", "full")[:, None], -passed * self.stream, found)

    def experts_before(self) -> tuple[Reals, Reals, Reals]:
        """At each layer with experts that is looked at: those of its sort that are through, all layers that are, and what they kept."""
        every = np.maximum(self.experts_of_chunk, 1.0)
        own = counted(np.array((0, 1, -2, -1))[:, None, None, None], every)
        return own, own, self.layers.let_go_with_experts(own, every)

    def kept_by_last(self, number: float) -> Reals:
        """What the last layers of a chunk keep, one or two of them."""
        return number * self.layers.largest

    def let_go_of_halves(self, passed: Reals) -> Reals:
        """What so many layers kept, and in front of a decoder's what its encoder gave."""
        is_through = passed > self.job.model.layers - 0.5
        return self.of_halves(passed, self.layers.one) + np.where(is_through, self.encoded, 0.0)

    def of_halves(self, passed: Reals, own: Reals) -> Reals:
        """The sum over `passed` layers of what is each sort's `own`, (C, K): a decoder's are through before those of its encoder."""
        decoders, decodes = float(self.job.model.layers), decodes_K(self.job.model)
        return np.asarray(
            np.minimum(passed, decoders) * own[:, decodes] + np.maximum(passed - decoders, 0.0) * own[:, ~decodes]
        )

    def copies_left(self, passed: Reals) -> Reals:
        """Copies of weights that are kept when so many layers are through."""
        if self.in_halves:
            gone = self.compute * self.of_halves(passed, self.units)
            return np.where(self.copies > 0.0, np.maximum(0.0, self.copies - gone), 0.0)
        return self.copies * (1.0 - passed / np.maximum(self.layers_of_chunk, 1.0))

    def let_go_in_turn(self, passed: Reals) -> Reals:
        """The same where layers with experts are through first."""
        with_experts, every = self.experts_of_chunk, self.layers.every / self.chunks
        kept = self.layers.kept_with_experts
        rest = np.maximum(0.0, every - with_experts * kept) / np.maximum(1.0, self.layers_of_chunk - with_experts)
        return np.minimum(passed, with_experts) * kept + np.maximum(passed - with_experts, 0.0) * rest

    is_side = False
    """Whether the layers that are looked at keep everything beside others that are computed again."""

    def is_first_layer(self, passed: Reals) -> Mask:
        """Whether no layer of the chunk is left to be gathered beside the one behind which `passed` ones lie: of a few layers the last,
        too, may be the first."""
        return np.asarray(passed >= np.maximum(self.layers_of_chunk, 1.0) - 1.0)

    @cached_property
    def widest(self) -> Reals:
        """Elements of the widest layer, or slice of one, (C, 1)."""
        return self.counts.widest[:, None] / pieces_C(self.group)[:, None]

    @cached_property
    def routed(self) -> Reals:
        """Elements of the experts of a layer where they are a unit of their own, because other ranks share them than the rest of
        the layer, (C, 1); else nothing."""
        if not self.has_apart:
            return NONE
        shards = expert_shards(self.c)
        held = expert_CK(self.job.model, self.c, shards) * shards[:, None]
        return np.where(self.apart, held.max(axis=1, keepdims=True), 0.0)

    @property
    def last_unit(self) -> Reals:
        """Elements of the buffer of the unit that a layer's forward gathers last, (C, 1)."""
        return self.dense if self.routed is NONE else np.where(self.apart, self.buffered, self.widest)

    @cached_property
    def buffered(self) -> Reals:
        """Elements of a layer's experts that are gathered through a buffer, (C, 1): a rank that has all of them copies matrix by
        matrix, without one and not ahead of time (FSDPParamGroup, unshard and wait_for_unshard)."""
        return np.where(self.sharers > 1, self.routed, 0.0)

    @cached_property
    def copies_experts_late(self) -> Mask:
        """Where a layer's experts are not there until its backward enters them, (C, 1): nothing computed them again, and nothing
        gathers them ahead of time."""
        forgets_none = self.c.is_word("recompute", "none")[:, None]
        return np.asarray(self.apart & self.reshards & (self.sharers == 1) & forgets_none, np.bool_)

    def routed_of(self, share: Reals | None) -> Reals:
        """Elements of experts that lie apart, in a share of the other layers or, with None, in all layers of a rank."""
        if not self.has_apart:
            return NONE
        every = np.where(self.apart, self.counts.experts, 0.0)
        return every if share is None else share * np.maximum(0.0, every - self.routed)

    @cached_property
    def dense(self) -> Reals:
        """Elements of the widest layer's own unit, (C, 1): all but experts that lie apart."""
        if not self.has_apart:
            return self.widest
        present = np.asarray((self.group.layers_SK > 0).any(axis=0))
        return np.where(self.apart, self._widest_unit(present), self.widest)

    def _widest_unit(self, chosen: Mask) -> Reals:
        """Elements of the widest of the chosen sorts of layers (K,), without experts that lie apart, (C, 1)."""
        return np.where(chosen, self.units, 0.0).max(axis=1, keepdims=True)

    @cached_property
    def units(self) -> Reals:
        """Elements of every sort of layer without experts that lie apart, with all padding, (C, K)."""
        return dense_CK(self.job.model, self.c, self._parts[:, 0]) * self._parts

    @cached_property
    def beside(self) -> Reals:
        """Elements of the own unit of the widest layer that has experts apart, (C, 1): without those."""
        if not self.layers.are_mixed:
            return self.dense
        return np.where(self.apart, self._widest_unit(self.layers.have_experts), self.dense)

    @cached_property
    def alone(self) -> Reals:
        """The same of layers without experts."""
        return self._widest_unit(~self.layers.have_experts)

    @cached_property
    def is_mixed(self) -> bool:
        """Whether experts lie apart in some layers, others have none, and no policy of one layer differs from another's."""
        is_whole = np.array_equal(self.layers.group.layers_SK, self.group.layers_SK)
        return self.has_apart and self.layers.are_mixed and is_whole

    @cached_property
    def in_halves(self) -> bool:
        """Whether layers lie in an encoder and the decoder behind it, one sort in each, in one piece and under one policy."""
        shape = self.job.model
        if not shape.enc_layers or self.piped or self.group.is_tiled or shape.adapters is not None:
            return False
        return len(kinds(shape)) == 2 and np.array_equal(self.layers.group.layers_SK, self.group.layers_SK)

    @once_for("state")
    def experts_of_chunk(self) -> Reals:
        """How many layers of a chunk have experts, of those that are looked at, (C, S)."""
        with_experts = self.layers.group.layers_SK[:, self.layers.have_experts].sum(axis=1)
        return on_stages(1.0 / self.chunks[:, 0], with_experts)

    @once_for("state")
    def first(self) -> Reals:
        """1 where the pass goes through the embedding."""
        return self.group.is_first[None, :] * self.situation.is_first * 1.0

    @once_for("state")
    def last(self) -> Reals:
        """1 where the pass goes through the head."""
        return self.group.is_last[None, :] * self.situation.is_last * 1.0

    @once_for("state")
    def head(self) -> Reals:
        """Elements of the head's matrix, where the pass goes through it."""
        return vocabulary_elements(self.job.model, self.c["tp"], np.ones_like(self.c["tp"]))[:, None] * self.last

    @once_for("state")
    def behind(self) -> Reals:
        """Elements of the unit of norm and head, where the pass goes through it."""
        return self.counts.behind * self.situation.is_last

    @once_for("state")
    def before(self) -> Reals:
        """Elements of the embedding's unit, where the pass goes through it."""
        return self.counts.before * self.situation.is_first

    @cached_property
    def second_table(self) -> Reals:
        """The gradient of a table that both halves look up and no head shares: the decoder's part waits for the encoder's, (C, S)."""
        if self.tied or not self.in_halves:
            return NONE
        return self.ends * np.where(self.managed, self.compute, self.stored) * self.table

    @cached_property
    def table(self) -> Reals:
        """Elements of the token table on the rank, where the pass goes through it."""
        one = np.ones_like(self.c["tp"])
        return vocabulary_elements(self.job.model, self.c["tp"], one)[:, None] * self.first

    @once_for("work")
    def in_flight(self) -> Reals:
        """All that other passes in flight keep."""
        return _kept_beside(self.situation, self._chunk, self._embedded, self._headed)

    @once_for("work")
    def others(self) -> Reals:
        """The same, and the step's tokens and labels."""
        return self.in_flight + self.inputs

    @property
    def moving(self) -> Instant:
        """What a rank of a pipeline holds in one pass and not in another: activations of other passes, gradients, and units of other chunks
        that were gathered too early. Of passes with as much, one that finds such a unit holds a byte more."""

        def shared(own: Step) -> Terms:
            return {"gradients": own.earlier, "gather_buffers": own.held_early + (own.found_early > 0.0)}

        work = self.part("work", lambda own: {"activations": own.in_flight})
        return Instant(LAYERS, {}, parts=(work, self.part("state", shared)))

    @once_for("work")
    def activations(self) -> Reals:
        """All that is kept when this pass's backward begins."""
        return (
            self.others + self._chunk + self.situation.is_first * self._embedded + self.situation.is_last * self._headed
        )

    @once_for("work")
    def in_layers(self) -> Reals:
        """All that is kept when the layers' backward starts: what lies behind them is gone, but for what a decoder's read of its encoder."""
        return self.activations - self.last * edges_CS(self.job, self.group) + self.encoded

    @cached_property
    def encoded(self) -> Reals:
        """What is kept of an encoder's result until its own layers go backward, (C, 1)."""
        return np.asarray(encoded_C(self.job, self.c))[:, None] if self.in_halves else NONE

    @cached_property
    def memory(self) -> Reals:
        """That of it which is gone with the last of the decoder's layers, (C, 1)."""
        return memory_C(self.job, self.c)[:, None]

    @cached_property
    def _chunk(self) -> Reals:
        """What one micro-batch keeps of one chunk inside."""
        return self.layers.every / self.chunks + tables_C(self.job, self.c)[:, None] + self.places

    @cached_property
    def rows(self) -> Reals:
        """Elements of the rows that a micro-batch gets from a parameter server, (C, 1)."""
        from strategist.memory.served import rows_C

        return rows_C(self.job, self.c)[:, None]

    @cached_property
    def places(self) -> Reals:
        """What is kept of ids whose rows a parameter server gave, (C, 1): which rows they name, and where each of them is among these."""
        if not self.c.serves_tables:
            return NONE
        from strategist.memory.served import kept_bytes_C  # few ask for a server

        return kept_bytes_C(self.job, self.c)[:, None]

    @cached_property
    def _embedded(self) -> Reals:
        """What the chunk with the embedding keeps more: its input does not lie in a receive buffer."""
        return on_stages(self.stream[:, 0], self.group.is_first * self.piped)

    @cached_property
    def _headed(self) -> Reals:
        """What the chunk with the head keeps more: final norm and the head's input, but no output to hand on."""
        return edges_CS(self.job, self.group) - on_stages(self.stream[:, 0], self.group.is_last * self.piped)

    @once_for("work")
    def held_logits(self) -> Reals:
        """The logits that a pipeline's last stage holds on to, and those of passes that wait for their backward."""
        if not self.piped:
            return NONE
        waiting = self.situation.others_last * waiting_logits_CS(self.job, self.group)
        return self.last * held_logits_CS(self.job, self.group) + waiting

    @once_for("work")
    def logits_before_head(self) -> Reals:
        """The same while a forward pass has not come to its head: those of its own are not there yet, but where a stage has one chunk it
        holds on to those of the pass before (schedules.py, Schedule1F1B)."""
        takes_turns = self.c.is_word("schedule", "interleaved")[:, None]
        if not takes_turns.any():
            return self.held_logits
        own = self.last * held_logits_CS(self.job, self.group)
        return self.held_logits - np.where(takes_turns, own, 0.0)

    @once_for("work")
    def inputs(self) -> Reals:
        """The step's tokens and labels."""
        return on_stages(step_inputs_C(self.job, self.c), np.ones(len(self.group.stages)))

    @cached_property
    def stream(self) -> Reals:
        """The residual stream's gradient as the rank holds it between layers, (C, 1)."""
        return residual_C(self.job, self.c, whole=False)[:, None]

    @cached_property
    def whole_stream(self) -> Reals:
        """The same for all tokens of the micro-batch, as matrices that are cut read and give it, (C, 1)."""
        return whole_stream_C(self.job, self.c)[:, None]

    @cached_property
    def headed(self) -> float:
        """Tokens that the head looks at over those of the streams above: a decoder's behind an encoder."""
        return target_share(self.job)

    @cached_property
    def cuts_sequences(self) -> bool:
        """Whether some candidate's ranks hold parts of a sequence between the layers of a dense model."""
        return self.job.model.moe is None and bool((sequence_cut(self.c) > 1).any())

    @once_for("state")
    def stands(self) -> Mask:
        """Where gradients stand that this pass adds to: of earlier micro-batches, or DDP's buckets. Those of nn.DataParallel's replicas
        gather apart until the last is there."""
        return np.asarray((self.several & (not self.c.in_threads)) | self.buckets, np.bool_)

    @once_for("state")
    def earlier(self) -> Reals:
        """Gradients that stand when the pass starts; in a pipeline those of other chunks too."""
        if not self.piped:
            return np.where(self.several | self.buckets, self.at_rest, 0.0)
        return _standing(self.situation, self.counts, self.at_rest, self.settled)

    def fresh(self, elements: Reals, routed: Reals | float = 0.0) -> Reals:
        """Gradients that this pass has made so far, of `elements`, where none stood before; at most all that will rest. `routed`
        of them are of experts that lie apart."""
        shares = elements / self._parts
        if self.has_apart:
            shares = shares + routed * (1.0 / self.sharers - 1.0 / self._parts)
        made = np.minimum(self.trained * BYTES[self.job.formats.gradient] * shares, self.at_rest)
        if self.piped:
            made = np.where(self._waits_whole, self.trained * self.reduce * elements, made)
        return np.where(self.stands, 0.0, made)

    @cached_property
    def _parts(self) -> Column:
        """Ranks that share a gradient, (C, 1)."""
        return np.where(self.shards_gradients, self.shards, 1)

    @cached_property
    def _waits_whole(self) -> Mask:
        """Where a pipeline keeps gradients whole that it will share, (C, 1)."""
        return np.asarray(self.managed & self.shards_gradients, np.bool_)

    @cached_property
    def sharers(self) -> Reals:
        """Ranks that share a gradient of the same experts where those lie apart, else of everything, (C, 1)."""
        return np.where(self.apart & self.shards_gradients, expert_shards(self.c)[:, None], self._parts) * 1.0

    def in_reduction(self, elements: Reals, bare: Reals) -> Reals:
        """A unit while it is reduced: its gradient, of `bare` elements, and the copy that is sent, of `elements`; where no shards
        are made of it, the gradient is gone when the result comes."""
        if self.piped:
            return NONE
        own = np.where(self.shards_gradients, self.compute, 0.0) * bare
        return np.where(self.reduces, self.trained * (self.reduce * elements + own), 0.0)

    def output(self, elements: Reals, *, routed: bool = False) -> Reals:
        """What a reduction gives, of `elements`, before it is added to what earlier micro-batches gave: gradients, or sums that
        replicas will average after the last one (FSDPParamGroup, _partial_reduce_output). `routed`: of experts that lie apart."""
        if self.piped or not self._takes_over.any():
            return self._reduced(elements, routed=routed)
        return np.where(self._takes_over, 0.0, self._reduced(elements, routed=routed))

    def taking_over(self, elements: Reals, *, routed: bool = False) -> Reals:
        """The same where sums of two micro-batches wait for replicas: what comes out takes in the sum that stands and becomes
        the gradient. With more of them the first such instant is an addition to the sum."""
        if self.piped or not self._takes_over.any():
            return NONE
        return np.where(self._takes_over, self._reduced(elements, routed=routed), 0.0)

    @cached_property
    def _takes_over(self) -> Mask:
        """Where the only addition is the last one, and to sums that wait for replicas, (C, 1)."""
        waits = ~self.shards_gradients | (self.c["dp_replicate"] > 1)[:, None]
        return np.asarray(waits & (self.c["accumulation"] == 2)[:, None] & self.job.profile.replicas_wait, np.bool_)

    def _reduced(self, elements: Reals, *, routed: bool) -> Reals:
        if self.piped:
            return NONE
        parts = self.sharers if routed else self._parts
        joins = self.reduces & self.several & (self.shards_gradients | self.job.profile.replicas_wait)
        return np.where(joins, self.trained * self.reduce * elements / parts, 0.0)

    def retained(self, elements: Reals) -> Reals:
        """Where replicas average after each micro-batch: reduced gradients of unsharded units, which wait for the end of
        backward beside those that stand (FSDPParamGroup, _all_reduce_state)."""
        if self.piped or self.job.profile.replicas_wait:
            return NONE
        waits = self.reduces & self.several & ~self.shards_gradients
        return np.where(waits, self.trained * self.reduce * elements, 0.0)

    @cached_property
    def outer(self) -> Reals:
        """Elements of the units outside the layers that are gathered as long as the pass runs: all of a root unit."""
        return self.before + self.behind if self.tied else self.before

    def gathered(
        self,
        *,
        layers: int | Column,
        head: bool,
        passed: Reals | float = 0.0,
        experts: Reals | float = 0.0,
    ) -> Reals:
        """Gathered weights: `layers` layers under ZeRO-3, otherwise all but what backward has `passed` (elements), which a
        pipeline keeps too. Tied ends are a root unit, which ZeRO-3 does not give back, and no less is there than what backward needs
        soon (`near_turn`). Where experts lie apart, `layers` are those
        without them, and beside them are `experts` times those of a layer."""
        counts, tied = self.counts, self.job.model.tied
        if self.piped:
            chunk = self._gathered_layers(layers, counts.layers / self.chunks, experts)
            root = self.root if tied else (self.behind if head else 0.0)
            done = counts.layers * self.situation.reduced + counts.behind * self.situation.last_reduced
            kept = np.where(self.reshards, chunk + root, counts.whole - done)
            return added(np.where(self.managed, self.compute * kept, 0.0), self.held_early)
        own = self._gathered_layers(layers, counts.layers, experts)
        still = np.maximum(0.0, counts.layers - passed)
        if self.packed < 1.0:
            own, still = self.packed * own, self.packed * still
        behind = counts.behind if head and not tied else 0.0
        fetched = own + (self.outer if tied else 0.0) + behind
        if self.job.profile.reuse_distance:
            near = near_turn(self.job, self.c, counts.whole) - passed - (0.0 if head or tied else counts.behind)
            fetched = np.maximum(fetched, self.packed * near)
        return np.where(self.managed, self.compute * np.where(self.reshards, fetched, still + self.outer + behind), 0.0)

    def _gathered_layers(self, layers: int | Column, own: Reals, experts: Reals | float) -> Reals:
        """Elements of some layers of a rank that has `own` in all; where only some have experts they are the last ones, without a
        pipeline."""
        if not self.has_apart:
            return np.minimum(layers * self.widest, own)
        unit = self.beside if self.is_mixed and not self.piped else self.dense
        alone = own - np.where(self.apart, self.counts.experts / self.chunks, 0.0)
        return np.minimum(layers * unit, alone) + experts * self.routed

    @once_for("state")
    def root(self) -> Reals:
        """Elements of a pipeline's tied ends that are gathered while a pass runs. ZeRO-3 gives them back after a backward pass and
        gathers them when the next one begins, behind the loss; an embedding that forward gathered stays while other chunks work."""
        held = self.situation.holds_first
        if not held.any():
            return self.before + self.behind
        return self.before + self.behind + np.where(held & ~self.situation.is_first, self.counts.before, 0.0)

    @once_for("state")
    def not_again(self) -> Reals:
        """Bytes of a root's norm and head that are given back when a pass ends, where no forward pass follows that needs them."""
        breadth_first = self.c.is_word("schedule", *BREADTH_FIRST)[:, None]
        if not (self.piped and breadth_first.any()):
            return NONE
        ends = breadth_first & self.managed & self.reshards
        return np.where(ends, self.compute * self.behind, 0.0)

    @once_for("state")
    def gathered_at_loss(self) -> Reals:
        """Gathered weights at the loss, where the pass before has given the head back and no forward pass gathered it again."""
        found, alternates = self.gathered(layers=0, head=True), self.situation.alternates
        if not self.piped or alternates.all():
            return found
        return found - np.where(self.managed & self.reshards & ~alternates, self.compute * self.behind, 0.0)

    def in_layer(self, gone: Reals) -> LayerInstants:
        """The worst instant of the worst sort of layer when this share of the other layers is gone, (..., C, S)."""
        return self._in_only_layer if self.group.layers_SK.shape[1] == 1 else self._in_layer(gone, NONE)

    @cached_property
    def _in_only_layer(self) -> LayerInstants:
        """The same of the only sort, whatever is gone."""
        return self._in_layer(np.zeros((1, 1)), NONE)

    def in_given_layer(self, gone: Reals) -> LayerInstants:
        """The same in the last layer of a pipeline's chunk, the gradient that it is given left out."""
        last = self.last > 0
        found = self._in_layer(gone, self.stream)
        return found.unless(last, self.in_layer(gone)) if last.any() else found

    def before_attention(self, gone: Reals) -> LayerInstants:
        """The same of instants before attention's backward."""
        return self._in_layer(gone, NONE, BEFORE_ATTENTION)

    def from_attention(self, gone: Reals) -> LayerInstants:
        """The same of instants in attention's backward and behind it."""
        return self._in_layer(gone, NONE, FROM_ATTENTION)

    def _in_layer(self, gone: Reals, given: Reals, which: slice = EVERY) -> LayerInstants:
        ats = self.layers.by_sort if which is EVERY else self.layers.by_sort.some(which)
        found = self._as_they_stand(gone, given, ats, is_followed=True)
        if not (self.has_apart and self.reshards.any() and ats.is_sooner.any()):
            return found
        passed = gone * np.maximum(self.layers_of_chunk - 1.0, 1.0)
        alone = self.is_first_layer(passed + HARDLY_A_LAYER)
        return found.unless(alone, self._as_they_stand(gone, given, ats, is_followed=False))

    def _as_they_stand(self, gone: Reals, given: Reals, ats: LayerInstants, *, is_followed: bool) -> LayerInstants:
        """The same where a layer is left to be gathered next, or none is."""
        standing = self._worst_in_layer(gone, given, np.bool_(True), ats, is_followed)
        if self.stands.all():
            return standing
        return standing.unless(~self.stands, self._worst_in_layer(gone, given, np.bool_(False), ats, is_followed))

    def _worst_in_layer(
        self, gone: Reals, given: Reals, stands: np.bool_, ats: LayerInstants, is_followed: bool
    ) -> LayerInstants:
        """The same where gradients stand or not. Of each sort the instant counts that is worst by what differs between them, of
        the sorts the one that is worst with what it keeps beside the layers that are left."""
        made = self.trained * np.where(self.shards_gradients, self.reduce, BYTES[self.job.formats.gradient])
        made = np.where(self.at_rest.any(axis=1, keepdims=True), made, 0.0)  # offloaded ones leave as they are made
        partial = np.where(self.at_once, np.where(stands, 0.0, made), self.trained * self.compute)
        worth: Reals = ats.temporaries - ats.freed + partial * (ats.weights + ats.stacked)
        if self.has_copies:
            worth = worth - self._copies_gone(ats)
        if self.empties.any():
            worth = worth - np.where(self.empties, self.trained * self.stored, 0.0) * self.joined(ats)
        worth = added(worth, self._joining(ats, stands), NONE if given is NONE else -given * ats.is_early)
        if self.has_apart and ats.is_sooner.any():
            next_one = self.dense if is_followed else 0.0
            later = self.compute * (next_one + np.where(self.copies_experts_late, self.routed, 0.0))
            worth = worth - np.where(self.apart & self.reshards, later, 0.0) * ats.is_sooner
        at = worth.argmax(axis=0), *np.indices(worth.shape[1:], sparse=True)
        total = worth.max(axis=0)[:, None, :]
        if total.shape[-1] > 1:
            total = total + gone[..., None] * ats.kept[:, None, :]
            if self.has_copies and self.tells_sorts:
                total = total + (self._makes_copies * ats.every)[:, None, :]
            if self.has_apart and ats.routed.ndim > 2:
                total = total + self._when_reduced(gone, ats.routed.max(axis=0), stands)
            if self.is_mixed:
                total = np.where(self._are_elsewhere(gone), -np.inf, total)
            if self.in_halves:
                total = np.where(self._in_other_half(gone), -np.inf, total)
        sort = worst_sort(self.layers.group, total)

        def of_worst(part: Any) -> Any:
            own = part if part.ndim == 2 else entries(part, at)
            return of_sort(self.layers.group, own, sort)

        return ats.each(of_worst)

    def _copies_gone(self, ats: LayerInstants) -> Reals:
        """Bytes of copies of weights that are gone with their gradients, (..., C, K): where recomputation made them, no more than those."""
        gone = np.where(self.plain, self.trained * self.compute, 0.0) * ats.weights
        if not self.job.model.is_convolutional:  # elsewhere they are the layer's own
            return gone
        again = self.copies_again(ats.every)
        return np.where(again > 0.0, np.minimum(gone, again), gone)

    def _are_elsewhere(self, gone: Reals) -> Mask:
        """Sorts of layers that do not lie where a share of the others is `gone`, (..., C, S, K): those with experts come last in
        forward, and first in backward."""
        have = self.layers.have_experts
        before = gone * np.maximum(self.layers_of_chunk - 1.0, 0.0)
        behind = np.expand_dims(before > self.experts_of_chunk - 0.5, -1)
        held = self.group.layers_SK > 0
        both = np.expand_dims(held[:, have].any(axis=1) & held[:, ~have].any(axis=1), -1)
        return np.asarray(self.apart[..., None] & both & (have == behind))

    def _in_other_half(self, gone: Reals) -> Mask:
        """Sorts of layers that do not lie where a share of the others is `gone`, (..., C, S, K)."""
        before = gone * np.maximum(self.layers_of_chunk - 1.0, 0.0)
        return np.asarray(
            np.expand_dims(before > self.job.model.layers - 0.5, -1) == decodes_K(self.job.model), np.bool_
        )

    def _when_reduced(self, gone: Reals, routed: Reals, stands: np.bool_) -> Reals:
        """What `routed` experts (C, K) that lie apart change when their unit is through, (..., C, S, K): their gradients and weights
        are gone, they are reduced in place of the layer above, and where none stood there are shards of gradients."""
        gradient = self.reduce if self.piped else BYTES[self.job.formats.gradient] / self.sharers
        gradient = np.where(self.at_once | stands | ~self.at_rest.any(axis=1, keepdims=True), 0.0, gradient)
        weights = np.where(self.reshards, self.routed, 0.0 if self.piped else routed)
        change = self.trained * (gradient - np.where(self.at_once, 0.0, self.compute)) * routed - self.compute * weights
        change = np.where(self.apart & (routed > 0.0), change, 0.0)[:, None, :]
        if self.piped:
            return change
        behind = np.zeros_like(self.behind) if self.tied else self.behind
        sent = self.trained * self.reduce * (self.routed - np.where(gone > 0.0, self.dense, behind))
        return change + np.where((self.apart & (routed > 0.0))[:, None, :], sent[..., None], 0.0)

    @staticmethod
    def joined(at: LayerInstants) -> Reals:
        """Elements of a layer's matrices whose gradients have joined what stands: of all that have one but the matrix at work."""
        return np.where(at.is_product, 0.0, at.weights)

    def joining(self, at: LayerInstants) -> Reals:
        """Bytes of gradients that are about to join what stands: of a matrix at work, in the format of its pass and, where that is
        another, in the weight's; of stacked matrices. Where nothing stands they become gradients, once they are cast."""
        return self._joining(at, self.stands)

    def _joining(self, at: LayerInstants, stands: Mask | np.bool_) -> Reals:
        if not self.at_once.any():
            return NONE
        casts = self.casts & ~self.managed
        work = np.where(stands | casts, self.compute, 0.0) + np.where(stands & casts, self.stored, 0.0)
        work = np.where(at.is_product & self.at_once, work, 0.0)
        stacked = np.where(self.at_once & stands, np.where(self.managed, self.compute, self.stored), 0.0)
        return self.trained * (work * at.weights + stacked * at.stacked)

    @cached_property
    def given(self) -> Reals:
        """The gradient that a pipeline's last layer of a chunk is given, which lies in a receive buffer as long as it is needed."""
        return self.stream * (1.0 - self.last)

    @once_for("state")
    def ahead_of_time(self) -> Reals:
        """Weights that ZeRO-3 gathers too early in a pipeline, (C, S) bytes: FSDP2 takes what ran before the first layer in any
        forward pass for what comes next, which is the end of the chunk's micro-batch before (FSDPParamGroup, _backward_prefetch). A root
        unit is there already, and so is an only layer. Embeddings are never gathered in backward."""
        s, group = self.situation, self.group
        ends = s.is_last & group.is_last[None, :]
        others = ~(s.is_first & group.is_first[None, :]) & (self.layers_of_chunk > 1)
        layer = np.where(s.is_begun | (s.others > 0), self.dense, 0.0) * others
        last = np.where(s.is_begun | (s.others_last > 0), self.counts.behind, 0.0) * (not self.job.model.tied)
        return np.where(self.managed & self.reshards, self.compute * np.where(ends, last, layer), 0.0)

    @once_for("state")
    def held_early(self) -> Reals:
        """The same that other chunks gathered, until a pass of theirs uses it."""
        if self.situation.early is NEVER:
            return NONE
        return self._gathered_early(finds=False)

    @once_for("state")
    def found_early(self) -> Reals:
        """The same that a forward pass finds of its own chunk."""
        return self._gathered_early(finds=True)

    def _gathered_early(self, *, finds: bool) -> Reals:
        units = self.dense, self.counts.behind, self.layers_of_chunk
        found = _early_units(self.job, self.group, self.situation, *units, finds=finds)
        return np.where(self.managed & self.reshards, self.compute * found, 0.0)

    @cached_property
    def reduces(self) -> Mask:
        """Where units are reduced during the pass: fully_shard and replicate outside of a pipeline."""
        return self.managed & (not self.piped)

    @cached_property
    def copies(self) -> Reals:
        """autocast's copies of the layers' weights that are kept for backward: none where layers are computed again; adapters are cast
        for each use."""
        if self.job.model.adapters is not None and self.compute < BYTES[self.job.formats.gradient]:
            return self._copied(self.trained * self.counts.whole)
        if not self.has_copies:
            return NONE
        return self._copied(self.counts.layers)

    def _copied(self, elements: Reals) -> Reals:
        keeps = self.plain & self.c.is_word("recompute", "none")[:, None]
        return np.where(keeps, self.compute * elements, 0.0)

    @cached_property
    def cached(self) -> Reals:
        """autocast's copies of the layers' weights that its cache holds until forward is over, and nothing afterwards: of whole
        weights, not of single experts."""
        if not self.has_copies:
            return NONE
        dense = self.compute * (self.counts.layers - self.counts.experts)
        return np.where(self.plain & (self.copies == 0.0), dense, 0.0)

    def copies_again(self, every: Reals) -> Reals:
        """The copies of one layer's weights that recomputation makes; `every` are the elements of its matrices where sorts differ."""
        layers = np.maximum(self.group.layers_S[None, :], 1.0)
        return self._makes_copies * (every if self.tells_sorts else self.counts.layers / layers)

    @property
    def tells_sorts(self) -> bool:
        """Whether copies of a layer's weights are those of its own sort, not of all layers in the mean."""
        return self.layers.are_mixed or self.in_halves

    @cached_property
    def _makes_copies(self) -> Reals:
        """Bytes of an element's copy where recomputation makes one, (C, 1)."""
        again = self.plain & ~self.c.is_word("recompute", "none")[:, None]
        return np.where(again, self.compute, 0.0)

    @cached_property
    def outside(self) -> Reals:
        """Gradients that gather outside DDP's buckets while micro-batches are not reduced (no_sync)."""
        if not self.buckets.any():
            return NONE
        stay = self.buckets & self.several
        return np.where(stay, self.at_rest, 0.0) if stay.any() else NONE

    @cached_property
    def empties(self) -> Mask:
        """Where a gradient leaves those outside for its bucket as soon as it is made: in the last of two micro-batches. With more of
        them the one before it, in which nothing leaves, holds most."""
        return np.asarray(self.buckets & (self.c["accumulation"] == 2)[:, None], np.bool_)

    @cached_property
    def head_copy(self) -> Reals:
        """autocast's copy of the head's weight."""
        return np.where(self.plain, self.compute * self.head, 0.0) if self.has_copies else NONE

    @cached_property
    def waiting(self) -> Reals:
        """The head's gradient, which waits for the embedding's when both are one weight of a root unit."""
        return np.where(self.reduces, self.ends * self.compute * self.head, 0.0) if self.tied else NONE

    @cached_property
    def head_outside(self) -> Reals:
        """The same outside of units, in the format of the gradients."""
        return np.where(~self.managed, self.ends * self.stored * self.head, 0.0) if self.tied else NONE

    @cached_property
    def old_head(self) -> Reals:
        """That of it which waits for the sum."""
        return np.where(self.stands, self.head_outside, 0.0) if self.casts and self.tied else self.head_outside

    @cached_property
    def growing_head(self) -> Reals:
        """That of it which becomes the gradient, as the embedding's is added to it: under autocast, where none stands yet."""
        return np.where(self.stands, 0.0, self.head_outside) if self.casts and self.tied else NONE

    @once_for("state")
    def late(self) -> Reals:
        """The gradient of norm and head on a pipeline's last stage whose table is tied, in the compute format: they are the root
        unit, which joins what stands when the pass is over (FSDPState, _root_post_backward_final_callback)."""
        if not (self.piped and self.job.model.tied):
            return NONE
        return np.where(self.at_once, 0.0, self.ends * self.compute * self.behind)

    @once_for("state")
    def passed_head(self) -> Reals:
        """Elements of norm and head whose gradients have joined what stands when the layers' backward begins: a unit of their own."""
        if self.tied:
            return np.zeros_like(self.behind)
        return self.behind if self.late is NONE else np.where(self.at_once, self.behind, 0.0)

    @once_for("work")
    def previous(self) -> Reals:
        """The gradient of the stage's input that the stage before still reads, in a pipeline of one chunk per rank."""
        if not self.piped:
            return NONE
        sends = self.c.is_word("schedule", "1f1b")[:, None] & self.situation.is_begun & ~self.group.is_first[None, :]
        return np.where(sends, self.stream, 0.0)
