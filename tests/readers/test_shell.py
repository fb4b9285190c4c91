"""What a shell makes of the words of a script, as far as the script alone says it."""

from __future__ import annotations

import subprocess

import pytest

from strategist.readers.shell import LONGEST, read_words, split


def words(text: str) -> tuple[str, ...]:
    """The words of a script, with its values put in."""
    return read_words(split(text))[0]


def by_a_shell(text: str) -> tuple[str, ...]:
    """The words that a shell gives to the last command, one a line."""
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True, env={})
    return tuple(done.stdout.split())


SET = "N=4\nW=$((N * 8))\nT=3\nMODE=false\nNAME='a b'\n"
SHOW = "printf '%s\\n'"


@pytest.mark.parametrize(
    "said",
    [
        "$((N*8/T))",
        "$(( N * 8 / T ))",
        "$(( ($N + 2) * (W - T) % 7 ))",
        "$((-7 / 2)) $((-7 % 2)) $((7 / -2)) $((7 % -2))",
        "$((W / (N * 2) * ${MISSING:-5}))",
        "--size=$((W)) x$((T + 1))y",
        '"$((N + T))"',
        "${1:-6} ${MISSING:-$((2 * 3))}",
    ],
)
def test_sums_come_to_what_a_shell_makes_of_them(said: str) -> None:
    """Whole numbers, variables of the script, brackets, and division towards zero."""
    line = f"{SET}{SHOW} {said}"
    assert words(line)[-len(by_a_shell(line)) :] == by_a_shell(line)


@pytest.mark.parametrize(
    "said",
    ["$((M * 2))", "$((N ** 2))", "$((N / 0))", "$((NAME + 1))", "$((f(1)))", "$((010 + 1))", f"$((1{'+1' * LONGEST}))", "$(nproc)", "$1"],
)  # fmt: skip
def test_what_is_no_sum_of_known_numbers_stays(said: str) -> None:
    """Nothing is guessed: the words are those of the script."""
    assert "".join(words(f"{SET}x {said}")).endswith(f"x{said}".replace(" ", ""))


def test_numbers_do_not_grow_without_end() -> None:
    """A shell's numbers have 64 bits."""
    text = "A=9999999999\n" + "A=$((A * A))\n" * 60
    assert max(map(len, words(text))) < 60


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[ "${MODE}" = "true" ]', False),
        ('[ "$MODE" = false ]', True),
        ('[ "$MODE" != "false" ]', False),
        ("[[ $MODE == true ]]", False),
        ('[[ "$NAME" == "a b" ]]', True),
        ('[ "${MISSING:-no}" = no ]', True),
    ],
)
def test_branches_of_known_words_are_read_where_they_are_taken(condition: str, taken: bool) -> None:
    """As a shell takes them, with what stands behind elif and else, and inside of other branches."""
    text = f"{SET}if {condition}; then\n echo one\n if [ -f x ]; then echo two; fi\nelif [ $MODE = false ]; then echo three\nelse\n echo four; fi\necho five"
    found = [word for word in words(text) if word in ("one", "two", "three", "four", "five")]
    assert found == (["one", "two", "five"] if taken else ["three", "five"])


@pytest.mark.parametrize(
    "text",
    [
        "if [ -f x ]; then echo one; else echo two; fi",
        'if [ "$MODE" = true ] && [ -f x ]; then echo one; else echo two; fi',
        "if [ $N -eq 1 ]; then echo one; else echo two; fi",
        'if [ "$1" = true ]; then echo one; else echo two; fi',
        "if [[ $NAME == a* ]]; then echo one; else echo two; fi",
        "echo if\nif [ $MODE = true ]; then echo one; else echo two; fi",
        "MODE=true\nif [ $MODE = true ]; then echo one; else echo two; fi",
        "if [ -f x ]; then SET=1; fi\nif [ $SET = 1 ]; then echo one; else echo two; fi",
        "read MODE\nif [ $MODE = true ]; then echo one; else echo two; fi",
    ],
)
def test_other_branches_are_all_read(text: str) -> None:
    """Conditions that are not clear: of files, of several, of numbers, of patterns, of variables that may hold something else by then."""
    assert [word for word in words(SET + text) if word in ("one", "two")] == ["one", "two"]


def test_brackets_of_lists_and_groups_are_no_part_of_words() -> None:
    """Those that a word opens and closes itself are."""
    text = "ARGS=(--a 1 --b '([0]+[1])*8' --c $((N * 2)))\n(cd x; ((M=3)); echo $M)"
    assert words(f"N=4\n{text}") == (
        "N=4", "ARGS=(--a", "1", "--b", "([0]+[1])*8", "--c", "8", "cd", "x", "M=3", "echo", "3",
    )  # fmt: skip
