"""nn.DataParallel in the executor: how a batch is split and given back, and what its copies of a module are."""

from __future__ import annotations

import pytest

from strategist.errors import StrategistError
from strategist.executor.support import layout_obstacles
from tests.plans import make_plan

THREADS = {"replicas": "threads", "dp_replicate": 2}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"tp": 2}, "strategy.replicas"),
        ({"dp_shard": 2, "zero": 3}, "strategy.replicas"),
        ({"compile": True}, "strategy.replicas"),
        ({"offload": "optimizer"}, "strategy.replicas"),
        ({"dp_replicate": 1}, "strategy.replicas"),
    ],
)
def test_threads_beside_other_splits_are_refused(change: dict[str, object], place: str) -> None:
    """Whole replicas in one process: no other axis, no compiled or offloaded copies."""
    assert place in [obstacle.place for obstacle in layout_obstacles(make_plan(**THREADS | change))]
    assert layout_obstacles(make_plan(**THREADS)) == ()


@pytest.mark.slow
def test_the_numbers_0_to_19_are_split_as_torch_says() -> None:
    """In batches of 10 over two threads: the first half of each batch to the first, as nn.DataParallel chunks its input; the
    results come back in the order of the batch."""
    import torch
    from torch import Tensor, nn

    from strategist.executor.threads import HostThreads

    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[list[int]] = []

        def __deepcopy__(self, memo: object) -> Heard:
            return other

        def forward(self, x: Tensor) -> Tensor:
            self.heard.append(x.tolist())
            return 10 * x

    first, other = Heard(), Heard()
    threads = HostThreads(first, 2)
    numbers = torch.arange(20)
    results = [threads(x=batch).tolist() for batch in numbers.split(10)]
    assert first.heard == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert other.heard == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]
    assert results == [list(range(0, 100, 10)), list(range(100, 200, 10))]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "threads"), [(1, 4), (5, 4), (6, 4), (7, 3), (8, 4)])
def test_parts_are_those_of_torch_chunk(rows: int, threads: int) -> None:
    """Every sample goes to one thread, in order; no part is longer than the first, and there may be fewer parts than threads."""
    import torch

    from strategist.executor.threads import split

    batch = {"x": torch.arange(rows), "y": torch.arange(rows) + 100}
    parts = list(split(batch, threads))
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(rows))
    assert all((part["y"] - part["x"] == 100).all() for part in parts)
    assert [len(part["x"]) for part in parts] == [len(each) for each in torch.arange(rows).chunk(threads)]


@pytest.mark.slow
def test_copies_follow_the_module_and_give_their_gradients_to_it() -> None:
    """After a change of the weights the copies compute with the new ones; gradients add up in the module; its own buffers are those
    that the first thread changes."""
    import torch
    from torch import Tensor, nn

    from strategist.executor.threads import HostThreads

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.again = nn.Parameter(torch.ones(())), None
            self.register_buffer("calls", torch.zeros(()))
            self.tied = nn.Module()
            self.tied.weight = self.weight

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.weight * self.tied.weight

    module = Scaled().double()
    threads = HostThreads(module, 2)
    for weight in (1.0, 3.0):
        with torch.no_grad():
            module.weight.fill_(weight)
        module.weight.grad = None
        x = torch.arange(1.0, 5.0, dtype=torch.float64)
        result = threads(x=x)
        assert result.tolist() == (x * weight**2).tolist()
        result.sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.item() == 2 * weight * x.sum().item()
    assert module.calls.item() == 2


@pytest.mark.slow
def test_a_world_of_two_processes_is_refused_for_two_threads() -> None:
    """A plan of threads is for one process, and says that its ranks are threads."""
    from strategist.executor.mesh import check_world

    plan = make_plan(**THREADS)
    check_world(plan, 1)
    with pytest.raises(StrategistError, match="as threads") as refused:
        check_world(plan, 2)
    assert refused.value.code == "FACTS_DIFFER"
