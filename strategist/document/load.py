"""The door for documents: a file becomes a Plan or an Observed only after strict checks of format, keys and types."""

from __future__ import annotations

from typing import Any

from strategist.document.calibration import CALIBRATION_FORMAT, Calibration
from strategist.document.observed import OBSERVED, Observed
from strategist.document.plan import FORMAT, Plan
from strategist.errors import InputError, StaleError, StrategistError, shown
from strategist.reading import checked, read_document

LARGEST = 1e30
"""Above every count, size and rate there is; the FLOP of a long run stay below it."""


def load_plan(path: str, flag: str = "PLAN") -> Plan:
    """The Plan in a file, or in standard input for `-`. Raises InputError for files and keys, KIND for other documents, StaleError
    SCHEMA_VERSION."""
    return plan_from(read_document(path, flag), flag)


def plan_from(value: Any, flag: str) -> Plan:
    """The Plan in a parsed JSON value."""
    _require_format(value, flag, FORMAT, "a Plan", "Plan again with this version.", "strategist plan --out plan.json")
    try:
        plan = checked(Plan, value, flag)
    except InputError as fault:
        raise _of_another_version(fault, value, flag) from None
    if plan.decision.difference == 0.0:
        raise InputError(
            "RANGE",
            "$.decision.difference is the other policy's step time over the chosen one's; it must be above 0.",
            flag="$.decision.difference",
            value=0,
            hint="Correct the file, or make it again.",
        )
    if not plan.memory.stages:
        raise InputError("MISSING", f"{flag}: $.memory.stages is empty, and every stage has its bytes.", flag="$.memory.stages", hint="Correct the file, or make it again.")  # fmt: skip
    return plan


def _of_another_version(fault: InputError, value: dict[str, Any], flag: str) -> StrategistError:
    """What is wrong with a Plan: that another version made it, where that explains a key or a word that this one does not have."""
    from strategist import __version__

    made_by, ours = value.get("made_by"), f"strategist {__version__}"
    is_foreign = isinstance(made_by, str) and made_by.startswith("strategist ") and made_by != ours
    if not is_foreign or fault.code not in ("UNKNOWN_KEY", "MISSING", "CHOICE"):
        return fault
    return StaleError(
        "SCHEMA_VERSION",
        f"{flag} was made by {shown(made_by)}, and this is {ours}. {fault.message}",
        flag=fault.flag,
        value=fault.value,
        hint=f"Plan again with this version, or read it with {shown(made_by)}.",
        also=fault.also,
    )


def load_observed(path: str) -> Observed:
    """The Observed in a file. Raises what `load_plan` raises."""
    return observed_from(read_document(path, "OBSERVED"), "OBSERVED")


def observed_from(value: Any, flag: str) -> Observed:
    """The Observed in a parsed JSON value."""
    made = "strategist trace plan.json --out trace.json"
    _require_format(value, flag, OBSERVED, "an observation", "Trace again with this version.", made)
    return checked(Observed, value, flag)


def _require_format(value: Any, flag: str, wanted: str, kind: str, again: str, made: str) -> None:
    """Raise InputError KIND for another sort of document and StaleError SCHEMA_VERSION for another version of it."""
    found = value.get("format") if isinstance(value, dict) else None
    if not isinstance(found, str) or not found.startswith(wanted.partition("/")[0] + "/"):
        raise InputError(
            "KIND",
            f"{flag} is not {kind}: its `format` is {shown(found)!r}.",
            flag=flag,
            value=found,
            hint=f"Make one with `{made}`.",
        )
    if found != wanted:
        raise StaleError(
            "SCHEMA_VERSION",
            f"{flag} has format {shown(found)}; this version reads {wanted}.",
            flag=flag,
            value=found,
            hint=again,
        )
    _refuse_wild_numbers(value, "$")


def _refuse_wild_numbers(value: Any, path: str) -> None:
    """Nothing in a document is negative, and nothing is so large that a float could not count with it."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_wild_numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_wild_numbers(item, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not 0 <= value <= LARGEST:
        code, words = ("NEGATIVE", "negative") if value < 0 else ("TOO_LARGE", f"larger than {LARGEST:.0e}")
        raise InputError(
            code, f"{shown(path)} is {words}.", flag=path, value=value, hint="Correct the file, or make it again."
        )


def load_calibration(path: str, flag: str = "--calibration") -> Calibration:
    """The Calibration in a file. Raises InputError for files, keys and numbers, KIND for other documents."""
    value = read_document(path, flag)
    found = value.get("format") if isinstance(value, dict) else None
    if found != CALIBRATION_FORMAT:
        raise InputError(
            "KIND",
            f"{flag} is not a calibration of this version: its `format` is {shown(found)!r}.",
            flag=flag,
            value=found,
            hint="Make one with `strategist calibrate RUNS.csv --out calibration.json`.",
        )
    _refuse_wild_numbers(value, "$")
    return _within_reason(checked(Calibration, value, flag), flag)


def _within_reason(calibration: Calibration, flag: str) -> Calibration:
    """Factors beyond a tenth or ten times are no calibration, two of one part would multiply, and intervals hold what is predicted. Raises InputError
    RANGE and CONFLICT."""
    seen: dict[tuple[str, str, str], int] = {}
    for number, factor in enumerate(calibration.factors):
        first = seen.setdefault((factor.part, factor.gpu, factor.framework), number)
        if first != number:
            raise InputError(
                "CONFLICT", f"{flag}: $.factors[{number}] and $.factors[{first}] are both of {factor.part} on the same devices and frameworks.", flag=flag, value=factor.part, hint="Keep one, or calibrate again."
            )  # fmt: skip
        if not 0.1 <= factor.value <= 10:
            raise InputError(
                "RANGE", f"{flag}: $.factors[{number}].value must lie between 0.1 and 10.", flag=flag, value=factor.value, hint="Calibrate again."
            )  # fmt: skip
    for number, near in enumerate(calibration.near):
        if not 0.1 <= near.low <= 1 <= near.high <= 10:
            raise InputError(
                "RANGE", f"{flag}: $.near[{number}] must go from 0.1 to 1, low, to 1 to 10, high.", flag=flag, value=(near.low, near.high), hint="Calibrate again."
            )  # fmt: skip
    return calibration


def schema() -> dict[str, Any]:
    """The JSON schema of a Plan."""
    from pydantic import TypeAdapter

    return {"$id": FORMAT} | TypeAdapter(Plan).json_schema()
