"""A live `nn.Module` becomes a ModelShape by duck typing; torch is never imported, and nothing of the module is run.

A module that carries a Hugging Face configuration is read through it, and the weights are counted all the same. What the
module has otherwise than its configuration says is the module's: how many blocks, and what it gives for a token. Any
other module is looked at: how many weights, which blocks repeat, what Linear and Embedding shapes say. Only a
structure whose every weight is accounted for is called a decoder; everything else is of kind "module".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from strategist.errors import InputError
from strategist.facts.layer_kind import LayerKind, spell
from strategist.facts.model import LOOKED_UP, MAX_LAYERS, RUNS_IN_ORDER, ModelShape, layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.module_parts import Parts, decoder_of, facts_of, plain_tables, resnet_of
from strategist.facts.parameters import behind_head, count, table_width
from strategist.records import dataclass, replace

TRUSTED_DIFFERENCE = 0.25
"""A configuration whose count is farther than this from the module's describes something else."""

_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")
_GIVE_WORDS = ("decoder", "encoder", "hybrid", "ssm", "encdec", "encdec-audio")
"""Kinds of models whose output head is as wide as the vocabulary, where they have one."""


class Weight(Protocol):
    """What is used of a parameter."""

    @property
    def shape(self) -> Any:
        """Its sizes."""

    def numel(self) -> int:
        """Its number of elements."""


class ModuleLike(Protocol):
    """What is used of an `nn.Module`."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, Weight]]:
        """Names and weights, shared ones under each of their names when asked not to remove duplicates."""

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Names and modules, itself included."""

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Names and direct children."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Blocks of one class that stand in one container, in order."""

    name: str
    blocks: tuple[ModuleLike, ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A module that calls its parts one behind the other, each with what the one before gave: names from the module on, in order, and
    which of them are its layers. What stands between two layers goes with the first."""

    parts: tuple[tuple[str, ModuleLike], ...]
    layers: tuple[int, ...]


def is_module(value: object) -> bool:
    """True for anything that offers its parameters and modules the way `nn.Module` does."""
    return all(callable(getattr(value, name, None)) for name in ("named_parameters", "named_modules", "named_children"))


def shape_from_module(module: ModuleLike, flag: str = "model") -> ModelShape:
    """The shape of a module (on any device, meta included), with its exact parameter count, and how many of them are frozen.

    Raises InputError EMPTY for a module without parameters, or without one that is trained.
    """
    total = weights_of(module)
    if not total:
        raise InputError("EMPTY", f"{flag} has no parameters.", flag=flag, hint="Pass a module with weights; the meta device will do.")  # fmt: skip
    frozen = _frozen(module)
    if frozen == total:
        raise InputError(
            "EMPTY",
            f"{flag} has no parameter to train: requires_grad is False for all {total:,} weights.",
            flag=flag,
            value=type(module).__name__,
            hint="Call requires_grad_(True) on the parts that are trained.",
        )
    configured, why = _configured(module, total, flag)
    return replace(_looked_at(module, total, why) if configured is None else configured, frozen=frozen)


def weights_of(*modules: ModuleLike) -> int:
    """Elements of all parameters of some modules; shared ones count once."""
    named = (pair for module in modules for pair in module.named_parameters(remove_duplicate=False))
    return sum({id(weight): weight.numel() for _, weight in named}.values())


def _frozen(module: ModuleLike) -> int:
    """Elements of the parameters that have no gradient; shared ones count once."""
    every = {id(weight): weight for _, weight in module.named_parameters(remove_duplicate=False)}.values()
    return sum(weight.numel() for weight in every if getattr(weight, "requires_grad", True) is False)


def sequence_of(module: ModuleLike) -> Sequence | None:
    """The parts of a `Sequential` whose repeated blocks, directly or in further ones inside it, run in order; None for any other module."""
    stacks = _by_size(module)
    return _in_stack(module, stacks[0]) if stacks else None


def _in_stack(module: ModuleLike, stack: Stack) -> Sequence | None:
    """The same where the blocks of one stack are the layers."""
    parts = tuple(_in_order(module, stack.name))
    blocks = {id(block) for block in stack.blocks}
    layers = tuple(place for place, (_, part) in enumerate(parts) if id(part) in blocks)
    return Sequence(parts, layers) if len(layers) == len(stack.blocks) else None


def _in_order(module: ModuleLike, towards: str, prefix: str = "") -> Iterator[tuple[str, ModuleLike]]:
    """What a module calls one behind the other, opened up as far as the container of that name; nothing where it does more than that."""
    if not only_calls(module):
        return
    for name, child in module.named_children():
        own = f"{prefix}{name}"
        if towards == own or towards.startswith(f"{own}."):
            yield from _in_order(child, towards, f"{own}.")
        else:
            yield own, child


def only_calls(module: ModuleLike) -> bool:
    """Whether a module's forward is that of torch's Sequential."""
    kind = next((base for base in type(module).__mro__ if base.__name__ == "Sequential"), None)
    return kind is not None and getattr(type(module), "forward", None) is vars(kind).get("forward")


def _configured(module: ModuleLike, total: int, flag: str) -> tuple[ModelShape | None, str]:
    """The shape by the module's own Hugging Face configuration; else None and why it was not used."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    values = to_dict() if callable(to_dict) else None
    if not isinstance(values, Mapping) or "model_type" not in values:
        return None, "it carries no Hugging Face configuration"
    try:
        shape = shape_from_config(values, f"{flag}.config", is_built=True)
    except InputError as problem:
        return None, f"its configuration cannot be read ({problem.message})"
    stacks = _by_size(module)
    outputs = _outputs(module, stacks, shape)
    has_head = outputs == shape.vocab
    described = shape if has_head else replace(shape, tied=True, lm_head_bias=False)  # the table alone, and no head
    held = _as_many_blocks(module, stacks, described, total)
    difference = total - count(held).total
    if abs(difference) > TRUSTED_DIFFERENCE * total:
        return None, f"its configuration describes {count(held).total} weights and the module has {total}"
    held = replace(held, extra_parameters=held.extra_parameters + difference)
    if behind_head(held) < 0:
        return (
            None,
            f"it has {-difference} weights less than its configuration describes, and they are none outside its layers",
        )
    notes = [f"Weights counted in the module: {total}{_against(difference)}"]
    if held.layers != shape.layers:
        notes.append(
            f"It has {held.layers} layers where its configuration says {shape.layers}: the module's number is taken."
        )
    if not has_head:
        notes.append(_without_head(shape, outputs))
        held = _with_outputs(held, outputs)
    return replace(held, source=f"module of class {type(module).__name__}", notes=(*notes, *shape.notes)), ""


def _against(difference: int) -> str:
    """How the count of a module compares with that of its configuration."""
    if not difference:
        return ", as its configuration says."
    how = "counted as extra" if difference > 0 else "taken off what lies behind the layers"
    return f", {difference:+d} against its configuration; the difference is {how}."


def _as_many_blocks(module: ModuleLike, stacks: list[Stack], shape: ModelShape, total: int) -> ModelShape:
    """The shape with as many layers as the module has blocks, where that brings its weights nearer to those of the module: somebody cut
    layers off, or stacked more of them, and left the configuration as it was. Of layers of several sorts the first are taken."""
    if not stacks or shape.kind not in (*_GIVE_WORDS, "vit") or shape.enc_layers:
        return shape
    container = dict(module.named_modules())[stacks[0].name]
    blocks = sum(1 for _, child in container.named_children() if weights_of(child))
    kinds = layer_sequence(shape)
    if blocks > MAX_LAYERS or (blocks > len(kinds) and len(set(kinds)) > 1):
        return shape
    held = _with_layers(shape, kinds[:blocks] if blocks <= len(kinds) else kinds[:1] * blocks)
    return held if abs(total - count(held).total) < abs(total - count(shape).total) else shape


def _with_layers(shape: ModelShape, kinds: tuple[LayerKind, ...]) -> ModelShape:
    """The shape with these layers and no others."""
    moe = shape.moe and replace(shape.moe, layers=sum(kind.ffn == "moe" for kind in kinds))
    are_alike = len(set(kinds)) == 1 and not shape.pattern and shape.mix is None
    return replace(shape, layers=len(kinds), moe=moe, pattern="" if are_alike else spell(kinds), parameters_stated=None)


def _outputs(module: ModuleLike, stacks: list[Stack], shape: ModelShape) -> int:
    """What the module gives for a token: the vocabulary's words where some part outside the blocks is as wide; else the outputs of the
    last Linear there, such as labels; 0 for hidden states alone (transformers 5.23.0 src/transformers/modeling_utils.py,
    get_output_embeddings: None without an output head)."""
    blocks = tuple(f"{stack.name}." for stack in stacks)
    outside = [part for name, part in module.named_modules() if not name.startswith(blocks)]
    widths = [part.out_features for part in outside if type(getattr(part, "out_features", None)) is int]
    own = getattr(module, "get_output_embeddings", None)
    if shape.kind not in _GIVE_WORDS or shape.vocab in widths or (callable(own) and own() is not None):
        return shape.vocab
    last = widths[-1] if widths else shape.hidden
    if last != shape.hidden:
        return last
    return 0 if callable(own) else shape.vocab  # a class of somebody's own may multiply by its table


def _without_head(shape: ModelShape, outputs: int) -> str:
    """What is said of a module that gives no words."""
    given = f"{outputs} numbers for a token" if outputs else "hidden states"
    return f"It has no output head of {shape.vocab} words: it gives {given}, and logits and loss are of these."


def _with_outputs(shape: ModelShape, outputs: int) -> ModelShape:
    """A shape without a head that gives so many numbers for a token, by a matrix of its own. Its table is one of the weights that no field
    explains, as in modules that are looked at, and with all else outside of the layers in one unit (executor/steps/shard_data.py)."""
    table = shape.vocab * table_width(shape)
    head = outputs * table_width(shape)
    extra = (*shape.extra, (LOOKED_UP, table))
    return replace(shape, vocab=outputs, extra_parameters=shape.extra_parameters + table - head, extra=extra)


def _looked_at(module: ModuleLike, total: int, why: str) -> ModelShape:
    stacks = _by_size(module)
    best = stacks[0] if stacks else Stack("", (module,))
    notes = [f"Read from the module itself: {why}."]
    if not stacks:
        notes.append("It repeats no blocks, so it is one indivisible layer.")
    if len(stacks) > 1:
        others = ", ".join(f"{len(stack.blocks)} in {stack.name}" for stack in stacks[1:4])
        notes.append(f"Layers are those of {best.name}; other repeated blocks: {others}.")
    parts = _parts(module, best, total)
    decoder = decoder_of(parts)
    if decoder is not None:
        notes.append("Every weight is accounted for by a decoder of this shape.")
        return replace(decoder, name=parts.name, source=f"module of class {parts.name}", notes=tuple(notes))
    network = resnet_of(parts)
    if network is not None:
        image = dict(network.extra)["image"]
        notes = [
            notes[0],
            f"Every weight is accounted for by a ResNet; images of {image} x {image} pixels are assumed.",
        ]
        return replace(network, name=parts.name, source=f"module of class {parts.name}", notes=tuple(notes))
    in_order = bool(stacks) and _in_stack(module, best) is not None
    return _opaque(parts, notes, in_order=in_order)


def _by_size(module: ModuleLike) -> list[Stack]:
    """All stacks, that with most weights first."""
    return sorted(_stacks(module), key=lambda stack: weights_of(*stack.blocks), reverse=True)


def _stacks(module: ModuleLike) -> list[Stack]:
    """Containers that hold at least two blocks of one class, outermost only."""
    found: list[Stack] = []
    for name, candidate in module.named_modules():
        inside_another = any(name.startswith(f"{stack.name}.") or not stack.name for stack in found)
        if inside_another or not any(base.__name__ in _CONTAINERS for base in type(candidate).__mro__):
            continue
        children = [child for _, child in candidate.named_children() if weights_of(child)]
        common = Counter(type(child) for child in children).most_common(1)
        if common and common[0][1] > 1:
            found.append(Stack(name, tuple(child for child in children if type(child) is common[0][0])))
    return found


def _parts(module: ModuleLike, stack: Stack, total: int) -> Parts:
    sizes = [weights_of(block) for block in stack.blocks]
    return Parts(
        name=type(module).__name__,
        total=total,
        blocks=len(sizes),
        blocks_total=weights_of(*stack.blocks),
        largest=max(sizes),
        equal=len(set(sizes)) == 1,
        modules=tuple(inner for _, inner in module.named_modules()),
        block=stack.blocks[0],
    )


def _opaque(parts: Parts, notes: list[str], *, in_order: bool) -> ModelShape:
    """A shape that says no more than what was read, with every weight counted in its layers or outside them."""
    facts = facts_of(parts)
    unread = [name for name in ("vocab", "hidden", "heads", "ffn_hidden") if not facts.get(name)]
    bare = ModelShape(
        name=parts.name,
        family="module",
        kind="module",
        formula="module",
        layers=min(parts.blocks, MAX_LAYERS),
        pos="none",
        norm="none",
        final_norm=False,
        parameters_stated=parts.total,
        extra=(("largest_layer_parameters", parts.largest), *(((RUNS_IN_ORDER, 1),) if in_order else ())),
        tables=plain_tables(parts),
        source=f"module of class {parts.name}",
        notes=(*notes, f"Could not be read: {', '.join(unread)}.") if unread else tuple(notes),
        **{"hidden": 0, "vocab": 0} | facts,
    )
    return _with_all_weights(bare, parts)


def _with_all_weights(bare: ModelShape, parts: Parts) -> ModelShape:
    """The weights that the facts do not explain, in the layers evenly or outside; facts that explain too much go."""
    outside = count(replace(bare, layers=0)).total
    explained = count(replace(bare, layers=1)).total - outside
    if explained > parts.blocks_total // bare.layers or outside > parts.total - parts.blocks_total:
        bare = replace(bare, ffn_hidden=0, heads=0, kv_heads=0, head_dim=0, vocab=0)
        explained = outside = 0
    per_layer = parts.blocks_total // bare.layers - explained
    extra = parts.total - outside - bare.layers * (explained + per_layer)
    return replace(bare, layer_extra_parameters=per_layer, extra_parameters=extra)
