"""Compressed gradients are not exact, so each is held against what it claims: the same algorithm in one process, the exact mean where
nothing is left out, and losses that fall."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.errors import ImpossibleError
from strategist.executor.support import layout_obstacles
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_llama

REPLICAS: dict[str, Any] = {"dp_replicate": 2, "formats": FLOAT32}
RANKED, SHARED = {"compression": "powersgd", "compression_rank": 4}, {"compression": "topk", "compression_share": 0.1}
CASTS: tuple[dict[str, Any], ...] = ({"compression": "bf16"}, {"compression": "fp16"})
EVERY: tuple[dict[str, Any], ...] = (*CASTS, RANKED, SHARED)


@pytest.mark.parametrize("chosen", EVERY, ids=lambda chosen: chosen["compression"])
def test_only_whole_replicas_in_float32_compress(chosen: dict[str, Any]) -> None:
    """Hooks are lost under fully_shard, in pipelines and in threads; float64 and unknown settings are refused too."""
    assert layout_obstacles(make_plan(**REPLICAS | chosen)) == ()
    assert layout_obstacles(make_plan(**REPLICAS | chosen | {"accumulation": 3, "formats": BFLOAT16})) == ()
    others: tuple[dict[str, Any], ...] = (
        {"dp_replicate": 1}, {"dp_shard": 2, "zero": 3}, {"tp": 2}, {"pp": 2}, {"replicas": "threads"}, {"formats": make_plan().strategy.formats},
        {"compression_rank": 0 if chosen is RANKED else 3}, {"compression_share": 0.0 if chosen is SHARED else 0.5},
    )  # fmt: skip
    for other in others:
        places = [obstacle.place for obstacle in layout_obstacles(make_plan(**REPLICAS | chosen | other))]
        assert "strategy.compression" in places, other


@pytest.mark.parametrize("chosen", EVERY, ids=lambda chosen: chosen["compression"])
def test_what_is_owed_is_not_kept_beside_a_loss_scale(chosen: dict[str, Any]) -> None:
    """In float16 gradients are multiplied by a scale that changes: compression that remembers is refused, a cast is not."""
    plan = make_plan(**REPLICAS | chosen | {"formats": replace(FLOAT32, compute="float16")})
    assert bool(layout_obstacles(plan)) == (chosen in (RANKED, SHARED))


def strategy(**chosen: Any) -> Any:
    """The strategy of two replicas with a compression."""
    return make_plan(**REPLICAS | chosen).strategy


@pytest.mark.slow
@pytest.mark.parametrize(("share", "rounds"), [(0.1, 1), (0.1, 3), (1.0, 1)])
def test_top_k_is_that_of_one_process(share: float, rounds: int) -> None:
    """Two ranks under DDP, with and without accumulation, give in every step what one process computes for both in turn, with
    all elements the exact mean."""
    import numpy as np

    from tests.executor import compressed
    from tests.executor.harness import run_ranks

    chosen = strategy(compression="topk", compression_share=share)
    expected = compressed.largest_by_one_process(share)
    for found in run_ranks(2, compressed.exchanged, chosen, None, rounds):
        for step, gradients in enumerate(found):
            for name, value in gradients.items():
                np.testing.assert_allclose(value, expected[step][name], atol=2e-6)
                if share == 1.0:
                    np.testing.assert_allclose(value, compressed.means(step)[name], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "error"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_a_cast_is_off_by_its_rounding_alone(word: str, error: float) -> None:
    """Two numbers are rounded, then their sum: no gradient is further from the mean than that of numbers of this size."""
    from tests.executor import compressed
    from tests.executor.harness import run_ranks

    for found in run_ranks(2, compressed.exchanged, strategy(compression=word)):
        for step, gradients in enumerate(found):
            for name, value in gradients.items():
                parts = [abs(compressed.gradients_of(step, rank)[name]).max() for rank in range(compressed.RANKS)]
                assert abs(value - compressed.means(step)[name]).max() <= 2 * error * max(parts)
                assert abs(value - compressed.means(step)[name]).max() > 0


@pytest.mark.slow
def test_power_sgd_projects_the_mean_and_owes_the_rest() -> None:
    """Two steps are exact. Then each large matrix has rank 3 and is the mean, with what is owed, projected on its own columns; what
    was left out so far is the difference of all means and all gradients. Vectors and small matrices stay exact."""
    import numpy as np

    from tests.executor import compressed
    from tests.executor.harness import run_ranks

    (found, other) = run_ranks(2, compressed.exchanged, strategy(compression="powersgd", compression_rank=3))
    owed = dict.fromkeys(compressed.SHAPES, 0.0)
    for step, gradients in enumerate(found):
        for name, value in gradients.items():
            np.testing.assert_array_equal(value, other[step][name])
            mean = compressed.means(step)[name]
            if step < 2 or name in ("vector", "small"):
                np.testing.assert_allclose(value, mean, atol=1e-6)
                continue
            whole = mean + owed[name]
            left, sizes, _ = np.linalg.svd(value)
            assert (sizes[3:] < 1e-4 * sizes[0]).all()
            np.testing.assert_allclose(value, left[:, :3] @ left[:, :3].T @ whole, atol=1e-4)
            owed[name] = whole - value


@pytest.mark.slow
def test_power_sgd_of_full_rank_is_the_mean() -> None:
    """With as many columns as a matrix has nothing is left out, because nothing is worth compressing."""
    import numpy as np

    from tests.executor import compressed
    from tests.executor.harness import run_ranks

    (found, _) = run_ranks(2, compressed.exchanged, strategy(compression="powersgd", compression_rank=40))
    for step, gradients in enumerate(found):
        for name, value in gradients.items():
            np.testing.assert_allclose(value, compressed.means(step)[name], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("bf16",), ("fp16",), ("powersgd", 4), ("topk", 0, 0.1)], ids=lambda arguments: arguments[0]
)
def test_a_model_learns_with_compressed_gradients(arguments: tuple[Any, ...]) -> None:
    """After 30 steps on one batch the loss has fallen at least half as far as with exact gradients, alike on both ranks."""
    from tests.executor.compressed import trained
    from tests.executor.harness import run_ranks

    exact = run_ranks(2, trained, "none")[0]
    first, second = run_ranks(2, trained, *arguments)
    assert first == second
    assert first[0] - first[-1] >= 0.5 * (exact[0] - exact[-1])


SEVERAL_BUCKETS = tiny_llama(hidden=128, head_dim=16, ffn_hidden=384, layers=4)
"""A model with more than the first bucket of DDP, 1 MiB, of gradients."""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [RANKED, SHARED], ids=lambda chosen: chosen["compression"])
def test_what_goes_on_owes_what_it_owed(chosen: dict[str, Any], tmp_path: Path) -> None:
    """From checkpoints after one, two and four steps training is bit by bit that without a stop, with one micro-batch and with two,
    although DDP makes its buckets anew in every process; without what is owed it would not be."""
    from tests.executor.compressed import stopped_and_went_on
    from tests.executor.harness import run_ranks

    plan = make_plan(SEVERAL_BUCKETS, **REPLICAS | chosen | {"micro_batch": 2, "accumulation": 2})
    for whole, resumed, forgotten in run_ranks(2, stopped_and_went_on, plan, tmp_path):
        for start, losses in resumed.items():
            assert losses == whole[start:]
        assert forgotten != whole[4:]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [RANKED, SHARED], ids=lambda chosen: chosen["compression"])
def test_other_replicas_owe_the_same_together(chosen: dict[str, Any], tmp_path: Path) -> None:
    """On twice as many replicas the mean of what they owe is what it was, and nobody else's is taken: training goes on."""
    import numpy as np

    from tests.executor.compressed import owed_and_loss
    from tests.executor.harness import run_ranks

    two, four = (make_plan(**REPLICAS | chosen | {"dp_replicate": n, "micro_batch": 8 // n}) for n in (2, 4))
    before = run_ranks(2, owed_and_loss, two, None, tmp_path / "saved")
    after = run_ranks(4, owed_and_loss, four, tmp_path / "saved", None)
    means = [
        {name: np.mean([owed[name] for owed, _ in found], axis=0) for name in found[0][0]} for found in (before, after)
    ]
    assert means[0].keys() == means[1].keys()
    for name, value in means[0].items():
        np.testing.assert_allclose(means[1][name], value, atol=1e-7)
        assert any(abs(value).max() > 0 for value in means[0].values())
    assert len({loss for _, loss in after}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("other", [{}, {"compression": "topk", "compression_share": 0.2}, RANKED], ids=str)
def test_what_is_owed_is_not_lost_unsaid(other: dict[str, Any], tmp_path: Path) -> None:
    """Under another compression, or none, loading is refused in a sentence, and the session is what it was; a run that owes nothing yet
    begins any compression."""
    from tests.executor.compressed import owed_and_loss
    from tests.executor.harness import run_ranks
    from tests.executor.workers import refused_load

    shape = tiny_llama()
    said = (
        make_plan(shape, **REPLICAS | SHARED | {"micro_batch": 4}),
        make_plan(shape, **REPLICAS | other | {"micro_batch": 4}),
    )
    run_ranks(2, owed_and_loss, said[0], None, tmp_path / "saved")
    for code, sentence, is_unchanged in run_ranks(2, refused_load, said[1], tmp_path / "saved", shape):
        assert (code, is_unchanged) == ("FACTS_DIFFER", True)
        assert "compression topk-0.1 left out of gradients" in sentence
    plain = make_plan(shape, **REPLICAS | {"micro_batch": 4})
    run_ranks(2, owed_and_loss, plain, None, tmp_path / "plain")
    run_ranks(2, owed_and_loss, said[0], tmp_path / "plain", None)


def test_plans_with_compression_are_emitted_where_hooks_are_called() -> None:
    """The executor's targets take them as they are; frameworks say why not."""
    from strategist import emit

    plan = make_plan(**REPLICAS | RANKED)
    for target in ("torchrun", "mpirun", "ray"):
        assert '"compression": "powersgd"' in "".join(emit(plan, target).values())
    on_gpus = make_plan(**REPLICAS | RANKED | {"backend": "nccl"})
    for target, hook in {"accelerate": "DDPCommunicationHookType.POWER_SGD", "fabric": "powerSGD_hook"}.items():
        assert hook in "".join(emit(on_gpus, target).values())
    for target in ("deepspeed", "torchtitan", "megatron"):
        with pytest.raises(ImpossibleError, match="Hooks of DDP are not mapped"):
            emit(plan, target)
