"""A generated grid of scenarios, and for each what the formulas say beside what the trace saw, term by term.

Shapes are real ones cut down to a few layers: sizes per layer and vocabularies are those of the catalogue. Layouts are the
products that the executor runs. The order is fixed, so a scenario is known by its name.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from strategist.document.estimate import MOMENTS
from strategist.document.observed import RankObservation
from strategist.document.plan import NumberFormats, Plan, Stage
from strategist.executor.support import layout_obstacles
from strategist.facts.adapters import ATTENTION, TARGETS, as_trained, with_adapters
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile, with_frozen_base
from strategist.facts.runs import stage_of_head
from strategist.memory.estimate import Ledger, ledger
from strategist.space.candidates import LAYERS_OF, MESH_COLUMNS, OF_STAGE, OPTION_COLUMNS, Candidates, code
from strategist.space.shares import elements, groups
from strategist.space.stages import head_in_layers, stage_chunks
from strategist.space.traffic import traffic
from tests.plans import make_plan, stages_of

SEED = 7
SIZE, SPREAD = 300, 24
"""Scenarios of LAYOUTS, and of SEQUENCES."""
MODELS = (
    "llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b", "qwen2.5-0.5b", "llama-2-7b", "mistral-7b-v0.1",
    "gpt2-medium", "mixtral-8x7b", "gemma-2b", "qwen1.5-moe-a2.7b", "opt-1.3b",
)  # fmt: skip
"""Among them: grouped, single and full keys and values; tied and untied ends; odd vocabularies; shared experts."""
TERMS = (
    "parameters", "gradients", "optimizer", "activations", "logits", "gather_buffers", "bucket_buffers",
    "pipeline_buffers", "temporaries",
)  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_replicate": 8},
    {"dp_shard": 8, "zero": 1},
    {"dp_shard": 8, "zero": 2},
    {"dp_shard": 8, "zero": 3},
    {"dp_shard": 64, "zero": 3},
    {"dp_shard": 24, "zero": 3},
    {"dp_replicate": 4, "dp_shard": 8, "zero": 2},
    {"dp_replicate": 4, "dp_shard": 8, "zero": 3},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp_replicate": 4},
    {"tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": True},
    {"tp": 2, "dp_shard": 16, "zero": 3, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 2, "dp_shard": 4, "zero": 2},
    {"pp": 4, "dp_shard": 4, "zero": 3},
    {"pp": 2, "tp": 2, "dp_shard": 4, "zero": 3, "sequence_parallel": True},
    {"pp": 2, "virtual_stages": 2, "dp_shard": 4, "zero": 2},
    {"pp": 2, "dp_replicate": 4},
    {"pp": 4, "virtual_stages": 2},
    {"pp": 2, "dp_shard": 4, "zero": 1},
    {"tp": 2, "dp_shard": 4, "zero": 1, "sequence_parallel": True},
    {"dp_replicate": 2, "dp_shard": 4, "zero": 1},
    {"dp_shard": 8, "zero": 3, "offload": "parameters"},
)
"""Those that the executor does not run are passed over."""
RING, EXCHANGE = ({"cp": 2, "context_parallel": kind} for kind in ("ring", "all-to-all"))
SEQUENCES: tuple[dict[str, Any], ...] = (
    RING | {"dp_shard": 4, "zero": 3},
    EXCHANGE | {"dp_shard": 4, "zero": 3},
    RING | {"cp": 4, "dp_replicate": 2},
    EXCHANGE | {"cp": 4, "dp_replicate": 2},
    RING | {"tp": 2, "dp_shard": 2, "zero": 3, "sequence_parallel": True},
    EXCHANGE | {"tp": 2, "dp_replicate": 2},
    RING | {"dp_shard": 2, "zero": 1},
    EXCHANGE | {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    RING | {"cp": 8, "zero": 2},
    EXCHANGE | {"pp": 2, "dp_shard": 2, "zero": 2},
    RING | {"pp": 2, "dp_shard": 2, "zero": 3},
)
"""The same with context parallelism."""
INSIDE = {"cp": 4, "cp_inner": 2, "context_parallel": "hierarchical"}
BFS = {"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs"}
ROOMY = 1 << 50
"""Bytes of a device on which the allocator never has to give anything back."""


@dataclass(frozen=True)
class Scenario:
    """One question to both: a shape, a length, a precision and a layout, how many tokens the busiest rank's experts get over the mean, and how
    many a decoder behind an encoder has."""

    name: str
    shape: ModelShape
    seq_len: int
    precision: str
    layout: Mapping[str, Any]
    imbalance: float = 1.0
    targets: int | None = None


LEARNED = tuple(
    Scenario(
        f"{model}-2l-learned-{number}",
        replace(load_model(model), layers=2),
        512,
        "bf16",
        {"tp": 2, "sequence_parallel": 1} | layout,
    )
    for number, (model, layout) in enumerate(
        (("gpt2-medium", {"dp_shard": 4, "zero": 1}), ("opt-1.3b", {"dp_shard": 4, "zero": 3}))
    )
)
"""Learned positions, of whose gradient each rank of tp has a term where it sees its own tokens alone."""

WEIGHTED = tuple(
    Scenario(f"{model}-{layers}l-weighted-{number}", replace(load_model(model), layers=layers), 1024, "bf16", layout)
    for number, (model, layers, layout) in enumerate(
        (model, layers, {"stage_split": "weighted", "accumulation": 2 * pp, "pp": pp, **more})
        for model, layers in (("llama-3.2-1b", 8), ("qwen2.5-0.5b", 9))
        for pp, more in ((2, {"dp_shard": 4, "zero": 3}), (4, {"dp_replicate": 2, "recompute": "full"}))
    )
)
"""Pipelines whose last stage owns fewer layers because of its head."""


def _in_passes(word: str, *rows: tuple[str, int, str, Mapping[str, Any]]) -> tuple[Scenario, ...]:
    """Scenarios of 1,000 tokens, each of a model with so many layers, in a precision, under a layout; `word` tells their names apart."""
    return tuple(
        Scenario(
            f"{model}{word}-{number}", replace(load_model(model), layers=layers, max_seq=4096), 1000, precision, layout
        )
        for number, (model, layers, precision, layout) in enumerate(rows)
    )


BREADTH_FIRST = _in_passes(
    "",
    ("llama-3.2-1b", 4, "bf16", BFS | {"accumulation": 3, "dp_shard": 4, "zero": 3}),
    ("llama-3.2-1b", 4, "bf16", {"schedule": "gpipe", "pp": 2, "accumulation": 3, "dp_shard": 4, "zero": 3}),
    ("llama-3.1-8b", 4, "bf16", BFS | {"accumulation": 2, "dp_shard": 4, "zero": 2}),
    ("qwen2.5-0.5b", 8, "fp32", BFS | {"pp": 4, "accumulation": 5, "recompute": "full"}),
)
"""Pipelines that run all forward passes before any backward pass; tied ends and free ones."""

Z3, FORWARD_FIRST = {"dp_shard": 4, "zero": 3}, {"pp": 2, "schedule": "gpipe", "accumulation": 3}
PIPES = tuple(
    Scenario(f"{model}-pipe-{number}", replace(load_model(model), layers=layers, max_seq=4096, **cut), seq_len, precision, layout)
    for number, (model, layers, cut, seq_len, precision, layout) in enumerate((
        ("llama-3.2-1b", 4, {}, 512, "bf16", FORWARD_FIRST | Z3),
        ("llama-3.1-8b", 4, {}, 512, "bf16", FORWARD_FIRST | Z3),
        ("qwen3-4b", 8, {"vocab": 2048}, 1024, "fp32", BFS | Z3 | {"accumulation": 4, "micro_batch": 4, "recompute": "selective"}),
        ("gpt3-1.3b", 4, {"pos_rows": 4096}, 4096, "fp16", {"pp": 2, "tp": 4, "sequence_parallel": True, "micro_batch": 4, "accumulation": 2, "schedule": "1f1b"}),
        ("qwen3-14b", 5, {}, 512, "fp32", {"pp": 2, "tp": 2, "micro_batch": 3, "accumulation": 4, "schedule": "1f1b", "recompute": "full", "stage_split": "weighted"} | Z3),
        ("llama-2-70b", 4, {}, 512, "bf16", {"pp": 2, "tp": 4, "micro_batch": 2, "accumulation": 4, "schedule": "1f1b"} | Z3),
        ("megatron-gpt-39.1b", 2, {"pos_rows": 4096}, 2048, "fp32", {"pp": 2, "micro_batch": 3, "accumulation": 4, "schedule": "1f1b"} | Z3),
    ))
)  # fmt: skip
"""Pipelines with few layers a stage, few words or many, in which what ZeRO-3 gathers beside a pass or forward alone holds most."""


IN_TURN = {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "accumulation": 4} | Z3
CHUNKS_IN_TURN = tuple(
    Scenario(f"{model}-{layers}l-turn-{number}", replace(load_model(model), layers=layers, max_seq=4096, parameters_stated=None, **cut), seq_len, precision, layout)
    for number, (model, layers, cut, seq_len, precision, layout) in enumerate((
        ("llama-3.1-8b", 8, {}, 512, "bf16", IN_TURN),
        ("olmo-1b", 8, {"vocab": 3072}, 1024, "bf16", IN_TURN | {"micro_batch": 3, "recompute": "selective"}),
        ("qwen1.5-14b", 2, {"vocab": 2048}, 1024, "bf16", {"pp": 2, "tp": 4, "sequence_parallel": True, "micro_batch": 2, "accumulation": 4, "schedule": "1f1b", "recompute": "selective"} | Z3),
    ))
)  # fmt: skip
"""Interleaved pipelines under ZeRO-3, and one whose ranks add up terms beside gathered weights (docs/decisions/0125)."""


SP2, SP4 = ({"tp": tp, "sequence_parallel": True} for tp in (2, 4))
CUT = tuple(
    Scenario(
        f"{model}-{layers}l-cut-{number}",
        replace(load_model(model), layers=layers, vocab=vocab, max_seq=4096, parameters_stated=None),
        seq_len,
        precision,
        layout,
    )
    for number, (model, layers, vocab, seq_len, precision, layout) in enumerate(
        (
            ("qwen1.5-32b", 2, 152064, 512, "fp32", SP4 | {"dp_shard": 8, "zero": 3, "accumulation": 2}),
            ("mistral-nemo-12b", 1, 2048, 2048, "fp32", SP4 | {"micro_batch": 3}),
            ("falcon3-7b", 2, 2048, 2048, "bf16", SP2 | {"dp_shard": 8, "zero": 2, "accumulation": 4}),
            ("falcon3-7b", 2, 2048, 2048, "bf16", SP2 | {"dp_shard": 8, "zero": 2, "recompute": "selective"}),
            ("tinyllama-1.1b", 2, 2048, 1000, "fp32", SP2 | {"dp_shard": 6, "zero": 3, "recompute": "full"}),
        )
    )
)
"""Sequence parallelism where terms that ranks add up, or few gathered layers, are most."""

ZB = {"pp": 2, "schedule": "zb_h1", "accumulation": 4}
TWO_PARTS = _in_passes(
    "-zb",
    ("llama-3.1-8b", 4, "bf16", ZB | {"dp_shard": 4, "zero": 2}),
    ("llama-3.2-1b", 8, "bf16", ZB | {"pp": 4, "dp_replicate": 2}),
    ("llama-3.1-8b", 4, "bf16", ZB | {"tp": 2, "sequence_parallel": True, "accumulation": 2}),
    ("qwen3-8b", 4, "fp32", ZB),
)
"""Pipelines whose backward passes come in two parts."""


def _with_two_runs(word: str, schedule: str, on_four: int, on_two: int) -> tuple[Scenario, ...]:
    """Of a schedule with two runs of layers a rank, with so many micro-batches on four stages, and beside tp on two."""
    layout = {"pp": 2, "virtual_stages": 2, "schedule": schedule, "accumulation": 4}
    return _in_passes(
        word,
        ("llama-3.1-8b", 4, "bf16", layout | {"dp_shard": 4, "zero": 2}),
        ("llama-3.1-8b", 8, "bf16", layout | {"pp": 4, "dp_replicate": 2, "accumulation": on_four}),
        ("llama-3.1-8b", 8, "bf16", layout | {"tp": 2, "sequence_parallel": True, "accumulation": on_two}),
        ("qwen3-8b", 4, "fp32", layout),
    )


IN_A_V = _with_two_runs("-zbv", "zbv", 7, 3)
"""The same with two runs of layers a rank, first and last on one."""

IN_PAIRS = _with_two_runs("-dual", "dualpipev", 9, 5)
"""The same with some backward passes in one part."""

SHORT = {"vocab": 3072}
HOME = {"dp_shard": 8, "zero": 3, "offload": "parameters"}


def _of_layers(model: str, layers: int) -> ModelShape:
    """The first layers of a model, with few words."""
    shape = replace(load_model(model), layers=layers, max_seq=4096, **SHORT)
    return shape if shape.moe is None else replace(shape, moe=replace(shape.moe, layers=layers))


STATES = tuple(
    Scenario(f"llama-3.2-1b-state-{number}", replace(load_model("llama-3.2-1b"), layers=4), 1024, "bf16", layout)
    for number, layout in enumerate(
        (
            {"dp_shard": 8, "zero": 3, "offload": "nvme", "accumulation": 2},
            {"dp_shard": 8, "zero": 2, "optimizer": "adamw8bit", "accumulation": 2},
            {"dp_shard": 4, "zero": 1, "optimizer": "adamw8bit"},
            {"tp": 2, "dp_replicate": 2, "optimizer": "adamw8bit", "sequence_parallel": True},
            {"dp_shard": 8, "zero": 3, "offload": "nvme", "optimizer": "adamw8bit"},
        )
    )
)
"""Optimizer state on a drive, and in eight bits."""

AWAY = tuple(
    Scenario(f"{model}-{layers}l-away-{number}", _of_layers(model, layers), seq_len, precision, layout)
    for number, (model, layers, seq_len, precision, layout) in enumerate((
        ("llama-3.1-8b", 4, 2048, "bf16", HOME | {"dp_shard": 1, "cp": 8, "context_parallel": "all-to-all", "recompute": "full"}),
        ("llama-3.1-8b", 4, 1024, "bf16", HOME | {"dp_shard": 4, "cp": 2, "context_parallel": "ring", "accumulation": 2}),
        ("llama-3.1-8b", 4, 1024, "bf16", HOME | {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "context_parallel": "ring"}),
        ("olmoe-1b-7b", 4, 1024, "bf16", HOME | {"dp_shard": 4, "cp": 2, "context_parallel": "ring", "ep": 4}),
        ("olmoe-1b-7b", 4, 1024, "bf16", HOME | {"ep": 8, "recompute": "full", "accumulation": 2}),
        ("qwen2.5-7b", 4, 1024, "bf16", {"dp_shard": 2, "zero": 2, "offload": "optimizer", "cp": 4, "context_parallel": "all-to-all", "accumulation": 2}),
        ("llama-3.2-1b", 4, 1024, "fp32", HOME | {"dp_shard": 4, "cp": 2, "context_parallel": "ring", "accumulation": 2}),
        ("mixtral-8x7b", 2, 1024, "bf16", HOME | {"offload": "nvme", "ep": 4}),
        ("mixtral-8x7b", 2, 1024, "bf16", HOME | {"dp_replicate": 2, "dp_shard": 4}),
        ("mixtral-8x7b", 2, 1024, "bf16", {"dp_replicate": 2, "dp_shard": 4, "zero": 2, "offload": "optimizer", "ep": 2}),
    ))
)  # fmt: skip
"""Weights and state away from ranks that share sequences, hold different experts or have replicas (docs/decisions/0163)."""


TILED = tuple(
    Scenario(
        f"{model}-tiled-{number}", replace(load_model(model), layers=4, max_seq=4096, **cut), seq_len, precision, layout
    )
    for number, (model, cut, seq_len, precision, layout) in enumerate(
        (
            ("llama-3.1-8b", {}, 2048, "bf16", {"dp_shard": 8, "zero": 3, "tiling": 8, "accumulation": 2}),
            ("llama-3.1-8b", SHORT, 2048, "bf16", {"dp_shard": 8, "zero": 3, "tiling": 8}),
            ("opt-1.3b", SHORT, 2048, "fp32", {"dp_shard": 8, "zero": 3, "tiling": 4}),
            ("qwen2.5-7b", SHORT, 1024, "bf16", HOME | {"tiling": 8, "recompute": "full", "accumulation": 2}),
            ("llama-3.2-1b", {}, 512, "bf16", HOME | {"offload": "nvme", "tiling": 2, "recompute": "full"}),
            ("opt-1.3b", SHORT, 512, "fp32", {"dp_shard": 24, "zero": 3, "tiling": 5, "recompute": "full"}),
        )
    )
)
"""Matrices in slices; with few words, layers hold most."""


CUT_EXPERTS = {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}
WHOLE_EXPERTS = {"tp": 2, "sequence_parallel": True}
EXPERTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mixtral-8x7b", {"ep": 8, "dp_shard": 8, "zero": 3}),
    ("mixtral-8x7b", {"ep": 2, "dp_shard": 8, "zero": 2, "recompute": "selective", "accumulation": 2}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 8, "dp_replicate": 2, "zero": 3, "recompute": "full"}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 4, "zero": 2, "pp": 2, "accumulation": 4}),
    ("mixtral-8x7b", {"ep": 2, "dp_shard": 4, "zero": 3}),
    ("deepseek-moe-16b", {"ep": 4, "dp_shard": 4, "zero": 3, "accumulation": 3}),
    ("olmoe-1b-7b", {"ep": 2, "dp_shard": 4, "dp_replicate": 2, "zero": 3, "accumulation": 3}),
    ("olmoe-1b-7b", {"ep": 2, "dp_shard": 4, "zero": 3, "pp": 2, "accumulation": 4}),
    ("mixtral-8x7b", {"ep": 4, "tp": 2, "etp": 2, "dp_shard": 4, "zero": 3, "sequence_parallel": True}),
    ("mixtral-8x7b", {"ep": 2, "tp": 2, "etp": 2, "dp_shard": 4, "zero": 2, "recompute": "full", "accumulation": 2}),
    ("mixtral-8x7b", {"ep": 8, "tp": 2, "dp_shard": 8, "zero": 3, "sequence_parallel": True}),
    ("qwen2-57b-a14b", {"ep": 4, "tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": True, "recompute": "full"}),
    (
        "mixtral-8x7b",
        {"ep": 4, "tp": 2, "dp_shard": 4, "zero": 2, "pp": 2, "accumulation": 4, "sequence_parallel": True},
    ),
    ("mixtral-8x7b", {"ep": 4, "dp_replicate": 8, "accumulation": 2}),
    ("olmoe-1b-7b", {"ep": 4, "dp_replicate": 4, "recompute": "full"}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 8, "zero": 2, "offload": "optimizer", "accumulation": 2}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 8, "zero": 3, "offload": "parameters"}),
    ("mixtral-8x7b", {"ep": 4, "dp_shard": 4, "zero": 1, "recompute": "full"}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 8, "zero": 1, "accumulation": 2}),
    ("mixtral-8x7b", {"ep": 2, "dp_shard": 8, "zero": 1, "pp": 2, "accumulation": 4}),
    ("qwen2-57b-a14b", {"ep": 4, "tp": 2, "dp_shard": 4, "zero": 1, "sequence_parallel": True, "accumulation": 2}),
    ("mixtral-8x7b", {"ep": 2, "tp": 2, "etp": 2, "dp_shard": 8, "zero": 1, "sequence_parallel": True}),
    ("olmoe-1b-7b", {"ep": 4, "dp_shard": 4, "dp_replicate": 2, "zero": 1}),
)
"""Models and layouts whose ranks share experts."""
AT_EXPERTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mixtral-8x7b", CUT_EXPERTS | {"dp_replicate": 4, "recompute": "selective", "accumulation": 2}),
    ("mixtral-8x7b", CUT_EXPERTS | {"dp_shard": 4, "zero": 2, "recompute": "full"}),
    ("deepseek-moe-16b", {"ep": 2, "dp_replicate": 4, "recompute": "selective", "accumulation": 2}),
    ("deepseek-moe-16b", CUT_EXPERTS | {"dp_replicate": 4, "recompute": "selective"}),
    ("deepseek-moe-16b", {"ep": 2, "dp_shard": 4, "zero": 2}),
    ("deepseek-moe-16b", {"ep": 2, "dp_shard": 4, "zero": 3, "recompute": "full"}),
    ("deepseek-moe-16b", WHOLE_EXPERTS | {"ep": 4, "dp_shard": 4, "zero": 3, "recompute": "full"}),
    ("deepseek-moe-16b", WHOLE_EXPERTS | {"ep": 2, "dp_replicate": 4, "recompute": "selective"}),
    ("mixtral-8x7b", WHOLE_EXPERTS | {"ep": 2, "dp_shard": 4, "zero": 2, "recompute": "selective"}),
    ("qwen2-57b-a14b", WHOLE_EXPERTS | {"ep": 4, "dp_replicate": 4, "recompute": "selective"}),
)
"""Those whose experts hold most: long micro-batches and few words."""


FEW_EXPERTS: tuple[tuple[str, int, int, str, dict[str, Any]], ...] = (
    ("qwen2-57b-a14b", 4, 4096, "bf16", {"tp": 2, "etp": 2, "micro_batch": 4, "recompute": "selective", "optimizer": "adamw8bit"}),
    ("mixtral-8x7b", 2, 512, "bf16", {"dp_shard": 6, "zero": 3, "ep": 2, "micro_batch": 4, "recompute": "selective"}),
)  # fmt: skip
"""Models, experts per token, and layouts of two layers."""


@cache
def of_few_experts() -> tuple[Scenario, ...]:
    """Two layers of eight experts: shared ones at work, and a layer before the first."""
    found = []
    for place, (name, chosen, seq_len, precision, layout) in enumerate(FEW_EXPERTS):
        shape = _of_experts(load_model(name))
        moe = shape.moe and replace(shape.moe, experts=8, top_k=chosen)
        found.append(Scenario(f"{name}-few-{place}", replace(shape, moe=moe), seq_len, precision, layout))
    return tuple(found)


EXPERTS_IN_TURN: tuple[tuple[str, int, int, int, str, Mapping[str, Any]], ...] = (
    ("deepseek-moe-16b", 4, 0, 1024, "bf16", {"dp_shard": 4, "ep": 4, "zero": 3}),
    ("phi-3.5-moe", 2, 0, 512, "fp32", {"dp_shard": 8, "ep": 4, "zero": 3, "micro_batch": 4, "accumulation": 2, "offload": "optimizer"}),
    ("glm-4.5-air", 4, 1, 1024, "bf16", {"recompute": "full", "accumulation": 2, "optimizer": "sgd"}),
    ("glm-4.5-air", 4, 1, 1000, "fp16", {"dp_replicate": 2, "dp_shard": 4, "ep": 4, "zero": 3, "micro_batch": 4, "accumulation": 4, "recompute": "full"}),
    ("deepseek-moe-16b", 4, 0, 1024, "bf16", WHOLE_EXPERTS | {"dp_shard": 4, "ep": 4, "zero": 3}),
    ("qwen2-57b-a14b", 8, 0, 4096, "bf16", {"tp": 2, "etp": 2, "micro_batch": 4, "recompute": "selective"}),
)  # fmt: skip
"""Models, experts per token, layers without experts, and layouts of two layers of eight experts."""


@cache
def in_turn() -> tuple[Scenario, ...]:
    """Experts one after the other in backward, and those that one rank alone has; all behind a router that the executor builds."""
    found = []
    for place, (name, chosen, dense, seq_len, precision, layout) in enumerate(EXPERTS_IN_TURN):
        shape = load_model(name)
        moe = shape.moe and replace(shape.moe, experts=8, top_k=chosen, layers=2 - dense, first_dense=dense)
        few = replace(shape, family="mixtral", layers=2, vocab=2048, max_seq=4096, moe=moe)
        found.append(Scenario(f"{name}-in-turn-{place}", few, seq_len, precision, layout))
    return tuple(found)


@cache
def busy_experts() -> tuple[Scenario, ...]:
    """The same and those that hold most, on the rank whose experts get so many more tokens than the mean one."""
    spread = (case for case in (*in_turn(), *at_experts()) if case.layout.get("ep", 1) > 1)
    ratios = (1.5, 1.9)
    return tuple(
        replace(case, name=f"{case.name}-busy", imbalance=ratios[place % len(ratios)])
        for place, case in enumerate(spread)
    )


@cache
def with_experts() -> tuple[Scenario, ...]:
    """Experts that several ranks share."""
    return tuple(
        Scenario(f"{name}-{place}", replace(load_model(name), layers=4), 2048, "bf16", layout)
        for place, (name, layout) in enumerate(EXPERTS)
    )


@cache
def at_experts() -> tuple[Scenario, ...]:
    """Experts that several ranks share, where what they hold decides."""
    return tuple(
        Scenario(f"{name}-most-{place}", _of_experts(load_model(name)), 4096, "bf16", layout | {"micro_batch": 4})
        for place, (name, layout) in enumerate(AT_EXPERTS)
    )


def _of_experts(shape: ModelShape) -> ModelShape:
    """Two layers with experts, few words."""
    moe = shape.moe and replace(shape.moe, layers=2, first_dense=0)
    return replace(shape, layers=2, vocab=1024, moe=moe)


@cache
def scenarios() -> tuple[Scenario, ...]:
    """The whole grid: SIZE scenarios that the executor runs, behind them those whose ranks share sequences or experts."""
    return (*_some(LAYOUTS, SIZE), *with_sequences(), *with_experts(), *at_experts())


@cache
def with_sequences() -> tuple[Scenario, ...]:
    """Sequences that several ranks hold: SPREAD of all layouts, and behind them one of each that shards gradients, short of
    vocabulary, so that layers hold most."""
    in_layers = (layout for layout in SEQUENCES if not layout.keys() & {"pp", "tp"} and layout.get("zero", 0) >= 2)
    return (*_some(SEQUENCES, SPREAD), *(_in_attention(layout) for layout in in_layers))


def _in_attention(layout: Mapping[str, Any]) -> Scenario:
    """A scenario in which what attention holds in backward counts."""
    shape = replace(load_model("gpt2-medium"), layers=3, vocab=2048, max_seq=4096, pos_rows=4096)
    words = "-".join(f"{key}{value}" for key, value in layout.items())
    return Scenario(
        f"gpt2-medium-3l-4096-bf16-attention-{words}", shape, 4096, "bf16", dict(layout) | {"micro_batch": 2}
    )


def _some(layouts: tuple[dict[str, Any], ...], count: int) -> tuple[Scenario, ...]:
    """Every layout in turn, the rest drawn with a fixed seed."""
    drawn = random.Random(SEED)
    found: dict[str, Scenario] = {}
    while len(found) < count:
        for layout in layouts:
            scenario = _drawn(drawn, layout)
            if not layout_obstacles(plan_of(scenario)):
                found.setdefault(scenario.name, scenario)
    return tuple(found.values())[:count]


ADAPTED = tuple(
    Scenario(f"{model}-{method}-{rank}-{len(targets)}-{number}", with_adapters(replace(load_model(model), layers=4), method, rank, targets), seq_len, precision, layout)
    for number, (method, model, rank, targets, seq_len, precision, layout) in enumerate((
        ("lora", "llama-3.1-8b", 16, TARGETS, 2048, "bf16", {"micro_batch": 1, "accumulation": 2}),
        ("lora", "llama-3.1-8b", 16, TARGETS, 2048, "bf16", {"dp_replicate": 8, "accumulation": 3}),
        ("lora", "llama-3.1-8b", 64, TARGETS, 4096, "bf16", {"dp_shard": 8, "zero": 3}),
        ("lora", "llama-3.2-1b", 16, ("q", "v"), 4096, "bf16", {"dp_shard": 8, "zero": 2, "accumulation": 2}),
        ("lora", "llama-3.2-1b", 8, TARGETS, 2048, "bf16", {"dp_replicate": 4, "dp_shard": 8, "zero": 3, "recompute": "full", "micro_batch": 4}),
        ("lora", "qwen2.5-7b", 16, TARGETS, 2048, "bf16", {"dp_shard": 8, "zero": 3, "recompute": "selective", "micro_batch": 2}),
        ("lora", "opt-1.3b", 32, TARGETS, 2048, "fp32", {"dp_replicate": 8, "recompute": "full", "micro_batch": 2}),
        ("lora", "qwen3-8b", 16, ("q", "k", "v", "o"), 2048, "bf16", {"dp_replicate": 8, "micro_batch": 2}),
        ("qlora", "llama-3.1-8b", 16, TARGETS, 2048, "bf16", {"micro_batch": 1, "accumulation": 2}),
        ("qlora", "llama-3.1-8b", 16, TARGETS, 2048, "bf16", {"dp_replicate": 8, "recompute": "full", "micro_batch": 2}),
        ("qlora", "llama-3.2-1b", 64, ("q", "v"), 4096, "bf16", {"dp_shard": 8, "zero": 3, "accumulation": 2}),
        ("qlora", "qwen2.5-7b", 16, TARGETS, 2048, "bf16", {"dp_replicate": 4, "dp_shard": 8, "zero": 2, "recompute": "selective"}),
        ("qlora", "opt-1.3b", 32, TARGETS, 2048, "fp32", {"dp_replicate": 8, "micro_batch": 2}),
        ("lora", "olmoe-1b-7b", 16, ATTENTION, 2048, "bf16", {"micro_batch": 2, "accumulation": 2}),
        ("lora", "mixtral-8x7b", 16, ATTENTION, 2048, "bf16", {"dp_shard": 8, "zero": 3}),
        ("lora", "mixtral-8x7b", 64, ("q", "v"), 2048, "bf16", {"dp_replicate": 4, "dp_shard": 8, "zero": 3, "recompute": "full", "micro_batch": 2}),
        ("lora", "deepseek-moe-16b", 16, ATTENTION, 4096, "bf16", {"dp_shard": 8, "zero": 2, "recompute": "selective", "accumulation": 2}),
        ("lora", "olmoe-1b-7b", 8, ("q", "v"), 2048, "fp32", {"dp_replicate": 8, "accumulation": 2}),
        ("qlora", "mixtral-8x7b", 16, ATTENTION, 2048, "bf16", {"dp_replicate": 8, "recompute": "full"}),
        ("qlora", "mixtral-8x7b", 16, ATTENTION, 2048, "bf16", {"dp_shard": 8, "zero": 3, "accumulation": 2}),
        ("qlora", "deepseek-moe-16b", 16, ("q", "v"), 2048, "bf16", {"micro_batch": 2, "recompute": "selective"}),
    ))
)  # fmt: skip
"""Adapters beside frozen weights, of full length or of four bits."""


SERVED = tuple(
    Scenario(f"{model}-served-{number}", replace(load_model(model), layers=layers, tied=False, max_seq=4096, **shape), seq_len, precision, layout | {"tables": "server"})
    for number, (model, layers, shape, seq_len, precision, layout) in enumerate((
        ("llama-3.1-8b", 3, {}, 2048, "bf16", {"dp_replicate": 8, "accumulation": 2}),
        ("llama-3.2-1b", 4, {}, 2048, "bf16", {"dp_replicate": 4, "micro_batch": 2, "recompute": "full"}),
        ("llama-3.2-1b", 4, SHORT, 4096, "fp32", {"dp_replicate": 2, "recompute": "selective"}),
        ("qwen2.5-7b", 2, SHORT, 512, "fp32", {"dp_replicate": 8, "accumulation": 4}),
        ("gpt2-medium", 3, {"pos_rows": 4096}, 1024, "bf16", {"dp_replicate": 8, "micro_batch": 4}),
        ("mixtral-8x7b", 2, {}, 1024, "bf16", {"dp_replicate": 4, "recompute": "full"}),
        ("llama-3.2-1b", 4, {}, 2048, "bf16", {"dp_replicate": 8, "loss": "chunked", "accumulation": 2}),
        ("qwen3-8b", 2, {}, 1024, "fp16", {"dp_replicate": 8, "micro_batch": 2}),
        ("llama-3.2-1b", 4, {}, 1024, "bf16", {"dp_replicate": 8, "optimizer": "adamw8bit"}),
        ("llama-3.2-1b", 1, {"vocab": 500_000}, 256, "fp32", {"dp_replicate": 2, "optimizer": "sgd", "accumulation": 2}),
    ))
)  # fmt: skip
"""Tables of embeddings on a parameter server."""


CHUNKED = tuple(
    Scenario(f"{model}-chunked-{number}", replace(load_model(model), layers=3, max_seq=4096, pos_rows=4096 if "gpt2" in model else 0), seq_len, precision, layout | {"loss": "chunked"})
    for number, (model, seq_len, precision, layout) in enumerate((
        ("llama-3.2-1b", 2048, "bf16", {"micro_batch": 2, "accumulation": 2}),
        ("llama-3.2-1b", 2048, "bf16", {"dp_replicate": 8, "micro_batch": 2, "recompute": "full"}),
        ("llama-3.1-8b", 2048, "bf16", {"dp_shard": 8, "zero": 3, "micro_batch": 2}),
        ("llama-3.1-8b", 2000, "bf16", {"dp_shard": 8, "zero": 2, "micro_batch": 3, "accumulation": 2, "recompute": "selective"}),
        ("qwen2.5-0.5b", 2000, "fp32", {"dp_shard": 8, "zero": 3, "micro_batch": 2, "accumulation": 2}),
        ("llama-3.2-1b", 2048, "bf16", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "micro_batch": 2, "accumulation": 2}),
        ("llama-3.1-8b", 1000, "fp32", {"micro_batch": 2}),
        ("mixtral-8x7b", 1024, "bf16", {"dp_shard": 4, "zero": 3, "ep": 2, "micro_batch": 2}),
        ("gpt2-medium", 1024, "bf16", {"dp_shard": 4, "zero": 3, "cp": 2, "context_parallel": "ring", "micro_batch": 2, "accumulation": 2}),
    ))
)  # fmt: skip
"""Losses of a few tokens at a time."""

SPLIT = tuple(
    Scenario(f"{model}-{layers}l-{seq_len}-split-{number}", replace(load_model(model), layers=layers, max_seq=8192, pos_rows=8192 if "gpt2" in model else 0, **more), seq_len, precision, INSIDE | layout)
    for number, (model, layers, more, seq_len, precision, layout) in enumerate((
        ("llama-3.1-8b", 3, {}, 4096, "bf16", {"zero": 3, "dp_shard": 4, "micro_batch": 2}),
        ("llama-3.1-8b", 3, {"vocab": 2048}, 4096, "bf16", {"zero": 2, "cp": 8, "micro_batch": 2, "recompute": "full"}),
        ("llama-2-7b", 3, {"vocab": 2048}, 8192, "bf16", {"zero": 2, "cp": 8, "cp_inner": 4, "accumulation": 2}),
        ("gpt2-medium", 3, {"vocab": 2048}, 4096, "bf16", {"zero": 3, "dp_shard": 2, "micro_batch": 2}),
        ("llama-3.2-1b", 4, {}, 2048, "bf16", {"dp_replicate": 2, "micro_batch": 3, "accumulation": 2}),
        ("llama-2-7b", 3, {"vocab": 2048}, 4096, "bf16", {"tp": 2, "sequence_parallel": True, "dp_shard": 2, "zero": 3}),
        ("llama-3.1-8b", 4, {}, 2048, "bf16", {"pp": 2, "dp_shard": 2, "zero": 2, "accumulation": 4}),
        ("llama-3.1-8b", 3, {}, 2048, "fp16", {"zero": 1, "cp": 8, "recompute": "full"}),
        ("mixtral-8x7b", 2, {}, 2048, "bf16", {"zero": 3, "dp_shard": 2, "ep": 2, "micro_batch": 2}),
    ))
)  # fmt: skip
"""Sequences that ranks hold together in groups of those that exchange heads, around rings."""


def _some_again(
    word: str, key: str, rows: Sequence[tuple[str, int, int, int, str, dict[str, Any]]]
) -> tuple[Scenario, ...]:
    """Scenarios under full recompute of some layers alone: model, layers, the number under `key`, tokens, precision, layout."""
    return tuple(
        Scenario(
            f"{model}-{layers}l-{word}-{chosen}-{number}",
            replace(load_model(model), layers=layers, max_seq=4096, pos_rows=4096 if "gpt2" in model else 0),
            seq_len,
            precision,
            layout | {"recompute": "full", key: chosen},
        )
        for number, (model, layers, chosen, seq_len, precision, layout) in enumerate(rows)
    )


PARTLY = _some_again("first", "recompute_layers", (
    ("llama-3.1-8b", 4, 2, 2048, "bf16", {"dp_shard": 8, "zero": 3, "micro_batch": 2}),
    ("llama-3.2-1b", 4, 1, 2048, "bf16", {"dp_replicate": 8, "micro_batch": 2, "accumulation": 2}),
    ("llama-3.1-8b", 8, 2, 2048, "bf16", {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 4}),
    ("qwen2.5-7b", 4, 3, 1000, "bf16", {"tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": True, "accumulation": 3, "micro_batch": 2}),
    ("llama-2-7b", 8, 1, 2048, "bf16", {"pp": 2, "virtual_stages": 2, "accumulation": 4}),
    ("gpt2-medium", 5, 2, 1024, "fp32", {"micro_batch": 4}),
    ("mixtral-8x7b", 4, 1, 1024, "bf16", {"dp_shard": 4, "zero": 3, "ep": 2, "accumulation": 2}),
    ("mistral-7b-v0.1", 8, 3, 2048, "bf16", {"pp": 2, "tp": 2, "dp_shard": 4, "zero": 3, "sequence_parallel": True, "accumulation": 4}),
    ("llama-3.1-8b", 7, 2, 2048, "bf16", {"pp": 2, "dp_shard": 2, "zero": 3, "accumulation": 4, "micro_batch": 2}),
    ("llama-3.2-1b", 5, 3, 2048, "bf16", {"micro_batch": 1}),
    ("qwen2.5-0.5b", 6, 5, 4096, "bf16", {"dp_replicate": 2, "dp_shard": 4, "zero": 2, "accumulation": 2}),
    ("qwen1.5-moe-a2.7b", 4, 3, 2048, "bf16", {"dp_shard": 8, "zero": 3, "micro_batch": 2}),
    ("olmoe-1b-7b", 4, 2, 2048, "bf16", {"ep": 4, "dp_replicate": 8}),
    ("llama-2-7b", 4, 2, 2048, "bf16", {"cp": 2, "context_parallel": "ring", "dp_shard": 4, "zero": 3}),
    ("llama-3.1-8b", 8, 1, 1024, "bf16", {"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "dp_shard": 4, "zero": 2, "accumulation": 4}),
    ("llama-3.2-1b", 4, 2, 1000, "bf16", {"tp": 2, "dp_shard": 4, "zero": 1}),
))  # fmt: skip
"""Full recompute of the first layers of every chunk."""


ALTERNATE = _some_again("every", "recompute_every", (
    ("llama-3.1-8b", 4, 2, 2048, "bf16", {"dp_shard": 8, "zero": 3, "micro_batch": 2}),
    ("llama-3.2-1b", 5, 2, 2048, "bf16", {"dp_replicate": 8, "micro_batch": 2, "accumulation": 2}),
    ("llama-3.1-8b", 8, 2, 2048, "bf16", {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 4}),
    ("qwen2.5-7b", 6, 3, 1000, "bf16", {"tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": True, "accumulation": 3, "micro_batch": 2}),
    ("llama-2-7b", 8, 2, 2048, "bf16", {"pp": 2, "virtual_stages": 2, "accumulation": 4}),
    ("gpt2-medium", 7, 3, 1024, "fp32", {"micro_batch": 4}),
    ("mixtral-8x7b", 4, 2, 1024, "bf16", {"dp_shard": 4, "zero": 3, "ep": 2, "accumulation": 2}),
    ("mistral-7b-v0.1", 8, 3, 2048, "bf16", {"pp": 2, "tp": 2, "dp_shard": 4, "zero": 3, "sequence_parallel": True, "accumulation": 4}),
    ("llama-3.1-8b", 7, 2, 2048, "bf16", {"pp": 2, "dp_shard": 2, "zero": 3, "accumulation": 4, "micro_batch": 2}),
    ("llama-3.2-1b", 6, 2, 2048, "bf16", {"micro_batch": 1}),
    ("qwen2.5-0.5b", 6, 2, 4096, "bf16", {"dp_replicate": 2, "dp_shard": 4, "zero": 2, "accumulation": 2}),
    ("qwen1.5-moe-a2.7b", 4, 3, 2048, "bf16", {"dp_shard": 8, "zero": 3, "micro_batch": 2}),
    ("olmoe-1b-7b", 5, 2, 2048, "bf16", {"ep": 4, "dp_replicate": 8}),
    ("llama-2-7b", 4, 4, 2048, "bf16", {"cp": 2, "context_parallel": "ring", "dp_shard": 4, "zero": 3}),
    ("llama-3.1-8b", 12, 2, 1024, "bf16", {"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "dp_shard": 4, "zero": 2, "accumulation": 4}),
    ("llama-3.2-1b", 4, 2, 1000, "bf16", {"tp": 2, "dp_shard": 4, "zero": 1}),
))  # fmt: skip
"""Full recompute of every second layer of a chunk, or every third or fourth."""


BY_STAGE = tuple(
    Scenario(
        f"{model}-{layers}l-by-stage-{'-'.join(map(str, depths))}-{number}",
        replace(load_model(model), layers=layers, max_seq=4096, pos_rows=4096 if "gpt2" in model else 0),
        seq_len,
        precision,
        layout | {"pp": len(depths), "recompute": "full", "recompute_stages": depths},
    )
    for number, (model, layers, depths, seq_len, precision, layout) in enumerate((
        ("llama-3.1-8b", 8, (3, 1), 2048, "bf16", {"dp_shard": 4, "zero": 2, "accumulation": 4}),
        ("llama-3.2-1b", 8, (2, 1, 1, 0), 1024, "bf16", {"accumulation": 8}),
        ("llama-2-7b", 8, (2, 0), 2048, "bf16", {"virtual_stages": 2, "dp_shard": 2, "zero": 3, "accumulation": 4}),
        ("mistral-7b-v0.1", 9, (1, 3, 0), 2048, "bf16", {"tp": 2, "dp_shard": 2, "zero": 3, "sequence_parallel": True, "accumulation": 6}),
        ("gpt2-medium", 7, (3, 2), 1024, "fp32", {"schedule": "gpipe", "dp_replicate": 2, "accumulation": 2}),
        ("qwen2.5-7b", 8, (0, 2, 1, 2), 1000, "bf16", {"stage_split": "weighted", "micro_batch": 2, "accumulation": 4}),
        ("llama-3.1-8b", 9, (1, 1, 0), 1024, "bf16", {"stage_split": "balanced", "stage_layers": (2, 3, 4), "dp_shard": 4, "zero": 3, "accumulation": 6}),
        ("qwen2.5-7b", 8, (1, 3), 1000, "bf16", {"stage_split": "balanced", "stage_layers": (3, 5), "tp": 2, "sequence_parallel": True, "accumulation": 4}),
        ("olmoe-1b-7b", 6, (2, 1), 2048, "bf16", {"ep": 2, "dp_shard": 2, "zero": 2, "accumulation": 4}),
        ("llama-3.1-8b", 8, (0, 2), 1024, "bf16", {"virtual_stages": 2, "schedule": "looped_bfs", "accumulation": 4}),
    ))
)  # fmt: skip
"""Full recompute of other layers on every stage."""


FEW_WORDS = {"vocab": 2048}
TURNED = tuple(
    Scenario(f"{model}-muon-{number}", replace(load_model(model), layers=4, max_seq=4096, **cut), seq_len, precision, layout | {"optimizer": "muon"})
    for number, (model, cut, seq_len, precision, layout) in enumerate((
        ("llama-3.2-1b", {}, 1024, "bf16", {"accumulation": 2}),
        ("llama-3.1-8b", FEW_WORDS, 512, "bf16", {"dp_shard": 8, "zero": 3}),
        ("qwen2.5-0.5b", {}, 1000, "fp32", {"dp_shard": 24, "zero": 2, "accumulation": 2}),
        ("llama-3.2-1b", {}, 1024, "bf16", {"dp_shard": 8, "zero": 1, "accumulation": 2}),
        ("qwen2.5-7b", FEW_WORDS, 512, "bf16", {"pp": 2, "dp_shard": 4, "zero": 1, "accumulation": 2}),
        ("qwen3-8b", FEW_WORDS, 512, "bf16", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "recompute": "full"}),
        ("opt-1.3b", {"pos_rows": 4096}, 1000, "fp32", {"dp_replicate": 8}),
        ("llama-3.1-8b", FEW_WORDS, 512, "bf16", {"pp": 2, "dp_shard": 4, "zero": 3, "accumulation": 4}),
        ("llama-3.2-1b", {}, 1024, "bf16", {"pp": 2, "dp_replicate": 2, "accumulation": 2}),
        ("gpt2-medium", FEW_WORDS | {"pos_rows": 4096}, 512, "bf16", {"dp_shard": 4, "zero": 3, "cp": 2, "context_parallel": "ring"}),
        ("llama-3.1-8b", FEW_WORDS, 512, "bf16", {"tp": 4, "sequence_parallel": True}),
        ("qwen2.5-7b", FEW_WORDS, 512, "bf16", {"tp": 2, "dp_shard": 6, "zero": 3, "sequence_parallel": True, "accumulation": 2}),
        ("gpt2-medium", {"pos_rows": 4096}, 512, "fp32", {"tp": 2, "dp_shard": 4, "zero": 2}),
        ("qwen3-8b", FEW_WORDS, 512, "bf16", {"pp": 2, "tp": 2, "dp_replicate": 2, "accumulation": 2}),
    ))
)  # fmt: skip
"""Muon; with few words and tokens, its update holds most."""


IN_EIGHT_BITS = tuple(
    Scenario(
        f"{model}-{layers}l-fp8-{number}",
        replace(load_model(model), layers=layers, max_seq=4096, parameters_stated=None, **cut),
        seq_len,
        "fp8",
        layout,
    )
    for number, (model, layers, cut, seq_len, layout) in enumerate((
        ("llama-3.2-1b", 4, SHORT, 4096, {"dp_shard": 8, "zero": 3}),
        ("llama-3.1-8b", 8, SHORT, 2048, {"pp": 2, "virtual_stages": 2, "dp_shard": 4, "zero": 3, "accumulation": 4}),
        ("llama-3.1-8b", 4, SHORT, 4096, {"dp_shard": 8, "zero": 3, "micro_batch": 2, "recompute": "selective"}),
        ("llama-3.2-1b", 4, SHORT, 4096, {"dp_shard": 8, "zero": 2, "accumulation": 2, "recompute": "full"}),
        ("gpt2-medium", 4, SHORT | {"pos_rows": 4096}, 2048, {"dp_shard": 4, "zero": 1, "accumulation": 2}),
        ("llama-3.2-1b", 4, {}, 1024, {"dp_replicate": 8, "micro_batch": 2}),
        ("llama-3.1-8b", 4, {}, 2048, {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 4}),
        ("llama-3.1-8b", 4, SHORT, 2048, {"pp": 2, "dp_replicate": 4, "accumulation": 2, "recompute": "full"}),
        ("llama-3.1-8b", 8, {}, 1024, {"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "dp_shard": 4, "zero": 3, "accumulation": 4}),
        ("llama-3.1-8b", 4, SHORT, 512, {"dp_shard": 8, "zero": 3}),
        ("llama-3.1-8b", 4, SHORT, 2048, {"dp_shard": 8, "zero": 3, "loss": "chunked"}),
        ("llama-2-7b", 4, SHORT, 2048, {"dp_shard": 4, "zero": 3, "cp": 2, "context_parallel": "ring"}),
        ("mistral-7b-v0.1", 5, SHORT, 4096, {"dp_shard": 4, "zero": 2, "cp": 2, "context_parallel": "all-to-all"}),
        ("opt-1.3b", 4, SHORT | {"pos_rows": 4096}, 2048, {"dp_shard": 4, "zero": 3}),
        ("qwen2.5-7b", 4, SHORT, 1024, {"dp_shard": 8, "zero": 3, "offload": "parameters", "accumulation": 2}),
        ("qwen3-8b", 4, SHORT, 512, {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "recompute": "full", "recompute_layers": 2}),
        ("llama-3.1-8b", 4, SHORT, 1024, {"dp_shard": 8, "zero": 3, "recompute": "full", "recompute_every": 2, "micro_batch": 2}),
        ("llama-3.2-1b", 4, SHORT, 1024, {"dp_shard": 8, "zero": 3, "optimizer": "muon"}),
        ("llama-3.2-1b", 1, SHORT, 2048, {"dp_shard": 8, "zero": 3}),
        ("olmo-1b", 3, SHORT, 2048, {"pp": 2, "accumulation": 4, "recompute": "selective", "stage_split": "weighted"}),
        ("llama-3.2-1b", 4, SHORT, 2048, {"accumulation": 2}),
    ))
)  # fmt: skip
"""Matrices of torchao, which cast what they read; with few words, casts hold most."""


FEW_LAYERS = tuple(
    Scenario(f"{model}-{layers}l-few-{number}", replace(load_model(model), layers=layers, max_seq=4096, **SHORT, pos_rows=4096 if model in ("gpt2-medium", "opt-1.3b") else 0), seq_len, precision, layout)
    for number, (model, layers, seq_len, precision, layout) in enumerate((
        ("llama-3.2-1b", 2, 1000, "bf16", {"dp_shard": 8, "zero": 3, "accumulation": 2}),
        ("gpt2-medium", 1, 512, "bf16", {"dp_shard": 4, "zero": 3, "loss": "chunked"}),
        ("llama-3.2-1b", 3, 1000, "fp32", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "offload": "parameters", "accumulation": 3}),
        ("llama-3.2-1b", 3, 512, "bf16", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, "offload": "nvme", "optimizer": "sgd"}),
        ("llama-3.2-1b", 3, 4096, "bf16", {"dp_replicate": 8, "recompute": "full", "micro_batch": 2}),
        ("opt-1.3b", 3, 4096, "fp16", {"recompute": "full", "micro_batch": 2, "accumulation": 2}),
        ("llama-3.2-1b", 3, 4096, "bf16", {"recompute": "selective", "micro_batch": 2}),
    ))
)  # fmt: skip
"""Layouts of data ranks with few layers or words, where what others hide decides (docs/decisions/0122)."""


BESIDE_LAYERS = tuple(
    Scenario(f"{model}-{layers}l-beside-{number}", replace(load_model(model), layers=layers, max_seq=4096, **SHORT, pos_rows=4096 if model == "gpt2-medium" else 0), seq_len, precision, layout)
    for number, (model, layers, seq_len, precision, layout) in enumerate((
        ("qwen1.5-1.8b", 2, 512, "bf16", SP4 | {"dp_replicate": 2, "dp_shard": 4, "zero": 3}),
        ("llama-3.2-1b", 2, 512, "fp16", {"dp_replicate": 2, "dp_shard": 4, "zero": 3, "recompute": "selective", "accumulation": 2}),
        ("tinyllama-1.1b", 3, 2048, "fp32", {"dp_replicate": 4, "recompute": "selective", "accumulation": 2, "micro_batch": 2}),
        ("gpt2-medium", 3, 2048, "bf16", {"dp_replicate": 4, "recompute": "full", "accumulation": 2, "micro_batch": 4}),
    ))
)  # fmt: skip
"""Layouts in which a layer's own instants hold most: the first of two as it is unpacked, those of DDP and of autocast (docs/decisions/0127)."""


def _drawn(drawn: random.Random, layout: Mapping[str, Any]) -> Scenario:
    model, layers = drawn.choice(MODELS), drawn.choice((4, 5, 6))
    pp = layout.get("pp", 1)
    virtual = layout.get("virtual_stages", 1)
    layers = pp * virtual if virtual > 1 else layers
    choices = {
        "micro_batch": drawn.choice((1, 2, 4)),
        "accumulation": drawn.choice((1, 2, 3)) if pp == 1 else pp * drawn.choice((1, 2)),
        "recompute": drawn.choice(("none", "none", "selective", "full")),
    }
    seq_len, precision = drawn.choice((512, 1000, 2048, 4096)), drawn.choice(("bf16", "bf16", "fp32"))
    known = load_model(model)
    positions = 4096 if known.pos == "learned" else known.pos_rows
    shape = replace(known, layers=layers, max_seq=4096, pos_rows=positions)
    if shape.moe is not None and "tp" in layout:
        choices["etp"] = layout["tp"]  # every expert over all tp ranks
    words = "-".join(f"{key}{value}" for key, value in (dict(layout) | choices).items())
    return Scenario(
        f"{model}-{layers}l-{seq_len}-{precision}-{words}", shape, seq_len, precision, dict(layout) | choices
    )


def job_of(scenario: Scenario, plan: Plan) -> Job:
    """The question that the formulas answer."""
    job = Job(cluster=plan.cluster, model=plan.model, workload=plan.workload, profile=find_profile())
    return as_trained(job)


def plan_of(scenario: Scenario) -> Plan:
    """The plan of a scenario, for GPUs, with the stages that the planner would make."""
    layout = dict(scenario.layout)
    lengths = layout.pop("stage_layers", ())
    pp, virtual, layers = layout.get("pp", 1), layout.get("virtual_stages", 1), scenario.shape.depth
    is_weighted = layout.get("stage_split") == "weighted"
    head = head_in_layers(scenario.shape) if is_weighted else 0.0
    stages = tuple(
        Stage(
            index=s,
            layers=stage_chunks(layers, pp, virtual, s, head, layout.get("schedule", "none")),
            embedding=s == 0,
            head=s == stage_of_head(layout.get("schedule", "none"), pp),
        )
        for s in range(pp)
    )
    profile = find_profile() if scenario.shape.adapters is None else with_frozen_base(find_profile())
    formats = profile.formats_for(scenario.precision)
    plan = make_plan(
        scenario.shape,
        seq_len=scenario.seq_len,
        stages=stages_of(*lengths) if lengths else stages,
        backend="nccl",
        formats=NumberFormats(
            parameter=formats.parameter, gradient=formats.gradient, reduce=formats.reduce, compute=formats.compute
        ),
        **layout,
    )
    roomy = replace(plan.memory, capacity_bytes=ROOMY)
    asked = replace(
        plan.workload,
        precision=scenario.precision,
        optimizer=plan.strategy.optimizer,
        expert_imbalance=scenario.imbalance,
        target_len=scenario.targets,
    )
    return replace(plan, workload=asked, memory=roomy)


def candidates_of(plan: Plan) -> Candidates:
    """The plan's layout as one row of columns."""
    words = ("schedule", "context_parallel", "recompute", "offload", "stage_split", "loss", "tables", "recompute_depth")
    values = {name: plan.mesh.size(name) for name in MESH_COLUMNS}
    values |= {name: getattr(plan.strategy, name) for name in OPTION_COLUMNS}
    if plan.strategy.loss != "whole":
        values["loss"] = plan.strategy.loss
    if plan.strategy.tables != "local":
        values["tables"] = plan.strategy.tables
    if plan.strategy.recompute_layers:
        values["recompute_layers"] = plan.strategy.recompute_layers
    if plan.strategy.cp_inner > 1:
        values["cp_inner"] = plan.strategy.cp_inner
    if plan.strategy.uneven_batch:
        values["uneven_batch"] = 1
    if plan.strategy.recompute_every:
        values["recompute_every"] = plan.strategy.recompute_every
    if plan.strategy.recompute_stages:
        values["recompute_depth"] = plan.strategy.recompute_depth
        values |= {f"{OF_STAGE}{stage}": number for stage, number in enumerate(plan.strategy.recompute_stages)}
    if plan.strategy.stage_split == "balanced":
        values |= {f"{LAYERS_OF}{stage}": own.layer_count for stage, own in enumerate(plan.strategy.stages)}
    return Candidates(
        {
            name: np.array([code(name, str(value)) if name in words else int(value)], np.int64)
            for name, value in values.items()
        }
    )


def predicted(job: Job, plan: Plan) -> dict[int, dict[str, dict[str, int]]]:
    """Bytes by stage, moment and term, as the formulas have them."""
    group = next(iter(groups(job, candidates_of(plan), every_stage=True)))
    table = ledger(job, group)
    return {
        int(stage): {name: _worst(table, moment, place)[0] for moment, name in enumerate(MOMENTS)}
        for place, stage in enumerate(group.stages)
    }


def peaks(job: Job, plan: Plan, stage: int) -> list[dict[str, int]]:
    """Bytes by term where one stage holds most, as the formulas have it: one answer for each instant that is as bad."""
    table = ledger(job, next(iter(groups(job, candidates_of(plan), every_stage=True))))
    by_moment = (_worst(table, moment, stage) for moment in range(len(MOMENTS)))
    every = [terms for found in by_moment for terms in found]
    most = max(sum(terms.values()) for terms in every)
    return [terms for terms in every if sum(terms.values()) >= most - len(TERMS)]


def reserved(job: Job, plan: Plan, stage: int) -> int:
    """Bytes that the allocator holds on a stage, as the formulas have them."""
    table = ledger(job, next(iter(groups(job, candidates_of(plan), every_stage=True))))
    return int(table.reserved[0, stage])


def on_host(job: Job, plan: Plan) -> int:
    """Bytes of the host's memory that a rank takes, as the formulas have them."""
    return int(ledger(job, next(iter(groups(job, candidates_of(plan), every_stage=True)))).host[0])


def _worst(table: Ledger, moment: int, place: int) -> list[dict[str, int]]:
    """Bytes by term at each instant of a moment at which one stage holds most, but for a byte."""
    held = np.where(table.moments == moment, table.on_stage(place)[:, 0], -1.0)
    each = (
        table.bytes_at(np.array([instant]), np.array([place])) for instant in np.flatnonzero(held >= held.max() - 1.0)
    )
    return [{term: int(found[term][0]) for term in TERMS} for found in each]


def sent(job: Job, plan: Plan, stage: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(bytes, collectives) per step by axis and operation, as the formulas have them."""
    group = next(iter(groups(job, candidates_of(plan), every_stage=True)))
    total: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in traffic(job, group, elements(job.model, group)):
        size = float((row.payload_CS * row.count_CS)[0, stage])
        if size and _talks(plan, row.place):
            pieces = float(np.broadcast_to(row.pieces_CS, row.count_CS.shape)[0, stage])
            found = total[row.axis, row.op]
            total[row.axis, row.op] = found[0] + round(size), found[1] + round(pieces * row.count_CS[0, stage])
    return dict(total)


def _talks(plan: Plan, place: str) -> bool:
    mesh = plan.mesh
    sizes = {
        "shards": mesh.dp_shard * mesh.cp,
        "replicas": mesh.data_parallel * mesh.cp,
        "expert_replicas": mesh.expert_dp,
        "server": 2,
        "cp_inner": plan.strategy.cp_inner,
        "cp_ring": mesh.cp // plan.strategy.cp_inner,
    }
    return sizes.get(place, plan.mesh.size(place) if place in MESH_COLUMNS else 1) > 1


PEAK = "peak"
"""The place of a figure that is looked at when the whole is largest, whichever moment that is."""
AXES = dict.fromkeys(
    ("dp_shard", "dp_replicate", "shards", "expert_shards", "expert_data", "data", "world"), "dp"
) | dict.fromkeys(("cp_inner", "cp_ring"), "cp")
OF_TOKENS = ("send", "all_to_all")
"""What ranks of one sequence, or of one set of experts, send each other; everything else that their group carries are weights
and gradients."""
SCALAR = 8
"""Bytes of the largest number that ranks agree on (losses, counts, norms); formulas leave them out."""


def observed_sent(rank: RankObservation) -> dict[tuple[str, str], tuple[int, int]]:
    """(bytes, collectives) per step by axis and operation, as the trace saw them. A message received was sent by its
    neighbour."""
    total: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in rank.collectives:
        if row.bytes > SCALAR and row.op != "recv":
            is_shared = row.axis in ("cp", "ep") and row.op not in OF_TOKENS
            key = ("dp" if is_shared else AXES.get(row.axis, row.axis), row.op)
            total[key] = total[key][0] + row.bytes * row.count, total[key][1] + row.count
    return dict(total)


@dataclass(frozen=True)
class Difference:
    """One figure of one scenario: `kind` memory (at a moment, by term), sent or count (bytes and number of collectives
    by axis, by operation)."""

    scenario: str
    stage: int
    kind: str
    place: str
    name: str
    predicted: int
    traced: int

    @property
    def ratio(self) -> float:
        """Predicted over traced."""
        return self.predicted / self.traced if self.traced else float("inf") if self.predicted else 1.0


def differences(scenario: Scenario, rank: RankObservation) -> Iterator[Difference]:
    """Every figure of a scenario, equal ones too. Where the formulas see several instants at which as much is held, the trace
    has seen one of them: that one is compared."""
    plan = plan_of(scenario)
    job = job_of(scenario, plan)
    said = predicted(job, plan)[rank.stage]
    seen = {moment.moment: moment for moment in rank.memory.moments}
    for moment, terms in said.items():
        for term in TERMS:
            traced = seen[moment].term(term) if moment in seen else 0
            yield Difference(scenario.name, rank.stage, "memory", moment, term, terms.get(term, 0), traced)
    for moment, terms in said.items():
        traced = seen[moment].allocated if moment in seen else 0
        yield Difference(scenario.name, rank.stage, "memory", moment, "allocated", sum(terms.values()), traced)
    peak = rank.memory.peak
    worst = min(
        peaks(job, plan, rank.stage), key=lambda terms: sum(abs(terms[term] - peak.term(term)) for term in TERMS)
    )
    for term in TERMS:
        yield Difference(scenario.name, rank.stage, "memory", PEAK, term, worst[term], peak.term(term))
    yield Difference(scenario.name, rank.stage, "memory", PEAK, "allocated", sum(worst.values()), peak.allocated)
    in_all = reserved(job, plan, rank.stage)
    yield Difference(scenario.name, rank.stage, "memory", PEAK, "reserved", in_all, rank.memory.reserved)
    formula, trace = sent(job, plan, rank.stage), observed_sent(rank)
    for axis, op in sorted(formula.keys() | trace.keys()):
        pairs = zip(formula.get((axis, op), (0, 0)), trace.get((axis, op), (0, 0)), strict=True)
        for kind, pair in zip(("sent", "count"), pairs, strict=True):
            yield Difference(scenario.name, rank.stage, kind, axis, op, *pair)
