"""Saving and loading a session with torch's distributed checkpoints, under names that no layout changes.

One flat dictionary of tensors: `model/NAME`, `optimizer/NAME/STATE`, `random/RANK`, and whatever else the session counts.
Every rank gives what it holds, with its place in the whole tensor, so a checkpoint of one layout can be read by another. There
are only tensors in it: torch unpickles anything else.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from strategist.errors import InputError, InternalError, StaleError, StrategistError, shown
from strategist.executor.bundles import Bundle, bundles_of
from strategist.executor.dealt import DealtOut
from strategist.executor.drive import StateOnDrive
from strategist.executor.feedback import OWED, Feedback, feedback_of, owed_by
from strategist.executor.initialise import local_part
from strategist.executor.models.reference import constants_of_model
from strategist.executor.names import by_weight, plain_name, whole_name
from strategist.executor.scales import SCALES, Loan, is_scale, loans, scale_name
from strategist.executor.stacked import Stacked
from strategist.executor.tables import Server
from strategist.facts.constants import PLAIN
from strategist.runs.checkpoints import (
    FORMAT,
    PARTIAL,
    FileMark,
    Manifest,
    flaws_of_files,
    mark_of,
    publish,
    read_manifest,
)

METADATA = ".metadata"
State = dict[str, Tensor]
NUMBERS = (int, float)
"""States of an optimizer that are no tensors."""
HeldStates = tuple[str, nn.Parameter, dict[str, Any]]
"""A parameter's name, the parameter, and the states that this rank keeps for it."""


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by the names that the bare model gives them; slices of a tiled one by their own."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {plain_name(name): parameter for name, parameter in inner.named_parameters()}


def state_of(model: nn.Module, optimizer: Optimizer) -> State:
    """This rank's part of parameters, optimizer state and random numbers, by name; the tensors themselves, not copies."""
    named = named_parameters(model)
    return state_of_parameters(named, _optimizer_states(named, optimizer), bundles_of(model))


def state_of_parameters(
    named: dict[str, nn.Parameter], held: list[HeldStates], bundles: Mapping[str, Bundle] | None = None
) -> State:
    """The same of some parameters and the states that are kept for them, `bundles` of matrices among them."""
    places = _places(named)
    state: State = {f"model/{name}": parameter.detach() for name, parameter in named.items()}
    scales: State = {}
    for name, parameter, values in held:
        first, _ = places.get(name, (0, 0))
        for key, value in values.items():
            if isinstance(value, NUMBERS):
                state[f"optimizer/{name}/{key}"] = torch.tensor(value)
            elif isinstance(value, Tensor) and key not in SCALES:
                state[f"optimizer/{name}/{key}"] = _placed_like(parameter, value)
            elif isinstance(value, Tensor) and value.numel() > 0:
                scales[scale_name(whole_name(name), key, parameter, first)] = value
    return _whole_tensors(state, places, bundles or {}) | scales


def _places(named: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """The first row of each slice of a weight in several, and the rows of the weight."""
    places: dict[str, tuple[int, int]] = {}
    for slices in by_weight(named).values():
        if len(slices) > 1:
            *firsts, rows = accumulate((len(named[name]) for name in slices), initial=0)
            places |= {name: (first, rows) for name, first in zip(slices, firsts, strict=True)}
    return places


def _whole_tensors(state: State, places: Mapping[str, tuple[int, int]], bundles: Mapping[str, Bundle]) -> State:
    """The same with slices put together, those that this rank has a state of, and the matrices of bundles in the order of the model. A
    number is the same for all slices: the first one's stands for it."""
    whole: State = {}
    for name, slices in by_weight(state).items():
        parts, of = [state[part] for part in slices], [part.split("/")[1] for part in slices]
        if of[0] in places and parts[0].dim():
            whole[name] = Stacked(parts, [places[part][0] for part in of], places[of[0]][1])
        elif of[0] in bundles and parts[0].dim():
            whole[name] = bundles[of[0]].whole(parts[0])
        else:
            whole[name] = parts[0]
    return whole


def _share_numbers(held: list[HeldStates]) -> None:
    """Give all slices of a weight the tensors of one number that the optimizer keeps of the first one, such as its steps."""
    states = {name: values for name, _, values in held}
    for first, *others in by_weight(states).values():
        for key, value in states[first].items():
            for name in others if isinstance(value, Tensor) and value.dim() == 0 else ():
                states[name][key].copy_(value)


def _optimizer_states(named: dict[str, nn.Parameter], optimizer: Optimizer) -> list[HeldStates]:
    """The states that this rank keeps, by parameter; with zero 1 only those of some."""
    if isinstance(optimizer, StateOnDrive):
        by_id = {id(parameter): name for name, parameter in named.items()}
        return [(by_id[id(parameter)], parameter, values) for parameter, values in optimizer.whole().items()]
    kept = {held: values for states in kept_states(optimizer) for held, values in states.items()}
    return [(name, named[name], kept[held]) for name, held in _held_by_optimizer(named, optimizer) if held in kept]


def take_states(optimizer: Optimizer, held: list[HeldStates], state: Mapping[str, Tensor]) -> None:
    """Give the optimizer what was read beside its own tensors: numbers, and copies of pieces."""
    for name, _, values in held:
        numbers = {key: type(value) for key, value in values.items() if isinstance(value, NUMBERS)}
        values.update({key: kind(state[f"optimizer/{whole_name(name)}/{key}"]) for key, kind in numbers.items()})
    if isinstance(optimizer, StateOnDrive):
        optimizer.take({parameter: values for _, parameter, values in held})


def _held_by_optimizer(named: dict[str, nn.Parameter], optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """(name, what the optimizer updates for it): the parameters themselves, or local views of them with zero 1 and copies in the
    host's memory with an optimizer there, its `parts`."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = getattr(optimizer, "parts", {})
    by_id = {id(parts.get(parameter, parameter)): name for name, parameter in named.items()}
    return [(by_id[id(parameter)], parameter) for parameter in held]


@torch.no_grad()
def follow_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Give an optimizer in the host's memory the weights that the model has now: it would hand back its own after a step."""
    named = named_parameters(model)
    if isinstance(optimizer, StateOnDrive):  # it looks where the weights lie before each update
        return
    for name, held in _held_by_optimizer(named, optimizer):
        if held is not named[name]:
            held.copy_(local_part(named[name]))


def _placed_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A state of a local part, flat or not, as part of the whole, cut as the parameter is; numbers and placed states as they are."""
    if isinstance(value, DTensor) or value.dim() == 0:
        return value
    if not isinstance(parameter, DTensor):
        return value.view(parameter.shape) if value.numel() == parameter.numel() else value
    part = value.view(local_part(parameter.detach()).shape)
    return DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # from_local would move what rests in the host's memory


@torch.no_grad()
def fill_optimizer(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Make the states that an optimizer only has after its first step: one step with gradients and rates of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in trained:
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def whole_state(model: nn.Module, optimizer: Optimizer, counters: State, server: Server | None = None) -> State:
    """All that a checkpoint has of this rank: `state_of`, tables on a server, what the session counts, what compression owes, and the
    random numbers."""
    owed = owed_by(feedback_of(model), _rank())
    tables = {} if server is None else server.state(with_optimizer=False)
    return state_of(model, optimizer) | tables | counters | owed | {_random_name(): torch.get_rng_state()}


def make_room(folder: Path) -> None:
    """Begin a checkpoint; every rank must call it. Raises, on every rank, InputError EXISTS when it is there already, InternalError
    IO when the machine refuses."""
    _agree(_refuse_existing, folder)
    _agree(_make_partial, _partial_of(folder))


def save(folder: Path, state: State, facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write a state into a folder that `make_room` began; every rank must call it, and talks over `group`.

    The folder has its name only once all of it is on the disk. Raises InternalError IO on every rank when the machine refuses;
    what was written by then is swept by the next run.
    """
    partial = _partial_of(folder)
    _agree(_write, partial, state, group, group=group)
    marks = _from_all(_agree(_own_marks, partial, group=group), group)
    files = {name: mark for each in marks for name, mark in sorted(each.items())}
    manifest = Manifest(format=FORMAT, world=_world(), files=files, **facts)
    _agree(_publish, partial, folder, manifest, group=group)


def _partial_of(folder: Path) -> Path:
    return folder.with_name(PARTIAL + folder.name)


def load(
    folder: Path, model: nn.Module, optimizer: Optimizer, counters: State, server: Server | None = None
) -> Manifest:
    """Fill parameters, optimizer, tables on a server and `counters` from a checkpoint, whatever layout wrote it, and what compression
    owes; every rank must call it.

    Every file's digest is compared first, each rank looking at some. Raises on every rank, with nothing changed:
    InputError for a folder that is no checkpoint, StaleError DIGEST for one that is not what its manifest says,
    StaleError FACTS_DIFFER for one of another model or other constants, or of another compression that owes something.
    """
    manifest: Manifest = _agree(read_manifest, folder)
    _agree(_require_sound, folder, manifest)
    _agree(_require_same_constants, folder, manifest, model)
    reader = _Reader(folder, manifest)
    metadata: Metadata = _agree(reader.read_metadata)
    stored, feedback = metadata.state_dict_metadata, feedback_of(model)
    _agree(_require_debtor, folder, stored, feedback)
    has_states = any(name.startswith("optimizer/") for name in stored)
    is_new = has_states and not any(kept_states(optimizer))
    if is_new:
        fill_optimizer(model.parameters(), optimizer)
    named = named_parameters(model)
    held = _optimizer_states(named, optimizer)
    tables = {} if server is None else server.state(with_optimizer=has_states)
    state = state_of_parameters(named, held, bundles_of(model)) | tables | counters
    borrowed = {name: found for name in state if is_scale(name) and (found := loans(name, stored))}
    asked = {name: value for name, value in state.items() if name not in borrowed} | _room_for(borrowed, stored)
    try:
        _agree(_require_fit, folder, metadata, asked, set().union(*_from_all(set(state))))
    except StrategistError:
        if is_new:
            _forget_states(optimizer)
        if server is not None:
            server.take(None)
        raise
    _read(asked, reader, alone=_world() == 1)
    for name, found in borrowed.items():
        state[name].copy_(torch.cat([asked[loan.name][loan.blocks] for loan in found]))
    _share_numbers(held)
    take_states(optimizer, held, state)
    follow_weights(model, optimizer)
    if server is not None:
        server.take({name: state[name] for name in tables})
    if feedback is not None:
        feedback.take(_owed(feedback.kind, stored, reader, manifest.world))
    if manifest.world == _world():
        numbers = {_random_name(): torch.get_rng_state()}
        _read(numbers, reader, alone=_world() == 1)
        torch.set_rng_state(numbers[_random_name()])
    return manifest


def _owed(kind: str, stored: Mapping[str, Any], reader: FileSystemReader, world: int) -> State:
    """What this rank owes from now on: what it owed then or, where other ranks did, the mean of what all of them owed, so that all
    together still owe the same."""
    ranks = [_rank()] if world == _world() else range(world)
    total: State = {}
    for rank in ranks:
        prefix = f"{OWED}{kind}/{rank}/"
        part = {
            name: torch.empty(there.size, dtype=there.properties.dtype)
            for name, there in stored.items()
            if name.startswith(prefix)
        }
        _read(part, reader, alone=_world() == 1)
        for name, value in part.items():
            of_all = total.setdefault(name.removeprefix(prefix), value)
            if of_all is not value and value.is_floating_point():
                of_all += value
    for value in (value for value in total.values() if value.is_floating_point()):
        value /= len(ranks)
    return total


def _room_for(borrowed: Mapping[str, tuple[Loan, ...]], stored: Mapping[str, Any]) -> State:
    """Places for scales that were stored for other runs than this rank's."""
    return {loan.name: torch.empty(stored[loan.name].size) for found in borrowed.values() for loan in found}


def _forget_states(optimizer: Optimizer) -> None:
    if isinstance(optimizer, StateOnDrive):
        optimizer.forget()
    else:
        for states in kept_states(optimizer):
            states.clear()


def read_tensors(
    folder: Path, sizes: Mapping[str, torch.Size], dtype: torch.dtype
) -> Callable[[Iterable[str]], dict[str, Tensor]]:
    """A reader of whole parameters, by name, of a checkpoint that is sound and of a model with these sizes.

    For one process, whether it is in a group or not. Raises what `load` raises.
    """
    manifest = read_manifest(folder)
    _require_sound(folder, manifest)
    reader = _Reader(folder, manifest)
    metadata = reader.read_metadata()
    shapes = {f"model/{name}": torch.empty(size, device="meta") for name, size in sizes.items()}
    _require_fit(folder, metadata, shapes, set(shapes))

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        state = {f"model/{name}": torch.empty(sizes[name], dtype=dtype) for name in names}
        _read(state, reader, alone=True)
        return {name.removeprefix("model/"): value for name, value in state.items()}

    return read


def _read(state: State, reader: FileSystemReader, *, alone: bool) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    read_state(state, storage_reader=reader, planner=planner, no_dist=alone)


def kept_states(optimizer: Optimizer) -> list[MutableMapping[Tensor, Any]]:
    """Where an optimizer keeps its states, by what it updates."""
    return optimizer.states if isinstance(optimizer, DealtOut) else [optimizer.state]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _random_name() -> str:
    return f"random/{_rank()}"


def _agree(work: Any, *arguments: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The result of some work; when it failed on any rank, every rank raises the error of the lowest of those."""
    result, error = None, None
    try:
        result = work(*arguments)
    except StrategistError as problem:
        error = problem
    except OSError as problem:
        error = _io(problem)
    except CheckpointException as problem:  # torch's collection of what went wrong on which rank
        error = _io(next(iter(problem.failures.values()))[0])
    first = next((each for each in _from_all(error, group) if each is not None), None)
    if first is not None:
        raise first
    return result


def _io(problem: BaseException) -> InternalError:
    known = getattr(problem, "strerror", None)
    words = known or f"{type(problem).__name__}: {problem}; torch says so when the disk is full, too"
    return InternalError(
        "IO",
        f"The checkpoint cannot be written or read: {words}.",
        hint="Free some space on the disk, or name another folder.",
    )


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise InputError(
            "EXISTS",
            f"The checkpoint {shown(str(folder))} exists; it was not touched.",
            flag="folder",
            value=str(folder),
            hint="Save every checkpoint into a new folder.",
        )


def _make_partial(partial: Path) -> None:
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _write(partial: Path, state: State, group: dist.ProcessGroup | None) -> None:
    writer = _Writer(partial, overwrite=False)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    write_state(state, storage_writer=writer, planner=planner, process_group=group, no_dist=_world() == 1)


def _own_marks(partial: Path) -> dict[str, FileMark]:
    """Digests of the files that this rank wrote; rank 0 wrote the metadata too."""
    mine = [path for path in partial.iterdir() if path.name.startswith(f"__{_rank()}_")]
    if _rank() == 0:
        mine.append(partial / METADATA)
    return {path.name: mark_of(path) for path in mine}


def _from_all(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has, by rank."""
    if _world() == 1:
        return [mine]
    everybody: list[Any] = [None] * _world()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _publish(partial: Path, folder: Path, manifest: Manifest) -> None:
    if _rank() == 0:
        publish(partial, folder, manifest)


def _require_sound(folder: Path, manifest: Manifest) -> None:
    mine = sorted(manifest.files)[_rank() :: _world()]
    for why in flaws_of_files(folder, manifest, mine):
        raise StaleError(
            "DIGEST",
            f"The checkpoint {shown(str(folder))} was changed or is damaged: {why}",
            flag="folder",
            value=str(folder),
            hint="Load an older one.",
        )


def _require_fit(folder: Path, metadata: Metadata, state: State, anywhere: set[str]) -> None:
    """Every tensor that this rank needs is there, as a tensor of the right size, and all of the model there has a place."""
    stored = metadata.state_dict_metadata
    wrong = sorted(name for name, value in state.items() if not _fits(stored.get(name), value))
    extra = sorted(name for name in stored if name.startswith("model/") and name not in anywhere)
    if wrong and is_scale(wrong[0]) and not extra and all(is_scale(name) for name in wrong):
        raise _other_blocks(folder, wrong[0], stored)
    if wrong or extra:
        raise StaleError(
            "FACTS_DIFFER",
            f"The checkpoint {shown(str(folder))} is of another model or optimizer: {len(wrong)} tensors of this rank are not "
            f"in it in name and size, and {len(extra)} of its own are not known here, such as {shown((wrong + extra)[0])}.",
            flag="folder",
            value=(wrong + extra)[0],
            hint="Build the session from the plan of that run, or from another plan for the same model.",
        )


def _fits(stored: Any, value: Tensor) -> bool:
    """Codes of eight bits never stand for numbers, nor numbers for codes."""
    if not isinstance(stored, TensorStorageMetadata) or stored.size != value.size():
        return False
    return stored.properties.dtype.is_floating_point == value.dtype.is_floating_point


def _other_blocks(folder: Path, name: str, stored: Mapping[str, Any]) -> StaleError:
    kind, _, cut = name.rpartition("/")
    there = sorted(other.rpartition("/")[2] for other in stored if other.rpartition("/")[0] == kind)
    return StaleError(
        "FACTS_DIFFER",
        f"The 8-bit moments of the checkpoint {shown(str(folder))} are in other blocks than this layout's: this rank holds the "
        f"elements {cut} of {kind}, which is stored for {' and '.join(there[:2]) or 'none'}.",
        flag="folder",
        value=name,
        hint="Go on under a layout that cuts the weights as that one did, or whose parts are whole blocks of 256 elements of its parts.",
    )


def _require_same_constants(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Weights that were trained with other rotary angles fit in name and size, and say something else."""
    theirs, own = manifest.constants or PLAIN, constants_of_model(model)
    if theirs != own:
        raise StaleError(
            "FACTS_DIFFER",
            f"The checkpoint {shown(str(folder))} is of a model with {theirs}; the session's has {own}.",
            flag="folder",
            value=str(theirs),
            hint="Build the session with model_from_shape(plan.model, constants=...) of that run.",
        )


def _require_debtor(folder: Path, stored: Mapping[str, Any], feedback: Feedback | None) -> None:
    """What compression left out of gradients goes on with the same compression only."""
    theirs = {name.split("/")[1] for name in stored if name.startswith(OWED)}
    own = set() if feedback is None else {feedback.kind}
    for kind in sorted(theirs - own):
        raise StaleError(
            "FACTS_DIFFER",
            f"The checkpoint {shown(str(folder))} holds what compression {kind} left out of gradients so far; under "
            f"{'compression ' + feedback.kind if feedback is not None else 'no such compression'} it would be lost.",
            flag="folder",
            value=kind,
            hint="Go on under the same compression, on any number of replicas, or begin anew with the weights alone.",
        )


class _Writer(FileSystemWriter):
    """torch's writer, without the path of this machine in the metadata."""

    def storage_meta(self) -> StorageMeta:
        """Nothing that the files' own names do not say."""
        return StorageMeta()


class _Reader(FileSystemReader):
    """torch's reader, except that its metadata can only consist of what torch itself writes there."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder, self._manifest = folder, manifest

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        """The metadata of the checkpoint. Raises InputError KIND for what is none, or what names other files."""
        data = (self._folder / METADATA).read_bytes()
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
            names = {info.relative_path for info in metadata.storage_data.values()}
        except (
            pickle.UnpicklingError,
            AttributeError,
            EOFError,
            IndexError,
            TypeError,
            KeyError,
            ValueError,
        ) as problem:
            raise _not_ours(self._folder, str(problem)) from None
        if not isinstance(metadata, Metadata) or not names <= set(self._manifest.files):
            raise _not_ours(self._folder, "it names files that the manifest does not list")
        return metadata


def _not_ours(folder: Path, why: str) -> InputError:
    return InputError(
        "KIND",
        f"The metadata of the checkpoint {shown(str(folder))} is not what torch writes: {shown(why)}.",
        flag="folder",
        value=str(folder),
        hint="Load a checkpoint that strategist wrote.",
    )


class _Unpickler(pickle.Unpickler):
    """Makes only the plain records of torch's checkpoint metadata; a pickle can otherwise call anything."""

    ALLOWED = frozenset(
        {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
         ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
        | {("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
            "_MEM_FORMAT_ENCODING")}
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """One of the few names, or a number format of torch."""
        if (module, name) in self.ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
