"""Forward of the last layer under autocast, whose cache holds copies of all weights used so far until forward is over.

Where layers are computed again nothing keeps those copies or what a layer makes inside, so with few words the last layer's
feed-forward part can hold more than the loss does. Its order of work is that of executor/models/feed_forward.py: what goes
into the activation is there until the part is through, a gate's result is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.memory.instant import LOSS, Instant, added
from strategist.memory.saved import OURS
from strategist.memory.step import Step


def forward_instants(step: Step) -> Iterator[Instant]:
    """Behind the activation, when the last matrix has no copy yet; and when that matrix has given its result, which selective recompute
    keeps. Of dense layers of our own that are all computed again."""
    shape, layers = step.job.model, step.layers
    is_own = step.job.profile.keeping.name == OURS and shape.moe is None and shape.adapters is None
    if not is_own or step.c.is_word("recompute", "none").all() or not step.cached.any():
        return
    forgets = step.c.is_word("recompute", "full")[:, None]
    is_plain = shape.mlp_act in ("relu", "relu2") and not shape.mlp_gated
    inside = layers.transient + np.where(forgets & is_plain, layers.product, 0.0)
    gone = layers.product * (shape.mlp_gated or shape.mlp_act == "relu2")
    copy = step.compute * layers.last_matrix
    for held in (inside - copy, inside - gone + np.where(forgets, step.stream, 0.0)):
        terms = {
            "gradients": step.earlier,
            "activations": step.in_layers - layers.rest,
            "bucket_buffers": step.copies,
            "temporaries": added(step.outside, step.cached, held),
        }
        where = step.cached > 0.0
        yield Instant(LOSS, {name: np.where(where, held, 0.0) for name, held in terms.items()})
