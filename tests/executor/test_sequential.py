"""A pipeline cuts any Sequential: whatever its parts are, training is that of one process, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.document.plan import Plan
from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

PIPE = {"pp": 2, "accumulation": 4, "micro_batch": 2}
PLAIN, SHARDED = {"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("flat", "own", PIPE | {"schedule": "gpipe"}),
    ("flat", "tokens", PIPE | {"recompute": "full"}),
    ("nested", "own", PIPE),
    ("nested", "own", PIPE | {"virtual_stages": 2}),
    ("plain", "own", PIPE),
    ("plain", "tokens", PIPE | {"virtual_stages": 2, "schedule": "looped_bfs"}),
    ("flat", "own", {"pp": 4, "accumulation": 8, "micro_batch": 1, "recompute": "selective"}),
    ("nested", "own", PIPE | PLAIN | {"accumulation": 2}),
    ("nested", "tokens", PIPE | SHARDED | {"micro_batch": 1}),
    ("plain", "own", PIPE | {"dp_shard": 2, "zero": 1, "accumulation": 2}),
    ("flat", "own", PIPE | SHARDED | {"zero": 2, "micro_batch": 1, "schedule": "gpipe"}),
    ("plain", "own", SHARDED | {"micro_batch": 4}),
)


def planned(kind: str, layout: dict[str, Any]) -> Plan:
    """A plan by hand for one of the modules, whose layers are those that the planner reads."""
    from strategist.facts.modules import shape_from_module
    from tests.executor.sequences import LENGTH, MODELS

    shape = shape_from_module(MODELS[kind]())
    plan = make_plan(replace(tiny_llama(), layers=shape.layers), seq_len=LENGTH, **layout)
    return replace(plan, model=shape)


@pytest.mark.parametrize(("kind", "loss", "layout"), CASES, ids=lambda value: str(value)[:70])
def test_training_is_that_of_one_process(kind: str, loss: str, layout: dict[str, Any]) -> None:
    """Losses of samples of different lengths and the weights of all stages, with a loss of one's own or over words."""
    import torch

    from tests.executor.harness import run_ranks
    from tests.executor.sequences import alone, train

    losses, weights = alone(kind, loss)
    plan = planned(kind, layout)
    for found, parameters in run_ranks(plan.mesh.world, train, plan, kind, loss):
        assert found == pytest.approx(losses, abs=1e-12, rel=0)
        assert parameters.keys() == weights.keys()
        assert all(torch.allclose(parameters[name], value, rtol=0, atol=1e-9) for name, value in weights.items())
    assert max(losses) - min(losses) > 1e-3 * max(losses)


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [("nested", PIPE, PLAIN | {"micro_batch": 4}), ("plain", SHARDED | {"micro_batch": 4}, PIPE)],
    ids=lambda value: str(value)[:40],
)
def test_a_checkpoint_goes_on_under_another_layout(
    kind: str, first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    """From a pipeline to replicas, and from shards to a pipeline: names are those of the whole module."""
    import torch

    from tests.executor.harness import run_ranks
    from tests.executor.sequences import alone, train_on

    losses, weights = alone(kind, "own")
    for found, parameters in run_ranks(
        2, train_on, planned(kind, first), planned(kind, then), kind, str(tmp_path / "saved")
    ):
        assert found == pytest.approx(losses, abs=1e-12, rel=0)
        assert all(torch.allclose(parameters[name], value, rtol=0, atol=1e-9) for name, value in weights.items())


def odd(kind: str) -> Any:
    """Modules that a pipeline cannot cut."""
    from torch import nn

    from tests.executor.modules import Mix

    class Backwards(nn.Sequential):
        def forward(self, x: Any) -> Any:
            for part in reversed(self):
                x = part(x)
            return x

    blocks = [Mix(4) for _ in range(4)]
    if kind == "shared":
        blocks[3].inner = blocks[0].inner
    inside = nn.ModuleDict({"tower": nn.Sequential(*blocks)})
    return {"backwards": Backwards(*blocks), "inside": inside, "shared": nn.Sequential(*blocks)}[kind]


@pytest.mark.parametrize(
    ("kind", "sentence"), [("backwards", "may be cut"), ("inside", "may be cut"), ("shared", "share a weight")]
)
def test_what_does_more_than_to_call_its_parts_is_refused(kind: str, sentence: str) -> None:
    """A forward of one's own, a container inside something else, a weight that two stages would need."""
    from strategist.errors import ImpossibleError
    from strategist.executor.models import require_splittable

    with pytest.raises(ImpossibleError, match=sentence) as refused:
        cuts = require_splittable(odd(kind), "pp")
        assert cuts.layer_count() == 4
        cuts.keep_stage(range(2), embedding=True, head=False)
    assert refused.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("kind", "pp", "legal"), [("backwards", 2, False), ("inside", 2, False), ("flat", 2, True), ("plain", 4, True)]
)
def test_the_planner_cuts_what_the_executor_cuts(kind: str, pp: int, legal: bool) -> None:
    """A plan with pp is there where parts run in order, and refused by a rule elsewhere; tensors are never cut."""
    from strategist import recommend
    from strategist.errors import StrategistError
    from tests.executor.sequences import MODELS

    model = MODELS[kind]() if kind in MODELS else odd(kind)
    if legal:
        assert recommend(model, "dgx-h100:1", seq_len=16, global_batch=64, pin=f"pp={pp}").mesh.pp == pp
    else:
        with pytest.raises(StrategistError, match="one stack of layers"):
            recommend(model, "dgx-h100:1", seq_len=16, global_batch=64, pin=f"pp={pp}")
    with pytest.raises(StrategistError, match="only weights and blocks are known"):
        recommend(model, "dgx-h100:1", seq_len=16, global_batch=64, pin="tp=2")


def test_only_what_calls_its_parts_is_given_a_tensor_without_its_name() -> None:
    """A Sequential with a forward of its own takes the batch by its own names, as any other module does."""
    from strategist.facts.modules import only_calls
    from tests.executor.sequences import MODELS

    assert [only_calls(make()) for make in MODELS.values()] == [True, True, True]
    assert [only_calls(odd(kind)) for kind in ("backwards", "inside", "shared")] == [False, False, True]
