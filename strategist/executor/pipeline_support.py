"""Whether a plan's stages, schedule and micro-batches make a pipeline, said without torch."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.plan import Plan
from strategist.executor.obstacles import Obstacle
from strategist.facts.runs import OF_CHUNKS, V_SHAPED, runs_of

IN_TWO_PARTS = ("zb_h1", *V_SHAPED)
"""Schedules that make gradients of inputs first and those of weights later."""


def pipeline_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Everything about pp, its schedule and its stages that keeps the executor from running `plan`."""
    shape = (*_schedule(plan), *_virtual_stages(plan))
    yield from shape
    if not shape:  # a stage layout can only be judged once it is clear how many runs of layers a stage has
        yield from (*_layout(plan), *_divisibility(plan), *_micro_batches(plan), *_two_parts(plan))


def _schedule(plan: Plan) -> Iterator[Obstacle]:
    pp, schedule = plan.mesh.pp, plan.strategy.schedule
    if (pp > 1) != (schedule != "none"):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.schedule",
            value=schedule,
            sentence=f"Schedule {schedule!r} does not go with pp = {pp}.",
            hint="A pipeline needs gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zbv or dualpipev; without one the schedule is none.",
        )


def _virtual_stages(plan: Plan) -> Iterator[Obstacle]:
    schedule, virtual = plan.strategy.schedule, plan.strategy.virtual_stages
    if virtual < 1 or (virtual > 1) != (schedule in OF_CHUNKS) or (schedule in V_SHAPED and virtual != 2):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.virtual_stages",
            value=virtual,
            sentence=f"Schedule {schedule!r} does not go with virtual_stages = {virtual}.",
            hint="interleaved and looped_bfs need 2 or more virtual stages, zbv and dualpipev have 2; every other schedule has 1.",
        )


def _layout(plan: Plan) -> Iterator[Obstacle]:
    pp, strategy = plan.mesh.pp, plan.strategy
    if not _stages_cover_the_model(plan):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.stages",
            value=[list(stage.layers) for stage in strategy.stages],
            sentence=f"The {pp} stages must take turns, or under a V-shaped schedule come back in turn, at "
            f"{pp * strategy.virtual_stages} unbroken runs of layers that cover 0 to {plan.model.depth} in order, the first "
            "with the embedding, the last with the head.",
            hint="Leave the stage layout to the planner.",
        )


def _stages_cover_the_model(plan: Plan) -> bool:
    """Every run of the model is one of the stage's that the schedule gives it to."""
    stages, virtual, pp = plan.strategy.stages, plan.strategy.virtual_stages, plan.mesh.pp
    if len(stages) != pp or any(len(stage.layers) != virtual for stage in stages):
        return False
    numbers = [runs_of(plan.strategy.schedule, pp, virtual, place) for place in range(pp)]
    of_run = {
        number: run
        for own, stage in zip(numbers, stages, strict=True)
        for number, run in zip(own, stage.layers, strict=True)
    }
    runs = [of_run[number] for number in range(pp * virtual)]
    edges = [edge for run in runs for edge in run]
    joined = edges[0] == 0 and edges[-1] == plan.model.depth and edges[1:-1:2] == edges[2::2]
    grows = all(first < end for first, end in runs)
    last = next(place for place, own in enumerate(numbers) if own[-1] == pp * virtual - 1)
    ends = all(s.embedding == (i == 0) and s.head == (i == last) and s.index == i for i, s in enumerate(stages))
    return joined and grows and ends


def _divisibility(plan: Plan) -> Iterator[Obstacle]:
    pp, virtual, layers = plan.mesh.pp, plan.strategy.virtual_stages, plan.model.depth
    if virtual > 1 and layers % (pp * virtual):
        yield Obstacle(
            code="DIVISIBILITY",
            place="strategy.virtual_stages",
            value=virtual,
            sentence=f"{layers} layers do not divide into {pp} x {virtual} equal chunks.",
            hint="Choose virtual stages so that pp x virtual_stages divides the layers.",
        )


def _micro_batches(plan: Plan) -> Iterator[Obstacle]:
    pp, count, schedule = plan.mesh.pp, plan.strategy.accumulation, plan.strategy.schedule
    if schedule in ("1f1b", "looped_bfs") and count < pp:
        yield _too_few(count, f"{schedule} over {pp} stages needs at least {pp} micro-batches; the plan has {count}.")
    if schedule in ("interleaved", "zb_h1") and (count < pp or count % pp):
        yield _too_few(
            count, f"{schedule} over {pp} stages needs a multiple of {pp} micro-batches; the plan has {count}."
        )
    least = {"zbv": 2 * pp - 1, "dualpipev": 2 * pp}.get(schedule, 0)
    if count < least:
        yield _too_few(
            count, f"{schedule} over {pp} stages needs at least {least} micro-batches; the plan has {count}."
        )


def _two_parts(plan: Plan) -> Iterator[Obstacle]:
    """Where backward comes in two parts: what torch 2.13 fails at (selective recompute, ZeRO-3), refuses (compile) or does too often
    (full recompute), and what no formula weighs (cp, experts)."""
    strategy, mesh, model = plan.strategy, plan.mesh, plan.model
    if strategy.schedule not in IN_TWO_PARTS:
        return
    unfit = {
        (f"recompute = {strategy.recompute}", "FRAMEWORK_LEGALITY"): strategy.recompute != "none",
        (f"zero = {strategy.zero}", "UNSUPPORTED"): strategy.zero == 3,
        (f"cp = {mesh.cp}", "UNSUPPORTED"): mesh.cp > 1,
        (f"{model.moe.experts if model.moe else 0} experts", "UNSUPPORTED"): model.moe is not None,
        ("compile = true", "FRAMEWORK_LEGALITY"): strategy.compile,
        ("tied ends", "UNSUPPORTED"): model.tied and strategy.schedule in V_SHAPED,
    }
    for words, code in (found for found, is_there in unfit.items() if is_there):
        yield Obstacle(
            code=code,
            place="strategy.schedule",
            value=strategy.schedule,
            sentence=f"The schedule {strategy.schedule!r} runs backward in two parts and does not go with {words}.",
            hint="Use schedule 1f1b.",
        )


def _too_few(count: int, sentence: str) -> Obstacle:
    return Obstacle(
        code="BATCH_SPLIT",
        place="strategy.accumulation",
        value=count,
        sentence=sentence,
        hint="Choose another micro-batch or global batch, or schedule gpipe.",
    )
