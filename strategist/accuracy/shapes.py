"""A run's model: the catalogue's where the row names one of its width, else a shape from the row's own numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain

from strategist.accuracy.table import Run, Unexpressed, number, whole
from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.model import Kind, ModelShape, Moe
from strategist.facts.model_rows import rows_called, shape_from_row
from strategist.facts.parameters import count
from strategist.facts.sizes import is_size, shape_for_size
from strategist.records import replace

_REMARK = re.compile(r" ?\(.*\)| cut to .*")
_SIZE = re.compile(r"[-_ ](\d+(?:\.\d+)?)(T|B|M)$", re.IGNORECASE)
_SIZES = {"T": 1e12, "B": 1e9, "M": 1e6}
_FIRST_DENSE = re.compile(r"first (\d+) layers? dense")
_FORM = re.compile(r"\bgelu_\w+")
_FAR = 1.5
"""A number of parameters so many times the catalogue's, or less of it, is another model's; names round theirs."""
_FEW = 4
"""So many names are worth being asked which."""
_ANSWERS = ("sft",)
"""What encoders are trained for with a head of their own in place of the vocabulary's."""
_LOOSE = re.compile(r"\bv(?=\d)|\bmoe\b", re.IGNORECASE)
"""What some pages put into a name that its makers do not: "Nemotron V3 Nano", "Qwen3 MoE 30B"."""
_SAME = ("hidden", "heads", "kv_heads", "ffn_hidden")
_ALIKE = ("model", "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "experts", "experts_active", "moe_ffn_hidden", "model_kind", "task", "seq_len")  # fmt: skip


def shape_of(run: Run) -> ModelShape:
    """The model of a run, with the activation that its `sharding_detail` names. Raises Unexpressed for facts that are missing."""
    form = _FORM.search(run.get("sharding_detail", ""))
    dense = _FIRST_DENSE.search(run.get("notes", ""))
    cells = (*((name, run.get(name, "")) for name in _ALIKE), ("first_dense", dense[1] if dense else ""))
    shape = _shape(cells)
    return shape if form is None else replace(shape, act_form=form[0])


@cache
def _shape(cells: tuple[tuple[str, str], ...]) -> ModelShape:
    run = dict(cells)
    known = _catalogued(_REMARK.sub("", run["model"])) or _catalogued(_SIZE.sub("", run["model"]))
    if known is not None and not known.hidden:
        raise Unexpressed(
            f"model {run['model']}: a {known.kind} is neither a stack of equally wide layers nor a ResNet"
        )
    against = "" if known is None else next(_against(known, run), "")
    is_known = known is not None and not against
    shape = (
        _with_layers(known, whole(run, "layers"), whole(run, "first_dense"))
        if known and is_known
        else _stated(run, against)
    )
    return _with_answer_head(shape) if shape.kind == "encoder" and run["task"] in _ANSWERS else shape


def _several(name: str) -> str:
    """The models of the catalogue that a name may stand for, where these are a few."""
    folded = _REMARK.sub("", name).lower().replace(" ", "-").rpartition("/")[2]
    names = [row["name"] for row in rows("models")]
    longer = [name for name in names if name.startswith(f"{folded}-") and folded not in names]
    return f"may be {' or '.join(longer)}, which is not stated" if 1 < len(longer) <= _FEW else ""


def _catalogued(name: str) -> ModelShape | None:
    """The model of that size, or the only one with that name; names are tried until one is known."""
    if is_size(name):
        return _sized(name)
    said = (name, " ".join(_LOOSE.sub("", name).split()))
    called = next((found for found in map(rows_called, chain(*map(_spellings, said))) if len(found) == 1), None)
    return None if called is None else shape_from_row(called[0])


def _spellings(name: str) -> Iterator[str]:
    """A name, the only one of the catalogue that goes on where it ends, and it without a folder."""
    folded = name.lower().replace(" ", "-")
    longer = [row["name"] for row in rows("models") if row["name"].startswith(f"{folded}-")]
    yield from (name, *(longer if len(longer) == 1 else ()), name.replace("/", "-"))


def _sized(size: str) -> ModelShape | None:
    try:
        return shape_for_size(size, "model").shape
    except InputError:  # the row's own numbers say what such a size is
        return None


def _against(shape: ModelShape, run: Run) -> Iterator[str]:
    """What contradicts the catalogue's model: a stated width, a number of parameters of as many layers, experts. Empty where it is the run's."""
    has_experts = bool(run["experts"])
    for name in _SAME:
        value = whole(run, name)
        if value not in (None, getattr(shape, name)) and not (has_experts and name == "ffn_hidden"):
            yield f"{name} is {value}, and {shape.name} has {getattr(shape, name)}"
    total = _total(run)
    if total is not None and whole(run, "layers") in (None, shape.layers):
        own = count(shape).total
        if not 1 / _FAR < total / own < _FAR:
            yield f"params_b is {total / 1e9:.3g}, and {shape.name} has {own / 1e9:.3g}"
    own_experts = 0 if shape.moe is None else shape.moe.experts
    if has_experts and whole(run, "experts") != own_experts:
        yield f"experts is {run['experts']}, and {shape.name} has {own_experts or 'none'}"


def _total(run: Run) -> float | None:
    """Parameters, as the row or the name says."""
    stated, named = number(run, "params_b"), _SIZE.search(_REMARK.sub("", run["model"]))
    if stated is None and named is not None:
        return float(named[1]) * _SIZES[named[2].upper()]
    return None if stated is None else stated * 1e9


def _with_layers(shape: ModelShape, layers: int | None, dense: int | None = None) -> ModelShape:
    """The model with fewer layers, as runs on one node cut it; `dense` of them, from the first on, have no experts where the
    row says so."""
    if layers is None or layers == shape.layers:
        return shape
    if shape.pattern or shape.mix or shape.enc_layers:
        raise Unexpressed(f"a model of mixed layers cut to {layers} layers")
    moe = shape.moe
    if moe is None:
        return replace(shape, layers=layers, parameters_stated=None)
    first = min(moe.first_dense if dense is None else dense, layers - 1)
    fewer = replace(moe, layers=min(moe.layers, layers - first), first_dense=first)
    return replace(shape, layers=layers, moe=fewer, parameters_stated=None)


def _stated(run: Run, against: str) -> ModelShape:
    """The model of the row's own numbers; `against` is what makes it another one than the catalogue's of that name."""
    for name in ("layers", "hidden", "heads"):
        if not run[name] and not run["model"]:
            raise Unexpressed(f"neither model nor {name} is stated")
        if not run[name]:
            lacking = _several(run["model"]) or f"{name} is not stated"
            raise Unexpressed(
                f"model {run['model']}: {against}: another model, of which {lacking}"
                if against
                else f"model {run['model']}: {lacking}"
            )
    if run["model_kind"] not in ("", "dense", "moe", "encoder", "encdec"):
        raise Unexpressed(f"model {run['model']}: layers of kind {run['model_kind']} are not stated")
    if run["model_kind"] == "encoder" and run["task"] in _ANSWERS:
        return _built(run, is_gated=False, is_tied=False)
    shapes = [_built(run, is_gated=gated, is_tied=tied) for gated in (False, True) for tied in (True, False)]
    total = number(run, "params_b")
    if total is None:
        return shapes[0]
    return min(shapes, key=lambda shape: abs(count(shape).total - total * 1e9))


def _with_answer_head(shape: ModelShape) -> ModelShape:
    """An encoder that marks an answer: two scores per token instead of the vocabulary; the token table stays."""
    table = shape.vocab * shape.hidden
    return replace(shape, vocab=2, extra_parameters=shape.extra_parameters + table, parameters_stated=None)


def _built(run: Run, *, is_gated: bool, is_tied: bool) -> ModelShape:
    """One reading of a row: gated models rotate positions and have no biases, plain ones learn them and have some."""
    hidden, heads = whole(run, "hidden") or 0, whole(run, "heads") or 1
    kind: Kind = "encoder" if run["model_kind"] == "encoder" else "decoder"
    seq_len = whole(run, "seq_len") or 0
    shape = ModelShape(
        name=run["model"],
        family="stated",
        kind=kind,
        layers=whole(run, "layers") or 1,
        hidden=hidden,
        vocab=whole(run, "vocab") or 50257,
        ffn_hidden=whole(run, "ffn_hidden") or 4 * hidden,
        heads=heads,
        kv_heads=whole(run, "kv_heads") or heads,
        head_dim=whole(run, "head_dim") or hidden // heads,
        tied=is_tied,
        max_seq=seq_len,
        pos="rope" if is_gated else "learned",
        pos_rows=0 if is_gated else seq_len,
        norm="rmsnorm" if is_gated else "layernorm",
        mlp_gated=is_gated,
        mlp_act="silu" if is_gated else "gelu",
        mlp_bias=not is_gated,
        qkv_bias=not is_gated,
        o_bias=not is_gated,
        moe=_experts(run),
        basis="derived",
        source=f"the row's own columns: {run['model']}",
    )
    return _of_two(shape) if run["model_kind"] == "encdec" else shape


def _of_two(decoder: ModelShape) -> ModelShape:
    """An encoder of as many layers in front, and T5's habits in both, whose positions are relative (Raffel et al. 2020, arXiv 1910.10683,
    section 2.1)."""
    plain = replace(decoder, pos="relative", pos_rows=0, norm="rmsnorm", mlp_bias=False, qkv_bias=False, o_bias=False)
    return replace(
        plain, kind="encdec", formula="encdec", enc_layers=decoder.layers, mlp_act="gelu", extra=(("rel_buckets", 32),)
    )


def _experts(run: Run) -> Moe | None:
    experts = whole(run, "experts")
    if experts is None:
        return None
    width, active, layers = (whole(run, name) for name in ("moe_ffn_hidden", "experts_active", "layers"))
    width = width or whole(run, "ffn_hidden")  # Megatron's default
    if width is None or active is None or layers is None:
        raise Unexpressed(f"model {run['model']}: moe_ffn_hidden or experts_active is not stated")
    return Moe(experts=experts, top_k=active, ffn=width, layers=layers)
