"""Dataclasses that cost a quarter of the time to define.

`dataclasses.dataclass` writes and compiles six functions per class, half a millisecond each time strategist starts and
forty milliseconds over the hundred records of a plan. This drop-in lets it describe the fields and adds one shared
`__init__`, `__repr__`, `__eq__` and `__hash__` instead. To type checkers it is the standard decorator, to `dataclasses`
and pydantic its classes are ordinary dataclasses. See docs/decisions/0004-light-records.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen=False, slots=False, kw_only=False, eq=True):
        """The class with `__init__`, `__repr__`, and as asked for `__eq__`, `__hash__` and frozen fields."""

        def finish(cls):
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
            made.__init__ = _initialiser(made)
            made.__repr__, made.__reduce__ = _repr, _reduce
            if eq:
                values = _values_of(made)
                made.__eq__ = _comparison(values)
                made.__hash__ = _hashing(values) if frozen else None
            if frozen:
                made.__setattr__ = made.__delattr__ = _refuse
            return made

        return finish


def _initialiser(cls: type) -> Any:
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    positional = tuple(field.name for field in fields if not field.kw_only)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    makers = {field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING}
    put = object.__setattr__
    count = len(names) if names == positional else -1

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes the method of that name
        if len(args) == count and not kwargs:
            for name, value in zip(names, args, strict=True):
                put(self, name, value)
            return
        if len(args) > len(positional):
            raise TypeError(f"{cls.__name__}() takes {len(positional)} positional arguments, not {len(args)}")
        given = dict(zip(positional, args, strict=False))
        for name in kwargs:
            if name in given or name not in names:
                raise TypeError(f"{cls.__name__}() got an unknown or repeated argument {name!r}")
        values = defaults | {name: make() for name, make in makers.items() if name not in kwargs} | given | kwargs
        for name in names:
            if name not in values:
                raise TypeError(f"{cls.__name__}() lacks the argument {name!r}")
            put(self, name, values[name])

    return __init__


def _values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields at once; records are keys of many caches, so this runs often."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _repr(self: Any) -> str:
    inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
    return f"{type(self).__qualname__}({inside})"


def _comparison(values: Callable[[Any], Any]) -> Any:
    def __eq__(self: Any, other: object) -> Any:  # noqa: N807 - becomes the method of that name
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hashing(values: Callable[[Any], Any]) -> Any:
    def __hash__(self: Any) -> int:  # noqa: N807 - becomes the method of that name
        return hash(values(self))

    return __hash__


def _refuse(_self: Any, name: str, *_value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")


def _reduce(self: Any) -> Any:
    return _rebuild, (type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__))


def _rebuild(cls: type, values: tuple[Any, ...]) -> Any:
    made: Any = object.__new__(cls)
    for name, value in zip(cls.__dataclass_fields__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)
    return made
