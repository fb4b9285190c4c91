"""A rehearsal runs the program that trains: its bytes are those of traces and of real ranks, its seconds add up."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strategist
from strategist import load_observed, load_plan
from strategist.document.estimate import TIME_TERMS, MemoryTerm
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import dump
from tests.cli.harness import ROOT, Refusal, assert_refuses, completed, edited, hand_written, process
from tests.examples import by_night
from tests.executor.harness import run_alone
from tests.measure.own_models import NO_MODELS, write_models
from tests.measure.real_ranks import measured_rises
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SHAPE = tiny_llama(layers=4, hidden=128, vocab=1024, ffn_hidden=352, head_dim=16, max_seq=128)
SHORT = replace(SHAPE, layers=2)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

WIDE = tiny_llama(layers=2, hidden=256, vocab=4096, ffn_hidden=704, head_dim=32, max_seq=512)
"""For bfloat16 shards: torch's `_chunk_cat` copies what it pads inside itself on the CPU, which no trace sees."""

GPT2 = tiny_gpt2(layers=2, hidden=128, vocab=1024, ffn_hidden=512, head_dim=16, max_seq=128, pos_rows=128)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"formats": FLOAT32},
    "one-bf16": {"formats": BFLOAT16},
    "ddp": {"formats": FLOAT32, "dp_replicate": 2, "accumulation": 5},
    "zero1-bf16": {"formats": BFLOAT16, "dp_shard": 2, "zero": 1},
    "fsdp": {"formats": FLOAT32, "dp_shard": 4, "zero": 3},
    "fsdp-bf16-full": {
        "formats": BFLOAT16,
        "dp_shard": 4,
        "zero": 3,
        "recompute": "full",
        "accumulation": 4,
        "shape": WIDE,
    },
    "hsdp": {"formats": BFLOAT16, "dp_replicate": 2, "dp_shard": 2, "zero": 2, "shape": WIDE},
    "tp": {"formats": FLOAT32, "tp": 2, "sequence_parallel": True},
    "tp-selective": {"formats": BFLOAT16, "tp": 2, "recompute": "selective"},
    "tp-fsdp": {"formats": BFLOAT16, "tp": 2, "dp_shard": 2, "zero": 3, "shape": WIDE},
    "gpt2": {"formats": FLOAT32, "dp_shard": 2, "zero": 3, "shape": GPT2},
    "ring": {"formats": FLOAT32, "cp": 4, "context_parallel": "ring", "dp_replicate": 2},
    "hierarchical": {"formats": FLOAT32, "cp": 4, "cp_inner": 2, "context_parallel": "hierarchical", "zero": 3},
    "exchange": {"formats": FLOAT32, "cp": 2, "context_parallel": "all-to-all", "dp_shard": 2, "zero": 3},
}


DDP_FAMILY: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero3": {"dp_shard": 2, "zero": 3},
}


def _both(plan: Plan) -> tuple[Observed, Observed]:
    return strategist.trace(plan), strategist.rehearse(plan, steps=1)


def both(plan: Plan) -> tuple[Observed, Observed]:
    """The plan traced and rehearsed, in a process without threads of its own."""
    found: tuple[Observed, Observed] = run_alone(_both, plan, timeout_s=300.0)
    return found


def adds_up(rank: RankObservation) -> bool:
    """Whether a rank was timed, in known terms that make up the step."""
    clock = rank.time
    assert clock is not None
    known = {term.name for term in clock.terms} <= set(TIME_TERMS)
    whole = sum(term.exposed_ns for term in clock.terms) == clock.step_ns > 0
    return known and whole and min(term.exposed_ns for term in clock.terms) >= 0 and clock.launch_floor_ns > 0


@pytest.mark.parametrize("name", by_night(LAYOUTS, ("one-bf16", "fsdp", "hsdp", "tp-selective", "exchange")))
def test_the_rehearsed_peak_is_the_traced_one(name: str) -> None:
    """The CPU's allocator hands out what the trace says, to a thousandth; terms of time make up the step."""
    choices = dict(LAYOUTS[name])
    shape = choices.pop("shape", SHORT)
    plan = make_plan(shape, seq_len=256 if shape is WIDE else 64, **choices)
    traced, rehearsed = both(plan)
    (before,), (after,) = traced.ranks, rehearsed.ranks
    assert after.memory.peak_bytes == pytest.approx(before.memory.peak_bytes, rel=1e-3)
    assert (after.memory.reserved, after.memory.slack) == (0, None)
    assert adds_up(after)
    assert rehearsed.rung == "rehearsed"
    assert rehearsed.plan == traced.plan
    used = {"fake-collectives": plan.mesh.world > 1, "repeated-micro-batches": plan.strategy.accumulation > 3}
    assert {row.name for row in after.substitutions} == {name for name, is_used in used.items() if is_used}


def _rehearsed_rise(plan: Plan) -> int:
    from strategist.measure.models import real_model
    from strategist.measure.rehearse_rank import held_on_cpu

    before, peak = held_on_cpu(plan, 0, real_model(plan.model))
    return peak - before


@pytest.mark.parametrize(
    "layout",
    [
        {"formats": FLOAT32, "pp": 2, "accumulation": 4},
        {"formats": BFLOAT16, "pp": 2, "accumulation": 4, "virtual_stages": 2},
    ],
    ids=["1f1b", "interleaved-bf16"],
)
def test_a_rehearsed_first_stage_holds_what_a_real_one_does(layout: dict[str, Any]) -> None:
    """What is sent lives until its sending was waited for, with gloo and here: the peaks are the same to the byte."""
    plan = make_plan(SHAPE, seq_len=64, **layout)
    assert run_alone(_rehearsed_rise, plan, timeout_s=120.0) == min(measured_rises(plan))


def test_a_first_stage_holds_one_boundary_more_than_its_trace() -> None:
    """The trace's sends keep nothing, those of a rehearsal do: one micro-batch of hidden states; the last stage has none."""
    plan = make_plan(SHAPE, seq_len=64, formats=FLOAT32, pp=2, accumulation=4)
    traced, rehearsed = both(plan)
    more = [after.memory.peak_bytes - before.memory.peak_bytes for before, after in zip(traced.ranks, rehearsed.ranks, strict=True)]  # fmt: skip
    assert more == [64 * SHAPE.hidden * 4, 0]
    assert all(adds_up(rank) for rank in rehearsed.ranks)


def test_experts_are_routed_and_their_dispatch_is_timed() -> None:
    """A mixture chooses its experts itself; sorting tokens is a term of its own."""
    plan = make_plan(tiny_mixtral(), formats=FLOAT32, dp_shard=2, zero=3)
    (rank,) = run_alone(_rehearsed, plan, timeout_s=120.0).ranks
    assert adds_up(rank)
    assert {"moe_dispatch", "matmul", "loss", "dp"} <= {term.name for term in rank.time.terms}


def test_tokens_travel_to_experts_that_are_not_there() -> None:
    """Where ranks share experts, every peer is taken to send this rank as many tokens as it gets from it: as many rows come
    back as went out, sorting them is timed, and the loss stays a number."""
    plan = make_plan(tiny_mixtral(), formats=FLOAT32, ep=2, dp_shard=4, zero=2, accumulation=2)
    (rank,) = run_alone(_rehearsed, plan, timeout_s=120.0).ranks
    assert adds_up(rank)
    assert {"moe_dispatch", "matmul", "loss", "dp"} <= {term.name for term in rank.time.terms}


def test_experts_are_chosen_alike_when_a_layer_runs_again() -> None:
    """What is gathered again for recomputation is what was gathered before, so that the router chooses as it did."""
    plan = make_plan(tiny_mixtral(), formats=FLOAT32, dp_shard=2, zero=3, recompute="full")
    (rank,) = run_alone(_rehearsed, plan, timeout_s=120.0).ranks
    assert adds_up(rank)


def _rehearsed(plan: Plan) -> Observed:
    return strategist.rehearse(plan, steps=1)


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_gradients_do_not_grow_from_layer_to_layer(sequence_parallel: bool) -> None:
    """Under tp a table of tokens is cut by rows, and what another rank's row would give is not sent by anybody: as zeros, it made
    gradients of 1e17 in 16 layers, and no numbers in more. They are as large as one process makes them."""
    shape = tiny_llama(layers=12, hidden=256, ffn_hidden=512, head_dim=32, vocab=1024, max_seq=128)
    alone, cut = (
        run_alone(_embedding_gradient, make_plan(shape, formats=FLOAT32, seq_len=128, **choices), timeout_s=120.0)
        for choices in ({}, {"tp": 2, "sequence_parallel": sequence_parallel})
    )
    assert alone / 4 < cut < alone * 4


def _embedding_gradient(plan: Plan) -> float:
    """The largest gradient of what the first layer is given, in a first step."""
    import torch

    from strategist.measure.models import real_model
    from strategist.measure.rehearse_rank import stage_set

    seen: list[float] = []
    with stage_set(plan, 0, torch.device("cpu")) as rehearsal:
        session = rehearsal.session(real_model(plan.model))

        def watch(_module: object, _inputs: object, hidden: torch.Tensor) -> None:
            hidden.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))

        session.parts.model.token_embedding.register_forward_hook(watch)
        session.step(rehearsal.batch(session))
    return max(seen)


def test_what_others_send_is_noise() -> None:
    """Gathered and received numbers are neither zero nor NaN, as wide as this rank's own, which stay as they were."""
    gathered, received, own, kept = run_alone(_noise, timeout_s=60.0)
    assert 0.9 < gathered < 1.1
    assert 0.9 < received < 1.1
    assert own
    assert kept


def _noise() -> tuple[float, float, bool, bool]:
    import torch
    import torch.distributed as dist

    from strategist.measure import noise

    noise.register()
    dist.init_process_group(noise.BACKEND, rank=1, world_size=4, store=dist.HashStore())
    part = 0.5 * torch.randn(4096)
    whole = torch.zeros(4 * 4096)
    dist.all_gather_into_tensor(whole, part)
    others = torch.cat([whole[:4096], whole[2 * 4096 :]])
    boundary = torch.full((4096,), float("nan"), dtype=torch.bfloat16)
    dist.recv(boundary, src=0)
    counts = torch.tensor([3, 5])
    summed = counts.clone()
    dist.all_reduce(summed)
    everybody = torch.zeros(8, dtype=torch.long)
    dist.all_gather_into_tensor(everybody, counts)
    dist.destroy_process_group()
    plausible = bool(others.ne(0).all()) and bool(boundary.isfinite().all())
    widths = float(others.std() / part.std()), float(boundary.float().std() / noise.WIDTH)
    is_kept = torch.equal(summed, counts) and everybody.tolist() == [3, 5] * 4
    return *widths, torch.equal(whole[4096:8192], part) and plausible, is_kept


class Ticks:
    """A clock that reads what it is told, one reading after the other."""

    def __init__(self, readings: Sequence[int]) -> None:
        self._readings = iter(readings)

    def mark(self) -> int:
        return next(self._readings)

    def ns(self, begin: int, end: int) -> int:
        return end - begin

    def settle(self) -> None: ...

    def is_main(self) -> bool:
        return True

    def lead(self) -> None: ...


def test_the_second_micro_batch_stands_for_those_left_out() -> None:
    """Begin at 0, micro-batches from 10, 30 and 60, end at 100, six left out; from 35 to 40 the second one fakes."""
    from strategist.measure.stopwatch import Meter

    meter = Meter(Ticks([0, 30, 35, 40, 60, 100]), left_out=6)
    meter.begin()
    meter.forward()
    meter.forward()
    with meter.faking():
        pass
    meter.forward()
    meter.end()
    assert meter.fake_ns == 7 * 5
    assert meter.step_ns == 30 + 7 * (30 - 5) + 40


def test_terms_make_up_the_step_whatever_was_read() -> None:
    """What no operation took is the host's; readings beyond the step are cut in proportion; sides of streams stay."""
    from strategist.measure.rehearse_rank import Share, settled

    short = settled([{"matmul": Share(600, 50, 100), "dp": Share(0, 70, 0)}], 1000, "rehearsed")
    assert {term.name: term.exposed_ns for term in short} == {"matmul": 600, "host": 400, "dp": 0}
    assert {term.name: term.hidden_ns for term in short} == {"matmul": 50, "host": 0, "dp": 70}
    assert [term.recomputed_ns for term in short if term.name == "matmul"] == [100]
    steps = [{"matmul": Share(900)}, {"matmul": Share(3000)}, {"matmul": Share(1500), "optimizer": Share(0)}]
    long = settled([{**step, "attention": Share(500)} for step in steps], 1000, "rehearsed")
    assert {term.name: term.exposed_ns for term in long} == {"matmul": 750, "attention": 250, "host": 0, "optimizer": 0}
    assert all(term.basis == "rehearsed" for term in (*short, *long))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan of two ranks and a module of models."""
    hand_written(tmp_path, dp_shard=2, zero=3, formats=FLOAT32)
    write_models(tmp_path)
    return tmp_path


def test_a_rehearsal_is_written_loaded_and_set_beside_its_plan(folder: Path) -> None:
    """The file is the document that --json prints; explain sets step and peak beside the plan's, and marks a term of each."""
    ran = process("rehearse", "plan.json", "--steps", "1", "--out", "rehearsal.json", "--json", cwd=folder)
    assert ran.code == 0, ran.out
    assert ran.err == ""
    text = (folder / "rehearsal.json").read_text(encoding="utf-8")
    observed = load_observed(str(folder / "rehearsal.json"))
    assert json.loads(text) == ran.document
    assert dump(observed) == text
    shown = process("explain", "plan.json", "--with", "rehearsal.json", "--json", cwd=folder)
    step, memory = shown.document["tree"]["children"]
    clock = observed.ranks[0].time
    assert clock is not None
    assert step["observed"] == [clock.step_ns]
    assert memory["observed"] == [observed.ranks[0].memory.peak_bytes]
    leaves = [leaf for child in step["children"] for leaf in (child["children"] or [child])]
    assert sum(leaf["is_worst"] for leaf in leaves) == 1
    seen = {leaf["name"]: leaf["observed"][0] for leaf in leaves}
    assert {term.name: term.exposed_ns for term in clock.terms} == {n: v for n, v in seen.items() if v is not None}
    words = process("explain", "plan.json", "--with", "rehearsal.json", cwd=folder).out
    assert "rehearsed" in words
    assert "without wire" in words


def test_a_plan_for_gpus_is_rehearsed_on_a_cpu_only_when_told(folder: Path) -> None:
    """Without a GPU and without --device the answer is a sentence; with --device cpu it is a CPU's rehearsal."""
    hand_written(folder, "gpu.json", formats=BFLOAT16, backend="nccl")
    refused = process("rehearse", "gpu.json", "--json", cwd=folder, **NO_GPU)
    assert (refused.code, refused.error["code"]) == (3, "E_UNSUPPORTED_DEVICE")
    assert "--device cpu" in refused.error["hint"]
    ran = process("rehearse", "gpu.json", "--device", "cpu", "--steps", "1", "--json", cwd=folder, **NO_GPU)
    assert (ran.code, ran.document["device"]) == (0, "one CPU core"), ran.out


def _too_large(path: Path) -> None:
    plan = load_plan(str(path))
    stages = tuple(replace(stage, terms=(MemoryTerm("activations", 10**15),)) for stage in plan.memory.stages)
    peak = replace(plan.memory.peak, value=1e15, low=1e15, high=1e15)
    path.write_text(dump(replace(plan, memory=replace(plan.memory, stages=stages, peak=peak))), encoding="utf-8")


def _unbuilt(path: Path) -> None:
    path.write_text(dump(make_plan(tiling=2, formats=FLOAT32)), encoding="utf-8")


REFUSALS = {
    "another version": Refusal(4, "E_SCHEMA_VERSION", (), edited(format="strategist-plan/2")),
    "a strategy without a program": Refusal(3, "E_UNSUPPORTED", (), _unbuilt),
    "more than there is": Refusal(3, "E_UNSUPPORTED_DEVICE", (), _too_large),
    "no such ranks": Refusal(2, "E_CHOICE", ("--ranks", "fastest")),
    "no such device": Refusal(2, "E_CHOICE", ("--device", "tpu")),
    "a GPU that is not here": Refusal(3, "E_UNSUPPORTED_DEVICE", ("--device", "cuda:7")),
    "no steps": Refusal(2, "E_TOO_SMALL", ("--steps", "0")),
    "half a step": Refusal(2, "E_INTEGER", ("--steps", "0.5")),
    **NO_MODELS,
}


BY_NIGHT = frozenset(NO_MODELS)
"""`trace` reads functions of models by the same code, and its tests try all of these every time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in BY_NIGHT else name for name in REFUSALS]
)
def test_bad_input_is_a_sentence_and_leaves_nothing(folder: Path, name: str) -> None:
    """Each refusal has its code, its exit code and a hint, and there is no file, not even a part of one."""
    assert_refuses(folder, "rehearse", REFUSALS[name], **NO_GPU)


@pytest.mark.parametrize("name", by_night(DDP_FAMILY, ("ddp", "zero1")))
def test_somebody_s_own_module_is_rehearsed(name: str, folder: Path) -> None:
    """A module that nobody described runs under each layout of the DDP family with real values; its peak is the trace's."""
    hand_written(folder, "own.json", formats=FLOAT32, **DDP_FAMILY[name])
    words = ("own.json", "--model-fn", "own:Tiny", "--json")
    traced, rehearsed = (process(command, *words, cwd=folder, **NO_GPU) for command in ("trace", "rehearse"))
    assert (traced.code, rehearsed.code, rehearsed.document["model"]) == (0, 0, "own:Tiny"), rehearsed.out
    (before,), (after,) = traced.document["ranks"], rehearsed.document["ranks"]
    moments = [sum(term["bytes"] for term in moment["terms"]) for moment in before["memory"]["moments"]]
    assert after["memory"]["allocated"] == pytest.approx(max(moments), rel=0.02)
    assert sum(term["exposed_ns"] for term in after["time"]["terms"]) == after["time"]["step_ns"]


def test_a_model_of_one_s_own_is_not_cut(folder: Path) -> None:
    """Tensor parallelism needs to know the model: the answer is a sentence, as `run` gives it."""
    hand_written(folder, "own.json", formats=FLOAT32, tp=2)
    ran = process("rehearse", "own.json", "--model-fn", "own:Tiny", "--json", cwd=folder, **NO_GPU)
    assert (ran.code, ran.error["code"]) == (3, "E_UNSUPPORTED")


def test_python_takes_a_module_with_its_values() -> None:
    """A live module is rehearsed as it is and stays as it was; what gives no module is refused."""
    assert run_alone(_own_module, timeout_s=120.0) == "E_TYPE"


def _own_module() -> str:
    import torch
    from torch import nn

    from strategist.errors import StrategistError

    plan = make_plan(dp_replicate=2, formats=FLOAT32)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.inner(input_ids)

    before = [parameter.clone() for parameter in model.parameters()]
    (rank,) = strategist.rehearse(plan, Named(), steps=1).ranks
    assert adds_up(rank)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    try:
        strategist.rehearse(plan, lambda: 7, steps=1)
    except StrategistError as error:
        return f"E_{error.code}"
    return ""


def test_the_script_for_gpus_measures_here(tmp_path: Path) -> None:
    """On CPU ranks it writes one line per configuration: bytes within their bars, time by terms, or why not."""
    words = [
        "--cpu",
        "--ranks",
        "2",
        "--models",
        "llama-debug",
        "--layouts",
        "dp_shard=2,zero=3;tp=3",
        "--seq-len",
        "16",
    ]
    folder, seen, rows = (str(tmp_path / name) for name in ("plans", "rehearsed.jsonl", "rows.jsonl"))
    for step in (
        ("prepare", folder, *words),
        ("run", folder, "--steps", "1", "--out", seen),
        ("compare", folder, "--rehearsed", seen, "--out", rows),
    ):
        ran = completed((sys.executable, "-m", "benchmarks.device.rehearse_gpu", *step), cwd=ROOT)
        assert ran.code == 0, ran.err
    lines = [json.loads(row) for row in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    refused, measured = lines
    assert measured["bytes"]["allocated"]["within"]
    assert sum(measured["step"]["rehearsed_ns"].values()) == measured["step"]["step_ns"]
    assert measured["date"]
    assert measured["versions"]["torch"]
    assert (refused["asked"], refused["refused"]) == ("tp=3", "E_DIVISIBILITY")
