"""What a library's modules of one architecture keep that others of its modules do not. One data row each."""

from __future__ import annotations

from functools import cache

from strategist.catalog import rows
from strategist.facts.keeping import Keeping
from strategist.records import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleForm:
    """How the modules of one `model_type` are written, where that keeps more from forward to backward: values that are a view of what one
    matrix gave with queries and keys, which are rotated elsewhere, keep all of it (`projected`); queries that are put together anew, such as those of
    which a part alone is rotated, have attention give its result head by head, which is copied before the last matrix reads it
    (`copied_output`). Norms that do not cast before they multiply by their weight, or that are written in several operations, keep more bytes of each
    element: in all 16 bits (`norm_low`), under autocast (`norm_mixed`) and in float32 (`norm_wide`)."""

    library: str
    model_type: str
    source: str
    projected: bool = False
    copied_output: bool = False
    norm_low: float = 0.0
    norm_mixed: float = 0.0
    norm_wide: float = 0.0


@cache
def find_module_form(library: str, model_type: str) -> ModuleForm | None:
    """The row of an architecture as a library calls it; None where its modules keep what others do, and where a framework has layers of its
    own (no library)."""
    asked = (library, model_type)
    found = (row for row in rows("module_forms") if (row["library"], row["model_type"]) == asked)
    return next((ModuleForm(**row) for row in found), None)


def kept_by_modules(keeping: Keeping, form: ModuleForm | None, numbers: str, *, is_fused: bool) -> Keeping:
    """The framework's habits with those of the modules that it runs, in such formats (`profile.numbers_of`). Where attention `is_fused` it keeps its
    result itself, so that a copy is one more."""
    if form is None:
        return keeping
    of_norms = {"low": form.norm_low, "mixed": form.norm_mixed, "wide": form.norm_wide}
    return replace(
        keeping,
        projected=keeping.projected or form.projected,
        copied_output=form.copied_output and is_fused,
        norm_bytes=of_norms[numbers],
    )
