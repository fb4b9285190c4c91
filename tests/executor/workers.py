"""What the ranks of a test do. In a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from strategist.document.plan import Plan
from strategist.errors import StrategistError
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.job import Instruments
from strategist.executor.loss import Batch
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import default_optimizer
from strategist.executor.parameter_server import RemoteServer, beside_server, serving
from strategist.executor.session import Session
from strategist.facts.constants import Constants
from strategist.facts.model import ModelShape
from tests.executor.modules import ByteMixer, mean_square
from tests.executor.reference import LEARNING_RATE, STEPS, Task, dataset_of, rate_of_step

Outcome = tuple[list[float], dict[str, Tensor], list[float]]


def _session(plan: Plan, task: Task) -> Session:
    """A session for the task, with the optimizer of the reference."""
    rate = rate_of_step if task.scheduled else None
    return session_of(plan, model_from_shape(task.shape), clip_norm=task.clip_norm, rate_of_step=rate, seed=task.seed)


def session_of(plan: Plan, model: nn.Module, *, seed: int = 0, **choices: Any) -> Session:
    """A session with the optimizer of the reference, beside the server that a plan with one has running."""
    server = server_of(plan, model, seed=seed, learning_rate=LEARNING_RATE)
    instruments = Instruments(compile_backend="aot_eager", server=server)
    make = default_optimizer(plan, LEARNING_RATE)
    return build(plan, model, make, seed=seed, instruments=instruments, **choices)


def server_of(plan: Plan, model: nn.Module, **choices: Any) -> RemoteServer | None:
    """The server, holding the tables of the model, if the plan has one."""
    return serving(plan, model, **choices) if plan.strategy.tables == "server" else None


def beside(plan: Plan) -> AbstractContextManager[None]:
    """The process that holds a plan's tables, if it has one."""
    return beside_server(torch.device("cpu")) if plan.strategy.tables == "server" else nullcontext()


def train_task(plan: Plan, task: Task) -> Outcome:
    """Losses, final parameters and gradient norms of the task under the plan's layout."""
    with beside(plan):
        session = _session(plan, task)
        results = [session.step(batch) for batch in session.loader(dataset_of(task), seed=task.seed)]
        return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]


def train_module(plan: Plan, data: SyntheticTokens) -> Outcome:
    """The same for a module of somebody else's, which comes with other values on every rank."""
    torch.manual_seed(dist.get_rank())
    session = build(plan, ByteMixer(), _sgd, loss_fn=mean_square)
    results = [session.step(batch) for batch in session.loader(data, shuffle=False)]
    return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]


def _sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def refusal(plan: Plan, spoil: str) -> tuple[str, str, bool]:
    """Code and sentence of the error that a spoilt batch causes, and whether the weights stayed as they were."""
    session = build(plan, model_from_shape(plan.model))
    batch = next(iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 8))))
    before = session.parameters_full()
    try:
        session.step(SPOIL[spoil](batch, session))
    except StrategistError as error:
        after = session.parameters_full()
        return error.code, error.message, all(after[name].equal(value) for name, value in before.items())
    return "", "", False


def _poison(batch: Batch, session: Session) -> Batch:
    """A NaN in one weight of rank 1's model only."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(session.parts.model.parameters()).fill_(float("nan"))
    return batch


SPOIL = {
    "short": lambda batch, _session: {name: value[:1] for name, value in batch.items()},
    "ignored": lambda batch, _session: {**batch, "labels": torch.full_like(batch["labels"], -100)},
    "poison": _poison,
}


def build_code(plan: Plan, kind: str) -> str:
    """The code of the error that building raises for a model of some kind; "" without an error."""
    makers: dict[str, Any] = {
        "shallow": lambda: model_from_shape(replace(plan.model, layers=1)),
        "reference": lambda: model_from_shape(plan.model),
        "module": ByteMixer,
        "meta": lambda: ByteMixer().to("meta"),
        "bare": lambda: nn.Linear(4, 4),
    }
    try:
        build(plan, makers[kind](), loss_fn=mean_square)
    except StrategistError as error:
        return error.code
    return ""


def fail_on(plan: Plan, rank: int) -> str:
    """Train, but let `rank` raise in its second step; the verdict that this rank arrives at."""

    def stumble(number: int, _result: object) -> None:
        if dist.is_initialized() and dist.get_rank() == rank and number == 0:
            raise ValueError("the data of this rank are gone")

    return _verdict(plan, stumble)


def fail_within(plan: Plan, rank: int, phase: str) -> str:
    """Train, but let `rank` raise inside of a pipeline's stage in the second step (the first one finds out the shapes); the verdict that
    this rank arrives at."""
    from torch.nn.modules import module as hooks

    done: list[int] = []

    def stumble(*_: object) -> None:
        if done and dist.get_rank() == rank:
            raise ValueError("the layer of this rank is gone")

    when = {"forward": hooks.register_module_forward_pre_hook, "backward": hooks.register_module_full_backward_pre_hook}
    when[phase](stumble)
    return _verdict(plan, lambda number, _: done.append(number))


def _verdict(plan: Plan, on_step: Callable[[int, Any], None]) -> str:
    """What training ends with, in words; nothing where it ends well."""
    from strategist.executor.train import train

    try:
        train(plan, STEPS, on_step=on_step)
    except StrategistError as error:
        return f"{error.code}: {error.message}"
    return ""


def collectives(plan: Plan) -> dict[str, int]:
    """How often each collective ran in one step, by its name without namespace; the second step, after set-up."""
    from torch.distributed.tensor.debug import CommDebugMode

    session = build(plan, model_from_shape(plan.model))
    first, second = list(session.loader(SyntheticTokens(plan.model.vocab, 16, 16)))[:2]
    session.step(first)
    with CommDebugMode() as counter:
        session.step(second)
    return {str(op).rsplit(".", 1)[-1]: count for op, count in counter.get_comm_counts().items()}


def gathered(plan: Plan) -> tuple[set[str], set[str]]:
    """Parameters that are whole on this rank when the loss is computed, and after the step; sharded ones are DTensors."""
    seen: list[set[str]] = []
    model = model_from_shape(plan.model)

    def whole() -> set[str]:
        return {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        seen.append(whole())
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    session = build(plan, model, loss_fn=loss)
    session.step(next(iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 16)))))
    return seen[-1], whole()


def offload_policies(plan: Plan) -> set[tuple[str, bool]]:
    """What FSDP2's units were told about offloading, and whether to pin memory for it."""
    session = build(plan, model_from_shape(plan.model))
    states = [module._get_fsdp_state() for module in session.parts.model.modules() if isinstance(module, FSDPModule)]
    policies = [group.offload_policy for state in states for group in state._fsdp_param_groups]
    return {(type(policy).__name__, getattr(policy, "pin_memory", False)) for policy in policies}


def unit_order(plan: Plan) -> list[str]:
    """FSDP2's gathers and reductions of one step in the order they began, by unit; the second step, after set-up."""
    from torch.profiler import profile

    session = build(plan, model_from_shape(plan.model))
    first, second = list(session.loader(SyntheticTokens(plan.model.vocab, 16, 16)))[:2]
    session.step(first)
    with profile() as record:
        session.step(second)
    begun = sorted(record.events(), key=lambda event: event.time_range.start)
    words = {"FSDP::all_gather (": "gather ", "FSDP::post_backward_reduce (": "reduce "}
    return [
        word + event.name.removeprefix(label).rstrip(")")
        for event in begun
        for label, word in words.items()
        if event.name.startswith(label)
    ]


def train_on_little_data(plan: Plan, steps: int) -> tuple[list[int], list[float], int]:
    """Train on two steps' worth of samples: numbers told to on_step, losses, ranks in the report."""
    from strategist.executor.train import train

    told: list[int] = []
    data = SyntheticTokens(plan.model.vocab, 16, 2 * plan.workload.global_batch)
    report = train(plan, steps, dataset=data, on_step=lambda number, _result: told.append(number))
    return told, [step.loss for step in report.steps], len(report.memory)


def train_part(plan: Plan, task: Task, start: Path | None, until: int, target: Path) -> Outcome:
    """Go on from a checkpoint to step `until` and save: losses of these steps, parameters, gradient norms."""
    with beside(plan):
        session = _session(plan, task)
        if start is not None:
            session.load(start)
        batches = iter(session.loader(dataset_of(task), seed=task.seed, first_step=session.steps))
        results = [session.step(next(batches)) for _ in range(session.steps, until)]
        session.save(target)
        return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]


def refused_load(plan: Plan, folder: Path, shape: ModelShape) -> tuple[str, str, bool]:
    """Code and sentence of the error that a checkpoint causes, and whether the session trains on as if nothing was."""
    data = SyntheticTokens(shape.vocab, 16, 16)
    fresh, session = (build(plan, model_from_shape(shape)) for _ in range(2))
    try:
        session.load(folder)
    except StrategistError as error:
        batch = next(iter(session.loader(data)))
        session.step(batch)
        fresh.step(batch)
        mine, same = session.parameters_full(), fresh.parameters_full()
        return error.code, error.message, all(same[name].equal(value) for name, value in mine.items())
    return "", "", False


Stepped = list[tuple[float, float | None]]


def stopped_in_float16(plan: Plan, folder: Path) -> tuple[Stepped, Stepped, Stepped]:
    """(loss, loss scale) of five steps, of which the first overflows, and of what checkpoints after one and three make of the
    rest. The scale doubles after two good steps."""
    data = SyntheticTokens(plan.model.vocab, plan.workload.seq_len, 5 * plan.workload.global_batch)
    forced = {0: 2.0**40, 1: 2.0**10}

    def stepped(start: Path | None, saves: tuple[int, ...] = ()) -> Stepped:
        session = build(plan, model_from_shape(plan.model))
        scale = session.loss_scale
        assert scale is not None
        scale.interval = 2
        if start is not None:
            session.load(start)
        seen: Stepped = []
        for batch in session.loader(data, first_step=session.steps):
            scale.value = forced.get(session.steps, scale.value)
            result = session.step(batch)
            seen.append((result.loss, result.loss_scale))
            if session.steps in saves:
                session.save(folder / str(session.steps))
        return seen

    return stepped(None, (1, 3)), stepped(folder / "1"), stepped(folder / "3")


def saved_in_background(plan: Plan, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of three steps beside and after a save without waiting, and of the same steps after loading what was saved."""
    data = SyntheticTokens(plan.model.vocab, plan.workload.seq_len, 5 * plan.workload.global_batch)

    def rest(session: Session) -> list[float]:
        return [session.step(batch).loss for batch in session.loader(data, first_step=session.steps)]

    first = build(plan, model_from_shape(plan.model))
    batches = iter(first.loader(data))
    for _ in range(2):
        first.step(next(batches))
    first.save(folder, wait=False)
    went_on = rest(first)
    first.finish_saving()
    second = build(plan, model_from_shape(plan.model), seed=7)
    second.load(folder)
    return went_on, rest(second)


def full_in_background(plan: Plan, folder: Path) -> tuple[str, int]:
    """The code of what waiting for a second checkpoint raises when rank 1 may not write it, and the steps done by then."""
    import resource

    session = build(plan, model_from_shape(plan.model))
    batches = iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 16)))
    session.step(next(batches))
    session.save(folder / "first", wait=False)
    session.finish_saving()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    session.save(folder / "second", wait=False)
    session.step(next(batches))
    try:
        session.finish_saving()
    except StrategistError as error:
        return error.code, session.steps
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "", session.steps


def save_twice(plan: Plan, folder: Path) -> str:
    """The code of the error that saving into the same folder again causes."""
    session = build(plan, model_from_shape(plan.model))
    session.step(next(iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 16)))))
    session.save(folder)
    try:
        session.save(folder)
    except StrategistError as error:
        return error.code
    return ""


def random_numbers(plan: Plan, folder: Path, seed: int, loads: bool) -> list[float]:
    """What this rank's generator gives next, after saving or loading."""
    session = build(plan, model_from_shape(plan.model))
    torch.manual_seed(seed + dist.get_rank())
    if loads:
        session.load(folder)
    else:
        session.save(folder)
    return torch.rand(3).tolist()


def made_by_transformers(folder: Path, tokens: list[list[int]]) -> list[Any]:
    """Give the model whose configuration lies in a folder large weights, save them there; what it says of some tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor(tokens), use_cache=False).logits.tolist()


def differing_to_transformers(one: Path, other: Path) -> list[str]:
    """Names of tensors that transformers does not read as bit by bit the same from two folders."""
    from transformers import AutoModelForCausalLM

    first, second = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, other))
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not second[name].equal(value)]


def carried(plan: Plan, source: Path, checkpoint: Path, target: Path, tokens: list[list[int]]) -> list[Any]:
    """Import, save and export weights; what the built-in model says with those that came in."""
    from strategist.executor.weights import constants_of, export_weights, import_weights

    with beside(plan):
        said = constants_of(source, plan.model)
        session = session_of(plan, model_from_shape(plan.model, constants=said))
        import_weights(session, source)
        session.save(checkpoint)
        if dist.get_rank() == 0:
            export_weights(checkpoint, plan, target)
        dist.barrier()
        whole = model_from_shape(plan.model, "cpu", torch.float32, constants=said)
        whole.load_state_dict(session.parameters_full(), strict=not plan.model.tied)
        whole.tie()
    with torch.no_grad():
        return whole(torch.tensor(tokens)).tolist()


def exported_in_parts(plan: Plan, folder: Path, limit: int | None) -> tuple[tuple[str, ...], bool]:
    """Export a new model's weights into files of at most `limit` bytes; their names, and whether they come in unchanged."""
    from strategist.executor import weights

    first, second = (build(plan, model_from_shape(plan.model), seed=seed) for seed in (1, 2))
    first.save(folder / "checkpoint")
    weights.LARGEST_FILE_BYTES = limit or weights.LARGEST_FILE_BYTES
    files = weights.export_weights(folder / "checkpoint", plan, folder / "out")
    weights.import_weights(second, folder / "out")
    other = second.parameters_full()
    return files, all(other[name].equal(value) for name, value in first.parameters_full().items())


def refused_import(plan: Plan, folder: Path) -> tuple[str, bool]:
    """The code of the error that a folder of weights causes, and whether the session's weights stayed."""
    from strategist.executor.weights import import_weights

    session = build(plan, model_from_shape(plan.model))
    before = session.parameters_full()
    try:
        import_weights(session, folder)
    except StrategistError as error:
        after = session.parameters_full()
        return error.code, all(after[name].equal(value) for name, value in before.items())
    return "", False


def refused_constants(plan: Plan, folder: Path, configs: list[str | None]) -> list[tuple[str, str, bool]]:
    """Of a folder of others' weights beside each of these config.json (None: without): code and sentence of the error of importing them,
    and whether the session's weights stayed."""
    from safetensors.torch import load_file, save_file

    from strategist.executor.weights import export_weights, import_weights

    session = build(plan, model_from_shape(plan.model))
    session.save(folder / "checkpoint")
    export_weights(folder / "checkpoint", plan, folder / "out")
    file = folder / "out" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)  # theirs have no note of ours
    before, found = session.parameters_full(), []
    for text in configs:
        (folder / "out" / "config.json").unlink(missing_ok=True)
        if text is not None:
            (folder / "out" / "config.json").write_text(text)
        code, sentence = "", ""
        try:
            import_weights(session, folder / "out")
        except StrategistError as error:
            code, sentence = error.code, error.message
        after = session.parameters_full()
        found.append((code, sentence, all(after[name].equal(value) for name, value in before.items())))
    return found


def exported_constants(plan: Plan, folder: Path, constants: Constants, config: str) -> tuple[Constants, str, str]:
    """Save and export a model with these constants: what the files say of them, and the codes of the errors of loading the checkpoint into
    a plain model and of reading the files beside a config.json."""
    from strategist.executor.weights import constants_of, export_weights

    build(plan, model_from_shape(plan.model, constants=constants)).save(folder / "checkpoint")
    export_weights(folder / "checkpoint", plan, folder / "out")
    said, codes = constants_of(folder / "out", plan.model), []
    (folder / "out" / "config.json").write_text(config)
    plain = build(plan, model_from_shape(plan.model))
    for work in (lambda: plain.load(folder / "checkpoint"), lambda: constants_of(folder / "out", plan.model)):
        try:
            work()
            codes.append("")
        except StrategistError as error:
            codes.append(error.code)
    return said, codes[0], codes[1]


def refused_drive(plan: Plan, folder: str) -> tuple[str, str, str | None]:
    """Code, sentence and flag of the error that a drive under `folder` causes when a session is built."""
    os.environ["TMPDIR"] = folder  # these processes are forked from a server that started elsewhere
    try:
        build(plan, model_from_shape(plan.model))
    except StrategistError as error:
        return error.code, error.message, error.flag
    return "", "", None


def kinds_of_modules(plan: Plan) -> list[str]:
    """Names of the classes that the modules of a session are made of."""
    model = build(plan, model_from_shape(plan.model)).parts.model
    return sorted({kind.__name__ for module in model.modules() for kind in type(module).__mro__})
