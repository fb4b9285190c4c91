"""A function of the user's by name, imported only where it will be called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from strategist.errors import InputError, shown
from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """`package.module:name`. Calling it imports the module, from the working folder too, and calls the function.

    Raises InputError NAME when there is no such module or function, and whatever module and function raise.
    """

    module: str
    name: str

    @property
    def title(self) -> str:
        """As it was written."""
        return f"{self.module}:{self.name}"

    def __call__(self) -> Any:
        """What the function gives."""
        return self._found()()

    def _found(self) -> Callable[[], Any]:
        sys.path.insert(0, os.getcwd())
        try:
            function = getattr(import_module(self.module), self.name, None)
        except ModuleNotFoundError as problem:
            raise self._missing(f"module {shown(problem.name)}") from None
        if not callable(function):
            raise self._missing(f"function {shown(self.name)} in {shown(self.module)}")
        return function  # type: ignore[no-any-return]

    def _missing(self, what: str) -> InputError:
        return InputError(
            "NAME",
            f"--model-fn: there is no {what}.",
            flag="--model-fn",
            value=self.title,
            hint="Run where it can be imported, or set PYTHONPATH.",
        )


def named_function(path: str) -> NamedFunction:
    """The function that `package.module:name` means. Raises InputError PARSE for another form."""
    module, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InputError(
            "PARSE",
            "--model-fn must be package.module:function.",
            flag="--model-fn",
            value=path,
            hint="Example: --model-fn mypackage.models:make_model.",
        )
    return NamedFunction(module, name)
