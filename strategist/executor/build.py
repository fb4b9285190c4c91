"""From a Plan to a Session: one list of steps, each in its own module, in an order that carries its reasons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from strategist.document.plan import Plan
from strategist.errors import require_function, require_type
from strategist.executor.chunks import Chunks, chunks_of
from strategist.executor.engines import make_engine
from strategist.executor.job import Instruments, Job
from strategist.executor.loss import LossFn, Objective
from strategist.executor.mesh import build_context_mesh, build_expert_mesh, build_mesh
from strategist.executor.obstacles import refuse
from strategist.executor.optimizers import MakeOptimizer, default_optimizer, make_optimizer_for
from strategist.executor.precision import parameter_dtype, products_of_fp32
from strategist.executor.processes import process_group
from strategist.executor.session import Parts, RateOfStep, Session
from strategist.executor.steps.compile_blocks import compile_blocks
from strategist.executor.steps.context_parallel import context_parallel
from strategist.executor.steps.expert_parallel import expert_parallel
from strategist.executor.steps.float8_matrices import float8_matrices
from strategist.executor.steps.materialise import materialise
from strategist.executor.steps.pipeline_split import pipeline_split
from strategist.executor.steps.recompute import recompute
from strategist.executor.steps.serve_tables import serve_tables
from strategist.executor.steps.shard_data import shard_data
from strategist.executor.steps.share_values import share_values
from strategist.executor.steps.tensor_parallel import tensor_parallel
from strategist.executor.steps.tile_matrices import tile_matrices
from strategist.executor.steps.train_adapters import train_adapters
from strategist.executor.steps.training_mode import training_mode
from strategist.executor.steps.wrap_ddp import wrap_ddp
from strategist.executor.support import layout_obstacles
from strategist.executor.threads import as_process
from strategist.facts.modules import only_calls

Step = Callable[[nn.Module, Job], nn.Module]

LAYOUT_STEPS: tuple[Step, ...] = (
    training_mode,  # before anything looks at the model
    serve_tables,  # before any rank holds a part of the model: no rank holds these
    train_adapters,  # before any cut: the format of the parameters is theirs from now on
    share_values,  # before any cut: afterwards no two ranks hold the same parts
    pipeline_split,  # before all that costs: what another stage owns need not be cut, wrapped or given memory here;
    #                  the steps after it see one chunk of an interleaved stage at a time
    context_parallel,  # after it: a copied chunk must not copy process groups
    expert_parallel,  # before FSDP, which shards DTensors further but whose DTensors cannot be cut
    tensor_parallel,  # before recompute, whose wrappers would change the names in its table; before FSDP, which shards
    #                   DTensors further but whose DTensors cannot be cut
    tile_matrices,  # before recompute, whose wrappers would change names; before FSDP, whose units slices are
    float8_matrices,  # before recompute, whose wrappers would change names; the layers are exchanged in place
    recompute,  # before compile: the compiler must see what is recomputed
    compile_blocks,  # before FSDP: its hooks stay outside the compiled graphs
    shard_data,  # last of the layout: it wraps whatever the others made
)
"""These need shapes only. A trace runs them outside fake mode, on a model on the meta device."""

LIVE_STEPS: tuple[Step, ...] = (
    materialise,  # the first moment at which a parameter takes memory: only this rank's part of it
    wrap_ddp,  # after it: DDP copies and buckets real values
)
"""These touch values. A trace runs them under fake tensors."""

STEPS = LAYOUT_STEPS + LIVE_STEPS


def build(
    plan: Plan,
    model: nn.Module,
    make_optimizer: MakeOptimizer | None = None,
    *,
    loss_fn: LossFn | None = None,
    clip_norm: float | None = None,
    rate_of_step: RateOfStep | None = None,
    seed: int = 0,
    instruments: Instruments | None = None,
) -> Session:
    """Live objects for `plan`: this rank's part of `model`, its optimizer and its schedule.

    `make_optimizer` gets parameter groups, as torch optimizers do. Without `loss_fn` the model gives logits (itself or
    as `.logits`) and learns `labels`; `loss_fn(outputs, batch)` gives the mean loss of one micro-batch instead, on a pipeline's last stage, and
    `own_loss` takes the one that the model computed. A Sequential is given the only tensor beside the labels. `clip_norm` limits the gradients' norm. `rate_of_step(step)` is what the
    optimizer's learning rates are multiplied by in a step, counted from 0; a loaded session goes on where it stands. Joins the process group when none is running; `Session.close` leaves it again.
    Raises ImpossibleError for what the executor cannot run, before anything starts, and StaleError for another world.
    """
    require_type(Plan, "plan", plan, "a Plan", 'plan=load_plan("plan.json")')
    require_type(nn.Module, "model", model, "a torch.nn.Module", "AutoModelForCausalLM.from_config(config)")
    require_function("make_optimizer", make_optimizer, "torch.optim.AdamW")
    require_function("loss_fn", loss_fn, "lambda outputs, batch: ...")
    require_function("rate_of_step", rate_of_step, "lambda step: 1.0")
    refuse(layout_obstacles(plan))
    with ExitStack() as resources:
        world = resources.enter_context(process_group(plan))
        resources.enter_context(products_of_fp32(plan))
        own = as_process(plan)
        job = Job(
            plan=own,
            mesh=build_mesh(own, world.device.type),
            expert_mesh=build_expert_mesh(own, world.device.type),
            context_mesh=build_context_mesh(own, world.device.type),
            device=world.device,
            threads=plan.mesh.world // plan.processes,
            seed=seed,
            instruments=instruments or Instruments(),
        )
        parts = bring_to_life(lay_out(model, job), job, make_optimizer, loss_fn)
        return Session(job, parts, clip_norm=clip_norm, rate_of_step=rate_of_step, resources=resources.pop_all())


def lay_out(model: nn.Module, job: Job) -> nn.Module:
    """`model` in the plan's number format and layout; nothing here reads or writes a parameter's values on meta."""
    model = model.to(parameter_dtype(job.plan))
    return _apply(LAYOUT_STEPS, model, job)


def bring_to_life(
    model: nn.Module, job: Job, make_optimizer: MakeOptimizer | None = None, loss_fn: LossFn | None = None
) -> Parts:
    """Values, optimizer and engine for a model that was laid out."""
    objective = Objective(
        loss_fn, chunked=job.plan.strategy.loss == "chunked", takes_one=only_calls(model)
    )  # before it: replicas hide what they hold
    model = _apply(LIVE_STEPS, model, job)
    optimizer = make_optimizer_for(model, job, make_optimizer or default_optimizer(job.plan))
    return Parts(
        model=model,
        optimizer=optimizer,
        engine=make_engine(model, job, objective),
        server=job.instruments.server,
    )


def _apply(steps: tuple[Step, ...], model: nn.Module, job: Job) -> nn.Module:
    for step in steps:
        model = _on_each_chunk(step, model, job)
    return model


def _on_each_chunk(step: Step, model: nn.Module, job: Job) -> nn.Module:
    if isinstance(model, Chunks):
        return Chunks([step(chunk, job) for chunk in chunks_of(model)])
    return step(model, job)
