"""Empty packages in place of those that frameworks import and a CPU cannot load. Python loads it at start-up from PYTHONPATH.

STAND_INS names them, separated by commas. Nothing that is emitted knows of it; what calls a stand-in gets nothing done.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Empty(type):
    """A class with nothing in it, every name of which is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class StandIn(ModuleType):
    """A package that is newer than any, of which every name is an empty class, made when it is asked for."""

    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class StandIns:
    """Finds and makes the packages of these names and whatever is imported from inside them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def stand_in(*names: str) -> None:
    """Put empty packages of these names before those that are installed."""
    sys.meta_path.insert(0, StandIns(names))  # type: ignore[arg-type]


if os.environ.get("STAND_INS"):
    stand_in(*os.environ["STAND_INS"].split(","))
