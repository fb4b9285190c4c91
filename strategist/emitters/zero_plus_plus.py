"""ZeRO++ in DeepSpeed's file: a user adds it when emitting, because no plan has a word for it (docs/decisions/0141).

hpz keeps a second copy of the weights inside each node, so that backward passes gather them there; qwz gathers weights as integers of
8 bits, qgz reduces gradients in 4 bits (Wang et al. 2023, arXiv 2306.10209, sections 3.1 to 3.3). Keys as in DeepSpeed 0.19.8,
runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.places import devices_per_node
from strategist.errors import ImpossibleError, require_known
from strategist.facts.parameters import count
from strategist.facts.profile import BYTES
from strategist.units import format_gib

FLAG = "--zeropp"
SWITCHES = {"qwz": "zero_quantized_weights", "qgz": "zero_quantized_gradients"}
SENT = {"qwz": "weights as integers of 8 bits", "qgz": "gradients in 4 bits"}
WORDS = ("hpz", *SWITCHES)


def checked_words(words: Sequence[str]) -> tuple[str, ...]:
    """Some of hpz, qwz and qgz, in this order. Raises InputError CHOICE with the nearest words."""
    for word in words:
        require_known(word, WORDS, f"{FLAG}: there is no {word!r} in ZeRO++; it has {', '.join(WORDS)}.", FLAG)
    return tuple(word for word in WORDS if word in words)


def keys(plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    """The keys of zero_optimization for some words; none for none."""
    second = {"zero_hpz_partition_size": devices_per_node(plan)} if "hpz" in words else {}
    return second | {key: True for word, key in SWITCHES.items() if word in words}


def second_copy_bytes(plan: Plan) -> int:
    """Bytes that each device holds of hpZ's second copy: all weights as they are stored, shared by the devices of a node.
    Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, _partition_param_sec."""
    return -(-count(plan.model).total * int(BYTES[plan.strategy.formats.parameter]) // devices_per_node(plan))


def require(plan: Plan, words: Sequence[str], target: str, *, by_deepspeed: bool) -> None:
    """Raise ImpossibleError UNSUPPORTED for words that a target, whose files for this plan are DeepSpeed's or not, has no place for."""
    if not words:
        return
    sentence = next(_obstacles(plan, words, target, by_deepspeed=by_deepspeed), None)
    if sentence is not None:
        raise ImpossibleError(
            "UNSUPPORTED",
            sentence,
            flag=FLAG,
            value=",".join(words),
            hint=f"Leave {FLAG} or the word away, or plan with --pin zero=3 for several nodes and emit --to deepspeed.",
        )


def _obstacles(plan: Plan, words: Sequence[str], target: str, *, by_deepspeed: bool) -> Iterator[str]:
    if not by_deepspeed:
        yield f"{target} trains this plan without DeepSpeed; ZeRO++ is DeepSpeed's."
    strategy, mesh = plan.strategy, plan.mesh
    if strategy.zero != 3:
        yield f"ZeRO++ changes ZeRO-3 alone; this plan has strategy.zero = {strategy.zero}."
    if strategy.offload != "none":
        yield f"ZeRO++ was not tried beside strategy.offload = {strategy.offload}."
    for axis in ("cp", "tp"):
        if mesh.size(axis) > 1:
            yield f"ZeRO++ was not tried beside mesh.{axis} = {mesh.size(axis)}: its groups are made of neighbours of all ranks."
    if "qgz" in words and strategy.formats.reduce != "float16":
        yield (
            f"qgz needs strategy.formats.reduce = float16: DeepSpeed 0.19's kernel reads gradients as float16 whatever they are; "
            f"here they are {strategy.formats.reduce}."
        )
    nodes, devices = plan.cluster.nodes, devices_per_node(plan)
    if set(words) & {"hpz", "qgz"} and 1 in (nodes, devices):
        yield (
            f"hpz and qgz tell the devices of a node from those of others, on several nodes of several devices; this plan has "
            f"{nodes} of {devices}."
        )
    if "hpz" in words:
        yield from _no_second_copy(plan, devices)


def _no_second_copy(plan: Plan, devices: int) -> Iterator[str]:
    copy, held, usable = second_copy_bytes(plan), plan.memory.worst.device, plan.memory.usable_bytes
    if held + copy > usable:
        yield (
            f"hpz keeps {format_gib(copy)} more on each device, a second copy of the weights shared by the {devices} devices of a node; "
            f"this plan holds {format_gib(held)} of the {format_gib(usable)} that are usable."
        )


def changes(plan: Plan, words: Sequence[str]) -> Iterator[str]:
    """What the words change of what the plan says, in sentences."""
    if "hpz" in words:
        yield f"hpz keeps {format_gib(second_copy_bytes(plan))} more on each device than the plan says; losses stay the same."
    if set(words) & set(SWITCHES):
        sent = " and ".join(what for word, what in SENT.items() if word in words)
        yield f"ZeRO++ sends {sent}: losses are no longer those of ZeRO-3 to the last digit."
