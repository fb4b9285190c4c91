"""A Plan as files for launchers and frameworks. Pure: names and texts come out, nothing is written here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters import zero_plus_plus
from strategist.emitters.accelerate import ACCELERATE
from strategist.emitters.axolotl import AXOLOTL
from strategist.emitters.byteps import BYTEPS
from strategist.emitters.composer import COMPOSER
from strategist.emitters.data_parallel import DATA_PARALLEL_SCRIPT
from strategist.emitters.deepspeed import CONFIG as DEEPSPEEDS
from strategist.emitters.deepspeed import DEEPSPEED
from strategist.emitters.drive import on_drive
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.epl import EPL
from strategist.emitters.kubernetes import KUBERNETES
from strategist.emitters.lightning import FABRIC_TARGET, TRAINER_TARGET
from strategist.emitters.llama_factory import LLAMA_FACTORY
from strategist.emitters.llm_foundry import LLM_FOUNDRY
from strategist.emitters.megatron import MEGATRON
from strategist.emitters.megatron_bridge import MEGATRON_BRIDGE
from strategist.emitters.mp_spawn import MP_SPAWN
from strategist.emitters.mpirun import MPIRUN
from strategist.emitters.nanotron import NANOTRON
from strategist.emitters.parameter_server import PARAMETER_SERVER
from strategist.emitters.quoting import checked_options
from strategist.emitters.ray import RAY
from strategist.emitters.skypilot import SKYPILOT
from strategist.emitters.slurm import SLURM
from strategist.emitters.torchrun import TORCHRUN
from strategist.emitters.torchtitan import TORCHTITAN
from strategist.emitters.transformers import TRANSFORMERS
from strategist.emitters.trl import TRL
from strategist.errors import InputError, did_you_mean

EMITTERS: tuple[Emitter, ...] = (
    TORCHRUN,
    SLURM,
    MP_SPAWN,
    MPIRUN,
    DATA_PARALLEL_SCRIPT,
    PARAMETER_SERVER,
    KUBERNETES,
    RAY,
    SKYPILOT,
    ACCELERATE,
    DEEPSPEED,
    TRANSFORMERS,
    TRL,
    LLAMA_FACTORY,
    AXOLOTL,
    FABRIC_TARGET,
    TRAINER_TARGET,
    COMPOSER,
    LLM_FOUNDRY,
    TORCHTITAN,
    MEGATRON,
    NANOTRON,
    MEGATRON_BRIDGE,
    BYTEPS,
    EPL,
)
"""Every target, in the order of `emit --list`."""

OLD_NAMES = {
    "torch-launch": "torch.distributed.launch is an alias of torchrun for old scripts: emit --to torchrun. Its words are the same without "
    "--use-env, and a script reads LOCAL_RANK instead of --local-rank."
}
"""Names that people know of targets which there are not, and what to do instead."""


def find_emitter(name: str, flag: str = "--to") -> Emitter:
    """The target of that name. Raises InputError CHOICE with the nearest names."""
    known = [emitter.name for emitter in EMITTERS]
    if name not in known:
        raise InputError(
            "CHOICE",
            f"{flag}: there is no target {name!r}.",
            flag=flag,
            value=name,
            hint=OLD_NAMES.get(name) or did_you_mean(name, known),
        )
    return next(emitter for emitter in EMITTERS if emitter.name == name)


def emit(plan: Plan, target: str, options: Options | None = None) -> Files:
    """File names and texts of one target. Raises InputError for options that do not belong into a script or into this plan's,
    ImpossibleError UNSUPPORTED for a plan that the target cannot express."""
    emitter, checked = find_emitter(target), checked_options(options or Options())
    emitter.require(plan)
    files = emitter.write(plan, on_drive(emitter, plan, checked))
    zero_plus_plus.require(plan, checked.zeropp, target, by_deepspeed=DEEPSPEEDS in files)
    return files


@cache
def proofs() -> Mapping[str, Mapping[str, Any]]:
    """How far each target was proven, by name: trained, parsed, or keys. Written by `make test-frameworks` alone."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("proofs.json").read_text("utf-8"))
    return found
