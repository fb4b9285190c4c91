"""Words of a shell as its script leaves them: variables and sums of them put in, branches that are not taken left out; nothing is run.

Variables that the script itself sets to plain words are put in, and so is `$((...))` of whole numbers; everything else stays as it is
written. What a shell does with them: POSIX.1-2017, Shell Command Language, 2.6.2 and 2.6.4.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from strategist.records import dataclass

Variables = Mapping[str, str | None]

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(?::?[-?]([^}]*))?\})")
_SUM = re.compile(r"\$\(\(((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*)\)\)")
"""`$((...))` with brackets in it, two deep."""

LONGEST, LARGEST = 200, 2**63 - 1
"""Characters of a sum beyond which nobody wrote it, and the largest number of a shell."""


OPENING, CLOSING = ("if", "case", "do", "{"), ("fi", "esac", "done", "}")
SETTING = ("for", "read", "unset")
"""Words of a shell around what may not be run, or not once, and before the name of a variable that they change."""


def split(text: str) -> list[str]:
    """The words of a text for a shell, where a sum is one word. Raises ValueError where quotes do not close."""
    whole = _SUM.sub(lambda match: "".join(match[0].split()), text.replace("\\\n", " "))
    return shlex.split(whole, comments=True)


def read_words(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str | None]]:
    """Words that are read, with values put in, and the variables that are set or unset (None)."""
    variables: dict[str, str | None] = {}
    read: list[str] = []
    before = ""
    for raw in _taken(words):
        word = _bare(expanded(raw, variables))
        name, equals, value = word.partition("=")
        if equals and _ASSIGNMENT.fullmatch(name):
            variables[name] = value
        elif before == "unset":
            variables[word] = None
        read += word.split() if word != _bare(raw) or word.startswith("--") else [word]
        before = raw
    return tuple(read), variables


def expanded(word: str, variables: Variables) -> str:
    """A word with the script's own variables put in, or the default that stands beside them, and what sums of them come to."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[2])
        return known if known is not None else match[3] if match[3] and "-" in match[0] else match[0]

    def result(match: re.Match[str]) -> str:
        number = _sum_of(match[1], variables)
        return match[0] if number is None else str(number)

    return _SUM.sub(result, _REFERENCE.sub(value, word))


def _bare(word: str) -> str:
    """A word without the brackets of a list or of a group of commands around it: those that it does not close or open itself."""
    word = word.strip(";")
    if word.startswith("((") and word.endswith("))"):
        return word[2:-2]
    more = word.count(")") - word.count("(")
    behind, before = len(word) - len(word.rstrip(")")), len(word) - len(word.lstrip("("))
    return word[max(0, min(before, -more)) : len(word) - max(0, min(behind, more))]


def _sum_of(text: str, variables: Variables) -> int | None:
    """What a sum of whole numbers and of variables that hold some comes to; None for any other text, which is never run."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):  # the latter of a null byte
        return None
    return _number(tree.body, variables)


def _number(node: ast.expr, variables: Variables) -> int | None:
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(name):
            held = variables.get(name) or ""
            return _bounded(int(held)) if re.fullmatch(r"0|[1-9][0-9]{0,18}", held) else None
        case ast.UnaryOp(ast.USub(), inner):
            one = _number(inner, variables)
            return None if one is None else -one
        case ast.BinOp(left, sign, right):
            one, other = _number(left, variables), _number(right, variables)
            return None if one is None or other is None else _bounded(_done(one, sign, other))
    return None


def _bounded(number: int | None) -> int | None:
    return number if number is not None and abs(number) <= LARGEST else None


def _done(one: int, sign: ast.operator, other: int) -> int | None:
    """One step of a sum. Shells divide as C does, towards zero."""
    match sign:
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.Mult():
            return one * other
        case ast.Div() | ast.Mod() if other:
            quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
            return quotient if isinstance(sign, ast.Div) else one - quotient * other
    return None


@dataclass(slots=True)
class _Branches:
    """One `if`: whether the branch that is being read may be taken, and whether an earlier one is in any case."""

    may_be: bool = True
    is_settled: bool = False

    def on(self, holds: bool | None) -> None:
        """The next branch, whose condition holds, does not, or may."""
        self.may_be = not self.is_settled and holds is not False
        self.is_settled = self.is_settled or holds is True


def _taken(words: Sequence[str]) -> Iterator[str]:
    """Words without the branches whose conditions do not hold. Where it is not clear which `fi` ends which `if`, all of them."""
    bare = [word.strip(";") for word in words]
    if bare.count("if") != bare.count("fi"):
        yield from words
        return
    constants, open_ones = _constants(words), [_Branches()]
    for index, word in enumerate(bare):
        if word == "if":
            open_ones.append(_Branches())
        if word in ("if", "elif", "else") and len(open_ones) > 1:
            open_ones[-1].on(True if word == "else" else _holds(bare[index + 1 : index + 7], constants))
        if word == "fi" and len(open_ones) > 1:
            open_ones.pop()
        if all(one.may_be for one in open_ones):
            yield words[index]


def _constants(words: Sequence[str]) -> dict[str, str | None]:
    """Variables that are set once, to a plain word, and in no branch, loop or function: others may hold anything where they are looked at."""
    times: Counter[str] = Counter()
    constants: dict[str, str | None] = {}
    depth = 0
    for before, word in pairwise(("", *map(_bare, words))):
        depth += (word in OPENING) - (word in CLOSING)
        name, equals, value = word.partition("=")
        if before in SETTING:
            times[word] += 1
        elif equals and _ASSIGNMENT.fullmatch(name):
            times[name] += 1
            constants[name] = None if depth else expanded(value, constants)
    return {name: value for name, value in constants.items() if times[name] == 1}


def _holds(words: Sequence[str], constants: Variables) -> bool | None:
    """Whether `[ a = b ]` or its like, and nothing beside it, holds before `then`; None where a side is not known or is a pattern."""
    match words:
        case [("[" | "[["), one, ("=" | "==" | "!=") as sign, other, ("]" | "]]"), "then"]:
            left, right = expanded(one, constants), expanded(other, constants)
            if set("$`*?[") & set(left + right):
                return None
            return (left == right) == (sign != "!=")
    return None
