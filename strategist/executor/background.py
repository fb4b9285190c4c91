"""A checkpoint that is written while training goes on: from a copy, by a thread of its own.

The threads of all ranks talk over a process group of their own, so that their messages never mix with those of training. All else
is as in a checkpoint that is waited for: manifest last, name last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from strategist.executor.checkpoint import State, make_room, save
from strategist.executor.stacked import Stacked


class BackgroundSaver:
    """Writes one checkpoint after the other for a session. Every rank must call the same methods. `copy` copies plain tensors to
    where they can wait until they are written."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def begin(self, folder: Path, state: State, facts: dict[str, Any]) -> None:
        """Copy a state and write it; the one before must be finished. Raises as `make_room`."""
        make_room(folder)
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        copy = {name: placed_copy(value, self._copy) for name, value in state.items()}
        self._thread = Thread(target=self._write, args=(folder, copy, facts), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, folder: Path, state: State, facts: dict[str, Any]) -> None:
        try:
            save(folder, state, facts, self._group)
        except BaseException as error:  # noqa: BLE001 - whoever finishes raises it
            self._error = error

    def finish(self) -> None:
        """Wait until what was begun lies on the disk. Raises what `save` raises, and RuntimeError when a peer is gone."""
        if self._thread is not None:
            self._thread.join()
        error, self._error, self._thread = self._error, None, None
        if error is not None:
            raise error


@torch.no_grad()
def placed_copy(value: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """What `copy` makes of a tensor, with the same place in the whole."""
    if isinstance(value, Stacked):
        return value.with_parts([placed_copy(part, copy) for part in value.parts])
    if isinstance(value, DTensor):
        return DTensor(copy(value.to_local()), value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return copy(value.detach())


def host_copy(value: Tensor) -> Tensor:
    """A tensor of its own in the host's memory."""
    return value.to("cpu", copy=True)
