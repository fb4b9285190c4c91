"""One layer in backward: gradients of activations, what is freed on the way, gradients of weights, per sort of layer (K).

Four instants can be the worst of a layer. Behind the feed-forward part's activation: its input, output and the gradients of
both are alive. When its last matrix gets its gradient. When its first matrices have theirs, and those of their inputs wait
to be added up. Inside attention: the feed-forward part is gone, all its weights have gradients, and flash attention's
workspace is added. Order of work: torch's autograd goes through strategist's own block backwards
(executor/models/block.py). Workspace: PyTorch 2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd:
softmax_d, dq_accum, dk_expanded, dv_expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import numpy as np

from strategist.columns import remembered
from strategist.facts.convolutions import blocks, numbers_behind
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import BYTES
from strategist.memory.activations import whole_stream_C
from strategist.memory.saved import (
    OURS,
    POLICIES,
    Cut,
    Habits,
    Part,
    Policy,
    Saved,
    habits_of,
    has_wide_softmax,
    saved_tensors,
)
from strategist.records import cached_property, dataclass
from strategist.space.candidates import EXCHANGES, RINGS, Candidates, Column, Mask, Reals, total_of
from strategist.space.shares import (
    ceil_div,
    copies_here,
    crowding,
    decodes_K,
    is_plain_data_parallel,
    layers,
    matrix_elements,
    of_layers,
    routed_cut,
    sequence_cut,
    targets,
    tokens,
)
from strategist.space.stages import kinds

INPUTS = (
    "q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "qkv", "qkvz", "beta", "in", "x", "dt", "decay_in", "decay_out", "gate_in", "gate_out",
)  # fmt: skip
"""Matrices whose gradients come after attention's own backward."""
ROWS, NARROW, WIDE = 128, 32, 64
"""Flash attention's backward rounds rows up to 128, the head width to 32, and to 64 above 128."""
CASTING = 9.0
"""Bytes per element while a tensor is cast to fp8: scaled in float32, clamped in float32, and the result (pytorch/ao
torchao/float8/float8_training_tensor.py, _ToFloat8ConstrFunc.forward, and float8_utils.py, to_fp8_saturated)."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerInstant:
    """One instant of one layer's backward, (C, K) each: bytes of temporaries, bytes of kept activations that are freed
    by then, and elements of weights whose gradients exist, and of `stacked` ones that are just put together; `is_product`:
    a matrix is just getting its gradient; `is_early`: the gradient that the layer was given is still needed; `routed`: those
    of the weights that are experts and through with backward, which are a unit of their own where ranks share them; `is_sooner`:
    those have not begun, so nothing is gathered for the next layer."""

    temporaries: Reals
    freed: Reals
    weights: Reals
    stacked: Reals | float = 0.0
    is_product: Mask | bool = False
    is_early: bool = True
    routed: Reals | float = 0.0
    is_sooner: Mask | bool = False


Rows = Callable[[Saved, Policy], bool]


def is_kept(row: Saved, policy: Policy) -> bool:
    """Rows that a policy keeps."""
    return policy in row.policies


def is_worth_keeping(row: Saved, policy: Policy) -> bool:
    """Rows that backward reads, whatever the policy."""
    return "none" in row.policies


def is_of_first_norm(row: Saved, policy: Policy) -> bool:
    """Rows that the first layer does not keep where nothing before it is trained: what the norm reads needs no gradient. A
    recomputed layer keeps its input all the same."""
    return policy == "none" and row.name.startswith("attention_norm_")


def is_used_up(row: Saved, policy: Policy) -> bool:
    """Rows that are kept in order to compute others again, and gone when that is done."""
    return "none" not in row.policies and policy in row.policies and row.part != "rest"


def is_brought_back(row: Saved, policy: Policy) -> bool:
    """Rows that backward computes again under a policy."""
    return "none" in row.policies and policy not in row.policies


class Kept:
    """Bytes of the rows of one layer for one micro-batch, under each candidate's policy, and elements of the layer's
    matrices, (C, K) each; each sum is made once. Where it is known of `one_of_each` sort of candidates, among which each has a `place`, it is
    taken from there."""

    def __init__(self, job: Job, c: Candidates, one_of_each: Kept | None = None, place: Column | None = None) -> None:
        self.job, self.c = job, c
        self._known: dict[tuple[Rows, tuple[Part, ...]], Reals] = {}
        self._one_of_each, self._place = one_of_each, place

    def rows(self, wanted: Rows, *parts: Part) -> Reals:
        """Some rows, of all parts or of some."""
        if (wanted, parts) not in self._known:
            self._known[wanted, parts] = self._rows(wanted, parts)
        return self._known[wanted, parts]

    def _rows(self, wanted: Rows, parts: tuple[Part, ...]) -> Reals:
        if self._one_of_each is None:
            return self._per_token(self._widths.of(wanted, parts)) * self._tokens
        return self.spread(self._one_of_each.rows(wanted, *parts))

    def spread(self, values: Reals) -> Reals:
        """Values of one candidate of each sort as those of all, (..., C, K); what has one row for several sorts is alike in all."""
        sorts = 0 if self._one_of_each is None else len(self._one_of_each.c)
        return values if self._place is None or values.shape[-2] != sorts else values.take(self._place, axis=-2)

    def _per_token(self, widths: Reals) -> Reals:
        """Bytes of rows per token, (C, K); few rows are cut in more than two of the ways that there are."""
        cuts = np.flatnonzero(widths.any(axis=(0, 1, 2))).tolist()
        own = (self._of_busiest(widths[..., cut]) / self._divisors[cut][:, None] for cut in cuts)
        return np.asarray(total_of(own)) if cuts else np.zeros((len(self.c), widths.shape[2]))

    def _of_busiest(self, widths: Reals) -> Reals:
        """Bytes of rows that are cut alike (2 or 1, policies, K), and behind them of rows that arrive, on the rank whose experts get most, (C, K)."""
        own, *arrived = (part[self.c["recompute"]] for part in widths)
        return own + crowding(self.job, self.c)[:, None] * arrived[0] if arrived else own

    @cached_property
    def _widths(self) -> Widths:
        return widths_of(self.job.model, habits_of(self.job), BYTES[self.job.formats.compute])

    @cached_property
    def _tokens(self) -> Reals:
        return tokens(self.job, self.c)[:, None]

    @cached_property
    def _divisors(self) -> tuple[Column | Reals, ...]:
        """What each of CUTS divides by, (C,) each."""
        c, sequence = self.c, sequence_cut(self.c)
        cut_only = np.where(c["tp"] > 1, sequence, np.inf)
        dispatched = routed_cut(c)
        exchanged = np.where(c.is_word("context_parallel", *EXCHANGES), c["tp"], np.inf)
        regathered = np.where(dispatched > 1, 1.0, np.inf)
        summed = np.where(dispatched > 1, np.inf, cut_only)
        cast = np.where(is_plain_data_parallel(self.job, c), 1.0, np.inf)
        return sequence, c["tp"], np.ones_like(sequence), dispatched, exchanged, regathered, summed, cast, cut_only

    def weights(self, chosen: Callable[[str], bool]) -> Reals:
        """Elements of the chosen matrices on one rank, of one piece of them where they are cut in some that nothing else knows."""
        if self._one_of_each is not None:
            return self.spread(self._one_of_each.weights(chosen))
        columns = [
            sizes[:, [chosen(matrix.name) for matrix in layer.matrices]].sum(axis=1)
            for layer, sizes in zip(layers(self.job.model), self._matrices, strict=True)
        ]
        return np.stack(columns, axis=1) / self.c["tiling"][:, None]

    @cached_property
    def final(self) -> Reals:
        """Elements of the weight that the layer lists last: a matrix, or a bias, which is as good as nothing."""
        if self._one_of_each is not None:
            return self.spread(self._one_of_each.final)
        columns = [
            sizes[:, -1] * (not layer.matrices[-1].bias)
            for layer, sizes in zip(layers(self.job.model), self._matrices, strict=True)
        ]
        return np.stack(columns, axis=1) / self.c["tiling"][:, None]

    @cached_property
    def _matrices(self) -> tuple[Column, ...]:
        """Elements of every matrix of each sort of layer, all copies of it on one rank, (C, M) each."""
        one = np.ones_like(self.c["tp"])
        return tuple(
            copies_here(layer, self.c) * matrix_elements(layer, self.c, one) for layer in layers(self.job.model)
        )


CUTS: tuple[Cut | Literal["cut_only"], ...] = (
    "sequence", "heads", "whole", "dispatched", "exchanged", "regathered", "summed", "autocast", "cut_only",
)  # fmt: skip
"""How rows are cut; the last are those of the sequence that exist only where tensor parallelism cuts the layer, in front of them those that only
plain modules under autocast have."""


class Widths:
    """Bytes of the rows of each sort of layer per token before they are cut, (1, policies, K, cuts); where some ranks' experts are
    crowded, (2, policies, K, cuts): behind all others those of tokens that came to experts."""

    def __init__(self, shape: ModelShape, habits: Habits, compute: float) -> None:
        self.rows = [saved_tensors(shape, kind, habits) for kind in kinds(shape)]
        self.halves, self.crowded, self.compute = habits.light == "half-blocks", habits.is_crowded, compute
        self._known: dict[tuple[Rows, tuple[Part, ...]], Reals] = {}

    def of(self, wanted: Rows, parts: tuple[Part, ...]) -> Reals:
        """The sum of some rows, of all parts if none is named."""
        if (wanted, parts) not in self._known:
            self._known[wanted, parts] = self._sum(wanted, parts)
        return self._known[wanted, parts]

    def _sum(self, wanted: Rows, parts: tuple[Part, ...]) -> Reals:
        found = np.zeros((1 + self.crowded, len(POLICIES), len(self.rows), len(CUTS)))
        for place, every in enumerate(self.rows):
            for row in (row for row in every if not parts or row.part in parts):
                cut = CUTS.index("cut_only" if row.cut_only else row.cut)
                keeps = [wanted(row, policy) for policy in POLICIES]
                found[int(row.arrives and self.crowded), keeps, place, cut] += row.width * _bytes(self.compute, row)
        if self.halves:  # every second layer is computed again whole
            none, selective, full = (POLICIES.index(policy) for policy in ("none", "selective", "full"))
            found[:, selective] = 0.5 * (found[:, none] + found[:, full])
        return found


@cache
def widths_of(shape: ModelShape, habits: Habits, compute: float) -> Widths:
    """The widths of a model under a framework's habits, `compute` bytes per element; each sum is made once."""
    return Widths(shape, habits, compute)


def _bytes(compute: float, row: Saved) -> float:
    """Bytes of one element of a row."""
    if row.is_float32:
        return 4.0
    return 1.0 if row.is_float8 else compute


def beside_decoder_CK(job: Job, c: Candidates) -> Reals | float:
    """Bytes of the gradient of what the encoder gave, which grows from one layer of the decoder to the next and lies beside each, (C, K)."""
    if not job.model.enc_layers:
        return 0.0
    return residual_C(job, c, whole=False)[:, None] * decodes_K(job.model)


def layer_instants(kept: Kept) -> tuple[LayerInstant, ...]:
    """The instants of one layer that can be its worst."""
    if kept.job.model.is_convolutional:
        return _in_convolutions(kept)
    last = kept.weights(is_last)
    dense: tuple[LayerInstant, ...] = (_last_matrix(kept, last), _behind_activation(kept, last), _first_matrices(kept))
    if kept.job.model.moe is None or kept.job.profile.keeping.name != OURS:
        gathered = (_gathered_gradient(kept),) if _gathers_gradient(kept) else ()
        casts = _while_cast(kept) if kept.job.casts_apart else ()
        across = (_in_attention(kept, across=True),) if kept.job.model.enc_layers else ()
        return (*dense, _in_attention(kept), _before_attention(kept), *gathered, *casts, *across)
    routed: tuple[LayerInstant, ...] = (_experts_begin(kept), _experts_end(kept), _first_expert(kept))
    routed = (*routed, _inputs_of_expert(kept), _inputs_together(kept), _summed_again(kept))
    if kept.job.model.moe.shared_ffn:
        routed = (*routed, _last_of_shared(kept), _inside_shared(kept))
    dense += (dense[0],) * (len(routed) - len(dense))  # other layers have fewer
    has_experts = np.array([kind.ffn == "moe" for kind in kinds(kept.job.model)])
    mixed = (_by_kind(has_experts, *pair) for pair in zip(routed, dense, strict=True))
    return (*mixed, _in_attention(kept), _before_attention(kept))


def _in_convolutions(kept: Kept) -> tuple[LayerInstant, ...]:
    """Where backward enters a block of convolutions: the gradient of its result, that of what its last norm made, and all that it
    computes again. What the blocks behind it kept is gone, and their weights have gradients. Blocks shrink towards the end, so that
    the worst one is seldom the last."""
    every = blocks(kept.job.model.extra)
    results = np.array([every[kind.block].result for kind in kinds(kept.job.model)], np.float64)
    gradients = 2.0 * BYTES[kept.job.formats.compute] * tokens(kept.job, kept.c)[:, None] * results
    weights = kept.weights(is_any) @ _are_behind(kept.job.model)
    enters = LayerInstant(gradients + kept.rows(is_brought_back), kept_behind(kept), weights)
    late = LayerInstant(enters.temporaries, enters.freed, weights, is_early=False)
    return (enters, enters, enters, late, late)  # as many as elsewhere


def kept_behind(kept: Kept) -> Reals:
    """Bytes that the blocks of convolutions behind the last one of each sort keep, (C, K)."""
    return np.asarray(kept.rows(is_kept) @ _are_behind(kept.job.model))


@cache
def _are_behind(shape: ModelShape) -> Reals:
    """How many blocks of each sort lie behind the last one of each, (K, K)."""
    places = {kind.block: place for place, kind in enumerate(kinds(shape))}
    behind = np.zeros((len(places), len(places)))
    for number, place in places.items():
        for other in numbers_behind(shape.extra, number):
            behind[places[other], place] += 1.0
    return behind


def _by_kind(has_experts: Mask, routed: LayerInstant, dense: LayerInstant) -> LayerInstant:
    """The first for sorts of layers with routed experts, the second for the others."""
    return LayerInstant(
        np.where(has_experts, routed.temporaries, dense.temporaries),
        np.where(has_experts, routed.freed, dense.freed),
        np.where(has_experts, routed.weights, dense.weights),
        np.where(has_experts, routed.stacked, dense.stacked),
        np.where(has_experts, routed.is_product, dense.is_product),
        is_sooner=np.where(has_experts, routed.is_sooner, dense.is_sooner),
    )


def _experts_begin(kept: Kept) -> LayerInstant:
    """Before the first expert's backward: gradients of what the experts gave, everything that is computed again. Shared experts
    are through, and the gradient of their inputs waits for the others'."""
    job, c = kept.job, kept.c
    stream = np.where(routed_cut(c) > 1, residual_C(job, c, whole=False), residual_C(job, c))
    gradients = (2.0 * arrived_C(job, c) + stream)[:, None] + _of_shared_inputs(kept)
    freed = kept.rows(is_used_up) + kept.rows(_is_kept_by_shared)
    again = kept.rows(_is_brought_back_by_routed)
    return LayerInstant(gradients + again, freed, kept.weights(_is_shared), is_sooner=True)


def copies_C(job: Job, c: Candidates) -> Reals:
    """Bytes of the tokens that a rank sends to experts, once for each that it chose, (C,)."""
    moe = job.model.moe
    width = moe.top_k * (moe.latent or job.model.hidden) if moe else 0
    return tokens(job, c) * width * BYTES[job.formats.compute] / routed_cut(c)


def arrived_C(job: Job, c: Candidates) -> Reals:
    """Bytes of the copies of tokens that come to the experts of the busiest rank, (C,)."""
    return copies_C(job, c) * crowding(job, c)


def _of_shared_inputs(kept: Kept) -> Reals:
    """Bytes of the gradient of what shared experts were given, (C, 1)."""
    job, moe = kept.job, kept.job.model.moe
    width = job.model.hidden if moe and moe.shared_ffn else 0
    return (tokens(job, kept.c) * width * BYTES[job.formats.compute] / routed_cut(kept.c))[:, None]


def _are_cast(job: Job, c: Candidates) -> Mask:
    """Whether gradients of matrices are cast as soon as they are made, since autocast and no engine holds the copies, (C, 1)."""
    return (is_plain_data_parallel(job, c) & (job.formats.compute != job.formats.parameter))[:, None]


def _last_of_shared(kept: Kept) -> LayerInstant:
    """When the last matrix of shared experts has its gradient, before the routed ones begin (autograd works backwards, and forward ran the
    shared ones last): beside it its input, the gradient of that, and all that was computed again. A gate gave a gradient of
    its own input and one of what it weighs. Beside whole experts the ranks' parts of the result's gradient are put together."""
    job, c = kept.job, kept.c
    given, whole, own = _given_to_shared(job, c)
    weighed = own if job.model.moe and job.model.moe.shared_gate else 0.0
    casts = _are_cast(job, c)
    again = kept.rows(_is_again_beside_shared) - np.where(casts, kept.rows(_is_shared_product_again), 0.0)
    freed = kept.rows(_is_gone_at_shared) + np.where(casts, kept.rows(_is_shared_product), 0.0)
    gradients = (given + weighed + whole)[:, None] + _shared_product(kept)
    weights = kept.weights(_is_last_of_shared)
    return LayerInstant(gradients + again, freed, weights, is_product=True, is_sooner=True)


def _inside_shared(kept: Kept) -> LayerInstant:
    """Behind the activation of shared experts: gradients of its result and of its inputs; what their last matrix read is gone."""
    times = 3.0 if kept.job.model.mlp_gated else 2.0
    given, _, _ = _given_to_shared(kept.job, kept.c)
    again = kept.rows(_is_again_beside_shared) - kept.rows(_is_shared_product_again)
    freed = kept.rows(_is_gone_at_shared) + kept.rows(_is_shared_product)
    temporaries = given[:, None] + times * _shared_product(kept) + again
    return LayerInstant(temporaries, freed, kept.weights(_is_last_of_shared), is_sooner=True)


def _given_to_shared(job: Job, c: Candidates) -> tuple[Column | Reals, Column | Reals, Column | Reals]:
    """Bytes of gradients beside shared experts at work: of the layer's result, and of what a gate read; of their own result where
    the ranks' parts of it are put together; of their result as a gate gives it, (C,) each."""
    apart = routed_cut(c) > 1
    own, whole = residual_C(job, c, whole=False), whole_stream_C(job, c)
    part = whole / routed_cut(c)
    given = own + np.where(apart, 0.0, gathered_stream_C(job, c))
    read = part if job.model.moe and job.model.moe.shared_gate else 0.0
    return given + read, np.where(apart, whole, 0.0), part


def _shared_product(kept: Kept) -> Reals:
    """The input of the last matrix of shared experts, kept or computed again, (C, K)."""
    return kept.rows(_is_shared_product) + kept.rows(_is_shared_product_again)


def _experts_end(kept: Kept) -> LayerInstant:
    """When the first matrix of all experts gets its gradient: those of single experts are there for every matrix, and are put
    together; beside them the gradient of the experts' inputs."""
    job, matrices = kept.job, 3.0 if kept.job.model.mlp_gated else 2.0
    routed = _trained_of_routed(kept)
    stream = residual_C(job, kept.c, whole=False)
    gradients = (arrived_C(job, kept.c) + stream)[:, None] + _of_shared_inputs(kept)
    freed = kept.rows(is_kept, "inside", "product") + kept.rows(is_used_up, "mixer", "ffn")
    again = kept.rows(is_brought_back, "mixer", "exchanged", "ffn") + BYTES[job.formats.compute] * routed
    return LayerInstant(gradients + again, freed, kept.weights(_is_shared), routed / matrices)


def _first_expert(kept: Kept) -> LayerInstant:
    """Behind the activation of the expert whose backward runs first: gradients of its result and its inputs, and its last matrix
    has one; the gradient of what all experts gave is there as long as others wait for it."""
    job, c = kept.job, kept.c
    moe, matrices = job.model.moe, 3.0 if job.model.mlp_gated else 2.0
    here = ceil_div(moe.experts if moe else 1, c["ep"])
    given, keeps = arrived_C(job, c), c.is_word("recompute", "none")
    product = given * (moe.ffn / (moe.latent or job.model.hidden) if moe else 0.0) / c["etp"] / here
    gone = copies_C(job, c) + (product if job.model.adapters is None else 0.0)
    gradients = matrices * product + np.where(here > 1, given, 0.0) + residual_C(job, c, whole=False)
    last = BYTES[job.formats.compute] * _trained_of_routed(kept) / (matrices * here)[:, None]
    again = kept.rows(_is_brought_back_by_routed) - np.where(keeps, 0.0, gone)[:, None]
    freed = kept.rows(is_used_up) + kept.rows(_is_kept_by_shared) + np.where(keeps, gone, 0.0)[:, None]
    return LayerInstant(gradients[:, None] + _of_shared_inputs(kept) + last + again, freed, kept.weights(_is_shared))


def _inputs_of_expert(kept: Kept) -> LayerInstant:
    """When the first matrices of an expert have their gradients: beside those of all its matrices one of its inputs per matrix, and
    that of the product's other factor. Of the first expert, while the others wait; or, where each makes more than it
    lets go of, of the last but one (behind the last nothing waits)."""
    job, c = kept.job, kept.c
    moe, is_gated = job.model.moe, job.model.mlp_gated
    here = ceil_div(moe.experts if moe else 1, c["ep"])
    given, keeps = arrived_C(job, c), c.is_word("recompute", "none")
    inputs = given / here
    product = inputs * (moe.ffn / (moe.latent or job.model.hidden) if moe else 0.0) / c["etp"]
    own = BYTES[job.formats.compute] * _trained_of_routed(kept) / here[:, None]
    inside, again = (kept.rows(rows) / here[:, None] for rows in (_is_kept_inside_expert, _is_again_inside_expert))
    makes = own + inputs[:, None]
    through = np.maximum(here - 2.0, 0.0)[:, None] * (makes > inside + again)
    at_work = 2.0 * inputs + product if is_gated else inputs + product
    gradients = at_work + np.where(here > 1, given, 0.0) + residual_C(job, c, whole=False)
    temporaries = gradients[:, None] + _of_shared_inputs(kept) + own + through * makes
    gone = copies_C(job, c)
    back = kept.rows(_is_brought_back_by_routed) - np.where(keeps, 0.0, gone)[:, None] - (through + 1.0) * again
    freed = kept.rows(is_used_up) + kept.rows(_is_kept_by_shared) + np.where(keeps, gone, 0.0)[:, None]
    return LayerInstant(temporaries + back, freed + (through + 1.0) * inside, kept.weights(_is_shared))


def _inputs_together(kept: Kept) -> LayerInstant:
    """When the gradients of all experts' inputs are put together, one gradient per expert is there for every matrix."""
    end = _experts_end(kept)
    return LayerInstant(end.temporaries + arrived_C(kept.job, kept.c)[:, None], end.freed, end.weights)


def _summed_again(kept: Kept) -> LayerInstant:
    """Where backward computes experts again: what they gave is added up for each token, beside it as it came, in the tokens' order and
    weighed (executor/models/experts.py: names of a function at work hold tensors)."""
    job, c = kept.job, kept.c
    adds = 3.0 * copies_C(job, c) + whole_stream_C(job, c) / routed_cut(c) + residual_C(job, c, whole=False)
    again = ~c.is_word("recompute", "none")[:, None]
    temporaries = np.where(again, adds[:, None] + again_at_experts(kept), 0.0)
    return LayerInstant(temporaries, kept.rows(is_used_up_by_experts), 0.0 * temporaries, is_sooner=True)


def again_at_experts(kept: Kept) -> Reals:
    """Bytes of what backward has computed again when the experts have, (C, K). Cut experts take the gradient of every rank's tokens, and so
    do shared ones, if no gate asks for something else before."""
    job, c = kept.job, kept.c
    moe, own = job.model.moe, routed_cut(c) > 1
    takes_own = own & (moe is not None and (not moe.shared_ffn or moe.shared_gate))
    whole = np.where(takes_own, 0.0, gathered_stream_C(job, c))[:, None]
    return kept.rows(is_made_again_by_experts) + part_of_norm_C(job, c)[:, None] + whole


def part_of_norm_C(job: Job, c: Candidates) -> Reals:
    """Bytes of a rank's part of the norm's result, which is held while cut experts work on the whole, (C,)."""
    return np.where((sequence_cut(c) > 1) & (routed_cut(c) == 1), residual_C(job, c, whole=False), 0.0)


def given_to_experts(kept: Kept) -> tuple[Reals, Reals]:
    """Where nothing is computed again, when backward enters the routed experts: bytes of the gradients of what they gave, of the layer and
    of what shared experts read, and kept bytes that are gone, (C, K) each."""
    gradients = arrived_C(kept.job, kept.c) + residual_C(kept.job, kept.c, whole=False)
    gone = kept.rows(_is_kept_by_shared) + kept.rows(_is_kept_output)
    return gradients[:, None] + _of_shared_inputs(kept), gone


def is_routed(name: str) -> bool:
    """A matrix of routed experts."""
    return name.startswith("expert_")


def _trained_of_routed(kept: Kept) -> Reals:
    """Elements of the routed experts that get gradients, (C, K): none beside adapters, which are attention's."""
    routed = kept.weights(is_routed)
    return routed if kept.job.model.adapters is None else 0.0 * routed


def _is_gone_at_shared(row: Saved, policy: Policy) -> bool:
    """Rows that are gone when shared experts go backward: those that served to compute others again, and the result that a gate
    weighed."""
    weighed = row.name == "shared_result" and is_kept(row, policy) and is_worth_keeping(row, policy)
    return weighed or is_used_up(row, policy)


def _is_again_beside_shared(row: Saved, policy: Policy) -> bool:
    """Rows that backward has computed again then, but for that result."""
    return is_brought_back(row, policy) and row.name != "shared_result"


def _is_last_of_shared(name: str) -> bool:
    return name == "shared_down"


def _is_shared_product(row: Saved, policy: Policy) -> bool:
    """The input of the last matrix of shared experts, where a policy keeps it."""
    return is_kept(row, policy) and row.name == "shared_product"


def _is_shared_product_again(row: Saved, policy: Policy) -> bool:
    """The same where backward computes it again."""
    return is_brought_back(row, policy) and row.name == "shared_product"


def _is_kept_by_shared(row: Saved, policy: Policy) -> bool:
    """Rows of shared experts that backward reads; they are through before the routed ones begin."""
    return is_kept(row, policy) and is_worth_keeping(row, policy) and row.name.startswith("shared_")


def _is_brought_back_by_routed(row: Saved, policy: Policy) -> bool:
    """Rows that backward computes again, but for those of shared experts."""
    return is_brought_back(row, policy) and not row.name.startswith("shared_")


def is_made_behind_experts(row: Saved, policy: Policy) -> bool:
    """Rows that a policy keeps, and that forward makes when the routed experts are through."""
    return is_kept(row, policy) and (_is_behind_experts(row) or row.part == "rest")


def is_made_again_by_experts(row: Saved, policy: Policy) -> bool:
    """Rows that backward computes again until the routed experts are through."""
    return is_brought_back(row, policy) and not _is_behind_experts(row)


def is_made_by_experts(row: Saved, policy: Policy) -> bool:
    """Rows that a policy keeps, and that the routed experts make of the tokens that came."""
    own = row.name.startswith("expert_") or row.name in ("gate", "up")
    return is_kept(row, policy) and own and row.name not in ("expert_input", "expert_output")


def _is_kept_output(row: Saved, policy: Policy) -> bool:
    """What the routed experts gave, where a policy keeps it."""
    return is_kept(row, policy) and row.name == "expert_output"


def _is_kept_inside_expert(row: Saved, policy: Policy) -> bool:
    """Rows between an expert's matrices that a policy keeps for its backward."""
    return is_made_by_experts(row, policy) and is_worth_keeping(row, policy)


def _is_again_inside_expert(row: Saved, policy: Policy) -> bool:
    """The same where backward computes them again."""
    return is_brought_back(row, policy) and is_made_by_experts(row, "none")


def is_used_up_by_experts(row: Saved, policy: Policy) -> bool:
    """Rows that are gone when backward has computed the routed experts again."""
    return is_used_up(row, policy) and not _is_behind_experts(row)


def _is_behind_experts(row: Saved) -> bool:
    return row.name == "expert_output" or row.name.startswith("shared_")


def _reduced_early(kept: Kept) -> Reals | float:
    """Elements of routed experts that other ranks share: their unit is through when attention's backward begins, (C, K)."""
    return kept.weights(is_routed) if (kept.c["ep"] > 1).any() else 0.0


def _is_shared(name: str) -> bool:
    return name.startswith("shared_")


def _behind_activation(kept: Kept, last: Reals) -> LayerInstant:
    """Behind the activation: gradients of its result, of its inputs, and of the residual stream."""
    shape = kept.job.model
    if shape.mlp_act == "relu" and not shape.mlp_gated:  # the result is what ReLU's own backward reads
        again = kept.rows(is_brought_back, "product")
        return LayerInstant(2.0 * _product(kept) + again + _beside_product(kept), kept.rows(is_used_up), last)
    times = 3.0 if shape.mlp_gated else 2.0
    freed = kept.rows(is_kept, "product") + kept.rows(is_used_up)
    return LayerInstant(times * _product(kept) + _beside_product(kept), freed, last)


def _last_matrix(kept: Kept, last: Reals) -> LayerInstant:
    """When the feed-forward part's last matrix has its gradient: beside it its input, the gradient of that and the stream's;
    under autocast the gradient is then cast, and the input gone."""
    job, c = kept.job, kept.c
    casts = _are_cast(job, c)
    freed = kept.rows(is_used_up) + np.where(casts, kept.rows(is_kept, "product"), 0.0)
    again = np.where(casts, 0.0, kept.rows(is_brought_back, "product"))
    gathered = of_layers(job, gathered_stream_C(job, c))
    gradients = _product(kept)
    if job.model.adapters is not None and "down" in job.model.adapters.targets:
        gradients = 2.0 * gradients  # of the frozen matrix and of its adapter, about to be added up
    beside = gradients + _beside_product(kept) + gathered
    if not casts.any() or job.model.adapters is not None:
        return LayerInstant(beside + again, freed, last, is_product=True)
    return _in_either_format(kept, last, beside, casts)


def _while_cast(kept: Kept) -> Iterator[LayerInstant]:
    """While matrices of the feed-forward part cast to fp8 what their products in backward read: the last one, that behind the
    activation if there is one, and the one that is left, when the gradients of the others are there already."""
    given, product = of_layers(kept.job, residual_C(kept.job, kept.c, whole=False)), _product(kept)
    last, gate, first = (kept.weights(chosen) for chosen in (is_last, _is_gate, _is_up))
    again = kept.rows(_is_result_again)
    into = kept.rows(is_brought_back, "product") + _beside_product(kept)
    yield LayerInstant(
        into + _inside_cast(kept, last, given, product), kept.rows(is_used_up) + again, np.zeros_like(last)
    )
    out_of = product + given + kept.rows(is_brought_back, "mixer", "exchanged", "ffn")
    freed = kept.rows(is_kept, "inside", "product") + kept.rows(is_used_up, "mixer") + again
    if kept.job.model.mlp_gated:
        yield LayerInstant(product + out_of + _inside_cast(kept, gate, product, given), freed, last)
    other = given if kept.job.model.mlp_gated else 0.0
    yield LayerInstant(other + out_of + _inside_cast(kept, first, product, given), freed, last + gate)


def _inside_cast(kept: Kept, weights: Reals, given: Reals, read: Reals) -> Reals:
    """The most bytes that a matrix makes in its backward until its own gradient, (C, K): `weights` elements, `given` bytes of gradient,
    `read` bytes of input. First gradient and weight are cast for the product that gives the input's gradient, then the
    gradient again, and the input, while the first ones are still there (pytorch/ao torchao/float8/float8_linear.py,
    matmul_with_hp_or_float8_args.backward)."""
    element = BYTES[kept.job.formats.compute]
    of_given, of_read = given / element, read / element
    behind = of_given + weights + read
    then = np.maximum(CASTING * of_given, of_given + CASTING * of_read)
    return np.maximum(of_given + CASTING * weights, behind + then)


def inside_forward_cast(kept: Kept) -> Reals:
    """The most bytes that the last matrix makes in forward, (C, K): its input is cast, then the weight beside that."""
    read, weights = _product(kept) / BYTES[kept.job.formats.compute], kept.weights(is_last)
    return np.maximum(CASTING * read, read + CASTING * weights)


def _is_gate(name: str) -> bool:
    return name == "gate"


def _is_up(name: str) -> bool:
    return name == "up"


def _is_result_again(row: Saved, policy: Policy) -> bool:
    """What the layer's last matrix gave, kept for the sake of recomputation alone, where that runs through it: torchao's layers save what
    backward reads behind their product, torch's own before it, so that it is not asked for."""
    return row.part == "rest" and "none" not in row.policies and policy in row.policies


def _in_either_format(kept: Kept, last: Reals, beside: Reals, casts: Mask) -> LayerInstant:
    """The same where `casts` may be under autocast: when the gradient is made, and its input and the copy of the matrix are still there, or
    when it is cast, and they are gone, whichever holds more: the first where a framework adds it to one buffer of gradients."""
    formats, own, back = kept.job.formats, kept.rows(is_kept, "product"), kept.rows(is_brought_back, "product")
    compute, stored = BYTES[formats.compute], BYTES[formats.parameter]
    of_trained = kept.job.trainable * last
    made = casts & ((own + back >= (stored - compute) * of_trained) | (not kept.job.profile.has_units))
    return LayerInstant(
        beside + np.where(made, back + compute * of_trained, np.where(casts, 0.0, back)),
        kept.rows(is_used_up) + np.where(casts & ~made, own, 0.0),
        np.where(made, 0.0, last),
        is_product=~made,
    )


def _gathers_gradient(kept: Kept) -> bool:
    """Whether some candidate's layers, dense ones of ours, put the gradient of several sequences together."""
    if kept.job.model.moe is not None or kept.job.profile.keeping.name != OURS:
        return False
    return bool(((sequence_cut(kept.c) > 1) & (kept.c["micro_batch"] > 1)).any())


def _gathered_gradient(kept: Kept) -> LayerInstant:
    """Before anything of a layer works backward: under sequence parallelism the gradient that it was given is put together, rank by
    rank and then, of several sequences, in their order (one alone is in order: the last matrix's instant has all of it; PyTorch 2.13 torch/distributed/_functional_collectives.py, all_gather_tensor)."""
    job, c = kept.job, kept.c
    copies = np.where(c["micro_batch"] > 1, 2.0, 0.0)
    gathered = residual_C(job, c, whole=False) + copies * gathered_stream_C(job, c)
    nothing = np.zeros((len(c), len(kinds(job.model))))
    return LayerInstant(of_layers(job, gathered) + nothing, nothing, nothing)


def _product(kept: Kept) -> Reals:
    """The input of the last matrix, kept or computed again, (C, K); neither beside adapters of other matrices alone."""
    job = kept.job
    if job.model.adapters is not None:
        width = job.model.ffn_hidden * BYTES[job.formats.compute]
        return (tokens(job, kept.c) * width)[:, None] + np.zeros((1, len(kinds(job.model))))
    return kept.rows(is_kept, "product") + kept.rows(is_brought_back, "product")


def _beside_product(kept: Kept) -> Reals:
    """The residual stream's gradients, and what else was computed again, (C, K)."""
    recomputed = kept.rows(is_brought_back) - kept.rows(is_brought_back, "product")
    return of_layers(kept.job, residual_C(kept.job, kept.c, whole=False)) + recomputed


def _first_matrices(kept: Kept) -> LayerInstant:
    """When the feed-forward part's first matrices have their gradients: beside them those of its input, one per matrix."""
    job, c = kept.job, kept.c
    streams = 2.0 if job.model.mlp_gated else 1.0
    whole = whole_stream_C(job, c)
    gradients = _product(kept) + of_layers(job, streams * whole + residual_C(job, c, whole=False))
    recomputed = kept.rows(is_brought_back, "mixer", "exchanged", "ffn")
    freed = kept.rows(is_kept, "inside", "product") + kept.rows(is_used_up, "mixer")
    return LayerInstant(gradients + recomputed, freed, kept.weights(_is_feed_forward))


def _in_attention(kept: Kept, *, across: bool = False) -> LayerInstant:
    """Inside attention's backward: the feed-forward part is gone, and what an all-to-all brought back; of our own block the whole
    gradient that the matrix behind attention needed, too (others were not traced). In a decoder behind an encoder that `across` to the
    encoder's keys is through before its own begins."""
    job, c = kept.job, kept.c
    whole = job.profile.keeping.name != OURS
    gradients = attention_gradients_CK(job, c, across=across) + of_layers(job, residual_C(job, c, whole=whole))
    freed = kept.rows(is_kept, "exchanged", "ffn", "inside", "product") + kept.rows(is_used_up, "mixer")
    again, weights = kept.rows(is_brought_back, "mixer"), kept.weights(_is_behind)
    if across:
        weights = np.where(decodes_K(job.model), kept.weights(_is_behind_across), weights)
    elif job.model.enc_layers:
        freed, again = freed + kept.rows(_is_kept_across), again - kept.rows(_is_again_across)
    routed = _reduced_early(kept)
    return LayerInstant(gradients + again, freed, weights, is_early=False, routed=routed)


def _before_attention(kept: Kept) -> LayerInstant:
    """When all matrices of the layer have their gradients: beside them those of attention's input, still to be added up, and
    that input."""
    job, c = kept.job, kept.c
    whole = whole_stream_C(job, c)
    queries = whole * (job.model.heads * job.model.head_dim / job.model.hidden) / c["tp"]
    keeps = c.is_word("recompute", "none")
    gradients = 2.0 * whole + queries + residual_C(job, c, whole=False) + np.where(keeps, 0.0, whole)
    gone = kept.rows(is_kept, "mixer", "exchanged", "ffn", "inside", "product")
    freed = gone - of_layers(job, np.where(keeps, whole, 0.0))
    temporaries, routed = of_layers(job, gradients) + np.zeros_like(freed), _reduced_early(kept)
    return LayerInstant(temporaries, freed, kept.weights(is_any), is_early=False, routed=routed)


@remembered
def residual_C(job: Job, c: Candidates, *, whole: bool = True) -> Reals:
    """Bytes of the residual stream's gradient, cut by sequence parallelism, and with `whole` as a row-cut matrix needs it
    too, (C,)."""
    size = whole_stream_C(job, c)
    cut = sequence_cut(c)
    return size / cut + np.where((cut > 1) & whole, size, 0.0)


def gathered_stream_C(job: Job, c: Candidates) -> Reals:
    """Bytes of the residual stream as sequence parallelism puts it together, (C,); nothing without it."""
    return residual_C(job, c) - residual_C(job, c, whole=False)


def attention_gradients_CK(job: Job, c: Candidates, *, across: bool) -> Reals:
    """The same inside each sort of layer, (C, K), or (C, 1) where all are alike: in a decoder behind an encoder of its own attention, or of that
    `across` to the encoder's keys."""
    inputs = attention_gradients_C(job, c)[:, None]
    if not job.model.enc_layers:
        return inputs
    return np.where(
        decodes_K(job.model), attention_gradients_C(job, c, of_targets=True, across=across)[:, None], inputs
    )


def attention_gradients_C(job: Job, c: Candidates, *, of_targets: bool = False, across: bool = False) -> Reals:
    """Bytes of attention's gradients and workspace, (C,); unfused attention has gradients of its scores instead, before and
    behind the softmax. With queries `of_targets` a decoder's, which go `across` to keys of an encoder, or meet their own."""
    shape, compute = job.model, BYTES[job.formats.compute]
    heads, keys = shape.heads / c["tp"], shape.kv_heads / c["tp"]
    count = targets(job, c) if of_targets else tokens(job, c)
    own = count * shape.head_dim * compute * (2.0 * heads + 2.0 * keys)
    met = tokens(job, c) if across else count
    if across:
        own = own + (met - count) * shape.head_dim * compute * 2.0 * keys
    if job.profile.attention == "unfused":
        each = BYTES["float32"] if has_wide_softmax(job) else compute
        length = job.workload.targets if of_targets and not across else job.workload.seq_len
        return own + 2.0 * each * count * heads * length
    step = NARROW if shape.head_dim <= ROWS else WIDE
    width = -(-max(shape.head_dim, 1) // step) * step
    rows = _attended_rows(job, c, job.workload.targets if of_targets else job.workload.seq_len)
    workspace = 4.0 * heads * rows * (1.0 + width)
    expanded = 2.0 * met * heads * shape.head_dim * compute if shape.kv_heads != shape.heads else 0.0
    return own + workspace + expanded + _in_ring_C(job, c, expanded)


def _attended_rows(job: Job, c: Candidates, queries: int) -> Reals:
    """Rows of flash attention's workspace for each head of a rank, (C,), of sequences of so many queries. Ranks that exchange heads attend
    to the tokens of all of them with their share of the heads."""
    length = ceil_div(queries, c["cp"] // c.exchanging)
    return np.asarray(c["micro_batch"] * ceil_div(length, np.full_like(length, ROWS)) * ROWS / c.exchanging)


def _in_ring_C(job: Job, c: Candidates, expanded: Reals | float) -> Reals:
    """Bytes that a ring holds beside its own block's gradients while it compares all of its queries with half of another rank's keys
    and values, (C,): those, and with more than two ranks the next ones under way; the sums of their gradients that came along;
    the gradients of this block; log-sum-exps of the back half, in a row (executor/context.py). Grouped keys are half as many.
    Ranks that exchanged heads first have more tokens of fewer heads: as many bytes."""
    rings = c.is_word("context_parallel", *RINGS) & (job.profile.keeping.name == OURS)
    if not rings.any():
        return np.zeros(len(c))
    shape, count = job.model, tokens(job, c) / c["tp"]
    of_head = shape.head_dim * BYTES[job.formats.compute]
    travelling = np.where(c["cp"] // c.exchanging > 2, 4.0, 2.0) * shape.kv_heads * of_head
    sums = 2.0 * shape.kv_heads * of_head
    gradients = (shape.heads + shape.kv_heads) * of_head
    return np.where(rings, count * (travelling + sums + gradients + 2.0 * shape.heads) - expanded / 2.0, 0.0)


def is_last(name: str) -> bool:
    """The last matrix of a feed-forward part."""
    return name in ("down", "shared_down", "expert_down")


def _is_feed_forward(name: str) -> bool:
    return name.endswith(("gate", "up", "down")) and name not in INPUTS and not name.startswith(("q_", "kv_", "o_"))


def _is_behind(name: str) -> bool:
    return name not in INPUTS


def _is_behind_across(name: str) -> bool:
    """Matrices that have gradients when a decoder's attention to its encoder goes backward: its own attention has yet to."""
    return _is_behind(name) and name != "o" and name.removeprefix("cross_") not in INPUTS


def _is_kept_across(row: Saved, policy: Policy) -> bool:
    """Rows of that attention which a policy keeps for its backward."""
    return is_kept(row, policy) and is_worth_keeping(row, policy) and row.name.startswith("cross_")


def _is_again_across(row: Saved, policy: Policy) -> bool:
    """The same where backward computes them again."""
    return is_brought_back(row, policy) and row.name.startswith("cross_")


def is_any(_name: str) -> bool:
    """Every matrix."""
    return True
