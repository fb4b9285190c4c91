"""Numbers that trained weights rely on and that no shape carries, because nothing is larger or slower for them.

A model with other constants is another model, although every tensor fits: they come from the config.json beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strategist.errors import ImpossibleError, InputError, shown
from strategist.records import dataclass

LLAMA3 = "llama3"
SPREAD = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary angles of Llama 3.1: waves longer than the old context over `low_freq_factor` turn `factor` times slower, those
    shorter than it over `high_freq_factor` as before, and what lies between in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The base of rotary angles (arXiv 2104.09864, section 3.3), how they are scaled, and what norms add to a variance."""

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    def __str__(self) -> str:
        scaling = self.rope_scaling
        said = "none" if scaling is None else f"{LLAMA3} with a factor of {scaling.factor:g}"
        return f"rope_theta {self.rope_theta:g}, scaling {said}, norm_eps {self.norm_eps:g}"


PLAIN = Constants()
"""Those of a model that nobody gave others."""


def constants_from(config: Mapping[str, Any], unsaid: Mapping[str, Any], place: str, *, rotary: bool) -> Constants:
    """What a config.json says, `unsaid` what its class in transformers takes where it says nothing.

    Keys and what stands before what as in transformers 5.23, modeling_rope_utils.py (convert_rope_params_to_dict,
    standardize_rope_params). Raises ImpossibleError UNSUPPORTED for angles that the built-in model has not got, InputError for values
    that are no numbers.
    """
    eps = _first(config, "rms_norm_eps", "layer_norm_epsilon", default=unsaid["norm_eps"])
    norm_eps = _positive(eps, "norm_eps", place)
    if not rotary:
        return Constants(norm_eps=norm_eps)
    said = _first(config, "rope_scaling", "rope_parameters", default={})
    if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
        raise _other_angles(place, "rope_parameters", said)
    part = said.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise _other_angles(place, "partial_rotary_factor", part)
    theta = said.get("rope_theta", _first(config, "rope_theta", default=unsaid["rope_theta"]))
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", LLAMA3):
        raise _other_angles(place, "rope_type", kind)
    return Constants(
        rope_theta=_positive(theta, "rope_theta", place),
        rope_scaling=_scaling(said, config, place) if kind == LLAMA3 else None,
        norm_eps=norm_eps,
    )


def _scaling(said: Mapping[str, Any], config: Mapping[str, Any], place: str) -> RopeScaling:
    before = said.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    spread = {name: _positive(said.get(name), name, place) for name in SPREAD}
    if spread["low_freq_factor"] >= spread["high_freq_factor"]:
        raise _other_angles(place, "low_freq_factor", spread["low_freq_factor"])
    old = _positive(before, "original_max_position_embeddings", place)
    return RopeScaling(**spread, original_max_position_embeddings=old)


def _first(config: Mapping[str, Any], *names: str, default: Any) -> Any:
    """The first of some keys that says something."""
    return next((config[name] for name in names if config.get(name) not in (None, {})), default)


def _positive(value: Any, name: str, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(
            "RANGE",
            f"{name} is {shown(json.dumps(value))} in {place}, which is no number above zero.",
            flag=name,
            value=value,
            hint="Fetch the file again.",
        )
    return float(value)


def _other_angles(place: str, name: str, value: Any) -> ImpossibleError:
    return ImpossibleError(
        "UNSUPPORTED",
        f"{place} says {name} = {shown(json.dumps(value))}; the built-in model turns all of a head by one base, plain or scaled as "
        "Llama 3.1 does.",
        flag=name,
        value=json.dumps(value),
        hint="Give build() a model of transformers that has loaded the weights.",
    )
