"""Lightning: scripts for Fabric and for Trainer, with torchrun as launcher.

Replicas alone are DDP; ZeRO 2 and 3 are FSDP2 under ModelParallelStrategy, in which ZeRO 2 keeps gathered weights after the
forward pass. Tensors are cut there by torch's styles after the plan of the Transformers model; beside them replicas are FSDP2's, too.
ZeRO-1, offloading and low weights beside fp32 masters are DeepSpeed's, whose own JSON lies beside the script. Names as in Lightning
2.6.6. There is no other configuration file: the scripts read the plan.
"""

from __future__ import annotations

from functools import partial

from strategist.document.plan import Plan, Strategy
from strategist.emitters import deepspeed
from strategist.emitters.coverage import (
    CUT_TENSORS,
    DATA_PARALLEL,
    EVERY,
    HOOKS,
    HOOKS_ARE_FOR_DDP,
    HOOKS_UNSCALED,
    NO_SHARDED_SCALER,
    NO_TOP_K,
    REDUCED_AS_KEPT,
    SHARDS_GO_WITH_ZERO,
    WHOLE_TOKENS,
    Clash,
    Coverage,
    causal_models,
    only_where,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.lightning_script import FABRIC, FABRIC_ENGINE, TRAINER, TRAINER_ENGINE
from strategist.emitters.torchrun import job_files
from strategist.records import replace


def by_deepspeed(strategy: Strategy) -> bool:
    """Whether DeepSpeed does the work: what FSDP2 under ModelParallelStrategy has no word for."""
    return strategy.zero == 1 or strategy.offload != "none" or strategy.formats in deepspeed.MASTERED


def _by_deepspeed(plan: Plan) -> bool:
    return by_deepspeed(plan.strategy)


COVERAGE = Coverage(
    framework="Lightning 2.6",
    values={
        **DATA_PARALLEL,
        **HOOKS,
        "mesh.tp": EVERY,
        "strategy.zero": EVERY,
        "strategy.offload": EVERY,
        "strategy.formats": deepspeed.FORMATS,
    },
    why={
        "mesh.pp": "It has no pipeline.",
        "mesh.cp": "It has no context parallelism.",
        "mesh.ep": "It has no expert parallelism.",
        "strategy.sequence_parallel": WHOLE_TOKENS,
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.compression": NO_TOP_K,
        "strategy.compile": "The script does not compile.",
        "strategy.formats": "It keeps fp32 weights, or with DeepSpeed low weights beside fp32 masters.",
        "workload.precision": "Its fp8 and fp4 need Transformer Engine's modules.",
    },
    clashes=(
        *(only_where(_by_deepspeed, clash) for clash in deepspeed.COVERAGE.clashes),
        Clash(
            holds=lambda plan: _by_deepspeed(plan) and plan.strategy.backend == "gloo",
            sentence="strategy.backend = gloo: Lightning's DeepSpeedStrategy, which strategy.zero = 1, offloading and masters need, "
            "stops where no CUDA device is.",
        ),
        Clash(
            holds=lambda plan: _by_deepspeed(plan) and plan.mesh.tp > 1,
            sentence="mesh.tp is cut by torch's styles, without DeepSpeed, which strategy.zero = 1, offloading and masters need.",
        ),
        only_where(lambda plan: not _by_deepspeed(plan), SHARDS_GO_WITH_ZERO),
        REDUCED_AS_KEPT,
        NO_SHARDED_SCALER,
        *CUT_TENSORS,
        HOOKS_ARE_FOR_DDP,
        HOOKS_UNSCALED,
        causal_models("Lightning"),
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)


def _write(train: str, train_by_deepspeed: str, plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh, and deepspeed.json where DeepSpeed does the work."""
    if _by_deepspeed(plan):
        return job_files(plan, options, train_by_deepspeed) | deepspeed.own_file(plan, options)
    return job_files(plan, options, train)


def target(name: str, title: str, scripts: tuple[str, str], coverage: Coverage) -> Emitter:
    """A target of two scripts: without DeepSpeed and with it."""
    return Emitter(
        name=name,
        title=f"{title} with DDP, FSDP2, tensor parallelism or DeepSpeed, a Hugging Face model",
        engine="lightning",
        versions="Lightning 2.6, transformers 5.23, DeepSpeed 0.19.8, torch 2.13",
        write=partial(_write, *scripts),
        axes=coverage.axes,
        coverage=coverage,
        executables=("launch.sh",),
        names_drive=True,
        by_deepspeed=by_deepspeed,
    )


FABRIC_TARGET = target("fabric", "Lightning Fabric", (FABRIC, FABRIC_ENGINE), COVERAGE)
TRAINER_TARGET = target(
    "trainer",
    "Lightning's Trainer",
    (TRAINER, TRAINER_ENGINE),
    replace(
        COVERAGE,
        values={place: values for place, values in COVERAGE.values.items() if place not in HOOKS},
        why={
            **COVERAGE.why,
            "strategy.compression": "Trainer's option for hooks of DDP is without effect on CPUs, so it was not tried.",
        },
    ),
)
