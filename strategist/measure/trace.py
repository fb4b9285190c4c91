"""Rung two of the ladder: the executor's real program at the plan's true world size, without the machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import digest
from strategist.executor.obstacles import refuse
from strategist.executor.support import layout_obstacles, require_packages
from strategist.measure.child import in_child
from strategist.measure.kinds import Kind, chosen_kinds

if TYPE_CHECKING:
    from torch import nn

    from strategist.measure.program import MakeModel

DEFAULT_RANKS = "first,middle,last"


def trace(
    plan: Plan,
    model: nn.Module | MakeModel | None = None,
    *,
    ranks: str = DEFAULT_RANKS,
    on_rank: Callable[[RankObservation], None] | None = None,
) -> Observed:
    """What one optimizer step of each kind of rank takes and sends, byte by byte, from the program that would train.

    `model` replaces the built-in model of the plan's shape: a module on the meta device, or a function that makes one
    (called once per kind, on meta). `ranks` as in `strategist trace --ranks`. `on_rank` hears of every finished kind.
    Each kind runs in a forked process of its own. Raises ImpossibleError for what the executor cannot run, InputError for
    ranks that do not exist and for models that cannot be made.
    """
    require_packages("Tracing", plan.model.method, plan.workload.precision)
    refuse(layout_obstacles(plan))
    kinds = chosen_kinds(plan, ranks)
    import torch  # the parent loads it once for all children

    name, make = _maker(plan, model)
    seen = []
    for kind in kinds:
        seen.append(
            in_child(partial(_one, plan, kind, make), f"Tracing {kind.name}", theirs="" if model is None else name)
        )
        if on_rank is not None:
            on_rank(seen[-1])
    return Observed(
        made_by=made_by(), rung="traced", plan=digest(plan), torch=torch.__version__, model=name, ranks=tuple(seen)
    )


def made_by() -> str:
    """Who wrote a document."""
    from strategist import __version__

    return f"strategist {__version__}"


def _maker(plan: Plan, model: nn.Module | MakeModel | None) -> tuple[str, MakeModel]:
    from strategist.measure.models import function_name, given_model, is_module, made_model, shape_model

    if model is None:
        return plan.model.name, shape_model(plan.model)
    if callable(model) and not is_module(model):
        return function_name(model), made_model(model)
    return type(model).__name__, given_model(model)


def _one(plan: Plan, kind: Kind, make: MakeModel) -> RankObservation:
    import torch

    from strategist.measure.trace_rank import trace_rank

    torch.set_num_threads(1)  # threads of the parent are not here
    return trace_rank(plan, kind, make)
