"""Is a part of the cluster faster, or cheaper, than all of it? A bound answers first; only what it allows is searched.

What a policy takes on a part is held against what it takes on all; and a part is called faster only where nothing that all could do, of
any family, is as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from strategist.document.plan import Hint, Objective, Policy, Request
from strategist.facts.hardware import Cluster, Link, Node, NodeGroup, with_gpus
from strategist.facts.job import Job
from strategist.facts.meshes import is_mesh
from strategist.facts.wiring import node_names
from strategist.planner.kinds import is_mixed, kinds
from strategist.planner.rank import complexity
from strategist.planner.recommend import choice
from strategist.planner.search import Found, Question, search
from strategist.records import dataclass, replace
from strategist.space.grammar import layout
from strategist.timing.calibrated import least_factor
from strategist.timing.estimate import model_FLOP
from strategist.timing.rates import matmul_rates
from strategist.units import format_seconds

if TYPE_CHECKING:
    from strategist.planner.uneven import Looked

TRIMMABLE = ("nvswitch", "pcie-host", "pcie-switch", "nvlink-mesh", "xgmi-mesh", "roce-mesh", "nvlink-pairs")
"""Nodes of which the first some devices are a node too: those of a switch or the host are alike, in a mesh each keeps its links to the others,
and of pairs the first ones are left."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the machines that does the job: its size, the seconds of the layout that is taken, that layout, and the device."""

    nodes: int
    gpus_per_node: int
    seconds: float
    layout: str
    device: str


def smaller_cluster_hint(found: Found, chosen: int, request: Request, uneven: Looked | None = None) -> tuple[Hint, ...]:
    """A hint when a part of the machines finishes a step sooner (objective cost: at a lower price); otherwise nothing. Of machines of
    several kinds always what the best kind alone does, beside what all of them do, and what an uneven batch does where somebody looked."""
    if is_mixed(found.question.job.cluster):
        alone = best_kind_alone(found, request.policy)
        kinds_ = kinds_hint(found, chosen, alone)
        return (kinds_,) if uneven is None else (kinds_, uneven_hint(found, chosen, alone, uneven))
    part = _best_part(found, chosen, request.policy)
    if part is None:
        return ()
    cluster, whole = found.question.job.cluster, found.step_seconds(chosen)
    some = _named(part, cluster)
    speed = f"{some} predicted at {format_seconds(part.seconds)} per step with {part.layout}, all {_size(cluster)} at {format_seconds(whole)}"
    if part.seconds * 1e9 < found.times.step.min():
        start = "Fewer machines are faster"
    else:
        saved = 1 - part.seconds * part.nodes * part.gpus_per_node / (whole * cluster.world)
        start = f"Fewer machines are {100 * saved:.0f} % cheaper"
    code = "W_FEWER_GPUS" if cluster.nodes == 1 else "W_FEWER_NODES"
    return (Hint(code=code, sentence=f"{start}: {speed}. Ask again with {_words(part, found, request)}."),)


def _words(part: Part, found: Found, request: Request) -> str:
    """How to ask for a part in the words in which all of the machines were asked for. --hardware takes another number of catalogued
    nodes, but none of a node's devices and nothing beside a file: there a part is asked for by leaving devices idle."""
    cluster, said = found.question.job.cluster, dict(request.given)
    if cluster.links:
        return "--allow-idle, which looks at parts behind the same switches too"
    if cluster.nodes > 1:
        return nodes_in_words(cluster, request, part.nodes, batch=found.question.job.workload.global_batch) or (
            "--allow-idle, which looks at other numbers of them too"
        )
    if "--hardware" in said and cluster.origin != "probed":
        return "--allow-idle, which looks at other numbers of them too"
    return _with_batch(f"--gpus-per-node {part.gpus_per_node}", said, found.question.job.workload.global_batch)


def nodes_in_words(cluster: Cluster, request: Request, nodes: int, *, batch: int) -> str | None:
    """How to ask for so many nodes of a cluster of equal ones in the words in which it was asked for, with the batch where nobody said it;
    None where only a file can say it."""
    said = dict(request.given)
    name, _, counts = said.get("--hardware", "").partition(":")
    if "--hardware" not in said:
        words = f"--nodes {nodes}"
    elif cluster.origin == "catalogue":
        is_rack = int(counts or 1) != cluster.nodes  # a rack is many nodes, and one of them has a name of its own
        words = f"--hardware {quote(f'{cluster.groups[0].node.name if is_rack else name}:{nodes}')}"
    else:
        return None
    return _with_batch(words, said, batch)


def _with_batch(words: str, said: Mapping[str, str], batch: int) -> str:
    """Words for machines with the batch, because what is usual depends on the number of devices."""
    return words if "--global-batch" in said else f"{words} --global-batch {batch}"


def price(found: Found, row: int) -> tuple[float, ...]:
    """What a layout costs by the objective, on the machines of its search: nanoseconds of a step, with objective cost those of all
    devices; bytes of a device, or what it asks of people, and then the time."""
    step = float(found.times.step[row])
    prices: dict[Objective, tuple[float, ...]] = {
        "time": (step,),
        "cost": (step * found.question.job.cluster.world,),
        "memory": (float(found.device_bytes[row]), step),
        "simplicity": (float(complexity(found.candidates.where(np.array([row])))[0]), step),
    }
    return prices[found.question.objective]


def _best_part(found: Found, chosen: int, policy: Policy) -> Part | None:
    """The part on which what the policy takes beats all that the whole could do, of any family, in time (objective cost: in price), and
    by the objective what the policy takes on the whole; if any does, the best of them."""
    counts_devices = found.question.objective == "cost"
    best: Part | None = None
    least = float(found.times.step.min()) / 1e9 * (found.question.job.cluster.world if counts_devices else 1)
    for cluster in parts(found.question.job.cluster, whole_nodes=counts_devices):
        job, weight = replace(found.question.job, cluster=cluster), cluster.world if counts_devices else 1
        if seconds_at_best(job) * weight >= least or not _may_take(replace(found.question, job=job), least / weight):
            continue
        smaller = search(replace(found.question, job=job), bests=True)
        row = choice(smaller, policy).row
        seconds = smaller.step_seconds(row)
        if seconds * weight < least and price(smaller, row) < price(found, chosen):
            least = seconds * weight
            best = _part(smaller, row)
    return best


def _may_take(asked: Question, seconds: float) -> bool:
    """Whether some layout takes less than so many seconds: a search that ends early, before one that knows what a policy takes."""
    found = search(asked, under_seconds=seconds, bests=True)
    return bool(len(found.fitting)) and float(found.times.step.min()) < seconds * 1e9


def _part(found: Found, row: int) -> Part:
    """The machines of a search, with a layout of it."""
    cluster = found.question.job.cluster
    node = cluster.groups[0].node
    words = layout(found.candidates.row(row))
    return Part(cluster.nodes, node.gpus, found.step_seconds(row), words, node.gpu.title)


def best_kind_alone(found: Found, policy: Policy) -> Part | None:
    """The kind of nodes on which what the policy takes needs the least time (objective cost: the lowest price), if any can do it alone."""
    counts_devices = found.question.objective == "cost"
    rivals = [rival for cluster in kinds(found.question.job.cluster) for rival in _alone(found, cluster, policy)]
    return min(rivals, key=lambda part: _price(part, counts_devices), default=None)


def _price(part: Part, counts_devices: bool) -> float:
    return part.seconds * (part.nodes * part.gpus_per_node if counts_devices else 1)


def kinds_hint(found: Found, chosen: int, alone: Part | None) -> Hint:
    """What the best kind of nodes alone does, and all of them: in a synchronous step all go as slowly as the slowest."""
    if alone is None:
        return Hint(code="W_ONE_KIND", sentence="No kind of the nodes can do this alone.")
    counts_devices, cluster = found.question.objective == "cost", found.question.job.cluster
    seconds, weight = found.step_seconds(chosen), cluster.world if counts_devices else 1
    numbers = f"{_by_itself(alone)}, all {cluster.nodes} nodes at {format_seconds(seconds)}"
    better = "cheaper" if counts_devices else "faster"
    fastest = int(found.times.step.argmin())
    if _price(alone, counts_devices) < found.step_seconds(fastest) * weight:
        text = f"One kind of the nodes is {better} alone: {numbers}. Use only these: ask again with --allow-idle."
    elif _price(alone, counts_devices) < seconds * weight:
        other = f"{format_seconds(found.step_seconds(fastest))} with {layout(found.candidates.row(fastest))}"
        text = f"No kind of the nodes is {better} alone than all of them can be: {numbers}, or at {other}."
    else:
        text = f"No kind of the nodes is {better} alone: {numbers}."
    return Hint(code="W_ONE_KIND", sentence=text)


def uneven_hint(found: Found, chosen: int, alone: Part | None, uneven: Looked, taken: bool = False) -> Hint:
    """An uneven batch, one kind of nodes alone and an even batch, in seconds; whether the plan has `taken` the first, or how to ask for it."""
    split, even = uneven.split, found.step_seconds(chosen)
    if split is None:
        why = uneven.why or "in no layout of whole replicas do micro-batches add up and fit every kind of nodes."
        return Hint(code="W_UNEVEN", sentence=f"No uneven batch is possible: {why}")
    seconds = split.step_ns / 1e9
    single = "no kind alone can" if alone is None else _by_itself(alone)
    numbers = f"{split.words}, predicted at {format_seconds(seconds)} per step with {split.layout}; {single}; an even batch over all {found.question.job.cluster.nodes} nodes at {format_seconds(even)}"
    if taken:
        start, then = "The batch is uneven", "Leave --also uneven_batch out to spread it evenly."
    elif seconds < even and not split.is_even:
        policy = "" if uneven.is_preferred else " --policy fastest"
        start, then = "An uneven batch is faster", f"Ask again with --also uneven_batch{policy}."
    else:
        start, then = "An uneven batch is not faster", ""
    best = alone is not None and alone.seconds < min(seconds, even)
    end = "One kind alone is the fastest of the three: --allow-idle takes it." if best else ""
    return Hint(code="W_UNEVEN", sentence=" ".join(filter(None, (f"{start}: {numbers}.", then, end))))


def _by_itself(alone: Part) -> str:
    return f"{alone.nodes} x {alone.gpus_per_node} {alone.device} alone predicted at {format_seconds(alone.seconds)} per step with {alone.layout}"


def _alone(found: Found, cluster: Cluster, policy: Policy) -> Iterator[Part]:
    """What the policy takes on the nodes of one kind, if anything fits."""
    asked = found.question
    part = search(replace(asked, job=replace(asked.job, cluster=cluster)), bests=True)
    if len(part.fitting):
        yield _part(part, choice(part, policy).row)


def _named(part: Part, cluster: Cluster) -> str:
    if cluster.nodes == 1:
        return "one GPU is" if part.gpus_per_node == 1 else f"{part.gpus_per_node} GPUs are"
    return "one node is" if part.nodes == 1 else f"{part.nodes} nodes are"


def _size(cluster: Cluster) -> str:
    return f"{cluster.world} GPUs" if cluster.nodes == 1 else f"{cluster.nodes} nodes"


def halves(count: int) -> Iterator[int]:
    """Powers of two up to half of a number."""
    part = 1
    while part <= count // 2:
        yield part
        part *= 2


def parts(cluster: Cluster, whole_nodes: bool, counts: Callable[[int], Iterable[int]] = halves) -> Iterator[Cluster]:
    """One, two, four ... nodes of a cluster of equal nodes, up to half of it, or as many as `counts` says of all; or devices
    of its only node. Of nodes that are joined link by link, groups behind the same switches, and single nodes."""
    if cluster.links:
        allowed = set(counts(cluster.nodes))
        yield from (part for part in _linked_parts(cluster) if part.nodes in allowed)
        return
    if len(cluster.groups) != 1:
        return
    group = cluster.groups[0]
    if cluster.nodes > 1:
        for count in counts(cluster.nodes):
            yield replace(cluster, groups=(NodeGroup(node=group.node, count=count, name=group.name),))
    elif not whole_nodes:
        smaller = (first_devices(group.node, count) for count in counts(group.node.gpus))
        yield from (replace(cluster, groups=(replace(group, node=node),)) for node in smaller if node is not None)


def _linked_parts(cluster: Cluster) -> Iterator[Cluster]:
    """Whole groups of nodes that stay joined when the slowest links are left out, then the next slower, and so on; and one node of each
    group alone."""
    found: list[Cluster] = []
    for slowest in sorted({link.Bps for link in cluster.links}):
        kept = tuple(link for link in cluster.links if link.Bps > slowest)
        for island in _islands(kept):
            groups = tuple(group for group in cluster.groups if island.issuperset(node_names(group.name, group.count)))
            names = {name for group in groups for name in node_names(group.name, group.count)}
            switches = tuple(name for name in cluster.switches if name in island)
            if names and names | set(switches) == island:
                links = tuple(link for link in kept if link.a in island)
                found.append(replace(cluster, groups=groups, links=links, switches=switches))
    alone = [replace(cluster, groups=(replace(group, count=1),), links=(), switches=()) for group in cluster.groups]
    yield from dict.fromkeys((*found, *alone))


def _islands(links: Iterable[Link]) -> list[set[str]]:
    """The ends of links, those that hang together in one set."""
    islands: list[set[str]] = []
    for link in links:
        touched = [island for island in islands if link.a in island or link.b in island]
        islands = [island for island in islands if island not in touched]
        islands.append({link.a, link.b}.union(*touched))
    return islands


def unlooked(cluster: Cluster) -> tuple[Hint, ...]:
    """Which parts of the machines are not looked at where devices may stay idle."""
    nodes = (group.node for group in cluster.groups)
    whole = next((node for node in nodes if node.gpus > 2 and first_devices(node, 2) is None), None)
    words = (
        []
        if whole is None
        else [f"several devices of a node whose links are listed one by one, or not alike ({whole.name})"]
    )
    if cluster.links and cluster.nodes > 2:
        words.append("nodes joined link by link other than single ones and whole groups behind the same switches")
    if not words:
        return ()
    sentence = f"--allow-idle did not look at all parts of these machines: left out were {' and '.join(words)}."
    return (Hint(code="W_IDLE_PARTS", sentence=sentence),)


def first_devices(node: Node, gpus: int) -> Node | None:
    """The first devices of a node as a node of their own; None where what joins them is not known of them alone. Nothing joins one."""
    some = with_gpus(node, gpus)
    if gpus == 1:
        return replace(some, links=())
    is_wired = is_mesh(some.links) if node.links else True
    return some if node.topology in TRIMMABLE and is_wired else None


def seconds_at_best(job: Job) -> float:
    """No layout can beat the useful FLOP at the best rate any matmul of any shape reaches on every device, under the least factor of a
    calibration. Without end where no device multiplies in the number format."""
    rates = [
        (group.count * group.node.gpus, float(matmul_rates(group.node.gpu, job.workload.precision).rate.max()))
        for group in job.cluster.groups
    ]
    together = sum(count * rate for count, rate in rates)
    return least_factor(job.on_parts) * model_FLOP(job) / together if together else math.inf
