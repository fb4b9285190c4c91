"""What a framework keeps in memory from forward to backward, and where its gradients lie. One data row each."""

from __future__ import annotations

from functools import cache
from typing import Literal

from strategist.catalog import rows
from strategist.records import dataclass

PipedOutputs = Literal["compute", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which tensors one framework's layers and loss keep.

    Of a layer: `gathered_inputs` keeps the inputs of column-cut matrices as gathered by sequence parallelism, not a rank's
    own part; `projected` keeps what the query, key and value matrix gave beside the rotated copies, because the values are a
    view of it, and `copied_output` a copy of what attention gave; `activated` keeps act(gate) beside gate and up; `expert_outputs` what routed experts gave; `rms_bytes` are
    kept per element of an RMSNorm's input beside the input, `norm_bytes` of any norm's (facts/module_forms.py); `mask_bytes` per element of each dropout of the residual stream,
    in models that train with dropout (plain MLPs; recipes of gated models have none); where attention is unfused, `drops_scores`
    says that such models drop scores too, and `wide_softmax` that the softmax of gated models, and any under autocast, is in float32;
    `float8_inputs` keeps inputs of matrices in one byte
    where the matrices run in fp8; `adapter_bytes` per element of the input of a matrix beside which adapters with dropout
    stand: queries and values, or with `adapts_all` every matrix.

    Beside the layers: `placeholders` are tensors of the size of each matrix of a layer that stand for gradients which
    matmuls have added to the buffer; `loose_gradients` lie beside the buffer in the compute format; `workspaces` of cuBLAS
    are held at once.

    Of the loss, per token and vocabulary entry: numbers of float32 and of compute-format copies that exist when the loss is
    computed and in its backward; `cut_float32` more in backward where the vocabulary is cut. With `pipes_from` an engine of
    pipelines runs jobs of so many stages or more, and its last stage holds the logits of two micro-batches as its outputs, in the
    format `piped_outputs`; with `holds_logits` the loop around the model holds those of one micro-batch, in the compute format, until the next gives others."""

    name: str
    gathered_inputs: bool
    projected: bool
    activated: bool
    expert_outputs: bool
    rms_bytes: float
    mask_bytes: float
    drops_scores: bool
    wide_softmax: bool
    float8_inputs: bool
    placeholders: bool
    loose_gradients: bool
    workspaces: int
    forward_float32: float
    forward_compute: float
    backward_float32: float
    backward_compute: float
    cut_float32: float
    adapter_bytes: float
    source: str
    adapts_all: bool = False
    pipes_from: int = 0
    piped_outputs: PipedOutputs = "compute"
    holds_logits: bool = False
    copied_output: bool = False
    norm_bytes: float = 0.0


@cache
def find_keeping(name: str = "own") -> Keeping:
    """The row of that name, which must exist."""
    return Keeping(**next(row for row in rows("keeping") if row["name"] == name))
