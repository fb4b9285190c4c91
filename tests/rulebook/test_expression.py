"""The language of rules: a few words of arithmetic and logic, on numbers and on columns, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import RuleError
from strategist.rulebook.expression import evaluate, names, parse
from strategist.rulebook.vocabulary import WORDS
from strategist.space.candidates import WORDS as CODED
from tests.examples import examples

VALUES: dict[str, Any] = {
    "tp": 4,
    "pp": 2,
    "dp": 8,
    "heads": 32,
    "seq_len": 4096,
    "fast_intra": True,
    "precision": "bf16",
}
NUMBERS = tuple(name for name, value in VALUES.items() if isinstance(value, int))

ALLOWED = (
    ast.Expression, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Name, ast.Constant, ast.Load, ast.And, ast.Or,
    ast.Not, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.Eq, ast.NotEq,
)  # fmt: skip


def value_of(text: str, values: dict[str, Any] = VALUES) -> Any:
    """What an expression evaluates to."""
    return evaluate(parse(text, "T1"), values)


@examples(300)
@given(st.text(max_size=60) | st.from_regex(r"[a-z(). +*/%<=>!,\[\]'0-9_:@-]{0,40}", fullmatch=True))
def test_any_text_is_a_value_or_a_refusal(text: str) -> None:
    """Whatever stands in `when`, it is whitelisted syntax with a value, or a RuleError; nothing else is ever evaluated."""
    try:
        tree = parse(text, "T1")
    except RuleError:
        return
    assert all(isinstance(node, ALLOWED) for node in ast.walk(tree))
    try:
        evaluate(tree, VALUES)
    except RuleError as refused:
        assert refused.hint


ARITHMETIC = st.recursive(
    st.sampled_from(NUMBERS) | st.integers(0, 10**6).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(("+", "-", "*", "/", "//", "%")), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=6,
)
LOGIC = st.recursive(
    st.tuples(ARITHMETIC, st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), ARITHMETIC).map(" ".join),
    lambda inner: st.tuples(inner, st.sampled_from(("and", "or")), inner).map(lambda p: f"({p[0]}) {p[1]} ({p[2]})")
    | inner.map(lambda one: f"not ({one})"),
    max_leaves=4,
)  # fmt: skip


@examples(200)
@given(LOGIC)
def test_conditions_mean_what_python_means(text: str) -> None:
    """A condition has Python's own value, except that dividing by zero gives zero instead of an exception."""
    try:
        expected = eval(text, {"__builtins__": {}}, dict(VALUES))
    except ZeroDivisionError:
        assert value_of(text) in (True, False)
        return
    assert bool(value_of(text)) is bool(expected)


@examples(100)
@given(LOGIC, st.lists(st.tuples(*(st.integers(1, 64) for _ in range(5))), min_size=1, max_size=5))
def test_columns_are_many_numbers(text: str, rows: list[tuple[int, ...]]) -> None:
    """A condition on columns is the condition on each row."""
    words = ("tp", "pp", "dp", "heads", "seq_len")
    columns = {word: np.array([row[i] for row in rows]) for i, word in enumerate(words)} | {"fast_intra": True}
    whole = np.broadcast_to(value_of(text, columns), (len(rows),))
    single = [bool(value_of(text, dict(zip(words, row, strict=True)) | {"fast_intra": True})) for row in rows]
    assert [bool(v) for v in whole] == single


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "open('x')", "().__class__", "tp.real", "tp[0]", "[tp for tp in (1,)]",
        "lambda: 1", "(tp := 2)", "f'{tp}'", "{1: 2}", "{1}", "[1]", "(1, 2)", "tp if pp else dp", "tp ** 99999999",
        "tp << 99", "tp & 1", "~tp", "+tp", "tp is 4", "tp in precision", "tp not in precision", "*tp", "await tp",
        "yield", "precision * 999999999", "'%d' % tp", "precision + 1", "-precision", "precision < 1", "None", "b'x'", "1j", "...", "", " ", "tp =", "tp == ", "x\x00", "((((", "tp; pp",
    ],
)  # fmt: skip
def test_everything_else_is_refused(text: str) -> None:
    """Calls, attributes, indices, literals of containers, shifts, powers: each is refused before it could run."""
    with pytest.raises(RuleError) as refused:
        value_of(text, VALUES)
    assert refused.value.hint


@pytest.mark.parametrize(
    "make", [lambda n: "(" * n + "tp" + ")" * n, lambda n: "not " * n + "tp", lambda n: "-" * n + "1"]
)
def test_deep_nesting_is_refused(make: Callable[[int], str]) -> None:
    """A text that would exhaust the stack is a refusal, not a crash."""
    for depth in (50, 5000, 100_000):
        try:
            value_of(make(depth))
        except RuleError as refused:
            assert refused.hint


def test_unknown_names_are_answered_with_the_nearest() -> None:
    """A name without a value is told with the names that are near."""
    with pytest.raises(RuleError, match="seq_lenn") as refused:
        value_of("seq_lenn > 1")
    assert "seq_len" in str(refused.value.hint)


@pytest.mark.parametrize("name", CODED)
def test_words_of_columns(name: str) -> None:
    """A quoted word beside a column of choices stands for its number, on either side; an unknown word is refused."""
    for number, word in enumerate(CODED[name]):
        assert value_of(f"{name} == '{word}'", {name: number})
        assert value_of(f"'{word}' == {name}", {name: number})
        assert not value_of(f"{name} != '{word}'", {name: number})
    with pytest.raises(RuleError, match="is not a value of"):
        value_of(f"{name} == 'nonsense'", {name: 0})


def test_names_of_an_expression() -> None:
    """The names are exactly the free ones, and words of choices are none."""
    assert names(parse("tp > 1 and schedule == 'gpipe' or not fast_intra", "T1")) == {"tp", "schedule", "fast_intra"}
    assert set(CODED) <= WORDS.keys()
