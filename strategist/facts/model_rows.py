"""Models of the catalogue: finding a row by name, and turning it into a ModelShape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from strategist.catalog import Row, rows
from strategist.errors import InputError, did_you_mean, shown
from strategist.facts.closed_formulas import completed
from strategist.facts.layer_kind import LayerKind, Mixer
from strategist.facts.model import Heads, Mix, Mla, ModelShape, Moe, Ssm, arranged, layer_sequence
from strategist.records import names_of, replace
from strategist.units import plain_text

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_DATE = re.compile(r"\d\d(0[1-9]|1[0-2])|(0[1-9]|1[0-2])[0-3]\d", re.ASCII)
"""Year and month (2507), or month and day (0324)."""
_VERSION = re.compile(r"v\d+(\.\d+)*", re.ASCII)
_CYCLE = re.compile(r"(\d+) (\w+)[^:]* : (\d+) (\w+)")
_BUILT = {"extra", "full_heads", "moe", "mla", "ssm", "mix", "norm", "source", "notes"}
_COPIED = set(names_of(ModelShape)) - _BUILT
_WORDS: dict[str, Mixer] = {
    "sliding": "sliding",
    "chunked": "sliding",
    "full": "attention",
    "attention": "attention",
}


def find_model(name: str, flag: str = "--model") -> Row:
    """The catalogue row of a model, by its name or its Hugging Face id (with or without the organisation), or by that of a variant of
    it with the same shape (`_shape_names`, `_relatives`).

    Case, blanks, dashes, underscores, colons and dots do not matter where they are not needed to tell two models apart.
    Raises InputError UNKNOWN_MODEL (with the nearest names), AMBIGUOUS, and OFFLINE for an `org/name` that is not in
    the catalogue, since nothing is ever downloaded.
    """
    text = plain_text(name, flag)
    found = rows_called(text)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(row["name"] for row in found)
        raise InputError("AMBIGUOUS", f"{flag}: {shown(text)} fits several models.", flag=flag, value=text, hint=f"Say {names}.")  # fmt: skip
    raise _not_found(text, flag)


def rows_called(name: str) -> Sequence[Row]:
    """The rows with this name, or else the one row whose shape a model of this name has: a variant by its words, or one of table
    `model_relatives`, or a variant of that."""
    if found := _rows_named(name):
        return found
    candidates = (_rows_named(said) or _relatives(said) for said in (name, *_shape_names(name)))
    return next((found for found in candidates if len(found) == 1), ())


def is_variant(name: str) -> bool:
    """Whether a name that the catalogue knows is that of a variant of a model."""
    return not _rows_named(name)


def _shape_names(name: str) -> Iterator[str]:
    """Names that a model of the same shape may have, the longest first: without whoever published it, without words that say how it was
    trained or stored, without the date of that, and without its version, which stands behind such a word.

    A date or a version in a base model's own name is still there when the longer names are tried.
    """
    bare = name.rpartition("/")[2]
    parts = [part for part in re.split(r"[-_ ]", bare.lower()) if part]
    variants = {row["word"] for row in rows("model_variants")}
    behind = [
        before in variants and _VERSION.fullmatch(part) for before, part in zip(["", *parts], parts, strict=False)
    ]
    kept = [(part, is_of_it) for part, is_of_it in zip(parts, behind, strict=True) if part not in variants]
    dateless = [(part, is_of_it) for part, is_of_it in kept if not _DATE.fullmatch(part)]
    bases = (kept, dateless, [own for own in dateless if not own[1]])
    yield from (bare, *("-".join(part for part, _ in base) for base in bases))


def _rows_named(name: str) -> Sequence[Row]:
    """The rows with this name in the strictest spelling in which there is any."""
    spellings = (
        _index(spelling).get(spelling(name), ()) for spelling in (str.lower, _without_separators, _without_dots)
    )
    return next((found for found in spellings if found), ())


def _relatives(name: str) -> Sequence[Row]:
    """The row whose shape a model has that was trained further and goes by a name of its own."""
    return _rows_named(_relatives_index().get(_without_separators(name.rpartition("/")[2]), ""))


@cache
def _relatives_index() -> Mapping[str, str]:
    return {_without_separators(row["name"].rpartition("/")[2]): row["model"] for row in rows("model_relatives")}


def _without_separators(text: str) -> str:
    return re.sub(r"[-_ :]", "", text.lower())


def _without_dots(text: str) -> str:
    return re.sub(r"[-_ :.]", "", text.lower())


@cache
def _index(spelling: Any) -> Mapping[str, Sequence[Row]]:
    """Every row by each of its names in one spelling."""
    index: dict[str, list[Row]] = {}
    for row in rows("models"):
        for key in {spelling(name) for name in _names(row)}:
            index.setdefault(key, []).append(row)
    return index


def _names(row: Row) -> tuple[str, ...]:
    identities = (row.get("hf_id", ""), *row.get("also_called", ()))
    return tuple(name for name in (row["name"], *identities, *(each.rpartition("/")[2] for each in identities)) if name)


def _not_found(text: str, flag: str) -> InputError:
    known = [row["name"] for row in rows("models")]
    if _REPOSITORY.fullmatch(text):
        sentence = f"{flag}: {shown(text)} is not in the catalogue, and nothing is downloaded."
        near = did_you_mean(text.rpartition("/")[2], known)
        return InputError("OFFLINE", sentence, flag=flag, value=text, hint=f"{near} Or pass --model-config FILE with its config.json.")  # fmt: skip
    hint = f"{did_you_mean(text, known)} Or pass --model-config FILE, or --model-size."
    return InputError("UNKNOWN_MODEL", f"{flag}: there is no model {shown(text)} in the catalogue.", flag=flag, value=text, hint=hint)  # fmt: skip


def shape_from_row(row: Row) -> ModelShape:
    """The shape of a catalogue row; a model that is no stack of layers (a U-Net) is one indivisible layer.

    Weights that the layers do not explain are added: per layer where the family repeats (DiT, FLUX, rows without a
    formula of their own), else for the whole model, so that `count` gives the row's total.
    """
    extra = _flat(row.get("extra", {}))
    extra.pop("attn_bias", None)  # the row's qkv_bias and o_bias say it
    copied = {key: value for key, value in row.items() if key in _COPIED}
    bare = ModelShape(
        **{"hidden": 0, "layers": 1, "vocab": 0} | copied,
        norm=_norm(row.get("norm", "rmsnorm")),
        k_bias=not extra.pop("no_k_bias", 0),
        full_every=0 if row["attn_kind"] == "sliding" else 1,
        moe=_moe(row),
        mla=_mla(row),
        full_heads=_full_heads(row),
        ssm=_ssm(extra) if "lin" in extra or "kind" in extra else None,
        mix=_mix(extra) if "lin" in extra else None,
        extra=() if "lin" in extra or "kind" in extra else tuple(sorted(extra.items())),
        extra_parameters=row.get("extra_params", 0),
        layer_extra_parameters=row.get("layer_extra_params", 0),
        other_tower_parameters=row.get("other_towers_params", 0),
        parameters_stated=row["params_total"] if row["formula"] == "none" else None,
        source=row["source"],
        notes=tuple(row[key] for key in ("extra_note",) if key in row),
    )
    return completed(_ordered(bare, row.get("attn_pattern", "")))


def _flat(extra: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts under joined keys: {"text": {"hidden": 512}} becomes {"text_hidden": 512}."""
    flat: dict[str, Any] = {}
    for key, value in extra.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, dict):
            flat |= _flat({str(k): v for k, v in inner.items()}, f"{prefix}{key}_")
        else:
            flat[prefix + key] = value
    return flat


def _norm(word: str) -> Any:
    return word.removesuffix("(adaLN)")


def _moe(row: Row) -> Moe | None:
    if "moe_experts" not in row:
        return None
    return Moe(
        experts=row["moe_experts"],
        top_k=row["moe_top_k"],
        ffn=row["moe_ffn"],
        layers=row["moe_layers"],
        first_dense=row.get("moe_first_dense", 0),
        shared_ffn=row.get("moe_shared_ffn", 0),
        shared_gate=row.get("moe_shared_gate", False),
        router_bias=row.get("moe_router_bias", False),
        expert_bias=row.get("moe_expert_bias", False),
        latent=row.get("moe_latent", 0),
        groups=row.get("moe_groups", 1),
        top_groups=row.get("moe_top_groups", 1),
    )


def _full_heads(row: Row) -> Heads | None:
    if "full_kv_heads" not in row:
        return None
    shared, sinks = row.get("full_shared_kv", False), row.get("full_sinks", False)
    return Heads(kv_heads=row["full_kv_heads"], head_dim=row["full_head_dim"], shared_kv=shared, sinks=sinks)


def _mla(row: Row) -> Mla | None:
    if "mla_kv_lora" not in row:
        return None
    return Mla(
        q_lora=row["mla_q_lora"],
        kv_lora=row["mla_kv_lora"],
        qk_nope=row["mla_qk_nope"],
        qk_rope=row["mla_qk_rope"],
        v_dim=row["mla_v_dim"],
        index_heads=row.get("index_heads", 0),
        index_dim=row.get("index_dim", 0),
        shared_kv=row.get("mla_shared_kv", False),
        o_groups=row.get("mla_o_groups", 0),
        o_rank=row.get("mla_o_rank", 0),
    )


def _ssm(extra: Mapping[str, Any]) -> Ssm:
    kind = extra.get("lin") or extra["kind"]
    if kind == "gdn":
        return Ssm(
            kind="gated-delta",
            conv=extra["conv"],
            k_heads=extra["lin_k_heads"],
            v_heads=extra["lin_v_heads"],
            k_dim=extra["lin_k_dim"],
            v_dim=extra["lin_v_dim"],
        )
    if kind == "mamba2":
        heads, width, groups = extra["ssm_heads"], extra["ssm_head_dim"], extra["groups"]
        return Ssm(
            kind="mamba2", conv=extra["d_conv"], state=extra["d_state"], heads=heads, head_dim=width, groups=groups
        )
    rank, norms = extra["dt_rank"], bool(extra.get("inner_norms"))
    return Ssm(
        kind="mamba1",
        conv=extra["d_conv"],
        state=extra["d_state"],
        expand=extra["expand"],
        dt_rank=rank,
        inner_norms=norms,
    )


def _mix(extra: Mapping[str, Any]) -> Mix:
    return Mix(
        attention=extra["n_attn"],
        linear=extra["n_lin"],
        mlp=extra["n_mlp"],
        moe=extra["n_moe"],
        norms=extra["n_norms"],
    )


def _ordered(shape: ModelShape, pattern: str) -> ModelShape:
    """The shape with its layers in the row's order: a cycle such as `5 sliding : 1 full`, or letters (`spell`)."""
    if not pattern:
        return shape
    cycle = _CYCLE.match(pattern)
    if cycle is None:
        words = pattern if " " in pattern else " ".join(pattern)
        return arranged(shape, layer_sequence(replace(shape, pattern=words)))
    linear: dict[str, Mixer] = {"linear": shape.ssm.kind} if shape.ssm else {}
    words_of = _WORDS | linear
    turns = [words_of[cycle[2]]] * int(cycle[1]) + [words_of[cycle[4]]] * int(cycle[3])
    kinds = layer_sequence(shape)
    return arranged(shape, [LayerKind(turns[i % len(turns)], kind.ffn) for i, kind in enumerate(kinds)])
