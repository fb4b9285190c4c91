"""Rung three of the ladder: one rank's real kernels on the device in front of us, and collectives that nobody answers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import digest
from strategist.errors import ImpossibleError, InputError, shown
from strategist.executor.obstacles import Obstacle, refuse
from strategist.executor.support import layout_obstacles, require_packages
from strategist.facts.local import free_memory
from strategist.measure.child import in_child
from strategist.measure.kinds import Kind, chosen_kinds
from strategist.measure.trace import DEFAULT_RANKS, made_by
from strategist.records import replace
from strategist.units import format_gib

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategist.measure.program import MakeModel

DEFAULT_STEPS, MAX_STEPS = 5, 1000


def rehearse(
    plan: Plan,
    model: nn.Module | MakeModel | None = None,
    *,
    ranks: str = DEFAULT_RANKS,
    steps: int = DEFAULT_STEPS,
    device: str | None = None,
    on_rank: Callable[[RankObservation], None] | None = None,
) -> Observed:
    """Seconds of a step by term, and the bytes an allocator hands out, for one rank of each kind on one real device.

    `model` replaces the built-in model of the plan's shape: a module with its values, or a function that makes one.
    `ranks` as in `strategist trace --ranks`. `device` is "cpu", "cuda" or "cuda:N"; without it a GPU for plans that need
    GPUs, the CPU for plans of CPU ranks. Each kind runs in a forked process of its own, so this one must not have used
    CUDA yet. Raises ImpossibleError UNSUPPORTED_DEVICE for a device that is not here or too small, and for what the
    executor cannot run; InputError for ranks, steps and devices that do not exist and for models that cannot be made.
    """
    require_packages("Rehearsing", plan.model.method, plan.workload.precision)
    refuse((*layout_obstacles(plan), *_not_alone(plan)))
    kinds, place = chosen_kinds(plan, ranks), _device_name(plan, device)
    if not 1 <= steps <= MAX_STEPS:
        raise InputError(
            "RANGE", f"A rehearsal has 1 to {MAX_STEPS} steps.", flag="--steps", value=steps, hint="Example: --steps 5."
        )
    import torch  # the parent loads it once for all children, and uses no device

    if place != "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ImpossibleError(
            "UNSUPPORTED",
            "This process uses CUDA already, and what is forked from it cannot.",
            flag="--device",
            value=place,
            hint="Rehearse in a fresh process, before anything touches the GPU.",
        )
    name, make = _maker(plan, model)
    title = in_child(partial(_title, place), "Looking at the device")
    for kind in kinds:
        in_child(partial(_require_room, plan, kind, place), f"Looking for room for {kind.name}")
    seen = []
    for kind in kinds:
        seen.append(_observed(plan, kind, make, place, steps, "" if model is None else name))
        if on_rank is not None:
            on_rank(seen[-1])
    return Observed(
        made_by=made_by(),
        rung="rehearsed",
        plan=digest(plan),
        torch=torch.__version__,
        model=name,
        ranks=tuple(seen),
        device=title,
    )


def _device_name(plan: Plan, asked: str | None) -> str:
    """cpu, cuda or cuda:N. Raises InputError CHOICE for other words."""
    if asked is None:
        return "cpu" if plan.strategy.backend == "gloo" else "cuda"
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", asked):
        raise InputError(
            "CHOICE",
            "--device knows cpu, cuda and cuda:N.",
            flag="--device",
            value=shown(asked),
            hint="Example: --device cpu.",
        )
    return asked


ALONE = {
    "compression": (
        "none",
        "Compressed gradients cannot be rehearsed: a hook computes with what peers send, and there are none.",
    ),
    "tables": ("local", "A worker of a parameter server cannot be rehearsed alone: what it waits for is the server."),
    "replicas": (
        "processes",
        "A device of nn.DataParallel cannot be rehearsed alone: one process drives all of them.",
    ),
}
"""Choices with the word under which one device can show what it does, and why not under the others."""


def _not_alone(plan: Plan) -> Iterator[Obstacle]:
    """What asks for others: several devices of one process, the answers of peers, a server."""
    for name, (word, sentence) in ALONE.items():
        chosen = getattr(plan.strategy, name)
        if chosen != word:
            yield Obstacle(
                code="UNSUPPORTED",
                place=f"strategy.{name}",
                value=chosen,
                sentence=sentence,
                hint=f"Trace it (`strategist trace`), or rehearse a plan with {name} = {word}.",
            )
    if plan.strategy.uneven_batch:
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.uneven_batch",
            value=plan.batch_identity,
            sentence="An uneven batch has a device of each kind to rehearse, and a rehearsal has one.",
            hint="Trace it (`strategist trace`), or rehearse a plan without --also uneven_batch.",
        )


def _maker(plan: Plan, model: Any) -> tuple[str, MakeModel]:
    from strategist.measure.models import function_name, is_module, real_model, valued_model

    if model is None:
        return plan.model.name, real_model(plan.model)
    return (type(model).__name__ if is_module(model) else function_name(model)), valued_model(model)


def _observed(plan: Plan, kind: Kind, make: MakeModel, place: str, steps: int, theirs: str) -> RankObservation:
    """One kind, timed in one process; on the CPU weighed in another, because weighing disturbs."""
    what = f"Rehearsing {kind.name}"
    timed = in_child(partial(_timed, plan, kind, make, place, steps), what, theirs=theirs)
    if place != "cpu":
        return timed
    return replace(timed, memory=in_child(partial(_weighed, plan, kind, make), what, theirs=theirs))


def _timed(plan: Plan, kind: Kind, make: MakeModel, place: str, steps: int) -> RankObservation:
    from strategist.measure.rehearse_rank import rehearse_rank

    device = _ready(place)
    with _out_of_memory(kind, place):
        return rehearse_rank(plan, kind, make, device, steps)


def _weighed(plan: Plan, kind: Kind, make: MakeModel) -> Any:
    from strategist.measure.rehearse_rank import held_on_cpu, measured_memory

    _ready("cpu")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says nothing of itself
    with _out_of_memory(kind, "cpu"):
        return measured_memory(held_on_cpu(plan, kind.rank, make)[1], reserved=0)


def _ready(place: str) -> torch.device:
    """The device, made current. On the CPU one thread computes: a CPU rank is one core, and the parent's are not here.

    Raises ImpossibleError UNSUPPORTED_DEVICE when it is not here.
    """
    import torch

    device = torch.device(place)
    if device.type == "cpu":
        torch.set_num_threads(1)
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ImpossibleError(
            "UNSUPPORTED_DEVICE",
            f"Torch sees {count} GPUs here, and {place} is none of them." if count else "Torch sees no GPU here.",
            flag="--device",
            value=place,
            hint="Rehearse where a GPU of the plan is, or name the CPU with --device cpu: its times are then a CPU's.",
        )
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # a device mesh would choose another GPU, by the rank's number, where none is in use
    return device


def _title(place: str) -> str:
    """What people call the device."""
    import torch

    device = _ready(place)
    return "one CPU core" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def _require_room(plan: Plan, kind: Kind, place: str) -> None:
    """Raise ImpossibleError UNSUPPORTED_DEVICE when the rank, as the plan has it, does not fit into what is free."""
    import torch

    device, ledger = _ready(place), next(stage for stage in plan.memory.stages if stage.stage == kind.stage)
    if device.type == "cpu":
        need, free = ledger.allocated, free_memory()
    else:
        need, free = ledger.reserved, int(torch.cuda.mem_get_info(device)[0])
    if free is not None and need > free:
        raise _no_room(kind, place, f"takes {format_gib(need)}, and {format_gib(free)} are free")


def _no_room(kind: Kind, place: str, words: str) -> ImpossibleError:
    return ImpossibleError(
        "UNSUPPORTED_DEVICE",
        f"{kind.name} does not fit {place}: it {words}.",
        flag="--device",
        value=place,
        hint="Rehearse on a device of the plan's size with nothing else on it, or trace the plan, which takes no device.",
    )


@contextmanager
def _out_of_memory(kind: Kind, place: str) -> Iterator[None]:
    """What an allocator says when it has nothing left, as the same refusal as before the start."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise _no_room(kind, place, "ran out of memory") from problem
    except RuntimeError as problem:
        if "DefaultCPUAllocator" not in str(problem):
            raise
        raise _no_room(kind, place, "ran out of memory") from problem
