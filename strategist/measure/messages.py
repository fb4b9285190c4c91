"""Collectives as they pass by: operation, bytes, format, and the group that takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

from strategist.document.observed import Pass
from strategist.records import dataclass, replace

NAMES: Mapping[str, str] = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "recv",
}
"""Operations of torch's two families of collectives by one name each."""

FAMILIES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of torch's collectives."""

UNSHARDED_GRADIENT = "unsharded gradient"
"""The role of a whole unit's gradient that FSDP2 will reduce; whether it accumulates first shows afterwards."""

REDUCTION = "_c10d_functional::all_reduce"
"""How DTensors add up terms that ranks have."""

SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"})
"""Operations of those namespaces that move no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective as this rank sees it. `bytes` is the larger of what goes in and what comes out.

    `is_functional` marks the family that DTensors use: it runs beside nothing but what the program puts before its use.
    """

    name: str
    bytes: int
    dtype: str
    group: str
    is_functional: bool
    operation: int = 0
    during: Pass = "setup"
    module: str = ""

    def at(self, operation: int, during: Pass, module: str) -> Message:
        """The message with its place in the program."""
        return replace(self, operation=operation, during=during, module=module)


def message_of(
    func: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor], name_group: Callable[[Any], str]
) -> Message | None:
    """The collective that a call is, or None. Raises KeyError for one that nobody described."""
    if func.namespace not in FAMILIES:
        return None
    name = func._schema.name.split("::")[1]
    if name in SILENT:
        return None
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(outputs)
    return Message(
        name=NAMES[name],
        bytes=max((t.numel() * t.element_size() for t in tensors), default=0),
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        group=name_group(group_in(leaves)),
        is_functional=func.namespace != "c10d",
    )


def arriving(func: Any, args: Any, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors whose contents a collective brings. Torch's older family writes into its first argument."""
    if func.namespace != "c10d":
        return outputs
    if func._schema.name == "c10d::send":
        return ()
    first = args[0]
    return (first,) if isinstance(first, Tensor) else [leaf for leaf in first if isinstance(leaf, Tensor)]


def group_in(leaves: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group among what a collective was called with; None when there is none."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
        if isinstance(leaf, str):
            try:
                return torch._C._distributed_c10d._resolve_process_group(GroupName(leaf))
            except RuntimeError:  # another word: the reduction
                continue
    return None


def buffers_of(func: Any, args: Any, kwargs: Any, axis: str) -> list[tuple[Tensor, str, str]]:
    """Tensors whose purpose the operation tells: (tensor, role, stream it was made in). `axis` is that of the group of a
    message.

    FSDP2 gathers in a stream of its own and reduces in another (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    foreach_all_gather and foreach_reduce); what a stream made, only that stream's pool gets back.
    """
    name = func._schema.name
    if name == "fsdp::all_gather_copy_in":
        return [(args[1], "gather_buffers", "gather"), *((t, "gather_buffers", "gather") for t in args[0])]
    if name == "fsdp::split_with_sizes_copy":
        return [(t, "gather_buffers", "main") for t in kwargs["out"]]
    if name == "fsdp::chunk_cat":
        return [*((t, UNSHARDED_GRADIENT, "main") for t in args[0]), (kwargs["out"], "gather_buffers", "main")]
    if name == "c10d::_reduce_scatter_base_":
        return [(args[0], "gather_buffers", "reduce")]
    if name == "c10d::recv_" and axis == "pp":
        return [(t, "pipeline_buffers", "main") for t in args[0]]
    return []
