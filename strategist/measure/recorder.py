"""Writes down what a program does: every byte it takes and gives back, every collective, every FLOP, in program order.

A TorchDispatchMode sees each operation after autograd and after DTensors were taken apart: what the device would see.
The cost per operation is constant. Nothing is judged here: `timeline.py` reads the record afterwards, when it is known
how long each allocation lived and what became of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from strategist.document.observed import Pass
from strategist.measure.flops import flop_of
from strategist.measure.messages import REDUCTION, Message, arriving, buffers_of, message_of
from strategist.measure.modules import ModuleClock
from strategist.measure.passes import PassClock
from strategist.measure.stand_ins import Replica
from strategist.records import dataclass, field


@dataclass(slots=True)
class Allocation:
    """One storage: where it was born, and what it turned out to be for (`role` is "" until somebody knows).

    `operation` is the one that made it, `graph` the backward pass that ran (-1 outside), `made_from` the allocations that it
    is another format or the sum of (over ranks, too), `grew_by` those that autograd added to it in place, `ended` the operation after
    which its memory went back.
    """

    number: int
    operation: int
    made_by: str
    module: str
    shape: tuple[int, ...]
    is_floating: bool
    graph: int
    size: int = 0
    role: str = ""
    stream: str = "main"
    made_from: tuple[int, ...] = ()
    grew_by: tuple[int, ...] = ()
    ended: int | None = None


DEVICE_OF = torch.ops.prim.device.default
SUM = "aten::add"

SOURCED = ("aten::_to_copy", SUM, REDUCTION)
"""Operations of whose results it is written down what they were made from."""

IN_PLACE = {
    "aten::index_put": torch.ops.aten.index_put_.default,
    "aten::scatter_add": torch.ops.aten.scatter_add_.default,
}
"""What the derivatives of `x[places]` and `x.gather` run in place, on zeros that they made; not where a dispatch mode like this one looks
on (PyTorch 2.13 ATen/TensorSubclassLikeUtils.h, areAnyTensorSubclassLike), so the recorder does."""

Change = tuple[int, int, int]
"""(operation, allocation, bytes taken or, negative, given back)."""


@dataclass(slots=True)
class Record:
    """Everything that was written down, one entry per operation in `passes`, `modules`, `operators` and `graphs`.

    `works` are the operations that cost FLOP, `uses` the first operation that needs what a message brought (by its place
    in `messages`), `begin` is where the step that counts begins (operation, change, message); before it is preparation.
    """

    allocations: dict[int, Allocation] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)
    flop: Counter[tuple[str, Pass]] = field(default_factory=Counter)
    works: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    begin: tuple[int, int, int] = (0, 0, 0)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active inside `with`. `mark` and its `passes` tell it what operations cannot.

    `name_group` names the group of a collective, "" one that sends nothing; `workspace` says how many bytes an operation takes inside itself.
    """

    def __init__(
        self, clock: ModuleClock, name_group: Callable[[Any], str], workspace: Callable[[Any, Any], int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        self.record = Record()
        self._clock, self._name_group = clock, name_group
        self._known: Any = WeakIdKeyDictionary()
        self._pending: Any = WeakIdKeyDictionary()
        self._count = 0
        self.passes = PassClock()
        self._muted = 0
        self._is_over = False
        self._reduces = False
        self._role_of_new = ""
        self._alone = _holders_of_a_gradient()
        self._replaced: list[tuple[Any, str, Any]] = []

    def mark(self, tensor: Tensor, role: str) -> None:
        """Say what the storages of a tensor are for, whatever was thought of them before."""
        for storage in _storages(tensor):
            self._enter(storage, tensor, "").role = role

    def all_new_is(self, role: str) -> None:
        """Say what everything is for that is made from now on; "" where that shows later."""
        self._role_of_new = role

    def restart(self) -> None:
        """What follows is the step that counts."""
        record = self.record
        record.begin = (len(record.passes), len(record.changes), len(record.messages))
        record.flop.clear()

    def __enter__(self) -> Recorder:
        recorder, resize = self, torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            recorder._resized(storage, size)
            return result

        reduce = FSDPParamGroup.post_backward

        def post_backward(group: Any, *unused: Any) -> None:
            recorder._reduces = True
            with recorder.passes.passing("backward"):  # a pipeline reduces when autograd is done
                reduce(group, *unused)
                _move_gradients(recorder, group)
            recorder._reduces = False
            if group._partial_reduce_output is not None:  # waits for the other replicas until the last micro-batch
                recorder.mark(group._partial_reduce_output, "gradients")

        wait = FSDPParamGroup.wait_for_unshard

        def wait_for_unshard(group: Any) -> None:
            wait(group)
            recorder._name_gathered(group)

        send = Replica.send

        def send_bucket(replica: Replica, number: int) -> None:
            recorder.all_new_is("bucket_buffers")
            send(replica, number)
            recorder.all_new_is("")

        self._replace(Replica, "send", send_bucket)
        self._replace(FSDPParamGroup, "post_backward", post_backward)
        self._replace(FSDPParamGroup, "wait_for_unshard", wait_for_unshard)
        self._replace(torch.UntypedStorage, "resize_", resize_)
        self._replace(ShardingPropagator, "_fake_mode_lock", _Muted(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._is_over = True  # what dies from here on outlived the program
        for owner, name, value in self._replaced:
            setattr(owner, name, value)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].device  # two of three questions are this one
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # taken apart first; its parts come back here
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)  # a question about a tensor or a note, no work
        self.record.passes.append(self.passes.now())
        self.record.modules.append(self._clock.now())
        self.record.operators.append(func._schema.name)
        self.record.graphs.append(torch._C._current_graph_task_id())
        # a fake wait makes a tensor of its own, a real one hands on the one that was waited for
        waits = func._schema.name == "_c10d_functional::wait_tensor"
        in_place = self._in_place_of(func, args) if self.record.graphs[-1] >= 0 else None
        if in_place is not None:
            in_place(*args, **kwargs)
        result = args[0] if waits or in_place is not None else func(*args, **kwargs)
        self._look(func, args, kwargs, result)
        return result

    def _in_place_of(self, func: Any, args: Any) -> Any:
        """What autograd runs instead of an operation of a backward pass where no dispatch mode looks on; None: the same."""
        if func._schema.name == SUM:
            return torch.ops.aten.add_.Tensor if self._only_autograd_has(args) else None
        return IN_PLACE.get(func._schema.name)

    def _only_autograd_has(self, summands: Any) -> bool:
        """Whether a sum is one of two gradients of the same tensor of which nobody but autograd has the first: torch adds the second to it
        (PyTorch 2.13 torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace)."""
        if len(summands) != 2 or not all(isinstance(value, Tensor) for value in summands):
            return False
        first, second = summands
        return first.shape == second.shape and first.dtype == second.dtype and _holders_of(first) == self._alone

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        here = len(self.record.passes) - 1
        if len(self._pending):
            self._note_uses(func, args, kwargs, here)
        for tensor in outputs:
            if not tensor.is_meta:
                for storage in _storages(tensor):
                    self._enter(storage, tensor, func._schema.name)
        self._note_workspace(self._workspace(func, args), func, outputs)
        self._note_sources(func, args, outputs)
        flop = flop_of(func, args, kwargs, result)
        if flop:
            self.record.flop[func._schema.name, self.record.passes[-1]] += flop
            self.record.works.append(here)
        message = message_of(func, args, kwargs, outputs, self._name_group)
        for tensor, role, stream in buffers_of(func, args, kwargs, "" if message is None else message.group):
            self._suggest(tensor, role, stream)
        if self._reduces and func._schema.name == "aten::copy_":  # a group of one copies what it would reduce
            self._suggest(args[0], "gather_buffers", "reduce")
        if message is not None and message.group:
            self._note_message(message.at(here, self.record.passes[-1], self.record.modules[-1]), func, args, outputs)

    def _name_gathered(self, group: Any) -> None:
        """Whole weights that a group of one rank copied instead of gathering."""
        for parameter in group.fsdp_params:
            for whole in getattr(parameter, "all_gather_outputs", ()):
                self._suggest(whole, "gather_buffers", "main")

    def _note_workspace(self, size: int, func: Any, outputs: list[Tensor]) -> None:
        """Bytes that an operation takes and gives back before anybody sees them."""
        if size:
            allocation = self._born(outputs[0], func._schema.name)
            self._change(allocation, size)
            self._change(allocation, 0)

    def _suggest(self, tensor: Tensor, role: str, stream: str) -> None:
        """What an operation tells about its buffers; the program's own word counts more."""
        for storage in _storages(tensor):
            allocation = self._enter(storage, tensor, "")
            if not allocation.role:
                allocation.role, allocation.stream = role, stream

    def _note_sources(self, func: Any, args: Any, outputs: list[Tensor]) -> None:
        if func._schema.name not in SOURCED or outputs[0].is_meta:
            return
        made = self._known.get(_storages(outputs[0])[0])
        sources = [self._known.get(_storages(value)[0]) for value in args if isinstance(value, Tensor)]
        numbers = tuple(source.number for source in sources if source is not None and source is not made)
        if made is not None and made.operation == len(self.record.passes) - 1:
            made.made_from = numbers
        elif made is not None and func._schema.name == SUM:
            made.grew_by += numbers

    def _note_message(self, message: Message, func: Any, args: Any, outputs: list[Tensor]) -> None:
        """Remember whose contents are not there before the message has arrived."""
        place = len(self.record.messages)
        self.record.messages.append(message)
        for tensor in arriving(func, args, outputs):
            for storage in _storages(tensor):
                self._pending[storage] = place

    def _note_uses(self, func: Any, args: Any, kwargs: Any, here: int) -> None:
        """The first operation that reads or writes what a message brings has to wait for it; looking at it has not."""
        if func.is_view:
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                place = self._pending.pop(leaf.untyped_storage(), None)
                if place is not None:
                    self.record.uses[place] = here

    def _enter(self, storage: Any, tensor: Tensor, made_by: str) -> Allocation:
        known: Allocation | None = self._known.get(storage)
        if known is not None:
            return known
        allocation = self._born(tensor, made_by)
        self._known[storage] = allocation
        self._change(allocation, storage.size())
        weakref.finalize(storage, self._change, allocation, 0)
        return allocation

    def _born(self, tensor: Tensor, made_by: str) -> Allocation:
        self._count += 1
        allocation = Allocation(
            number=self._count,
            operation=len(self.record.passes) - 1,
            made_by=made_by,
            module=self._clock.now(),
            shape=tuple(tensor.shape),
            is_floating=tensor.is_floating_point(),
            graph=torch._C._current_graph_task_id(),
            role=self._role_of_new,
        )
        self.record.allocations[allocation.number] = allocation
        return allocation

    def _resized(self, storage: Any, size: int) -> None:
        known = self._known.get(storage)
        if known is not None:
            self._change(known, size)

    def _change(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size and not self._is_over:
            self.record.changes.append((len(self.record.passes) - 1, allocation.number, size - allocation.size))
            allocation.ended = None if size else len(self.record.passes) - 1
            allocation.size = size


def _move_gradients(recorder: Recorder, group: Any) -> None:
    """Gradients that go to the host are copies of what replicas added up, which stays on the device until backward is over (FSDPParamGroup,
    _all_reduce_state). Here one device stands for both, and torch copies nothing."""
    if group._all_reduce_state is None or not any(parameter.offload_to_cpu for parameter in group.fsdp_params):
        return
    recorder.mark(group._all_reduce_state.all_reduce_input, "gradients")
    for parameter in group.fsdp_params:
        gradient = parameter.sharded_param.grad
        if gradient is not None:
            gradient._local_tensor = gradient._local_tensor.clone()


class _Holders(TorchDispatchMode):
    """How often the first summand of each sum was held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == SUM:
            self.found.append(_holders_of(args[0]))
        return func(*args, **(kwargs or {}))


def _holders_of_a_gradient() -> tuple[int, int]:
    """How often a gradient is held, seen from a dispatch mode, that nobody but autograd has."""
    leaf = torch.zeros(1, requires_grad=True)
    shared = leaf * 1.0
    joined = torch.cat([shared.exp(), shared.exp()])
    holders = _Holders()
    with holders:
        torch.autograd.grad(joined.sum(), leaf)
    return holders.found[0]


def _holders_of(tensor: Any) -> tuple[int, int]:
    """How often a tensor and its storage are held."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Muted:
    """Stands for the lock that torch holds while it works out the shapes of whole DTensors; such tensors never exist."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._muted += 1

    def __exit__(self, *_error: Any) -> None:
        self._recorder._muted -= 1


def _storages(tensor: Tensor) -> list[Any]:
    """The untyped storages of a tensor; of its parts when it is made of several."""
    if is_traceable_wrapper_subclass_type(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]  # a mesh may be among them
        return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
    return [tensor.untyped_storage()]
