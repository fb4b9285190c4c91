"""What a hook on the inputs of layers that are computed again keeps alive, counted with torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import register_multi_grad_hook  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

LAYERS, SHAPE = 8, (1, 64, 48)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A frozen matrix and a trained pair of thin ones; hooked, it does what FSDP1 does with a flat parameter that has no gradient
    (torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook)."""

    def __init__(self, *, is_hooked: bool) -> None:
        super().__init__()
        width = SHAPE[-1]
        self.is_hooked, self.state = is_hooked, None
        self.frozen = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.pair = torch.nn.Sequential(torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, width, bias=False))

    def forward(self, given: Any) -> Any:
        if self.is_hooked and torch.is_grad_enabled():
            self.state = register_multi_grad_hook([given], lambda _gradients: None)
        return given + self.frozen(torch.relu(given)) + self.pair(given)


class Living(TorchDispatchMode):  # type: ignore[misc]
    """Storages of hidden states that somebody still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if torch.is_tensor(one) and tuple(one.shape) == SHAPE:
                storage = one.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage)
        return found

    def count(self) -> int:
        """How many there are."""
        return sum(not one.expired() for one in self.seen.values())


def alive_in_backward(*, is_hooked: bool, reentrant: bool) -> list[int]:
    """Hidden states alive when backward comes to each layer, from the last one to the first."""
    layers = [Layer(is_hooked=is_hooked) for _ in range(LAYERS)]
    found: list[int] = []
    with Living() as living:
        hidden = torch.rand(SHAPE).requires_grad_()
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        hooks = [layer.register_forward_pre_hook(lambda *_: found.append(living.count())) for layer in layers]
        hidden.backward(torch.ones_like(hidden))
        for hook in hooks:
            hook.remove()
    return found


def steps(counts: list[int]) -> Iterator[int]:
    """How the count changes from one layer to the next, but for the last one, behind which the loss is."""
    return (after - before for before, after in pairwise(counts[1:]))


def test_a_hooked_leaf_and_its_gradient_stay_until_backward_is_over() -> None:
    """With checkpoints that begin with leaves, each layer behind which backward is leaves its input and that one's gradient: one
    hidden state more for each, where without hooks, or without leaves, there is one less."""
    assert set(steps(alive_in_backward(is_hooked=True, reentrant=True))) == {1}
    for is_hooked, reentrant in ((False, True), (True, False), (False, False)):
        assert set(steps(alive_in_backward(is_hooked=is_hooked, reentrant=reentrant))) == {-1}
