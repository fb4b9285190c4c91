"""Classes that a row leaves out, read off its free text: which precision, sharding, recomputation and schedule its words stand for.

The normalised columns (`precision_class`, `zero_class`, `recompute_class`) decide where they are filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from strategist.accuracy.table import Run, Unexpressed
from strategist.facts.adapters import TARGETS
from strategist.facts.workload import Optimizer, Precision

Words = tuple[tuple[str, str], ...]

_PRECISIONS: tuple[tuple[str, Precision], ...] = (
    (r"fp4", "fp4"),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half|\bamp\b|^16-(?:mixed|true)$", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32|float32|single|^32-true$", "fp32"),
)
_SHARDINGS: Words = (
    (r"no[ _]shard|^0$", "0"),
    (r"^1$", "1"),
    (r"^2$", "2"),
    (r"^3$", "3"),
    (r"zero[ _-]?\+\+", ""),
    (r"hsdp|hybrid", "hsdp"),
    (r"^z-?3\b", "3"),
    (r"^z-?2\b|zero[ _-]?offload", "2"),
    (r"^z-?1\b", "1"),
    (r"^z-?0\b", "0"),
    (r"(?:zero|stage)[ _-]?(?:stage[ _-]?)?3", "3"),
    (r"(?:zero|stage)[ _-]?(?:stage[ _-]?)?2", "2"),
    (r"(?:zero|stage)[ _-]?(?:stage[ _-]?)?1", "1"),
    (r"(?:zero|stage)[ _-]?(?:stage[ _-]?)?0", "0"),
    (r"grad[ _]op", "2"),
    (r"fsdp|full[ _]shard|fully[ _]shard", "3"),
    (r"dist(?:ributed)?[ _-]?(?:fused[ _-]?)?(?:opt|adam)", "1"),
    (r"ddp|data[ _-]?parallel|^(?:no(?:ne)?|n/?a|-)$", "0"),
)
_RECOMPUTES: Words = (
    (r"some layers|partial|every (?:other|second)|\d+ (?:of \d+ )?layers", "partial"),
    (r"selective|\bsac\b|minimal|\bonly\b|attention core|core attention", "selective"),
    (r"^no\b|none|\boff\b|false|disabled|without", "none"),
    (r"full|whole|all layers|checkpoint|^yes|^on$|true|uniform", "full"),
)
_SCHEDULES: Words = (
    (r"dualpipev", "dualpipev"),
    (r"zbv", "zbv"),
    (r"zb-?h1|zero[ -]bubble", "zb_h1"),
    (r"looped[ _-]?bfs|breadth[ -]first", "looped_bfs"),
    (r"gpipe", "gpipe"),
)
_TASKS: Words = ((r"qlora", "qlora"), (r"lora", "lora"))
_OFFLOADS: Words = (
    (r"activation|partial", ""),
    (r"^(?:no(?:ne)?|off|false|0|n/?a)\b|^-$", "none"),
    (r"nvme|infinity", "nvme"),
    (r"param|weight", "parameters"),
    (r"optim|adam|state", "optimizer"),
)
_SWITCHES: Words = (
    (r"^(?:no(?:ne)?|off|false|0|n/?a|n|eager)\b|^-$", "no"),
    (r"^(?:yes|on|true|1|y|oom)\b|torch\.?compile|inductor", "yes"),
)
_UNMODELLED_SCHEDULES = re.compile(r"dualpipe(?!v)|\bv-(?:half|min)\b|zbb|zb-?2p|zb-?h2|chimera")
_ALL_TO_ALL = re.compile(r"ulysses|\bcp[ _=:-]*(?:a2a|all-to-all)|(?:a2a|all-to-all) (?:cp|context)")
_EIGHT_BITS = re.compile(r"8[ _-]?bit")


def with_classes(run: Run) -> Run:
    """The row with the classes that its text stands for. Raises Unexpressed for words about recomputation that name no policy."""
    found = {
        "zero_class": _first(_SHARDINGS, run.get("zero_stage_or_fsdp") or run.get("framework", "")),
        "recompute_class": "" if run.get("recompute_class") else _recompute(run.get("recompute", "")),
    }
    return {**run, **{name: word for name, word in found.items() if word and not run.get(name)}}


def precision_of(run: Run) -> Precision:
    """The number format of the matrix products. Raises Unexpressed for a row without one that is known."""
    said = run.get("precision_class") or run.get("precision", "")
    found = next((word for pattern, word in _PRECISIONS if re.search(pattern, said.lower())), None)
    if found is None:
        raise Unexpressed(f"precision {said} has no model" if said else "precision is not stated")
    return found


def schedule_of(run: Run, pp: int, vp: int) -> str:
    """The schedule of the pipeline: as the row says, else interleaved for chunks and 1F1B for whole stages. Raises Unexpressed for
    one without a model."""
    said = run.get("sharding_detail", "").lower()
    if pp == 1:
        return "none"
    if unknown := _UNMODELLED_SCHEDULES.search(said):
        raise Unexpressed(f"schedule {unknown[0]} has no model")
    return _first(_SCHEDULES, said) or ("interleaved" if vp > 1 else "1f1b")


def context_parallel_of(run: Run, cp: int) -> str:
    """Whether keys and values travel in a ring or heads are exchanged for tokens; a ring where the row does not say."""
    said = " ".join(run.get(name, "") for name in ("framework", "sharding_detail", "attention_impl")).lower()
    return "none" if cp == 1 else "all-to-all" if _ALL_TO_ALL.search(said) else "ring"


def optimizer_of(run: Run, known: tuple[str, ...]) -> Optimizer:
    """The optimizer whose state the framework is known to hold; AdamW for what is like it or not stated."""
    said = run.get("optimizer", "").lower()
    if _EIGHT_BITS.search(said) and "adamw8bit" in known:
        return "adamw8bit"
    return "sgd" if "sgd" in said and "sgd" in known else "adamw"


def adapters_of(run: Run) -> str:
    """Whether adapters are trained: lora, qlora, or nothing for whole weights."""
    return _first(_TASKS, run.get("task", ""))


_RANK = re.compile(r"\b(?:rank|r ?=) ?(\d+)")
_ADAPTED: Mapping[str, tuple[str, ...]] = {
    **{f"{word}_proj": (word,) for word in TARGETS},
    "linear_qkv": ("q", "k", "v"), "linear_proj": ("o",), "linear_fc1": ("gate", "up"), "linear_fc2": ("down",),
    "adapters on every matrix": TARGETS,
}  # fmt: skip
"""Matrices beside which adapters stand, by the names of huggingface/transformers (models/llama/modeling_llama.py) and NVIDIA/Megatron-LM
(megatron/core/transformer), and the words of these tables."""


def adapters_stated(run: Run) -> tuple[int, tuple[str, ...]] | None:
    """The rank of a run's adapters and the matrices they stand beside; None where it does not say both."""
    said = run.get("sharding_detail", "").lower()
    rank, named = _RANK.search(said), [own for name, own in _ADAPTED.items() if name in said]
    targets = tuple(word for word in TARGETS if any(word in own for own in named))
    return (int(rank[1]), targets) if rank and targets and int(rank[1]) > 0 else None


def offload_of(run: Run) -> str:
    """Which state rests in the host's memory, none where the row says nothing. Raises Unexpressed for words that name none that is known,
    and where the sharding is of a kind that offloads and nobody says what."""
    said, sharding = run.get("offload", ""), run.get("zero_stage_or_fsdp", "").lower()
    found = _first(_OFFLOADS, said) if said else "none"
    if not said and "offload" in sharding:
        found = "optimizer" if re.search(r"zero[ _-]?offload", sharding) else ""
        said = sharding
    if not found:
        raise Unexpressed(f"offload {said}: which state moves is not stated, or it is one that has no model")
    return found


def switch_of(run: Run, column: str, known: str = "") -> bool | None:
    """What a cell says that is yes or no; None where it is empty or a word of `known`. Raises Unexpressed for other words."""
    said = run.get(column, "")
    if not said or said.lower() == known:
        return None
    found = _first(_SWITCHES, said)
    if not found:
        raise Unexpressed(f"{column} {said}: neither yes nor no")
    return found == "yes"


def _recompute(said: str) -> str:
    found = _first(_RECOMPUTES, said)
    if said and not found:
        raise Unexpressed(f"recompute {said}: neither none, selective nor full")
    return found


def _first(words: Words, said: str) -> str:
    low = said.lower()
    return next((word for pattern, word in words if re.search(pattern, low)), "") if low else ""
