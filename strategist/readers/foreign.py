"""What a reader gets and what it gives back; faults by name from the table of traps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Finding, Said
from strategist.errors import nearest, shown
from strategist.facts.adapters import TARGETS
from strategist.facts.key_ranges import key_ranges
from strategist.facts.model import ModelShape
from strategist.records import dataclass

Says = Mapping[str, Said]
FORMATS = {"fp32": "float32", "no": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
"""Short names of number formats, which most frameworks share."""
IN_BF16: dict[str, Said] = {"parameter": "bfloat16", "master": "none"}
"""Weights that rest in bf16, with no copies in fp32."""
FSDP_STAGES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""Stages of ZeRO by the name of FSDP's strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file as it was found: its path, its text, and the value of a JSON, YAML or TOML file (None for scripts)."""

    path: str
    text: str
    value: Any = None

    @property
    def table(self) -> Mapping[str, Any]:
        """The value when it is a table, else an empty one."""
        return self.value if isinstance(self.value, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """A choice that a file leaves to whoever starts it: its name in the Plan's words, the argument that makes it, and its text, such as $1."""

    choice: str
    argument: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What a reader made of a file. `ranks` are those that are started, where the file says so; what it leaves unsaid is not among what
    it says."""

    says: Says
    findings: tuple[Finding, ...]
    unsaid: tuple[Unsaid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One framework's files: how they are recognised, and what they say. `profile` names whose kernels and formats a
    prediction counts with; `on_nodes` finds what is wrong on nodes of so many devices alone; `model` is the model that a file
    describes or names, if it does; with `says_gradients` their formats are the file's, not the profile's;
    what it keeps is the profile's, or that row of `keeping`. `commands` are those that a job of the
    file runs, as a shell would read them."""

    name: str
    title: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source, int | None], Foreign]
    profile: str
    on_nodes: Callable[[Source, int], Iterable[Finding]] = lambda source, devices: ()
    model: Callable[[Source, str], ModelShape | None] = lambda source, flag: None
    says_gradients: bool = False
    keeping: str = ""
    commands: Callable[[Source], str] = lambda source: ""


@cache
def traps() -> Mapping[str, Mapping[str, str]]:
    """Every fault that a reader can find, by name."""
    return {row["name"]: row for row in rows("traps")}


@cache
def keys_of(framework: str, section: str = "") -> tuple[str, ...]:
    """The keys that a framework knows in a section."""
    found = next(row for row in rows("framework_keys") if (row["framework"], row["section"]) == (framework, section))
    return tuple(found["keys"])


def finding(rule: str, place: str, **words: Any) -> Finding:
    """The fault of that name at a place, with its numbers and words filled in."""
    row = traps()[rule]
    told = {name: word if isinstance(word, (int, float)) else _readable(str(word)) for name, word in words.items()}
    return Finding(
        rule=rule,
        kind="failure" if row["kind"] == "failure" else "warning",
        place=place,
        sentence=row["sentence"].format(**told),
        fix=row["fix"].format(**told),
        source=row["source"],
    )


def _readable(text: str) -> str:
    """Our own sentences whole, foreign words without what steers a terminal."""
    return "".join(c if c.isprintable() else shown(c) for c in text)


def near(word: str, known: Iterable[str]) -> str:
    """The key that was probably meant, or the advice to take this one out."""
    close = nearest(word, tuple(known))
    return f"Write {close[0]}." if close else f"Take {shown(word)} out."


ALMOST, SLIPS = 0.85, 2
"""How alike two arguments are, by difflib's ratio and letters more or less, when one is taken for the other misspelt."""


def is_misspelt(name: str, known: str) -> bool:
    """Whether a name is a known one with a slip in it, rather than another one."""
    return abs(len(name) - len(known)) <= SLIPS and SequenceMatcher(None, name, known).ratio() >= ALMOST


def odd_arguments(names: Iterable[str], known: tuple[str, ...], title: str) -> Iterator[Finding]:
    """Arguments that a parser does not know: misspelt ones each, and all others, which a program may have added, at once."""
    rest: list[str] = []
    for name in names:
        close = nearest(name, known, 1)
        if close and is_misspelt(name, close[0]):
            words = {"title": title, "where": "among its arguments", "swallows": "its parser stops"}
            yield finding("unknown-key", shown(name), key=shown(name), near=f"Write {close[0]}.", **words)
        else:
            rest.append(name)
    if rest:
        yield finding("foreign-arguments", shown(rest[0]), names=", ".join(shown(name) for name in rest), title=title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Where a framework looks at its keys, and what it does there with one that it does not know: places of `tables_at`."""

    framework: str
    title: str
    swallows: Mapping[str, str]

    def unknown(self, table: Mapping[str, Any]) -> Iterator[Finding]:
        """A finding for every key, at the top and in the sections, that the framework does not know."""
        for section, fate in self.swallows.items():
            for inner in tables_at(table, section):
                yield from self._in(inner, section, fate)

    def _in(self, table: Mapping[str, Any], section: str, fate: str) -> Iterator[Finding]:
        known = keys_of(self.framework, section)
        for key in table:
            if key not in known and not key.startswith("_"):  # people write comments under such names
                where = f"in {section}" if section else "at its top level"
                place = f"{section}.{key}" if section else key
                words = {"title": self.title, "key": shown(key), "where": where, "swallows": fate}
                yield self._old(section, key, place, words) or finding(
                    "unknown-key", shown(place), near=near(key, known), **words
                )

    def _old(self, section: str, key: str, place: str, words: Mapping[str, str]) -> Finding | None:
        """The finding for a key that earlier releases knew."""
        then = key_ranges(self.framework, section).get(key)
        if then is None or then.last is None:
            return None
        near = f"Write {then.instead}." if then.instead else f"Take {key} out."
        return finding("old-key", place, until=f"{then.framework} {then.last}", near=near, **words)


def whole(value: Any) -> int | None:
    """A positive whole number, also as text; None for anything else, such as "auto"."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and value > 0 else None


_NUMBER = re.compile(r"[+-]?[0-9]+")


def unsaid(
    said: Mapping[str, Any], numbers: Mapping[str, str], words: Mapping[str, str] | None = None, dashes: str = ""
) -> tuple[Unsaid, ...]:
    """Choices whose arguments are there and are no numbers, or of words, still say to a shell what it is to put there."""
    texts = {name: str(said[name]) for name in (*numbers, *(words or {})) if name in said}
    return tuple(
        Unsaid(choice=choice, argument=f"{dashes}{name}", text=texts[name])
        for name, choice in {**numbers, **(words or {})}.items()
        if name in texts and (set("$`") & set(texts[name]) or (name in numbers and not _NUMBER.fullmatch(texts[name])))
    )


def without(says: Says, open_ones: Iterable[Unsaid], *more: str) -> dict[str, Said]:
    """What is said beside choices that are left open, and more that follows from them."""
    left = {*(one.choice for one in open_ones), *more}
    return {name: word for name, word in says.items() if name not in left}


def tables_at(table: Mapping[str, Any], place: str) -> Iterator[Mapping[str, Any]]:
    """The tables at a place: names joined by dots, where * is each item of a list or of a table; "" is the top level."""
    found: Iterable[Any] = (table,)
    for part in filter(None, place.split(".")):
        found = [inner for outer in found for inner in _inside(outer, part)]
    yield from (inner for inner in found if isinstance(inner, dict))


def _inside(outer: Any, part: str) -> Iterable[Any]:
    if isinstance(outer, dict):
        return outer.values() if part == "*" else (outer.get(part),)
    return outer if part == "*" and isinstance(outer, list) else ()


def section_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a table; empty when it is missing or is something else."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def switched(table: Mapping[str, Any], name: str) -> bool:
    """Whether a switch is on; texts count as YAML and JSON writers use them."""
    return str(table.get(name, False)).lower() == "true"


def told(**values: Said | None) -> dict[str, Said]:
    """What is known of it."""
    return {name: value for name, value in values.items() if value is not None}


def unknown_word(place: str, title: str, word: Any, known: Iterable[str]) -> Iterator[Finding]:
    """A word that is none of those that a framework knows at a place; None is no word."""
    if word is not None and word not in (names := tuple(known)):
        words = {"title": title, "word": shown(str(word)), "known": ", ".join(names)}
        yield finding("unknown-word", place, near=near(str(word), names), **words)


OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "optimi_adamw": "adamw",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit",
    "ao_adamw_8bit": "adamw8bit",
    "sgd": "sgd",
    "decoupled_adamw": "adamw",
    "decoupled_sgdw": "sgd",
}
"""What the optimizers of Transformers (training_args.py, OptimizerNames), axolotl (utils/schemas/enums.py, CustomSupportedOptimizers) and
llm-foundry (registry of optimizers) hold, in the Plan's words."""


ONE_KERNEL = frozenset(name for name in OPTIMIZERS if "fused" in name or name.startswith("paged"))
"""Those that update each weight in one kernel, torch's, apex' or bitsandbytes', and make nothing of all weights at once."""


def update_of(optimizer: str) -> str | None:
    """How an optimizer cuts its update, where its name says that it is not in operations of torch."""
    return "one" if optimizer in ONE_KERNEL else None


def fsdp_stage(word: Any) -> int | None:
    """The stage of ZeRO that a name of FSDP's strategies comes to, or the switch that gathered weights are let go after forward; None for
    other words."""
    name = str(word).upper()
    return FSDP_STAGES.get({"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(name, name))


def hybrid_shards(place: str, words: Iterable[Any]) -> Iterator[Finding]:
    """A warning for strategies that shard inside a node, where a file does not say how many devices a node has."""
    named = next((str(word) for word in words if "HYBRID" in str(word).upper()), None)
    if named is not None:
        yield finding("hybrid-shard", place, word=shown(named))


def lora_targets(listed: Any) -> str | None:
    """Matrices with adapters in the Plan's words, where a list or a text names some, and all of them stand in every layer by such names."""
    names = listed if isinstance(listed, list) else str(listed or "").replace(",", " ").split()
    found = [str(name).removesuffix("_proj") for name in names]
    return ",".join(found) if found and set(found) <= set(TARGETS) else None


def uncounted_optimizer(place: str, word: Any) -> Iterator[Finding]:
    """A warning for an optimizer whose states nobody counted here; None is the framework's own choice."""
    if word is not None and str(word).lower() not in OPTIMIZERS:
        yield finding("uncounted-optimizer", place, word=shown(str(word)))


def batch_faults(says: Says, dp: int | None) -> Iterator[Finding]:
    """The identity global batch = micro-batch x accumulation x data-parallel ranks, as far as the numbers are known."""
    batch, micro, accumulation = (says.get(name) for name in ("global_batch", "micro_batch", "accumulation"))
    if not (isinstance(batch, int) and isinstance(micro, int) and isinstance(accumulation, int)):
        return
    each = micro * accumulation
    words = {"batch": batch, "micro": micro, "accumulation": accumulation}
    if dp is not None and batch != each * dp:
        yield finding("batch-product", "global batch", dp=dp, product=each * dp, **words)
    elif dp is None and batch % each:
        yield finding("batch-divides", "global batch", near=max(each, batch // each * each), **words)
