"""Records behave as the standard library's dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from strategist.facts.hardware import Link, NodeGroup
from strategist.facts.workload import Workload
from strategist.records import cached_property, dataclass

FIELDS: tuple[tuple[Any, ...], ...] = (
    ("a", int),
    ("b", str, dataclasses.field(default="x")),
    ("c", tuple[int, ...], dataclasses.field(default=())),
    ("d", list[int], dataclasses.field(default_factory=list, kw_only=True)),
)


def pair(**options: bool) -> tuple[type, type]:
    """The same class made by us and by the standard library."""
    ours, theirs = ({"__annotations__": {}, "__module__": __name__} for _ in range(2))
    for space in (ours, theirs):
        for name, kind, *default in FIELDS:
            space["__annotations__"][name] = kind  # type: ignore[index]
            if default:
                space[name] = dataclasses.field(
                    default=default[0].default, default_factory=default[0].default_factory, kw_only=default[0].kw_only
                )  # type: ignore[call-overload]
    made: type = dataclass(**options)(type("Thing", (), ours))  # type: ignore[call-overload]
    return made, dataclasses.dataclass(**options)(type("Thing", (), theirs))  # type: ignore[call-overload]


KINDS = st.fixed_dictionaries(
    {"frozen": st.booleans(), "slots": st.booleans(), "kw_only": st.booleans(), "eq": st.booleans()}
).filter(lambda o: o["eq"] or not o["frozen"])
VALUES = st.fixed_dictionaries(
    {}, optional={"a": st.integers(), "b": st.text(), "c": st.tuples(st.integers()), "d": st.lists(st.integers()), "e": st.none()}
)  # fmt: skip


def outcome(act: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of exception it ends with."""
    try:
        return act()
    except (TypeError, AttributeError) as problem:
        return type(problem)


@given(KINDS, st.lists(st.integers(), max_size=5), VALUES)
def test_construction(options: dict[str, bool], words: list[int], named: dict[str, Any]) -> None:
    """The same arguments give the same fields, or are refused with the same kind of exception."""
    made = [outcome(lambda kind=kind: kind(*words, **copy.deepcopy(named))) for kind in pair(**options)]
    if made[1] is TypeError:
        assert made[0] is TypeError
    else:
        assert dataclasses.asdict(made[0]) == dataclasses.asdict(made[1])
        assert repr(made[0]) == repr(made[1])


@given(KINDS, VALUES, VALUES)
def test_equality_and_hash(options: dict[str, bool], one: dict[str, Any], two: dict[str, Any]) -> None:
    """Two records are equal, and their hashes are, exactly when two dataclasses of the same values are."""
    answers = []
    for kind in pair(**options):
        left, right = (kind(**({"a": 1} | {k: v for k, v in given_.items() if k != "e"})) for given_ in (one, two))
        hashable = outcome(lambda left=left: hash(left)) is not TypeError
        same_hash = hashable and hash(left) == hash(right)
        answers.append(
            (left == right, left == left, left != right, left == 1, hashable, same_hash if left == right else None)
        )
    assert answers[0] == answers[1]


def assign(thing: Any, name: str) -> None:
    """Set an attribute."""
    setattr(thing, name, 5)


@given(KINDS, st.sampled_from((assign, delattr)), st.sampled_from(("a", "b")))
def test_assignment(options: dict[str, bool], act: Callable[[Any, str], None], name: str) -> None:
    """Setting and deleting a field works or fails with the same exception."""
    ends = [outcome(lambda kind=kind: act(kind(a=1), name)) for kind in pair(**options)]
    assert ends[0] == ends[1]


@given(KINDS)
def test_other_attributes(options: dict[str, bool]) -> None:
    """What is no field can be set where a dataclass lets it be set, and is refused where a dataclass refuses it."""
    ends = [outcome(lambda kind=kind: assign(kind(a=1), "zz")) for kind in pair(**options)]
    assert (ends[0] is None) == (ends[1] is None)


@given(KINDS, VALUES)
def test_replace(options: dict[str, bool], changes: dict[str, Any]) -> None:
    """`dataclasses.replace` changes what it changes and leaves the original alone."""
    ends = []
    for kind in pair(**options):
        thing = kind(a=1)
        changed = outcome(lambda thing=thing: dataclasses.replace(thing, **changes))
        ends.append(
            changed if isinstance(changed, type) else (dataclasses.astuple(changed), dataclasses.astuple(thing))
        )
    assert ends[0] == ends[1]


def test_fields_are_the_same() -> None:
    """Names, types, defaults and kinds of fields are what `dataclasses.fields` says of the standard class."""
    for options in ({}, {"kw_only": True}, {"frozen": True, "slots": True}):
        ours, theirs = (
            [(f.name, f.type, f.default, f.default_factory, f.kw_only) for f in dataclasses.fields(kind)]
            for kind in pair(**options)
        )
        assert ours == theirs


def test_factories_make_new_values() -> None:
    """Two records do not share what a factory made."""
    for kind in pair():
        one, two = kind(a=1), kind(a=1)
        one.d.append(5)
        assert two.d == []


RECORDS = (
    Link(a="gpu0", b="gpu1", kind="nvlink", Bps=1e9),
    Workload(seq_len=128, global_batch=4),
    Workload(tokens=10**12),
)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_copies_and_pickles(record: Any) -> None:
    """A record that was pickled or copied, at any depth and protocol, is equal and of the same class."""
    made = [pickle.loads(pickle.dumps(record, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for again in (*made, copy.copy(record), copy.deepcopy(record)):
        assert (again, type(again), hash(again)) == (record, type(record), hash(record))


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_pydantic_reads_and_writes_records(record: Any) -> None:
    """pydantic treats a record as a dataclass: out and back in, equal."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(record))
    assert adapter.validate_json(adapter.dump_json(record), strict=True) == record


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"seq_len": "8"}, "int_type"),
        ({"seq_len": 8.5}, "int_from_float int_type"),
        ({"precision": "bf17"}, "literal_error"),
        ({"nonsense": 1}, "unexpected_keyword_argument"),
    ],
)
def test_pydantic_is_strict_with_records(value: dict[str, Any], kind: str) -> None:
    """A wrong type, an unknown word and an unknown field are found, as in a standard dataclass."""
    config = ConfigDict(extra="forbid", strict=True)
    door = create_model("Door", __config__=config, root=(Workload, ...))
    with pytest.raises(ValidationError) as refused:
        door.model_validate_json(json.dumps({"root": value}))
    assert refused.value.errors()[0]["type"] in kind.split()


def test_records_without_equality_are_themselves() -> None:
    """With eq=False a record equals itself only, and is hashed by identity."""
    kind, _ = pair(eq=False)
    one, two = kind(a=1), kind(a=1)
    assert one != two
    assert len({one, two, one}) == 2


def test_nested_records_print_as_they_are_made() -> None:
    """repr is the call that makes the record."""
    link = RECORDS[0]
    assert repr(link) == "Link(a='gpu0', b='gpu1', kind='nvlink', Bps=1000000000.0)"
    assert eval(repr(link), {"Link": Link}) == link
    assert NodeGroup.__match_args__ == ()


def test_a_cached_property_is_worked_out_once_and_describes_itself() -> None:
    """As the standard library's: for each object when it is first read, under the name that it has in the class."""

    class Thing:
        asked = 0

        @cached_property
        def size(self) -> int:
            """How large it is."""
            self.asked += 1
            return 7 * self.asked

    one, other = Thing(), Thing()
    assert (one.size, one.size, one.asked, other.asked) == (7, 7, 1, 0)
    assert one.__dict__ == {"asked": 1, "size": 7}
    assert Thing.size.__doc__ == "How large it is."
