"""What a target can say: allowed values of every field that a layout has. Whatever is not named must be plain.

A new field of Mesh or Strategy is therefore refused by every framework's target until somebody maps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from strategist.document.plan import MESH_AXES, Dtype, Mesh, NumberFormats, Plan, Share, Strategy
from strategist.errors import ImpossibleError, shown
from strategist.facts.buildable import OWN_MODULE
from strategist.records import dataclass, names_of, replace

EVERY: tuple[Any, ...] = ()
"""Any value of a field can be said."""

FLOAT32 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float32")
LOW: tuple[Dtype, ...] = ("bfloat16", "float16")
AUTOCAST = tuple(replace(FLOAT32, compute=low, reduce=reduce) for low in LOW for reduce in ("float32", low))
NATIVE = (FLOAT32, *AUTOCAST)
"""Formats of PyTorch's DDP and FSDP2: fp32 weights and gradients, computed with, and perhaps reduced, in another format."""

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")

_SHAPED_BY_OTHERS = ("mesh.order", "strategy.stages", "strategy.profile")
"""Fields that no target needs to say: the order is checked as a whole, stages follow from mesh.pp, and the profile says
whose kernels the prediction is for, not how the job runs."""

_CAUSAL = ("decoder", "hybrid", "ssm")
PAIR = "encdec"
"""An encoder with a decoder behind it, both of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Values that a target can say one by one but not together; `sentence` names the fields and says why."""

    holds: Callable[[Plan], bool]
    sentence: str


def only_where(condition: Callable[[Plan], bool], clash: Clash) -> Clash:
    """A clash for the plans for which a condition holds: what one of a target's engines cannot say."""
    return replace(clash, holds=lambda plan: condition(plan) and clash.holds(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What a framework can express. `values` maps paths in the Plan to allowed values, `why` says why not the others.

    framework: name and version as a sentence's subject. hint: what to do with plans that are refused.
    """

    framework: str
    values: Mapping[str, tuple[Any, ...]]
    why: Mapping[str, str]
    clashes: tuple[Clash, ...] = ()
    hint: str = "Emit it to torchrun, which runs it on strategist's executor, or pin another layout."

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that may be larger than one."""
        return tuple(axis for axis in AXES if self.allowed(f"mesh.{axis}") == EVERY)

    def allowed(self, place: str) -> tuple[Any, ...]:
        """Values of a field that can be said; EVERY for all."""
        return self.values.get(place, (plain_values()[place],))

    def require(self, plan: Plan, target: str) -> None:
        """Raise ImpossibleError UNSUPPORTED with a sentence for every field of the plan that cannot be said."""
        found = tuple(self.obstacles(plan))
        if found:
            raise ImpossibleError(
                "UNSUPPORTED",
                f"{target} cannot express this plan: {' '.join(found)}",
                flag="--to",
                value=target,
                hint=self._way_out(plan, target),
            )

    def _way_out(self, plan: Plan, target: str) -> str:
        """What to do instead. No target's script trains still other kinds of models."""
        if plan.model.kind not in (*_CAUSAL, PAIR):
            return OWN_MODULE
        return f"{self.hint} `plan --frontend {target}` keeps to layouts that it can say."

    def obstacles(self, plan: Plan) -> Iterator[str]:
        """Sentences about fields of the plan, one by one and together, that cannot be said."""
        for place in plain_values():
            allowed = self.allowed(place)
            if allowed != EVERY and (value := attrgetter(place)(plan)) not in allowed:
                yield f"{self.framework} cannot say {place} = {_word(value)}{_others(allowed)}. {self.why.get(place, WHY.get(place, ''))}".rstrip()
        if _inner_to_outer(plan) != _inner_to_outer(plan, MESH_AXES):
            yield f"{self.framework} orders ranks as {', '.join(MESH_AXES)}, not by mesh.order = {', '.join(plan.mesh.order)}."
        yield from (clash.sentence for clash in self.clashes if clash.holds(plan))


def _inner_to_outer(plan: Plan, order: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Axes larger than one in rank order: the others do not matter."""
    return tuple(axis for axis in order or plan.mesh.order if plan.mesh.size(axis) > 1)


@cache
def plain_values() -> Mapping[str, Any]:
    """The path of each field that a target must map, and the value that says nothing."""
    records = (("mesh", Mesh()), ("strategy", Strategy(stages=(), formats=FLOAT32)))
    places = {f"{name}.{field}": getattr(record, field) for name, record in records for field in names_of(type(record))}
    fields = {place: value for place, value in places.items() if place not in _SHAPED_BY_OTHERS}
    return fields | {"workload.precision": "fp32", "workload.target_len": None, "model.method": "full"}


WHY = {
    "workload.target_len": "Its files train decoders alone, whose sequences have one length.",
    "model.method": "Adapters are put into a model by a training script, not by these files.",
    "strategy.compression": "Hooks of DDP are not mapped for it.",
    "strategy.tables": "No process of it holds tables of embeddings for others.",
    "strategy.uneven_batch": "It gives every replica equally many micro-batches.",
    "strategy.recompute_layers": "It recomputes all layers or none.",
    "strategy.recompute_every": "It recomputes all layers or none.",
    "strategy.cp_inner": "It has no groups inside context parallelism.",
    "strategy.recompute_stages": "It recomputes all layers or none.",
    "strategy.optimizer": "Which weights another Muon updates, and how far, or which states are in eight bits there, was not compared.",
}
"""Why a field cannot be said where a framework has no reason of its own."""

DATA_PARALLEL: Mapping[str, tuple[Any, ...]] = {
    "mesh.dp_replicate": EVERY,
    "mesh.dp_shard": EVERY,
    "strategy.micro_batch": EVERY,
    "strategy.accumulation": EVERY,
    "strategy.recompute": ("none", "full"),
    "strategy.optimizer": ("adamw", "sgd"),
    "strategy.formats": NATIVE,
    "strategy.backend": ("nccl", "gloo"),
    "workload.precision": ("fp32", "bf16", "fp16"),
}
"""What every framework of data parallelism can say."""

SHARDS_GO_WITH_ZERO = Clash(
    holds=lambda plan: (plan.mesh.dp_shard > 1) != (plan.strategy.zero > 0),
    sentence="strategy.zero = 2 and 3 go with mesh.dp_shard above 1, and 0 goes without.",
)
REDUCED_AS_KEPT = Clash(
    holds=lambda plan: (
        plan.mesh.dp_shard == 1 and plan.strategy.formats in AUTOCAST and plan.strategy.formats.reduce in LOW
    ),
    sentence="strategy.formats.reduce is that of the fp32 gradients in DDP.",
)
NO_SHARDED_SCALER = Clash(
    holds=lambda plan: (
        plan.mesh.dp_shard > 1
        and plan.strategy.zero > 1
        and plan.strategy.formats in AUTOCAST
        and plan.strategy.formats.compute == "float16"
    ),
    sentence="strategy.formats of float16 and FSDP2 need a scaler of sharded gradients, which was not tried.",
)


def _is_plain_decoder(plan: Plan) -> bool:
    """Whether each layer is attention, on key-value heads that tensor ranks share evenly, and one feed-forward part."""
    model = plan.model
    special = model.moe or model.mla or model.ssm or model.mix
    return model.kind == "decoder" and not special and model.kv_heads % plan.mesh.tp == 0


WHOLE_TOKENS = "Transformers' models take the number of tokens from hidden states, so these stay whole on tensor ranks."
"""Why there is no sequence parallelism in models of Transformers."""

CUT_TENSORS = (
    Clash(
        holds=lambda plan: plan.mesh.tp > 1 and not _is_plain_decoder(plan),
        sentence="mesh.tp was tried with decoders of attention and one feed-forward part a layer, on key-value heads that it "
        "divides; this model is another.",
    ),
    Clash(
        holds=lambda plan: plan.mesh.tp > 1 and plan.strategy.formats.compute == "float16",
        sentence="mesh.tp and strategy.formats of float16 need a scaler of gradients that are cut, which was not tried.",
    ),
    Clash(
        holds=lambda plan: plan.mesh.tp > 1 and plan.strategy.compression != "none",
        sentence="strategy.compression is a hook of DDP, which mesh.tp leaves to FSDP2.",
    ),
)
"""What frameworks that cut a model of Transformers by its own plan cannot say together."""

HOOKS: Mapping[str, tuple[Any, ...]] = {
    "strategy.compression": ("none", "bf16", "fp16", "powersgd"),
    "strategy.compression_rank": EVERY,
}
"""What torch's own hooks of DDP do to gradients."""
NO_TOP_K = "torch has no hook that sends the largest elements; that one is strategist's own."
HOOKS_ARE_FOR_DDP = Clash(
    holds=lambda plan: (
        plan.strategy.compression != "none"
        and (
            plan.mesh.data_parallel == 1
            or plan.mesh.dp_shard > 1
            or plan.strategy.zero > 0
            or plan.strategy.offload != "none"
        )
    ),
    sentence="strategy.compression is a hook of DDP: it needs mesh.dp_replicate above 1, and neither shards nor offloading.",
)
HOOKS_UNSCALED = Clash(
    holds=lambda plan: plan.strategy.compression != "none" and plan.strategy.formats not in (FLOAT32, *AUTOCAST[:2]),
    sentence="strategy.compression was tried with fp32 and bfloat16 strategy.formats: gradients that a loss scale made larger "
    "were not.",
)

EVEN_STAGES = Clash(
    holds=lambda plan: plan.mesh.pp > 1 and not has_even_stages(plan),
    sentence="mesh.pp: strategy.stages are uneven, and its stages are even.",
)
EXPERTS_OF_A_MODEL = Clash(
    holds=lambda plan: plan.model.moe is None and (plan.mesh.ep > 1 or plan.mesh.etp > 1),
    sentence="mesh.ep and mesh.etp need a model with experts.",
)


def has_even_stages(plan: Plan) -> bool:
    """Whether the runs of layers, in order, are equally long, the first ones a layer longer where it does not divide."""
    chunks = range(plan.strategy.virtual_stages)
    runs = [end - first for chunk in chunks for first, end in (stage.layers[chunk] for stage in plan.strategy.stages)]
    each, rest = divmod(plan.model.depth, len(runs))
    return runs == [each + (index < rest) for index in range(len(runs))]


PAIRS_NOT_IN_UNITS = Clash(
    holds=lambda plan: plan.model.kind == PAIR and plan.mesh.dp_shard > 1,
    sentence="strategy.zero = 2 and 3 are FSDP2 of Accelerate, which puts the table that an encoder and its decoder share into two units; torch "
    "refuses that.",
)


def causal_models(framework: str) -> Clash:
    """The emitted script trains language models; other kinds need another model class and other data."""
    sentence = f"The script for {framework} trains causal language models; model.kind is another."
    return Clash(holds=lambda plan: plan.model.kind not in _CAUSAL, sentence=sentence)


def language_models(framework: str) -> Clash:
    """The same of a script that trains encoders with decoders, too."""
    sentence = f"The script for {framework} trains causal language models and encoders with decoders of text; model.kind is another."
    return Clash(holds=lambda plan: plan.model.kind not in (*_CAUSAL, PAIR), sentence=sentence)


def _word(value: Any) -> str:
    """A value of a field in words."""
    if isinstance(value, NumberFormats):
        said = f"{value.parameter} parameters, {value.gradient} gradients, {value.reduce} reduction, {value.compute} compute"
        return f"({said}, master {value.master})"
    if isinstance(value, tuple):
        return "/".join(
            f"{own.replicas} x {own.micro_batches}" if isinstance(own, Share) else str(own) for own in value
        )
    return shown(str(value))


def _others(values: tuple[Any, ...]) -> str:
    """What can be said instead; number formats are too many words, and nothing is none."""
    return (
        ""
        if isinstance(values[0], NumberFormats) or values[0] in ((), None)
        else f"; it has {' or '.join(_word(value) for value in values)}"
    )
