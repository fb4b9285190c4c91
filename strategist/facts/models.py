"""The one door for models: a size, a name, a file, a mapping or a live module becomes a ModelShape."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strategist.errors import InputError
from strategist.facts.model import ModelShape
from strategist.facts.model_rows import find_model, is_variant, shape_from_row
from strategist.facts.sizes import is_size, shape_for_size
from strategist.reading import STANDARD_INPUT
from strategist.records import replace

if TYPE_CHECKING:
    from strategist.facts.modules import ModuleLike

__all__ = ["find_model", "load_model", "load_model_config", "shape_from_row"]

_FILE = re.compile(r"(\.{0,2}|~)/.*|.*\.(json|ya?ml|toml)|.*/.*/.*", re.IGNORECASE | re.DOTALL)


def load_model(source: str | os.PathLike[str] | Mapping[str, Any] | ModelShape | ModuleLike, flag: str = "--model") -> ModelShape:  # fmt: skip
    """The shape of a model given in any of these ways.

    A text is a size (`7B`), a catalogue name or Hugging Face id (`llama-3.1-8b`, `meta-llama/Llama-3.1-8B`), also that of a variant that
    was trained further (`meta-llama/Llama-3.1-8B-Instruct`), or a path:
    what starts with `./`, `../`, `/` or `~/`, ends in .json, .yaml or .toml, or has two slashes; `-` is standard input. What is in the current
    folder never changes the meaning of a name. A mapping is a Hugging Face configuration; a module is read by duck
    typing (`modules.shape_from_module`). Raises InputError as these do, and TYPE for anything else.
    """
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, str):
        return _from_text(source, flag)
    if isinstance(source, os.PathLike):
        return load_model_config(os.fspath(source), flag)
    if isinstance(source, Mapping):
        from strategist.facts.model_config import shape_from_config  # families are loaded only when one is read

        return shape_from_config(source, flag)
    return _from_module(source, flag)


def load_model_config(path: str, flag: str = "--model-config") -> ModelShape:
    """The shape described by a Hugging Face config.json (or the same in YAML or TOML)."""
    from strategist.facts.model_config import shape_from_config
    from strategist.reading import read_model_config

    return shape_from_config(read_model_config(path, flag), flag)


def _from_text(text: str, flag: str) -> ModelShape:
    if is_size(text):
        return shape_for_size(text, flag).shape
    if text == STANDARD_INPUT or _FILE.fullmatch(text.strip(" ")):
        return load_model_config(text.strip(" "), flag)
    shape = shape_from_row(find_model(text, flag))
    return replace(shape, called=text) if is_variant(text) else shape


def _from_module(source: Any, flag: str) -> ModelShape:
    from strategist.facts.modules import is_module, shape_from_module

    if not is_module(source):
        kinds = "a name, a size, a path, a configuration or a torch.nn.Module"
        raise InputError("TYPE", f"{flag} must be {kinds}.", flag=flag, value=type(source).__name__, hint='For example "llama-3.1-8b".')  # fmt: skip
    return shape_from_module(source, flag)
