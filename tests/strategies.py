"""Random models, machines, workloads and layouts for hypothesis. Every layout drawn is legal for its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.facts.buildable import departures
from strategist.facts.clusters import load_cluster
from strategist.facts.hardware import Cluster, with_gpus
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.model_parts import Mla, Moe, Ssm
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.planner.search import Question, legality, limits_of
from strategist.planner.situation import question
from strategist.rulebook.apply import forbid
from strategist.space.candidates import BY_STAGE, MESH_COLUMNS, NOT_ASKED, OPTION_COLUMNS, WORDS, Candidates
from strategist.space.enumerate import enumerate_candidates
from strategist.timing.rates import peak_FLOPs
from tests.examples import cases_of

Draw = Any
"""hypothesis' draw function, whose type has no public name."""

CI = settings(
    max_examples=cases_of(200),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""The same examples everywhere, so that a red test is red for everybody."""

NIGHTLY = settings(CI, max_examples=2500, derandomize=False, print_blob=True)
"""New examples every night; a failure prints how to see it again."""

MACHINES = (
    "dgx-h100", "dgx-h100:2", "dgx-h100:4", "aws-p4d.24xlarge", "aws-p4d.24xlarge:3", "oci-bm.gpu.l40s.4",
    "oci-bm.gpu.l40s.4:2", "ws-8x-4090", "ws-1x-4090", "ws-2x-4090", "dgx-gb200-nvl72-tray:2",
    "dgx-gb200-nvl72-tray:20", "mi300x-platform", "cpu:4",
)  # fmt: skip
"""Switched, meshed, host-bound and rack-wide machines of the catalogue, alone and several together."""


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def dense_shapes(draw: Draw) -> ModelShape:
    """Llama-like (gated, RMS norm, grouped heads) or GPT-like (plain, biases, tied), odd heads and prime layer counts."""
    heads, kv_heads = draw(st.sampled_from(((8, 8), (32, 8), (28, 4), (52, 4), (12, 12), (16, 1), (6, 3))))
    head_dim = draw(st.sampled_from((16, 64, 128)))
    is_gpt = draw(st.booleans())
    return ModelShape(
        name="random-dense", family="random", kind=draw(st.sampled_from(("decoder", "decoder", "encoder"))),
        layers=draw(st.sampled_from((1, 2, 3, 7, 8, 13, 16, 24))), hidden=heads * head_dim,
        vocab=draw(st.sampled_from((257, 50257, 32000, 128256))), ffn_hidden=draw(st.sampled_from((96, 1536, 4096, 11008))),
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, tied=draw(st.booleans()),
        norm="layernorm" if is_gpt else "rmsnorm", mlp_gated=not is_gpt, mlp_bias=is_gpt, qkv_bias=is_gpt, o_bias=is_gpt,
        pos="learned" if is_gpt else "rope", pos_rows=8192 if is_gpt else 0, lm_head_bias=is_gpt and draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("", "head"))), max_seq=8192, act_form=draw(st.sampled_from(("", "gelu_new"))),
        parallel_block=draw(st.sampled_from((False, False, False, True))),
    )  # fmt: skip


@st.composite
def sliding_shapes(draw: Draw) -> ModelShape:
    """Some layers see a window, every n-th sees everything."""
    shape = draw(dense_shapes())
    return replace(
        shape, window=draw(st.sampled_from((512, 1024, 4096))), full_every=draw(st.sampled_from((0, 1, 2, 6)))
    )


@st.composite
def moe_shapes(draw: Draw) -> ModelShape:
    """Routed experts, with or without shared ones, latent width, first dense layers."""
    shape = draw(dense_shapes())
    experts = draw(st.sampled_from((4, 8, 12, 60, 128)))
    moe = Moe(
        experts=experts, top_k=draw(st.sampled_from((1, 2, 4))), ffn=draw(st.sampled_from((96, 1408, 2048))),
        layers=draw(st.integers(1, shape.layers)), first_dense=draw(st.sampled_from((0, 0, 1))),
        shared_ffn=draw(st.sampled_from((0, 2816))), shared_gate=draw(st.booleans()), router_bias=draw(st.booleans()),
        expert_bias=draw(st.booleans()), latent=draw(st.sampled_from((0, 0, 128))),
    )  # fmt: skip
    return replace(shape, moe=moe)


@st.composite
def mla_shapes(draw: Draw) -> ModelShape:
    """Multi-head latent attention, dense or with experts."""
    shape = draw(st.one_of(dense_shapes(), moe_shapes()))
    mla = Mla(q_lora=draw(st.sampled_from((0, 96, 384))), kv_lora=128, qk_nope=64, qk_rope=32, v_dim=64)
    return replace(shape, mla=mla, kv_heads=shape.heads, qk_norm="", qkv_bias=False)


@st.composite
def state_space_shapes(draw: Draw) -> ModelShape:
    """A stack of linear mixers without attention."""
    h = draw(st.sampled_from((256, 768)))
    ssm = draw(
        st.sampled_from(
            (
                Ssm(kind="mamba1", conv=4, expand=2, state=16, dt_rank=48),
                Ssm(kind="mamba2", conv=4, heads=2 * h // 64, head_dim=64, state=128, groups=1),
            )
        )
    )
    return ModelShape(
        name="random-ssm", family="random", kind="ssm", layers=draw(st.sampled_from((3, 8))), hidden=h, vocab=50280,
        ssm=ssm, norms_per_layer=1, tied=draw(st.booleans()), max_seq=8192,
    )  # fmt: skip


STACKLESS = ("cnn", "unet")
"""Kinds of models in the catalogue without layers that the models of memory and time know."""


def catalogued_shapes() -> st.SearchStrategy[ModelShape]:
    """Real models of the catalogue: hybrids, encoder-decoders, towers and mixtures among them."""
    names = [row["name"] for row in rows("models") if row["kind"] not in STACKLESS]
    return st.sampled_from(names).map(load_model)


def shapes() -> st.SearchStrategy[ModelShape]:
    """Any of the shapes above."""
    drawn = (dense_shapes(), sliding_shapes(), moe_shapes(), mla_shapes(), state_space_shapes())
    return st.one_of(*drawn, catalogued_shapes())


@cache
def machine(name: str) -> Cluster:
    """Machines of the catalogue by name."""
    return load_cluster(name)


def clusters(names: Sequence[str] = MACHINES) -> st.SearchStrategy[Cluster]:
    """Machines of the catalogue."""
    return st.sampled_from(names).map(machine)


def trimmed(name: str, gpus: int) -> Cluster:
    """Machines of the catalogue with `gpus` devices on every node."""
    cluster = machine(name)
    group = cluster.groups[0]
    return replace(cluster, groups=(replace(group, node=with_gpus(group.node, gpus)),))


@st.composite
def workloads(draw: Draw, cluster: Cluster) -> Workload:
    """Sequences, batches, formats and optimizers that the machines can run."""
    gpu = cluster.smallest
    return Workload(
        seq_len=draw(st.sampled_from((128, 32, 1000, 2048, 4096, 8192, 6144))),
        global_batch=cluster.world * draw(st.sampled_from((1, 2, 3, 4, 8, 16))),
        precision=draw(
            st.sampled_from([name for name in ("bf16", "fp16", "fp32", "fp8", "fp4") if peak_FLOPs(gpu, name)])
        ),
        optimizer=draw(st.sampled_from(("adamw", "adamw8bit", "sgd"))),
    )


@st.composite
def jobs(draw: Draw, models: Any = None, machines: Any = None) -> Job:
    """A model, machines and a workload."""
    cluster = draw(clusters() if machines is None else machines)
    model = draw(shapes() if models is None else models)
    return Job(cluster=cluster, model=model, workload=draw(workloads(cluster)), profile=find_profile())


SMALL_MACHINES = (
    ("ws-1x-4090", 1), ("dgx-h100", 2), ("dgx-h100", 3), ("dgx-h100", 8), ("ws-4x-4090", 4), ("oci-bm.gpu.l40s.4", 4),
    ("ws-2x-4090:2", 2), ("aws-p4d.24xlarge:2", 3), ("dgx-gb200-nvl72-tray:2", 4), ("mi300x-platform", 8), ("cpu:4", 4),
)  # fmt: skip
"""Machines and devices per node: 1, 2, 3, 4, 6 and 8 ranks, whose whole search space is looked at in milliseconds."""


@st.composite
def questions(draw: Draw) -> Job:
    """A job small enough that every legal layout of it can be weighed and timed."""
    cluster = trimmed(*draw(st.sampled_from(SMALL_MACHINES)))
    job = draw(jobs(machines=st.just(cluster)))
    batch = cluster.world * draw(st.sampled_from((1, 2, 4)))
    return replace(job, workload=replace(job.workload, global_batch=batch))


def legal_candidates(job: Job, **limits: Any) -> Candidates:
    """Every legal layout that a search looks at, as columns; offloading to a disk that is not there left out."""
    asked = Question(job=job, **limits)
    everything = enumerate_candidates(limits_of(asked))
    keep, _ = forbid(legality(asked), question(job), everything)
    has_disk = all(group.node.nvme_read_Bps for group in job.cluster.groups)
    return everything.where(keep if has_disk else keep & ~everything.is_word("offload", "nvme"))


def rows_of(columns: Candidates) -> list[tuple[Any, ...]]:
    """The layouts of some columns as hashable rows."""
    names = (*MESH_COLUMNS, *OPTION_COLUMNS)
    return list(zip(*(columns[name].tolist() for name in names), strict=True))


@st.composite
def layouts(draw: Draw, job: Job) -> dict[str, Any]:
    """One legal layout on all devices of a job, inside or outside of what a search would look at."""
    mesh = draw(_meshes(job))
    dp, tp, cp, pp = mesh["dp_replicate"] * mesh["dp_shard"], mesh["tp"], mesh["cp"], mesh["pp"]
    zero = draw(st.sampled_from((1, 2, 3) if mesh["dp_shard"] > 1 else (0, 1, 2, 3)))
    micro = draw(st.sampled_from(divisors(job.workload.global_batch // dp)))
    m = job.workload.global_batch // dp // micro
    schedule, v = draw(_schedules(pp, m, job.model.layers + job.model.enc_layers))
    splits_sequence = tp > 1 and (job.workload.seq_len // cp) % tp == 0
    kinds = ("ring",) if (job.model.kv_heads // tp) % cp else ("ring", "all-to-all")
    layout = mesh | {
        "zero": zero, "virtual_stages": v, "schedule": schedule, "micro_batch": micro, "accumulation": m,
        "sequence_parallel": draw(st.sampled_from((0, 1))) if splits_sequence else 0,
        "context_parallel": draw(st.sampled_from(kinds)) if cp > 1 else "none",
        "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "offload": draw(st.sampled_from(_homes(job, zero, pp))),
        "tiling": draw(st.sampled_from((1, 8))) if zero == 3 else 1,
        "stage_split": draw(st.sampled_from(("even", "weighted"))) if pp > 1 and v == 1 else "even",
    }  # fmt: skip
    splits = _may_split_backward(job, layout) and draw(st.booleans())
    return layout | draw(st.sampled_from(_in_two_parts(job, layout))) if splits else layout


def _in_two_parts(job: Job, layout: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The schedules that this layout may run then."""
    pp, alone = layout["pp"], ({"schedule": "zb_h1"},)
    fills = layout["accumulation"] >= 2 * pp - 1 and job.model.layers % (2 * pp) == 0
    if not fills or job.model.tied or layout["stage_split"] == "weighted":
        return alone
    schedules = ("zbv", "dualpipev") if layout["accumulation"] >= 2 * pp else ("zbv",)
    return (*alone, *({"schedule": schedule, "virtual_stages": 2} for schedule in schedules))


def _may_split_backward(job: Job, layout: dict[str, Any]) -> bool:
    """Whether a pipeline of this layout may run backward in two parts."""
    fills = layout["schedule"] == "1f1b" and layout["accumulation"] % layout["pp"] == 0
    plain = layout["zero"] < 3 and layout["cp"] == 1 and layout["recompute"] == "none"
    return fills and plain and job.model.moe is None and not departures(job.model)


@st.composite
def _meshes(draw: Draw, job: Job) -> dict[str, int]:
    """Every axis divides what it cuts; experts spread over dp_shard x cp x tp."""
    shape, seq_len, left = job.model, job.workload.seq_len, job.cluster.world
    cut_by_tp = (shape.heads, shape.kv_heads, shape.ffn_hidden)
    tp = draw(st.sampled_from([d for d in divisors(left) if _divides(d, cut_by_tp) and d <= (shape.vocab or d)]))
    left //= tp
    most = shape.layers if shape.kind in SPLITTABLE and not shape.enc_layers else 1
    pp = draw(st.sampled_from([d for d in divisors(left) if d <= most]))
    left //= pp
    cp = draw(st.sampled_from([d for d in divisors(left) if d == 1 or (shape.heads and seq_len % (2 * d) == 0)]))
    dp = left // cp
    shard = draw(st.sampled_from(divisors(dp)))
    etp, ep = draw(_expert_splits(shape, shard * cp * tp, tp))
    return {"pp": pp, "dp_replicate": dp // shard, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep, "etp": etp}


SPLITTABLE = ("decoder", "encoder", "hybrid", "ssm", "vit")
"""Kinds of models that a pipeline can cut."""


def _divides(ways: int, numbers: Sequence[int]) -> bool:
    return all(number % ways == 0 for number in numbers)


def _homes(job: Job, zero: int, pp: int) -> tuple[str, ...]:
    """Where the state of a layout may lie."""
    if pp > 1 or zero < 2:
        return ("none",)
    has_disk = all(group.node.nvme_read_Bps for group in job.cluster.groups)
    weights = ("parameters", "nvme") if has_disk else ("parameters",)
    return ("none", "optimizer") if zero == 2 else ("none", "optimizer", *weights)


@st.composite
def _schedules(draw: Draw, pp: int, m: int, stack: int) -> tuple[str, int]:
    """(schedule, virtual_stages) that the micro-batches and the layers allow."""
    if pp == 1:
        return "none", 1
    rows_ = [("gpipe", 1)]
    if m >= pp:
        rows_.append(("1f1b", 1))
        rows_.extend(("looped_bfs", v) for v in range(2, 9) if stack % (pp * v) == 0)
    if m % pp == 0:
        rows_.extend(("interleaved", v) for v in range(2, 9) if stack % (pp * v) == 0)
    return draw(st.sampled_from(rows_))


@st.composite
def _expert_splits(draw: Draw, shape: ModelShape, ranks: int, tp: int) -> tuple[int, int]:
    """(etp, ep) that divide the experts and the ranks."""
    if shape.moe is None:
        return 1, 1
    etp = draw(st.sampled_from([d for d in divisors(tp) if shape.moe.ffn % d == 0]))
    return etp, draw(st.sampled_from([d for d in divisors(ranks // etp) if shape.moe.experts % d == 0]))


def candidates(rows_: Sequence[dict[str, Any]]) -> Candidates:
    """Layouts as the columns that the package computes on; what is never chosen only where it is said."""
    said = dict.fromkeys(name for row in rows_ for name in row)
    asked = (name for name in said if name in NOT_ASKED or name.startswith(BY_STAGE))
    names = (*MESH_COLUMNS, *OPTION_COLUMNS, *asked)
    return Candidates({name: np.array([_coded(row, name) for row in rows_], np.int64) for name in names})


def _coded(row: dict[str, Any], name: str) -> int:
    """The number that stands for a choice of a layout, of one that it does not say what nobody asks for."""
    if name not in row:
        return NOT_ASKED.get(name, 0)
    return WORDS[name].index(row[name]) if name in WORDS else int(row[name])
