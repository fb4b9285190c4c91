"""What was saved under one layout goes on under another as if nothing had happened; what was tampered with does not."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.facts.model import Adapters, ModelShape
from strategist.facts.runs import V_SHAPED
from strategist.runs.checkpoints import MANIFEST, mark_of
from tests.executor.test_parity import LOSS_BOUND, NORM_BOUND, PARAMETER_BOUND
from tests.plans import FLOAT32, make_plan, tiny_llama, tiny_mixtral, uneven

pytestmark = pytest.mark.slow

SINGLE: dict[str, Any] = {"micro_batch": 8}
DDP4 = {"dp_replicate": 4, "micro_batch": 2}
DDP2 = {"dp_replicate": 2, "micro_batch": 2, "accumulation": 2}
FSDP2 = {"dp_shard": 2, "zero": 3, "micro_batch": 4}
FSDP3 = {"dp_shard": 4, "zero": 2, "micro_batch": 2, "recompute": "full"}
FSDP4 = {"dp_shard": 4, "zero": 3, "micro_batch": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2}
ZERO1 = {"dp_shard": 2, "zero": 1, "micro_batch": 4}
TP_PP = {"tp": 2, "pp": 2, "micro_batch": 2, "accumulation": 4}
TP_FSDP = {"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 4, "sequence_parallel": True}
TP_ZERO1 = {"tp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 4}
PP_V2 = {"pp": 2, "virtual_stages": 2, "micro_batch": 2, "accumulation": 4}
PP_ZBV = PP_V2 | {"schedule": "zbv"}
PP_DUAL = PP_V2 | {"schedule": "dualpipev"}
PP_FSDP = {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2, "accumulation": 2}
HOST = {"dp_shard": 2, "zero": 2, "offload": "optimizer", "micro_batch": 4}
TP_HOST = {"tp": 2, "etp": 2, "dp_shard": 2, "zero": 2, "offload": "optimizer", "micro_batch": 4}
NVME2 = {"dp_shard": 2, "zero": 3, "offload": "nvme", "micro_batch": 4}
NVME4 = {"dp_shard": 4, "zero": 3, "offload": "nvme", "micro_batch": 2}
EP2 = {"dp_shard": 2, "zero": 3, "ep": 2, "micro_batch": 4}
EP_FSDP = {"dp_shard": 4, "zero": 3, "ep": 2, "micro_batch": 2}
EP4 = {"dp_shard": 4, "zero": 2, "ep": 4, "micro_batch": 2}
EP_ETP = {"tp": 2, "etp": 2, "ep": 2, "dp_shard": 2, "zero": 3, "micro_batch": 4}
EP_TP = {"tp": 2, "ep": 4, "dp_shard": 2, "zero": 2, "micro_batch": 4, "sequence_parallel": True}
EP_DDP = {"dp_replicate": 2, "ep": 2, "micro_batch": 4}
EP_ZERO1 = {"dp_shard": 4, "zero": 1, "ep": 2, "micro_batch": 2}
EP_HOST = {"dp_shard": 2, "zero": 3, "ep": 2, "offload": "parameters", "micro_batch": 4}

SERVED2 = DDP2 | {"tables": "server"}
SERVED4 = DDP4 | {"tables": "server"}

UNEVEN2 = {"dp_replicate": 2, "micro_batch": 2, "accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}
UNEVEN_ZERO1 = {"dp_shard": 3, "zero": 1, "micro_batch": 1, "accumulation": 4, "uneven_batch": uneven((2, 2), (1, 4))}

EIGHT = {"optimizer": "adamw8bit"}
WIDE = tiny_llama(hidden=512, head_dim=64)
"""Half of each of its weights is whole blocks of 256 elements, a quarter of a norm's is not."""

TILED = FSDP2 | {"tiling": 3, "recompute": "full"}
TILED_NVME = NVME4 | {"tiling": 8}
TILED_AWAY = {"dp_shard": 4, "zero": 3, "micro_batch": 2, "tiling": 2, "offload": "parameters"}

CHAINS: dict[str, tuple[dict[str, Any], ...]] = {
    "dp4 to tp2-pp2 to single and back": (DDP4, TP_PP, SINGLE, TP_PP, DDP4),
    "sharded, replicated, zero-1": (FSDP4, DDP2, ZERO1, FSDP2, ZERO1),
    "products": (HSDP, TP_FSDP, PP_V2, TP_ZERO1, PP_FSDP),
    "down and up again": (PP_ZBV, FSDP2, PP_DUAL, PP_V2, TP_PP),
    "more shards than rows": (PP_FSDP, FSDP3, TP_ZERO1, SINGLE, HSDP),
    "experts apart, copies on the host": (EP2, HOST, EP_ZERO1, SINGLE, EP_ZERO1),
    "tiles and none": (TILED, SINGLE, TILED_AWAY, HSDP, TILED),
    "further experts and copies": (HOST, EP4, TP_HOST, EP_FSDP, EP2),
    "a drive, memory, another drive": (NVME2, TP_PP, NVME4, ZERO1, NVME2),
    "experts beside everything": (EP_ETP, EP_TP, EP_DDP, EP_HOST, SINGLE),
    "on a server and off it": (SERVED2, FSDP2, SERVED4, SINGLE, SERVED2),
    "uneven and even": (UNEVEN2, FSDP2, UNEVEN_ZERO1, SINGLE, UNEVEN2),
    "tiles on a drive": (TILED_NVME, DDP2, TILED_NVME, TILED, TILED_NVME),
}
IN_CI = (
    "dp4 to tp2-pp2 to single and back",
    "sharded, replicated, zero-1",
    "experts apart, copies on the host",
    "down and up again",
    "a drive, memory, another drive",
    "uneven and even",
)


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(chain, id=name, marks=() if name in IN_CI else pytest.mark.nightly)
        for name, chain in CHAINS.items()
    ],
)
def test_a_new_layout_after_each_step_changes_nothing(chain: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    """Five steps under five layouts, with a checkpoint between each two, are five steps of one process in float64: losses,
    gradient norms, parameters; hence moments, step counts, the order of samples and a schedule of learning rates too."""
    apart = any(layout.get("schedule") in V_SHAPED or "tables" in layout for layout in chain)
    dense = tiny_llama(layers=4, tied=not apart, vocab=66, qkv_bias=True)
    _assert_goes_on(tiny_mixtral() if any("ep" in layout for layout in chain) else dense, chain, tmp_path)


def test_adapters_go_on_beside_weights_that_lie_elsewhere(tmp_path: Path) -> None:
    """The same where adapters are trained: frozen weights and moments of adapters alone are in the checkpoints."""
    adapters = Adapters(rank=3, alpha=6, targets=("q", "v", "down"))
    _assert_goes_on(tiny_llama(adapters=adapters), (FSDP2, DDP2, SINGLE, FSDP2, DDP2), tmp_path)


def test_muon_goes_on_whoever_holds_rows_of_its_momentum(tmp_path: Path) -> None:
    """The same where one momentum is kept of hidden matrices, and two moments of the rest."""
    shape = tiny_llama(layers=4, tied=True, ffn_hidden=42)
    _assert_goes_on(shape, (FSDP4, TP_FSDP, PP_FSDP, ZERO1, TP_PP), tmp_path, "muon")


def _assert_goes_on(
    shape: ModelShape, chain: tuple[dict[str, Any], ...], tmp_path: Path, optimizer: str = "adamw"
) -> None:
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task, trained_by_one_process
    from tests.executor.workers import train_part

    task = Task(shape, ragged=True, clip_norm=0.5, scheduled=True, optimizer=optimizer)
    losses, parameters, norms = trained_by_one_process(task)
    start: Path | None = None
    for step, layout in enumerate(chain):
        plan, target = make_plan(task.shape, optimizer=optimizer, **layout), tmp_path / f"step-{step + 1}"
        outcomes = run_ranks(plan.mesh.world, train_part, plan, task, start, step + 1, target)
        for got_losses, _, got_norms in outcomes:
            assert got_losses == pytest.approx(losses[step : step + 1], abs=LOSS_BOUND, rel=0)
            assert got_norms == pytest.approx(norms[step : step + 1], abs=NORM_BOUND, rel=0)
        start = target
    for _, got, _ in outcomes:
        assert got.keys() == parameters.keys()
        assert max(float((got[name] - value).abs().max()) for name, value in parameters.items()) <= PARAMETER_BOUND


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(DDP2, id="ddp"),
        pytest.param(FSDP2, id="fsdp"),
        pytest.param(ZERO1, id="zero1"),
        pytest.param(TP_PP, id="tp-pp", marks=pytest.mark.nightly),
        pytest.param(NVME2, id="drive", marks=pytest.mark.nightly),
        pytest.param(FSDP2 | EIGHT, id="eight-bits"),
        pytest.param(SERVED2, id="server", marks=pytest.mark.nightly),
        pytest.param(UNEVEN2, id="uneven"),
        pytest.param(SERVED2 | EIGHT, id="eight-bits-server", marks=pytest.mark.nightly),
        pytest.param(TP_FSDP | EIGHT, id="eight-bits-tp", marks=pytest.mark.nightly),
        pytest.param(ZERO1 | EIGHT, id="eight-bits-zero1", marks=pytest.mark.nightly),
    ],
)
def test_the_same_layout_goes_on_bit_by_bit(layout: dict[str, Any], tmp_path: Path) -> None:
    """In float32, three steps after a checkpoint of two are exactly the last three of five, on every rank."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task
    from tests.executor.workers import train_part

    task = Task(tiny_llama() if "tp" in layout else tiny_mixtral(), ragged=True)
    plan = make_plan(task.shape, **layout, formats=FLOAT32)
    whole = run_ranks(plan.mesh.world, train_part, plan, task, None, 5, tmp_path / "whole")
    run_ranks(plan.mesh.world, train_part, plan, task, None, 2, tmp_path / "half")
    rest = run_ranks(plan.mesh.world, train_part, plan, task, tmp_path / "half", 5, tmp_path / "rest")
    for (losses, parameters, _), (more, others, _) in zip(whole, rest, strict=True):
        assert losses[2:] == more
        assert all(parameters[name].equal(value) for name, value in others.items())


def test_each_rank_gets_its_random_numbers_back(tmp_path: Path) -> None:
    """After loading on as many ranks, every rank draws what it would have drawn, whatever it was seeded with."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import random_numbers

    plan = make_plan(**FSDP2)
    before, after = (
        run_ranks(2, random_numbers, plan, tmp_path / "saved", seed, loads) for seed, loads in ((5, False), (77, True))
    )
    assert before == after
    assert before[0] != before[1]


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    """Saving into a folder that exists is refused on every rank, and the folder stays complete."""
    from strategist.runs.checkpoints import flaw
    from tests.executor.harness import run_ranks
    from tests.executor.workers import save_twice

    assert run_ranks(2, save_twice, make_plan(**FSDP2), tmp_path / "once") == ["EXISTS", "EXISTS"]
    assert flaw(tmp_path / "once") is None
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


@pytest.mark.parametrize(
    "layout", [pytest.param(FSDP2, id="fsdp"), pytest.param(TP_PP, id="tp-pp", marks=pytest.mark.nightly)]
)
def test_float16_goes_on_with_its_loss_scale(layout: dict[str, Any], tmp_path: Path) -> None:
    """A step whose gradients overflowed counts as done, also when it was the first and the optimizer has no state yet: after a
    checkpoint behind it, and after one in the middle of an interval, losses and loss scales are those of the run without a stop."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import stopped_in_float16

    formats = replace(FLOAT32, compute="float16")
    plan = make_plan(**layout, formats=formats)
    for whole, after_one, after_three in run_ranks(plan.mesh.world, stopped_in_float16, plan, tmp_path):
        scales = [scale for _, scale in whole]
        assert (scales[1], scales[2], scales[3]) == (scales[1], scales[1], 2 * scales[1])
        assert after_one == whole[1:]
        assert after_three == whole[3:]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(FSDP2, id="fsdp"),
        pytest.param(SINGLE, id="single"),
        pytest.param(DDP2, id="ddp", marks=pytest.mark.nightly),
        pytest.param(HOST, id="host", marks=pytest.mark.nightly),
        pytest.param(NVME2, id="drive"),
        pytest.param(FSDP2 | EIGHT, id="eight-bits", marks=pytest.mark.nightly),
        pytest.param(TILED | EIGHT, id="tiles-eight-bits"),
        pytest.param(EP_FSDP, id="ep", marks=pytest.mark.nightly),
        pytest.param(TP_PP, id="tp-pp", marks=pytest.mark.nightly),
    ],
)
def test_what_is_written_in_the_background_is_what_was_there_when_it_began(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    """Training goes on while a checkpoint is written; loaded, it gives the weights, the losses and the order of samples of the
    step after which it began, bit by bit."""
    from strategist.runs.checkpoints import flaw
    from tests.executor.harness import run_ranks
    from tests.executor.workers import saved_in_background

    shape = tiny_mixtral() if "ep" in layout else tiny_llama()
    plan = make_plan(shape, **layout, formats=FLOAT32)
    for went_on, resumed in run_ranks(plan.mesh.world, saved_in_background, plan, tmp_path / "saved"):
        assert went_on == resumed
    assert flaw(tmp_path / "saved") is None
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_cannot_be_written_in_the_background_is_said_later(tmp_path: Path) -> None:
    """A disk that is full for one rank does not stop the steps; whoever waits for the checkpoint hears of it, on every rank; no folder
    has its name, and the one before is whole."""
    from strategist.runs.checkpoints import flaw
    from tests.executor.harness import run_ranks
    from tests.executor.workers import full_in_background

    for code, steps in run_ranks(2, full_in_background, make_plan(**FSDP2), tmp_path):
        assert (code, steps) == ("IO", 2)
    assert flaw(tmp_path / "first") is None
    assert not (tmp_path / "second").exists()


def test_moments_in_eight_bits_pass_through_layouts_with_the_same_blocks(tmp_path: Path) -> None:
    """Loaded and saved again under one process, in slices, on a drive, on the host and as replicas, the moments of two shards are the same bytes:
    training that goes on with them is bit by bit that without a stop."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task
    from tests.executor.workers import train_part

    task, start = Task(WIDE), tmp_path / "0"

    def trained(layout: dict[str, Any], start: Path | None, until: int, target: Path) -> list[Any]:
        plan = make_plan(WIDE, **layout, **EIGHT, formats=FLOAT32)
        return run_ranks(plan.mesh.world, train_part, plan, task, start, until, target)

    whole = trained(FSDP2, None, 5, tmp_path / "whole")
    trained(FSDP2, None, 2, start)
    for number, layout in enumerate((SINGLE, TILED, NVME2, SINGLE | {"offload": "optimizer"}, DDP2), 1):
        trained(layout, start, 2, tmp_path / str(number))
        start = tmp_path / str(number)
    rest = trained(FSDP2, start, 5, tmp_path / "rest")
    for (losses, parameters, _), (more, others, _) in zip(whole, rest, strict=True):
        assert losses[2:] == more
        assert all(parameters[name].equal(value) for name, value in others.items())


@pytest.mark.parametrize(
    ("written", "asked", "said"),
    [
        pytest.param(FSDP2 | EIGHT, FSDP4 | EIGHT, "other blocks", id="quarters of halves"),
        pytest.param(
            FSDP2, FSDP2 | EIGHT, "another model or optimizer", id="numbers as codes", marks=pytest.mark.nightly
        ),
        pytest.param(FSDP2 | EIGHT, NVME2, "another model or optimizer", id="codes as numbers"),
    ],
)
def test_moments_that_mean_something_else_are_refused(
    written: dict[str, Any], asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Blocks that another cut has torn apart, and codes where numbers are wanted, are refused in a sentence on every rank; the
    session trains on as if nothing had been loaded."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task
    from tests.executor.workers import refused_load, train_part

    first, second = (make_plan(WIDE, **layout, formats=FLOAT32) for layout in (written, asked))
    run_ranks(first.mesh.world, train_part, first, Task(WIDE), None, 1, tmp_path / "saved")
    for code, sentence, untouched in run_ranks(second.mesh.world, refused_load, second, tmp_path / "saved", WIDE):
        assert (code, untouched) == ("FACTS_DIFFER", True)
        assert said in sentence


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def _flip(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def _cut(folder: Path, name: str) -> None:
    with open(folder / name, "r+b") as file:
        file.truncate(100)


def _bomb(folder: Path, name: str) -> None:
    """Metadata that runs code, in a checkpoint whose manifest agrees with it."""
    (folder / name).write_bytes(pickle.dumps(Bomb(folder.parent / "canary")))
    _agree(folder, name)


def _agree(folder: Path, name: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    mark = mark_of(folder / name)
    manifest["files"][name] = {"size": mark.size, "sha256": mark.sha256}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _elsewhere(folder: Path, name: str) -> None:
    """Metadata that is well made but reads a file that the manifest does not list."""
    metadata = pickle.loads((folder / name).read_bytes())
    metadata.storage_data = {k: replace(v, relative_path="../other") for k, v in metadata.storage_data.items()}
    (folder / name).write_bytes(pickle.dumps(metadata))
    _agree(folder, name)


def _escape(folder: Path, _name: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../other"] = manifest["files"].pop("__1_0.distcp")
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")


DAMAGE: dict[str, tuple[Callable[[Path, str], None], str, str]] = {
    "a flipped bit": (_flip, "__0_0.distcp", "DIGEST"),
    "a flipped bit of the metadata": (_flip, ".metadata", "DIGEST"),
    "a truncated shard": (_cut, "__1_0.distcp", "DIGEST"),
    "a missing shard": (lambda folder, name: (folder / name).unlink(), "__1_0.distcp", "DIGEST"),
    "a link instead of a shard": (_link, "__1_0.distcp", "DIGEST"),
    "no manifest": (lambda folder, name: (folder / name).unlink(), MANIFEST, "FILE_NOT_FOUND"),
    "an empty manifest": (lambda folder, name: (folder / name).write_text(""), MANIFEST, "EMPTY_FILE"),
    "a manifest of other folders": (_escape, MANIFEST, "KIND"),
    "metadata that run code": (_bomb, ".metadata", "KIND"),
    "metadata of other files": (_elsewhere, ".metadata", "KIND"),
}


@pytest.mark.parametrize(("damage", "name", "code"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path, str], None], name: str, code: str, tmp_path_factory: pytest.TempPathFactory, saved: Path
) -> None:
    """Every rank raises the same error, nothing is executed, and the session trains on as if nothing had been loaded."""
    import shutil

    from tests.executor.harness import run_ranks
    from tests.executor.workers import refused_load

    folder = tmp_path_factory.mktemp("damaged") / "saved"
    shutil.copytree(saved, folder)
    damage(folder, name)
    for got, sentence, untouched in run_ranks(2, refused_load, make_plan(**FSDP2), folder, tiny_llama()):
        assert got == code, sentence
        assert sentence.endswith(".")
        assert untouched
    assert not (folder.parent / "canary").exists()


@pytest.mark.parametrize("changes", [{"layers": 3}, {"layers": 1}, {"ffn_hidden": 32}, {"qkv_bias": True}])
def test_a_checkpoint_of_another_model_is_refused(changes: dict[str, Any], saved: Path) -> None:
    """More layers, fewer, other widths, further tensors: refused before anything changes."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import refused_load

    shape = tiny_llama(**changes)
    for got, sentence, untouched in run_ranks(2, refused_load, make_plan(shape, **FSDP2), saved, shape):
        assert (got, untouched) == ("FACTS_DIFFER", True), sentence


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint of two ranks after one step."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task
    from tests.executor.workers import train_part

    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    run_ranks(2, train_part, make_plan(**FSDP2), Task(tiny_llama()), None, 1, folder)
    return folder
