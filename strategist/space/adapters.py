"""Adapters beside frozen matrices, as columns: what is trained on a rank, and what rests in four bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strategist.facts.adapters import QUANTISED_BYTES, quantised_of
from strategist.facts.job import Job
from strategist.facts.layers import Layer
from strategist.facts.model import ModelShape
from strategist.facts.profile import BYTES
from strategist.facts.tensors import ddp_buckets
from strategist.facts.weights import Matrix
from strategist.records import dataclass, replace
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.shares import (
    Group,
    expert_elements,
    is_plain_data_parallel,
    layers,
    matrix_elements,
    state_shards,
)
from strategist.space.traffic import Frozen


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Elements of some matrices on one rank of every stage, (C, S): `whole`, `sharded` by ZeRO's group with padding, and
    all ranks' sharded parts together, `padded`."""

    whole: Reals
    sharded: Reals
    padded: Reals


def trained_share(shape: ModelShape, group: Group) -> Share:
    """The adapters."""
    return _share(shape, group, lambda matrix: matrix.is_adapter)


def quantised_share(shape: ModelShape, group: Group) -> Share:
    """What rests in four bits under QLoRA: the frozen matrices of the layers."""
    dense, experts = _quantised_dense(shape, group), quantised_experts(shape, group)
    return Share(dense.whole + experts.whole, dense.sharded + experts.sharded, dense.padded + experts.padded)


def _quantised_dense(shape: ModelShape, group: Group) -> Share:
    """Of these all but the routed experts."""
    wanted = shape.method == "qlora"
    return _share(shape, group, lambda matrix: wanted and not (matrix.is_adapter or matrix.is_expert))


def quantised_experts(shape: ModelShape, group: Group) -> Share:
    """The routed experts among them."""
    if shape.method != "qlora":
        none: Reals = np.zeros((len(group.stages), len(group.candidates))).T
        return Share(none, none, none)
    return _spread(group, lambda c, shards: _experts_CK(shape, c, shards))


def _experts_CK(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    """Elements of the routed experts of one layer of each sort, biases left out, (C, K)."""
    weights = (Layer(tuple(replace(m, bias=False) for m in layer.matrices), (), 0) for layer in layers(shape))
    return np.stack([expert_elements(layer, c["ep"], c["etp"], shards) for layer in weights], axis=1)


def _share(shape: ModelShape, group: Group, wanted: Callable[[Matrix], bool]) -> Share:
    return _spread(group, lambda c, shards: _elements_CK(shape, c, shards, wanted))


def _spread(group: Group, elements_CK: Callable[[Candidates, Column], Reals]) -> Share:
    """Elements of one layer of each sort on the fullest of some shards, as those of stages."""
    c = group.meshes
    shards = state_shards(c)

    def spread(ranks: Column) -> Reals:
        return group.layers_of(elements_CK(c, ranks)).T.take(group.mesh_of, axis=-1).T

    sharded = spread(shards)
    return Share(spread(np.ones_like(shards)), sharded, sharded * state_shards(group.candidates)[:, None])


def _elements_CK(shape: ModelShape, c: Candidates, shards: Column, wanted: Callable[[Matrix], bool]) -> Reals:
    """Elements of some matrices of one layer of each sort, none of them experts, biases left out, (C, K)."""
    columns = [
        matrix_elements(layer, c, shards)
        @ np.array([wanted(m) * m.inputs / (m.inputs + m.bias) for m in layer.matrices], np.float64)
        for layer in layers(shape)
    ]
    return np.round(np.stack(columns, axis=1))


def resting_bytes_CS(job: Job, group: Group, held: Reals, trained: Reals, quantised: Reals) -> Reals:
    """Bytes of weights at rest, (C, S), of `held` elements: adapters in the format of their gradients, quantised matrices in
    four bits and their scales, the others in that of the job's weights."""
    formats = job.formats
    frozen = held - trained - quantised
    return BYTES[formats.parameter] * frozen + QUANTISED_BYTES * quantised + BYTES[formats.gradient] * trained


def frozen_traffic(job: Job, group: Group) -> Frozen:
    """Gradients of adapters, reduced layer by layer, or in DDP's buckets; of quantised matrices the codes and scales travel."""
    c, shape = group.candidates, job.model
    pads = (c["zero"] >= 2)[:, None]
    trained, packed = trained_share(shape, group), _quantised_dense(shape, group)
    buckets = ddp_buckets(shape, BYTES[job.formats.gradient])
    in_layers = np.broadcast_to(1.0 * group.layers_S, trained.whole.shape)
    return Frozen(
        trained=np.where(pads, trained.padded, trained.whole),
        units=np.where(
            is_plain_data_parallel(job, c)[:, None] | (not job.profile.has_units),
            1.0 * buckets,
            in_layers,
        ),
        spared=_spared_bytes(job, pads, packed),
    )


def frozen_experts(job: Job, group: Group) -> Frozen:
    """The same of routed experts, beside which no adapter stands: nothing of them is reduced."""
    packed = quantised_experts(job.model, group)
    none = 0.0 * packed.whole
    return Frozen(trained=none, units=none, spared=_spared_bytes(job, (group.candidates["zero"] >= 2)[:, None], packed))


def _spared_bytes(job: Job, pads: Mask, packed: Share) -> Reals:
    """Bytes that gathered weights save where they travel as they rest."""
    return (BYTES[job.formats.compute] - QUANTISED_BYTES) * np.where(pads, packed.padded, packed.whole)


def gathered_bytes(job: Job) -> float:
    """Bytes that stand for one gathered element of the layers, over the bytes of the compute format: below one where
    quantised weights travel as they rest."""
    if job.model.method != "qlora":
        return 1.0
    packed = sum(quantised_of(layer) for layer in layers(job.model))
    compute = BYTES[job.formats.compute]
    total = sum(matrix.copies * matrix.weights for layer in layers(job.model) for matrix in layer.matrices)
    return (QUANTISED_BYTES * packed + compute * (total - packed)) / (compute * total)


def unpacked_bytes(job: Job) -> float:
    """Bytes of the largest matrix as it is brought back to the compute format for a product; 0 where nothing is quantised."""
    if job.model.method != "qlora":
        return 0.0
    return BYTES[job.formats.compute] * max(matrix.weights for layer in layers(job.model) for matrix in layer.matrices)
