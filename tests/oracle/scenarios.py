"""Questions drawn by number for the search and the oracle: the same number is the same question everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import comb
from random import Random
from typing import Any

from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.records import replace
from tests.oracle.enumerate import plain_layouts, with_numbers
from tests.oracle.stages import Layout
from tests.strategies import machine, trimmed

MODELS = (
    "gpt2", "distilgpt2", "pythia-1b", "llama-3.2-1b", "llama-2-7b", "llama-2-13b", "llama-3.1-8b", "qwen2.5-7b", "llama-3.1-405b",
    "olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite", "t5-base", "mamba-130m", "vit-l-16", "bert-large-uncased",
)  # fmt: skip
NODES = ("dgx-h100", "aws-p4d.24xlarge", "ws-4x-4090", "oci-bm.gpu.l40s.4", "ws-2x-4090", "mi300x-platform", "dgx-gb200-nvl72-tray")  # fmt: skip
LENGTHS = (128, 256, 512, 1000, 1024, 2048, 4096, 8192)
TECHNIQUES: Mapping[str, Any] = {
    "tp": lambda a: a["tp"] > 1,
    "pp": lambda a: a["pp"] > 1,
    "cp": lambda a: a["cp"] > 1,
    "ep": lambda a: a["ep"] > 1,
    "hsdp": lambda a: a["dp_replicate"] > 1 and a["dp_shard"] > 1,
    "recompute": lambda a: a["recompute"] != "none",
    "offload": lambda a: a["offload"] != "none",
    "zero": lambda a: a["zero"] > 0,
}
"""What can be left out, and which layouts use it: in the oracle's words."""
ADDED = ("gpipe", "looped_bfs", "zb_h1", "zbv", "dualpipev", "tiling", "hierarchical")
"""What can be looked at beside."""
NUMBERS = {"recompute_layers": 1000, "recompute_by_stage": 200, "balanced_stages": 40}
"""Numbers of layers, which the oracle finds by trying all of them, and of how many layers of how many layouts together it does."""
SPLITS = 100_000
"""In how many ways layers may be dealt out to stages if the oracle is to try every one: 40 layers on 25 stages are 25 billion."""
SPREAD = ("pp", "recompute", "tp")
"""What is left out where sequences are spread over many ranks, so that few layouts remain."""
IN_TURN = ("tp", "zero", "recompute", "hsdp", "offload")
"""What is left out where stages come back in turn, which many micro-batches make worth while."""
TRIES = 200


@dataclass(frozen=True)
class Scenario:
    """A job, what is left out and what is added, and every legal layout of it that the oracle finds."""

    job: Job
    forbids: tuple[str, ...]
    also: tuple[str, ...]
    layouts: tuple[Layout, ...]

    def __str__(self) -> str:
        job, work = self.job, self.job.workload
        return f"{job.model.name}, {job.cluster.world} x {job.cluster.smallest.name}, {work.seq_len} x {work.global_batch} {work.precision}, without {self.forbids}, with {self.also}"


def scenario(number: int, *, devices: int, layouts: int) -> Scenario:
    """The question of a number, on up to so many devices, with 1 to `layouts` legal layouts. Raises LookupError when none of
    some hundred draws is like that."""
    random = Random(number)
    for _ in range(TRIES):
        job, forbids, also = _drawn(random, devices)
        every = plain_layouts(job, also)
        found = tuple(islice((a for a in every if not any(TECHNIQUES[word](a) for word in forbids)), layouts + 1))
        if 0 < len(found) <= layouts:
            return _with_numbers(random.choice(list(NUMBERS)), Scenario(job, forbids, also, found), layouts)
    raise LookupError(f"scenario {number} has no question of at most {layouts} layouts")


def _with_numbers(word: str, plain: Scenario, layouts: int) -> Scenario:
    """The question with numbers of layers too, where it has layouts that can run some again and the oracle can try all numbers."""
    can = [a for a in plain.layouts if a["recompute"] == "full" and (a["pp"] > 1 or word == "recompute_layers")]
    if not 0 < len(can) * plain.job.model.layers <= NUMBERS[word]:
        return plain
    splits = sum(comb(plain.job.model.layers - 1, a["pp"] - 1) for a in can)
    if word == "balanced_stages" and splits > SPLITS:
        return plain
    also = (*plain.also, word)
    found = tuple(with_numbers(plain.job, list(plain.layouts), also))
    return Scenario(plain.job, plain.forbids, also, found) if len(found) <= layouts else plain


def _drawn(random: Random, devices: int) -> tuple[Job, tuple[str, ...], tuple[str, ...]]:
    model = load_model(random.choice(MODELS))
    cluster = _machines(random, devices)
    on_cpu = cluster.smallest.vendor == "CPU"
    precision: Any = "fp32" if on_cpu else random.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    length = model.pos_rows if model.kind == "vit" else random.choice(LENGTHS)
    batch = random.choice((1, 2, 3, 4, cluster.world, cluster.world, 2 * cluster.world))
    work = Workload(seq_len=length, global_batch=batch, precision=precision, optimizer=random.choice(("adamw", "adamw", "sgd")))  # fmt: skip
    job = Job(cluster=cluster, model=model, workload=work, profile=find_profile(), headroom=random.choice((0.0, 0.05, 0.3)))  # fmt: skip
    forbids = tuple(random.sample(sorted(TECHNIQUES), random.choice((0, 1, 2, 3, 4))))
    also = tuple(random.sample(ADDED, random.choice((0, 0, 0, 1, 2, len(ADDED)))))
    if model.enc_layers:  # by what was drawn, so that other questions stay what they are
        job = replace(job, workload=replace(work, target_len=(None, 128, length // 4, 2 * length)[batch % 4]))
    few = len(also) <= 2
    if few and "hierarchical" in also and model.kind != "vit":  # few ranks have so many tokens that it is there
        return replace(job, workload=replace(work, seq_len=random.choice(LENGTHS[-2:]))), SPREAD, also
    if few and ("zbv" in also or "dualpipev" in also):
        return replace(job, workload=replace(work, global_batch=4 * cluster.world)), IN_TURN, also
    return job, forbids, also


def _machines(random: Random, devices: int) -> Cluster:
    """One to `devices` devices: a part of a node, a node, or several nodes or parts of them."""
    if random.random() < 0.08:
        return machine(f"cpu:{random.choice((1, 2, 3, 4))}")
    name = random.choice(NODES)
    size = random.randint(1, min(devices, machine(name).groups[0].node.gpus))
    count = random.choice((1, random.randint(1, devices // size)))
    part = replace(trimmed(name, size).groups[0], count=count)
    every = (part,) if count == 1 or random.random() > 0.3 else _of_two_kinds(random, part)
    return replace(machine(name), groups=every)


def _of_two_kinds(random: Random, part: NodeGroup) -> tuple[NodeGroup, NodeGroup]:
    """The first of some nodes, and others behind it with as many devices, whose links inside a node may be slower."""
    size = part.node.gpus
    enough = [name for name in NODES if machine(name).groups[0].node.gpus >= size]
    others = trimmed(random.choice(enough), size).groups[0]
    slower = replace(others.node, intra_Bps=others.node.intra_Bps / random.choice((1, 8)))
    return replace(part, count=1), replace(others, node=slower, count=part.count - 1)
