"""What nobody said is filled in so that a question stays possible: small figures with independent derivations."""

from __future__ import annotations

import pytest

from strategist.api import recommend
from strategist.ask import Given, complete
from strategist.errors import InputError
from strategist.facts.job import Job

MACHINES = ("cpu:3", "dgx-h100", "dgx-h100:64", "dgx-h100:1000")


def asked(hardware: str, **more: float | str) -> Job:
    """The job of a small model on some machines."""
    return complete(Given(model="gpt2", hardware=hardware, **more)).question.job  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", MACHINES)
def test_the_usual_batch_gives_every_device_a_sequence(hardware: str) -> None:
    """On any number of devices, more than usual batches have sequences among them, every device gets equally many, at least one;
    said micro-batches and accumulation divide it too."""
    world = asked(hardware).cluster.world
    for said in ({}, {"micro_batch": 3}, {"micro_batch": 2, "grad_accum": 5}):
        batch = asked(hardware, **said).workload.global_batch
        assert batch >= world
        assert batch % (world * said.get("micro_batch", 1) * said.get("grad_accum", 1)) == 0


@pytest.mark.parametrize("said", [{"micro_batch": 3, "grad_accum": 5}, {"micro_batch": 7}, {"grad_accum": 7}, {"pin": "micro_batch=3,tp=2"}])  # fmt: skip
def test_the_usual_batch_is_one_that_some_layout_makes(said: dict[str, float | str]) -> None:
    """Whatever part of the batch's product is fixed, the number of sequences that nobody said is one that a plan can have: 3 x 5 x 24 replicas are
    none on eight devices."""
    plan = recommend("gpt2", "dgx-h100", **said)  # type: ignore[arg-type]
    own = plan.strategy.micro_batch * plan.strategy.accumulation * plan.mesh.dp_replicate * plan.mesh.dp_shard
    assert own == plan.workload.global_batch


@pytest.mark.parametrize("strategy", ["dp=8,mbs=3", "dp=8,micro_batch=3,accumulation=5", "tp=2,accumulation=7"])
def test_the_usual_batch_goes_with_the_layout_that_is_given(strategy: str) -> None:
    """A micro-batch in a layout moves the batch as --micro-batch does."""
    pins = dict(part.split("=") for part in strategy.split(","))
    each = int(pins.get("mbs", pins.get("micro_batch", 1))) * int(pins.get("accumulation", 1))
    batch = asked("dgx-h100", strategy=strategy).workload.global_batch
    assert batch % (each * 8 // int(pins.get("tp", 1))) == 0


@pytest.mark.parametrize("said", [{"micro_batch": 2**24, "grad_accum": 2**24}, {"strategy": "mbs=134217728,accumulation=134217728"}])  # fmt: skip
def test_no_batch_is_assumed_that_nobody_may_say(said: dict[str, float | str]) -> None:
    """Numbers that are allowed alone make no batch together that is beyond the limit of --global-batch: 64 bits would not hold its bytes."""
    with pytest.raises(InputError) as refused:
        asked("dgx-h100", **said)
    assert (refused.value.code, refused.value.flag) == ("TOO_LARGE", "--global-batch")


@pytest.mark.parametrize(
    ("hardware", "precision"),
    [
        ("dgx-h100", "bf16"),
        ("dgx-2", "fp16"),
        ("aws-g4dn.12xlarge", "fp16"),
        ("cpu:2", "fp32"),
        ("ws-2x-2080ti-nvlink", "fp16"),
    ],
)
def test_the_usual_precision_is_one_in_which_the_device_multiplies(hardware: str, precision: str) -> None:
    """Cards from before bf16 compute in fp16, and CPUs in fp32; whoever names one gets that one."""
    assert asked(hardware).workload.precision == precision
    assert asked(hardware, precision="fp32").workload.precision == "fp32"


def test_a_card_that_is_slow_in_half_precision_computes_in_fp32() -> None:
    """Consumer cards from before tensor cores have hardly any units for fp16."""
    job = complete(Given(model="gpt2", gpu="gtx-1080ti", gpus_per_node=2)).question.job
    assert job.workload.precision == "fp32"


@pytest.mark.parametrize("share", [0.0, 0.05, 0.25, 0.5])
def test_headroom_is_room_that_stays_free(share: float) -> None:
    """What a plan may use and what must stay free are the device's memory together."""
    job = asked("dgx-h100", headroom=share)
    memory = job.cluster.smallest.memory_bytes
    assert 0 <= memory * (1 - share) - job.usable_bytes < 1
    assert job.usable_bytes <= memory


@pytest.mark.parametrize(
    ("gpus", "nodes", "batch"),
    [(8, 4, 256), (6, 1, 264), (8, 3, 288), (8, 5, 320), (6, 5, 300), (3, 1, 264), (8, 64, 512)],
)
def test_what_every_device_takes_of_the_usual_batch_has_divisors(gpus: int, nodes: int, batch: int) -> None:
    """Devices whose number is no power of two share a few more sequences than the usual 256: 11 or 43 for each would leave micro-batches of one."""
    assert (
        complete(
            Given(model="llama-3.2-1b", gpu="h100", gpus_per_node=gpus, nodes=nodes)
        ).question.job.workload.global_batch
        == batch
    )
