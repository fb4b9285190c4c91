"""From the winning row to the Plan: the one crossing from columns to documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from strategist.catalog import rows
from strategist.document.estimate import (
    MOMENTS,
    TIME_TERMS,
    Estimate,
    MemoryLedger,
    MemoryTerm,
    StageMemory,
    TimeLedger,
    TimeTerm,
)
from strategist.document.plan import Economics, Hint, Mesh, NumberFormats, Request, Stage, Strategy
from strategist.errors import ImpossibleError
from strategist.facts.calibration import Near, Part
from strategist.facts.job import Job
from strategist.facts.model import layer_sequence
from strategist.facts.runs import stage_of_head
from strategist.memory.estimate import Ledger, ledger
from strategist.planner.search import Found
from strategist.space.candidates import LAYERS_OF, OF_STAGE, Candidates
from strategist.space.engines import own_job
from strategist.space.shares import groups
from strategist.space.stages import head_in_layers, stage_chunks
from strategist.timing.calibrated import TOO_LONG_NS, parts_of_one
from strategist.timing.estimate import StepTimes, mfu, model_FLOP
from strategist.timing.intervals import Interval, distance_of, is_known, names_of, published_interval
from strategist.units import format_gib


class Place(NamedTuple):
    """Where runs are held against predictions: devices of one design, a profile, a class of widths; the empty one means any."""

    chip: str
    framework: str = ""
    width: str = ""


ANYWHERE = Place("default")
NARROW, WIDE = 2048, 8192
"""The widest hidden state of a narrow model and the narrowest of a wide one: the width decides how well a matrix fills a device."""


def neighbourhoods(job: Job) -> tuple[Place, ...]:
    """Where runs like a job lie, the nearest first; those of networks of convolutions nowhere, since no factor was fitted to any."""
    if job.model.is_convolutional:
        return ()
    chip, framework, hidden = job.cluster.slowest.gpu.chip, job.profile.name, job.model.hidden
    width = "narrow" if hidden <= NARROW else "wide" if hidden >= WIDE else "middle"
    return (Place(chip, framework, width), Place(chip, "", width), Place(chip))


def near_job(job: Job) -> tuple[Near, ...]:
    """Those of its owner's errors that are of runs like a job, the nearest first."""
    known = {Place(near.chip, near.framework, near.width): near for near in job.near}
    return tuple(known[place] for place in neighbourhoods(job) if place in known)


def step_interval(job: Job, seconds: Mapping[Part, float]) -> Interval:
    """The interval of a step that takes so many seconds in each part: that of its owner's nearest runs, if there are any, else that of
    published runs."""
    for own in near_job(job):
        return Interval(own.low, own.high)
    return published_interval(names_of(job.cluster, job.model, job.profile.name), seconds)


@cache
def peak_interval() -> Interval:
    """The interval of peaks, whatever the device (catalogue: intervals)."""
    row = next(row for row in rows("intervals") if row["name"] == "memory")
    return Interval(row["low"], row["high"])


FEW_RUNS, FEW_SOURCES = 20, 3
"""Published runs on devices of one design, and sources of them, below which somebody is told that there are few."""


def outside_known_errors(job: Job) -> tuple[Hint, ...]:
    """A warning where few runs or none tell how far steps like this one lie from their predictions."""
    device = job.cluster.slowest.gpu
    if job.model.is_convolutional:
        text = "No published run of a network of convolutions is in the calibration: the interval of the step is that of language models, and wider (docs/accuracy.md lists what ResNets took)."
        return (Hint(code="W_UNCALIBRATED", sentence=text),)
    if device.vendor == "CPU" or near_job(job):
        return ()
    seen = distance_of("chip", device.chip)
    if seen.runs < FEW_RUNS or seen.sources < FEW_SOURCES:
        design = ", ".join(dict.fromkeys(word for word in (device.arch, device.chip) if word))
        like = f"{device.title} ({design})" if design else device.title
        text = f"Too few published runs on devices like {like} were held against these formulas: the interval of the step rests mostly on other devices' errors, and is wider."
    elif not is_known("framework", job.profile.name):
        text = f"No published run of {job.profile.title} was held against these formulas: the interval of the step rests on other frameworks' errors, and is wider."
    else:
        return ()
    return (Hint(code="W_UNCALIBRATED", sentence=text),)


TIGHT = "W_TIGHT_MEMORY"


def near_the_limit(job: Job, memory: MemoryLedger, *, fits: bool) -> tuple[Hint, ...]:
    """A warning where the interval of the peak holds the size of the device, so that the verdict lies within the errors of the formulas. It
    is one of GPUs: processes share a host."""
    if job.cluster.smallest.vendor == "CPU" or not memory.is_tight:
        return ()
    verdict = "it may run out of memory all the same" if fits else "it may fit all the same"
    text = f"The device's {format_gib(memory.capacity_bytes)} lie within the interval of the peak, which holds four of five published peaks: {verdict}. Try a few steps, or choose what is further from the limit."
    return (Hint(code=TIGHT, sentence=text),)


def mesh_of(row: Mapping[str, Any]) -> Mesh:
    """The mesh of one candidate."""
    return Mesh(**{axis: row[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")})


def strategy_of(job: Job, row: Mapping[str, Any]) -> Strategy:
    """Everything but the mesh of one candidate."""
    backend = "gloo" if job.cluster.smallest.vendor == "CPU" else "nccl"
    chosen = (
        "zero",
        "virtual_stages",
        "schedule",
        "micro_batch",
        "accumulation",
        "context_parallel",
        "recompute",
        "offload",
        "tiling",
        "stage_split",
    )
    return Strategy(
        **{name: row[name] for name in chosen},
        replicas=row.get("replicas", "processes"),
        **_compression(row.get("compression", "none")),
        loss=row.get("loss", "whole"),
        tables=row.get("tables", "local"),
        recompute_layers=row.get("recompute_layers", 0),
        recompute_every=row.get("recompute_every", 0),
        cp_inner=row.get("cp_inner", 1),
        recompute_stages=_depths(row),
        stages=stages_of(job, row),
        sequence_parallel=bool(row["sequence_parallel"]),
        **fields_of(job),
        optimizer=job.workload.optimizer,
        backend=cast(Any, backend),
    )


def fields_of(job: Job) -> dict[str, Any]:
    """Fields of a strategy that the job's profile decides."""
    compiles = job.casts_apart  # one by one, the kernels of a cast take longer than fp8 saves
    return {"formats": formats_of(job), "compile": compiles, "profile": job.profile.name}


def formats_of(job: Job) -> NumberFormats:
    """Number formats of a job: masters are among the optimizer's state."""
    formats, precision = job.formats, job.workload.precision
    names = {name: cast(Any, getattr(formats, name)) for name in ("parameter", "gradient", "reduce", "compute")}
    return NumberFormats(**names, master=cast(Any, job.profile.master_for(precision)))


def _compression(word: Any) -> dict[str, Any]:
    """What is done to gradients, with its number."""
    if word == "none":
        return {}
    from strategist.facts.compression import compressor  # a file that other plans do not read

    row = compressor(word)
    return {"compression": word, "compression_rank": row.rank, "compression_share": row.share}


def _depths(row: Mapping[str, Any]) -> tuple[int, ...]:
    """How many layers each stage runs again where they differ; none where they are alike, 0 of each as long as the rule was not asked."""
    if row.get("recompute_depth") != "by-stage":
        return ()
    return tuple(row.get(f"{OF_STAGE}{stage}", 0) for stage in range(row["pp"]))


def stages_of(job: Job, row: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The layers of every stage."""
    layers, pp, last = len(layer_sequence(job.model)), row["pp"], stage_of_head(row["schedule"], row["pp"])
    head = head_in_layers(job.model) if row["stage_split"] == "weighted" else 0.0
    schedule = row["schedule"]
    chunks = [stage_chunks(layers, pp, row["virtual_stages"], stage, head, schedule) for stage in range(pp)]
    if row["stage_split"] == "balanced" and f"{LAYERS_OF}0" in row:  # the rule was asked
        ends = accumulate(row[f"{LAYERS_OF}{stage}"] for stage in range(pp))
        chunks = [((end - row[f"{LAYERS_OF}{stage}"], end),) for stage, end in enumerate(ends)]
    return tuple(Stage(index=s, layers=own, embedding=s == 0, head=s == last) for s, own in enumerate(chunks))


def memory_ledger(job: Job, candidate: Candidates) -> MemoryLedger:
    """The ledger of every stage of one candidate."""
    job = own_job(job, candidate)
    group = next(groups(job, candidate, every_stage=True))
    table = ledger(job, group)
    stages = tuple(_stage_memory(table, stage) for stage in range(group.pp))
    peak = max(stage.device for stage in stages)
    bounds = peak_interval()
    estimate = Estimate(float(peak), float(round(peak * bounds.low)), float(round(peak * bounds.high)), "B", "derived")
    return MemoryLedger(stages, estimate, job.cluster.smallest.memory_bytes, job.usable_bytes)


def _stage_memory(table: Ledger, stage: int) -> StageMemory:
    """One stage at its worst moment; terms without bytes are left out."""
    instant = int(table.on_stage(stage)[:, 0].argmax())
    values = {name: int(held[0]) for name, held in table.bytes_at(np.array([instant]), np.array([stage])).items()}
    assumed = ("runtime", "slack")
    terms = tuple(
        MemoryTerm(name, size, "assumed" if name in assumed else "derived") for name, size in values.items() if size
    )
    return StageMemory(stage, MOMENTS[table.moments[instant]], terms)


def time_ledger(job: Job, times: StepTimes, row: int) -> TimeLedger:
    """The ledger of one timed row. Raises ImpossibleError TOO_LARGE for a step that takes longer than is counted."""
    if times.step[row] >= TOO_LONG_NS:
        raise ImpossibleError(
            "TOO_LARGE",
            "One step would take more than two years, and none as long is predicted.",
            flag="--global-batch",
            value=job.workload.global_batch,
            hint="Use fewer or shorter sequences per step, or faster machines and links.",
        )
    terms = tuple(
        TimeTerm(name, int(times.exposed[name][row]), int(times.hidden[name][row]), int(times.again[name][row]))
        for name in TIME_TERMS
        if times.exposed[name][row] or times.hidden[name][row]
    )
    step_ns = int(times.step[row])
    own = {name: column[row : row + 1] for name, column in times.exposed.items()}
    seconds, bounds = step_ns / 1e9, step_interval(job, parts_of_one(own))
    return TimeLedger(
        terms=terms,
        step_ns=step_ns,
        step=Estimate(seconds, seconds * bounds.low, seconds * bounds.high, "s", "derived"),
        tokens_per_second=job.workload.tokens_per_step / seconds,
        mfu=mfu(job, seconds),
        model_FLOP=model_FLOP(job),
    )


def economics(job: Job, request: Request, step_seconds: float) -> Economics:
    """GPU-hours, and money when a price is given or every node has a list price."""
    world, work = job.cluster.world, job.workload
    per_step = step_seconds * world / 3600
    price, source = price_of(job, request)
    if work.tokens is None:
        return Economics(gpu_hours_per_step=per_step, price_per_gpu_hour=price, price_source=source)
    seconds = work.tokens / work.tokens_per_step * step_seconds
    hours = seconds * world / 3600
    return Economics(
        gpu_hours_per_step=per_step,
        run_seconds=seconds,
        run_gpu_hours=hours,
        price_per_gpu_hour=price,
        price_source=source,
        run_cost=None if price is None else hours * price,
    )


def price_of(job: Job, request: Request) -> tuple[float | None, str]:
    """The price of one device for one hour, and who says so; (None, "") where nobody does."""
    if request.price_per_gpu_hour is not None:
        return request.price_per_gpu_hour, "--price-per-gpu-hour"
    nodes = [group.node for group in job.cluster.groups]
    if len(nodes) == 1 and nodes[0].price_per_hour is not None:
        return nodes[0].price_per_hour / nodes[0].gpus, nodes[0].price_note
    return None, ""


def winners(found: Found, rows_: Sequence[int]) -> list[dict[str, int | str]]:
    """Some fitting rows with their words spelt out."""
    return [found.candidates.row(row) for row in rows_]
