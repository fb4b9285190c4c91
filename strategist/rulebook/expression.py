"""Expressions of rules: a whitelist over Python's syntax, evaluated on whole columns.

Numbers, quoted words, names of the vocabulary, + - * / // %, comparisons, and / or / not. No calls, no attributes,
no indexing: a rule file from a stranger can be read without running anything of theirs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strategist.errors import RuleError, did_you_mean, shown
from strategist.space.candidates import WORDS as CODED

Value = Any
_ARITHMETIC: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISON: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


LONGEST = 400
"""Characters of an expression; ours have at most a hundred, and a longer one could exhaust the stack."""

_SYNTAX = (
    ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Name, ast.Constant, ast.Load, ast.And, ast.Or, ast.Not, ast.USub,
    *_ARITHMETIC, *_COMPARISON,
)  # fmt: skip
_REMEDY = "Use names, numbers, + - * / // %, comparisons, and, or, not."


def parse(text: str, rule: str) -> ast.expr:
    """The syntax tree of an expression. Raises RuleError when it is not an expression of the allowed kind."""
    if len(text) > LONGEST:
        sentence = f"Rule {rule}: its condition has more than {LONGEST} characters."
        raise RuleError("RULE", sentence, value=text, hint="Split it into several rules.")
    try:
        tree = tree_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        sentence = f"Rule {rule}: {shown(text)!r} is not an expression."
        raise RuleError("RULE", sentence, value=text, hint=_REMEDY) from None
    for node in ast.walk(tree):
        _check(node, rule)
    return tree


def tree_of(text: str) -> ast.expr:
    """The syntax tree of an expression that is known to be allowed."""
    return ast.parse(text, mode="eval").body


def _check(node: ast.AST, rule: str) -> None:
    if not isinstance(node, _SYNTAX):
        raise RuleError("RULE", f"Rule {rule}: {type(node).__name__} is not allowed in a rule.", hint=_REMEDY)
    if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str)):
        sentence = f"Rule {rule}: only numbers and quoted words are allowed as constants."
        raise RuleError("RULE", sentence, value=node.value, hint="Write a number.")


def names(tree: ast.expr) -> frozenset[str]:
    """The names an expression uses."""
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def evaluate(tree: ast.expr, values: Mapping[str, Value]) -> Value:
    """The value of an expression: a scalar from scalars, a column from columns. Names must be in `values`.

    Raises RuleError for a name without a value, and for arithmetic that has no result (words, numbers out of range).
    """
    try:
        return _value(tree, values)
    except (TypeError, OverflowError, ValueError) as problem:
        sentence = f"The condition `{shown(ast.unparse(tree))}` cannot be computed: {problem}."
        raise RuleError("RULE", sentence, hint="Compare words with == and numbers with numbers.") from None


def _value(tree: ast.expr, values: Mapping[str, Value]) -> Value:
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _lookup(name, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, values))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _value(left, values), _value(right, values))
        case ast.BoolOp(op=op, values=parts):
            return _joined(isinstance(op, ast.And), parts, values)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            return _comparison(left, ops, rights, values)
    raise RuleError("RULE", f"{type(tree).__name__} is not allowed in a rule.", hint=_REMEDY)


def _joined(is_and: bool, parts: list[ast.expr], values: Mapping[str, Value]) -> Value:
    """`and` or `or`. A scalar that decides it ends the search, as in Python: most rules begin with what the question says, and the
    columns behind it need not be looked at."""
    combine, so_far = (np.logical_and if is_and else np.logical_or), is_and
    for part in parts:
        value = _value(part, values)
        so_far = value if np.ndim(so_far) == 0 and _is_mask(value) else combine(so_far, value)
        if np.ndim(so_far) == 0 and bool(so_far) is not is_and:
            break
    return so_far


def _lookup(name: str, values: Mapping[str, Value]) -> Value:
    if name not in values:
        raise RuleError("RULE", f"The name {name!r} has no value here.", value=name, hint=did_you_mean(name, values))
    return values[name]


def _arithmetic(op: ast.operator, left: Value, right: Value) -> Value:
    """Division by zero counts as zero: a model without heads cannot be cut unevenly."""
    if isinstance(left, str) or isinstance(right, str):
        raise TypeError("words are no numbers")
    if isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)):
        is_zero = np.asarray(right) == 0
        if is_zero.any():
            return np.where(is_zero, 0, _ARITHMETIC[type(op)](left, np.where(is_zero, 1, right)))
    return _ARITHMETIC[type(op)](left, right)


def _comparison(left: ast.expr, ops: list[ast.cmpop], rights: list[ast.expr], values: Mapping[str, Value]) -> Value:
    result: Value = True
    for op, right in zip(ops, rights, strict=True):
        a, b = _operand(left, right, values), _operand(right, left, values)
        holds = _COMPARISON[type(op)](a, b)
        result = holds if result is True and _is_mask(holds) else np.logical_and(result, holds)
        left = right
    return result


def _is_mask(value: Value) -> bool:
    """Whether this is a column of truth values, which a scalar that decided nothing leaves as it is."""
    return isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype == np.bool_


def _operand(side: ast.expr, other: ast.expr, values: Mapping[str, Value]) -> Value:
    """A quoted word beside a coded column becomes the number that stands for it."""
    if (
        isinstance(side, ast.Constant)
        and isinstance(side.value, str)
        and isinstance(other, ast.Name)
        and other.id in CODED
    ):
        known = CODED[other.id]
        if side.value not in known:
            raise RuleError(
                "RULE",
                f"{side.value!r} is not a value of {other.id}.",
                value=side.value,
                hint=did_you_mean(side.value, known),
            )
        return known.index(side.value)
    return _value(side, values)
