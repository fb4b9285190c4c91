"""Which releases of a framework know a key: ranges of the table, and what follows from them for emitted files."""

from __future__ import annotations

import pytest

from strategist import emit
from strategist.catalog import rows
from strategist.emitters.emitter import Options
from strategist.emitters.releases import releases_needed
from strategist.facts.key_ranges import first_release, key_ranges, number
from tests.emitters.grid import COMMON, plan_for, plan_on
from tests.plans import BFLOAT16


def test_every_row_is_a_range() -> None:
    """A key begins before it ends, inside what was looked at, and has one row in its section."""
    seen = set()
    for row in rows("key_ranges"):
        lowest, highest = row["looked_at"].split(" to ")
        first, last = row.get("first"), row.get("last")
        edges = [number(edge) for edge in (lowest, first, last, highest) if edge is not None]
        assert edges == sorted(edges)
        assert (first, last) != (None, None)
        assert first != lowest
        assert last != highest
        assert last is not None or "instead" not in row
        key = (row["framework"], row["section"], row["key"])
        assert key not in seen
        seen.add(key)


def test_the_newest_release_is_the_one_whose_keys_we_know() -> None:
    """What was not the last time seen before it stands among the keys of the tested version, what was does not: two tables that were
    taken from the sources in two ways."""
    tables = {(row["framework"], row["section"]): set(row["keys"]) for row in rows("framework_keys")}
    compared = 0
    for row in rows("key_ranges"):
        known = tables[row["framework"], row["section"]]
        assert (row["key"] in known) == ("last" not in row), row
        compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("target", "plan", "options", "needs"),
    [
        (
            "accelerate",
            plan_for(**COMMON | {"dp_shard": 2, "zero": 3}),
            Options(),
            "accelerate.yaml needs accelerate 1.",
        ),
        ("accelerate", plan_for(**COMMON | {"dp_replicate": 2}), Options(), None),
        ("deepspeed", plan_for(**COMMON | {"dp_shard": 2, "zero": 2}), Options(), None),
        (
            "deepspeed",
            plan_on(2, 4, **COMMON | {"formats": BFLOAT16}),
            Options(zeropp=("hpz",)),
            "deepspeed.json needs deepspeed 0.10 or later, which knows zero_hpz_partition_size.",
        ),
        ("trl", plan_for(**COMMON | {"dp_replicate": 2}), Options(), "sft.json needs transformers"),
        ("torchrun", plan_for(**COMMON | {"dp_replicate": 2}), Options(), None),
    ],
)
def test_files_say_which_release_they_need(target: str, plan: object, options: Options, needs: str | None) -> None:
    """The youngest key of each file, where one is younger than what was looked at."""
    said = tuple(releases_needed(emit(plan, target, options)))  # type: ignore[arg-type]
    assert (said == ()) if needs is None else said[0].startswith(needs)


def test_a_framework_over_another_has_its_keys() -> None:
    """TRL's file has the arguments of transformers' too, and releases are compared as numbers."""
    assert key_ranges("trl")["evaluation_strategy"].framework == "transformers"
    assert "max_seq_length" in key_ranges("trl")
    assert "max_seq_length" not in key_ranges("transformers")
    assert number("4.9") < number("4.10")
    youngest = first_release("transformers", "", ["accelerator_config", "eval_strategy", "output_dir"])
    assert youngest is not None
    assert (youngest.key, youngest.first) == ("eval_strategy", "4.41")
    assert first_release("transformers", "", ["output_dir"]) is None
