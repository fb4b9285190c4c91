"""The instants of frameworks that keep whole weights and one standing buffer of gradients (Megatron-LM, DeepSpeed, InternEvo).

Matmuls add weight gradients to the buffer, so that nothing but activations, their gradients and the loss moves while
micro-batches follow each other. Under ZeRO-3 two layers and the head are gathered in the compute format. Sources: the rows
of `keeping` in the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.facts.layers import Layer
from strategist.facts.profile import BYTES
from strategist.memory.activations import edges_CS, handed_on_CS, in_flight_CS, step_inputs_C, tables_C
from strategist.memory.backward import residual_C
from strategist.memory.instant import END, LAYERS, LOSS, UPDATE, Instant
from strategist.memory.layers import Layers
from strategist.memory.logits import forward_bytes_CS, gradient_bytes_CS, loss_bytes_CS, piped_CS
from strategist.memory.reduced import bucket_bytes_CS, copied_bytes_CS, left_from_before, too_large_bytes_CS
from strategist.space.candidates import Candidates, Column, Reals
from strategist.space.shares import Elements, Group, layers, matrix_elements, target_share, vocabulary_elements


def buffered_instants(
    job: Job, group: Group, counts: Elements, layers: Layers, gradients: Reals
) -> tuple[Instant, ...]:
    """Every instant at which a candidate of such a framework can peak; `gradients` are those of the buffer, (C, S)."""
    loose = job.trainable * BYTES[job.formats.compute] * counts.whole * job.profile.keeping.loose_gradients
    standing = {"gradients": gradients + loose + placeholders_CS(job, group)}
    moving = _moving(job, group, counts, layers)
    if job.profile.reduce_bucket:
        moving = _with_buckets(job, group, counts, moving)
    return tuple(Instant(moment, standing | terms) for moment, terms in moving)


def _with_buckets(
    job: Job, group: Group, counts: Elements, moving: Iterator[tuple[int, dict[str, Reals]]]
) -> Iterator[tuple[int, dict[str, Reals]]]:
    """The same instants with the buffers from which gradients are reduced."""
    bucket = bucket_bytes_CS(job, group)
    held = {
        LOSS: bucket * left_from_before(group),
        LAYERS: bucket,
        END: bucket + copied_bytes_CS(job, group, counts.whole),
        UPDATE: 0.0 * bucket,
    }
    for moment, terms in moving:
        yield moment, terms | {"bucket_buffers": held[moment]}


def _moving(job: Job, group: Group, counts: Elements, kept: Layers) -> Iterator[tuple[int, dict[str, Reals]]]:
    """(moment, terms that move) of every instant."""
    c, compute = group.candidates, BYTES[job.formats.compute]
    micro_batch = kept.every + edges_CS(job, group) + tables_C(job, c)[:, None] + handed_on_CS(job, group)
    inputs = on_stages(step_inputs_C(job, c), np.ones(len(group.stages)))
    every = in_flight_CS(group) * micro_batch + inputs
    own = 0.0 if job.profile.keeping.placeholders else job.trainable * compute
    everything = {"activations": every, "gather_buffers": _gathered(job, group, counts)}
    yield LOSS, everything | {"logits": forward_bytes_CS(job, group)}
    yield LOSS, everything | {"logits": loss_bytes_CS(job, group)}
    stream = on_stages(residual_C(job, c) * target_share(job), group.is_last)
    yield LOSS, everything | {"logits": gradient_bytes_CS(job, group), "temporaries": own * _head(job, group) + stream}
    last, piped = edges_CS(job, group), piped_CS(job, group)
    if job.profile.reduce_bucket:
        alone = too_large_bytes_CS(job, group, _head(job, group))
        yield LAYERS, everything | {"temporaries": alone + stream, "logits": piped}
    for layers_, gone in kept.in_turn:
        at = layers_.instants
        moving = {
            "activations": np.maximum(inputs, every - last - gone / c["virtual_stages"][:, None] - at.freed),
            "temporaries": at.temporaries + np.where(at.is_product, own * at.weights, 0.0),
        }
        yield LAYERS, everything | moving | {"logits": piped}
    table = job.trainable * compute * counts.before
    stream = on_stages(residual_C(job, c, whole=False), group.is_first)
    left = {"activations": np.maximum(inputs, every - micro_batch), "temporaries": table + stream, "logits": piped}
    yield END, everything | left
    yield UPDATE, {"activations": inputs, "logits": piped}


def _head(job: Job, group: Group) -> Reals:
    """Elements of the head's matrix on the stage that has it, (C, S)."""
    c = group.candidates
    table = vocabulary_elements(job.model, c["tp"], np.ones_like(c["tp"])).astype(np.float64)
    return on_stages(table, group.is_last)


def _gathered(job: Job, group: Group, counts: Elements) -> Reals:
    """Two layers and the head under ZeRO-3, (C, S)."""
    layers_held = np.minimum(2.0 * counts.widest[:, None], counts.layers)
    held = BYTES[job.formats.compute] * (layers_held + counts.behind)
    return np.where((group.candidates["zero"] >= 3)[:, None], held, 0.0)


def placeholders_CS(job: Job, group: Group) -> Reals:
    """Bytes of tensors that stand for gradients: one for each matrix that any layer of a stage has, whatever the number of
    such layers, and one for the head, (C, S)."""
    found = np.zeros((len(group.candidates), len(group.stages)))
    if not job.profile.keeping.placeholders:
        return found
    for stage, counts in enumerate(group.layers_SK):
        present = [layer for layer, count in zip(layers(job.model), counts, strict=True) if count]
        found[:, stage] = _distinct(present, group.candidates)
    return job.trainable * BYTES[job.formats.compute] * (found + _head(job, group))


def _distinct(present: list[Layer], c: Candidates) -> Column:
    """Elements of one copy of every matrix, (C,); routers are no matrices that add to the buffer."""
    one = np.ones_like(c["tp"])
    sizes: dict[tuple[str, int, int], Column] = {}
    for layer in present:
        columns = matrix_elements(layer, c, one).T
        named = {(m.name, m.outputs, m.inputs): column for m, column in zip(layer.matrices, columns, strict=True)}
        sizes |= {key: column for key, column in named.items() if key[0] != "router"}
    return np.asarray(sum(sizes.values(), np.zeros_like(one)))
