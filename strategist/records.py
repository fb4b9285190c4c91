"""Dataclasses that cost a tenth of the time to define.

`dataclasses.dataclass` looks into every annotation, writes and compiles six functions per class, half a millisecond each time
strategist starts and forty milliseconds over the hundred records of a plan. This drop-in only notes names and defaults and
adds one shared `__init__`, `__repr__`, `__eq__` and `__hash__`; the standard library describes the fields of a class when
somebody asks for them. To type checkers it is the standard decorator, to `dataclasses` and pydantic its classes are ordinary
dataclasses. See docs/decisions/0004-light-records.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple


class _Nothing:
    """A field has no default."""


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from functools import cached_property as cached_property
else:

    def dataclass(*, frozen=False, slots=False, kw_only=False, eq=True):
        """The class with `__init__`, `__repr__`, and as asked for `__eq__`, `__hash__` and frozen fields."""

        def finish(cls):
            notes = _notes_of(cls, kw_only)
            made = _slotted(cls, notes, frozen) if slots else cls
            made.__record_notes__, made.__match_args__ = notes, notes.positional
            made.__dataclass_fields__ = _Described("__dataclass_fields__", frozen, kw_only)
            made.__dataclass_params__ = _Described("__dataclass_params__", frozen, kw_only)
            made.__init__ = _initialiser(made, notes)
            made.__repr__, made.__reduce__ = _repr, _reduce
            if eq:
                values = _values_of(notes.names)
                made.__eq__ = _comparison(values)
                made.__hash__ = _hashing(values) if frozen else None
            if frozen:
                made.__setattr__ = made.__delattr__ = _refuse
            return made

        return finish

    def field(*, default=_Nothing, default_factory=None, kw_only=None):
        """A field with a default, or one that is made anew for each record, which may be given by word alone."""
        return _Said(default, default_factory, kw_only)

    def replace(record, /, **changes):
        """A record of the same class with some fields changed; `dataclasses.replace` without looking at descriptions."""
        return type(record)(**({name: getattr(record, name) for name in names_of(type(record))} | changes))

    class cached_property:  # noqa: N801 - stands for the one of the standard library
        """A property that is worked out when it is read for the first time; that of the standard library takes a lock before Python 3.12,
        three times as long, and every ledger reads some hundred."""

        def __init__(self, formula):
            self.formula, self.__doc__ = formula, formula.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            found = instance.__dict__[self.name] = self.formula(instance)
            return found


def names_of(cls: type) -> tuple[str, ...]:
    """The names of a record's fields, in order."""
    notes: _Notes = cls.__record_notes__  # type: ignore[attr-defined]
    return notes.names


def is_record(value: object) -> bool:
    """Whether something is a record, not the class of one."""
    return hasattr(type(value), "__record_notes__")


def defaults_of(cls: type) -> dict[str, Any]:
    """The fields of a record that have a default, and the default."""
    notes: _Notes = cls.__record_notes__  # type: ignore[attr-defined]
    return notes.defaults


class _Said(NamedTuple):
    """What `field` was told."""

    default: Any
    default_factory: Callable[[], Any] | None
    kw_only: bool | None


class _Notes(NamedTuple):
    """What a class says of its fields: their names in order, those that may be given by position, defaults, and what makes
    them; `own` are the class's own annotations and the values that stand beside them."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    makers: dict[str, Callable[[], Any]]
    own: dict[str, _Said]


def _notes_of(cls: type, kw_only: bool) -> _Notes:
    names: list[str] = []
    by_word: set[str] = set()
    defaults: dict[str, Any] = {}
    makers: dict[str, Callable[[], Any]] = {}
    for base in cls.__mro__[-1:0:-1]:
        notes = base.__dict__.get("__record_notes__")
        if notes is not None:
            names += [name for name in notes.names if name not in names]
            by_word |= set(notes.names) - set(notes.positional)
            defaults |= notes.defaults
            makers |= notes.makers
    annotations = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 - `inspect` costs 4 ms and is not needed otherwise
    own = {}
    for name, kind in annotations.items():
        if str(kind).startswith(("ClassVar", "typing.ClassVar")):
            continue
        if name not in names:
            names.append(name)
        own[name] = default, maker, alone = _default_of(cls.__dict__.get(name, _Nothing))
        if default is not _Nothing:
            defaults[name] = default
        if maker is not None:
            makers[name] = maker
        (by_word.add if (kw_only if alone is None else alone) else by_word.discard)(name)
    return _Notes(tuple(names), tuple(name for name in names if name not in by_word), defaults, makers, own)


def _default_of(value: Any) -> _Said:
    """The default of a field, what makes it, and whether it is given by word, where that is said; the standard library's fields
    are understood as well."""
    if isinstance(value, _Said):
        return value
    standard: Any = sys.modules.get("dataclasses")
    if standard is None or not isinstance(value, standard.Field):
        return _Said(value, None, None)
    missing = standard.MISSING
    return _Said(
        _Nothing if value.default is missing else value.default,
        None if value.default_factory is missing else value.default_factory,
        None if value.kw_only is missing else value.kw_only,
    )


def _slotted(cls: type, notes: _Notes, frozen: bool) -> type:
    """The class again, with a slot for each field of its own and the hash, and without the defaults, which would be in the
    way."""
    space = {key: value for key, value in cls.__dict__.items() if key not in ("__dict__", "__weakref__", *notes.names)}
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, "__slots__", ())}
    space["__slots__"] = tuple(
        name for name in (*notes.names, *(("__record_hash__",) if frozen else ())) if name not in inherited
    )
    made = type(cls)(cls.__name__, cls.__bases__, space)
    made.__qualname__ = cls.__qualname__
    return made


class _Described:
    """An attribute that the standard library gives a dataclass, asked for when it is read for the first time."""

    def __init__(self, name: str, frozen: bool, kw_only: bool) -> None:
        self.name, self.frozen, self.kw_only = name, frozen, kw_only

    def __get__(self, _instance: object, owner: type) -> Any:
        import dataclasses  # with `inspect` and `ast` 5 ms, and most plans never ask

        home = next(cls for cls in owner.__mro__ if cls.__dict__.get(self.name) is self)
        notes: _Notes = home.__record_notes__  # type: ignore[attr-defined]
        missing: Any = dataclasses.MISSING
        space: dict[str, Any] = {"__annotations__": dict(home.__annotations__), "__module__": home.__module__}
        for name, (default, maker, alone) in notes.own.items():
            space[name] = dataclasses.field(
                default=missing if default is _Nothing else default,
                default_factory=maker or missing,
                kw_only=missing if alone is None else alone,
            )
        shown: Any = type(home.__name__, home.__bases__, space)
        described: Any = dataclasses.dataclass(
            init=False, repr=False, eq=False, frozen=self.frozen, kw_only=self.kw_only
        )(shown)
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(home, name, described.__dict__[name])
        return home.__dict__[self.name]


def _initialiser(cls: type, notes: _Notes) -> Any:
    names, positional = notes.names, notes.positional
    put = object.__setattr__
    allowed = frozenset(names)
    count = len(names) if names == positional else -1

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes the method of that name
        if len(args) == count and not kwargs:
            for name, value in zip(names, args, strict=True):
                put(self, name, value)
            return
        if args:
            kwargs |= _by_name(cls, positional, args, kwargs)
        if not kwargs.keys() <= allowed:
            raise TypeError(f"{cls.__name__}() got an unknown argument {min(kwargs.keys() - allowed)!r}")
        if len(kwargs) < len(names):
            kwargs = _with_defaults(cls, notes, kwargs)
        for name in names:
            put(self, name, kwargs[name])

    return __init__


def _by_name(cls: type, positional: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by the names of their fields."""
    if len(args) > len(positional):
        raise TypeError(f"{cls.__name__}() takes {len(positional)} positional arguments, not {len(args)}")
    given = dict(zip(positional, args, strict=False))
    if not given.keys().isdisjoint(kwargs):
        raise TypeError(f"{cls.__name__}() got the argument {min(given.keys() & kwargs)!r} twice")
    return given


def _with_defaults(cls: type, notes: _Notes, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All fields: those given, and the defaults of the others."""
    made = {name: make() for name, make in notes.makers.items() if name not in kwargs}
    values = notes.defaults | made | kwargs
    if len(values) < len(notes.names):
        raise TypeError(f"{cls.__name__}() lacks the argument {min(set(notes.names) - values.keys())!r}")
    return values


def _values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields at once; records are keys of many caches, so this runs often."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _repr(self: Any) -> str:
    inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__record_notes__.names)
    return f"{type(self).__qualname__}({inside})"


def _comparison(values: Callable[[Any], Any]) -> Any:
    def __eq__(self: Any, other: object) -> Any:  # noqa: N807 - becomes the method of that name
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hashing(values: Callable[[Any], Any]) -> Any:
    def __hash__(self: Any) -> int:  # noqa: N807 - becomes the method of that name
        try:
            return self.__record_hash__  # type: ignore[no-any-return]
        except AttributeError:
            found = hash(values(self))
            object.__setattr__(self, "__record_hash__", found)
            return found

    return __hash__


def _refuse(_self: Any, name: str, *_value: Any) -> None:
    import dataclasses

    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")


def _reduce(self: Any) -> Any:
    return _rebuild, (type(self), tuple(getattr(self, name) for name in self.__record_notes__.names))


def _rebuild(cls: type, values: tuple[Any, ...]) -> Any:
    made: Any = object.__new__(cls)
    for name, value in zip(cls.__record_notes__.names, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)
    return made
