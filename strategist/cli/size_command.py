"""`strategist size`: from a model, tokens and a deadline to machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import CALIBRATION, CHOICE, COMMON, HARDWARE, MODEL, OUTPUT, WORKLOAD, Flag
from strategist.cli.output import watched, width
from strategist.errors import InputError

if TYPE_CHECKING:
    from strategist.document.sizing import Largest, Sizing

FLAGS = (
    *MODEL,
    Flag("--deadline", "the run must end by then, failures included: 30d, 12h, 2w", "DURATION"),
    Flag(
        "--max",
        "instead: the largest that fits on the machines of --hardware, or --gpu --nodes",
        "WORD",
        choices=("seq-len", "model-size", "micro-batch"),
    ),
    Flag(
        "--hardware",
        "machines for --max: node type and count (dgx-h100:4), a hardware file, local or cpu",
        "NODE[:COUNT]",
    ),
    Flag("--gpu", "devices to choose from: h100-sxm,h200-sxm,b200", "NAME,..."),
    Flag(
        "--gpus-per-node", "devices per node, 1 to 1024; otherwise those of the reference node, and parts of one", "N"
    ),
    Flag("--nodes", "at most so many nodes (2048)", "N"),
    *(flag for flag in HARDWARE if flag.name in ("--intra-bw", "--inter-bw")),
    *(flag for flag in WORKLOAD if flag.name not in ("--micro-batch", "--grad-accum", "--price-per-gpu-hour")),
    Flag("--price-per-gpu-hour", "price of one device for one hour: one for all, or one for each --gpu", "MONEY,..."),
    *(flag for flag in CHOICE if flag.name in ("--frontend", "--forbid", "--also", "--time-budget", "--config")),
    *CALIBRATION,
    *OUTPUT,
    *COMMON,
)

COMMAND = Command(
    "size",
    "Find the least, the cheapest and the fastest machines for a model, a number of tokens and a deadline.",
    FLAGS,
    examples=(
        "strategist size --model 70B --tokens 1T --deadline 30d",
        "strategist size --model 7B --hardware dgx-h100 --max seq-len",
        "strategist size --model 70B --tokens 1T --deadline 30d --gpu h100-sxm,b200 --price-per-gpu-hour 2.5,5",
    ),
)


def run(options: Namespace) -> int:
    """Print the sizing. Exit 3 when nothing is in time or nothing fits."""
    from strategist.document.sizing import Largest
    from strategist.reports.sizing import largest_text, sizing_text

    check_out(options)
    found = _sized(options)
    deliver(
        found,
        options,
        lambda: (
            largest_text(found, width())
            if isinstance(found, Largest)
            else sizing_text(found, width(), verbose=options.verbose)
        ),
    )
    return 0


def _sized(options: Namespace) -> Sizing | Largest:
    """The answers to the flags. Raises InputError for them and NoPlanError when there is none."""
    from strategist.ask import Given
    from strategist.cli.given import READERS, several, values_from
    from strategist.sizing import Wanted, largest_that_fits, sized
    from strategist.units import parse_duration

    lists = {name: several(READERS[name]) for name in ("gpu", "price_per_gpu_hour")}
    values = values_from(options, FLAGS, {**lists, "deadline": lambda text, flag: parse_duration(text, flag)})
    what = values.pop("max", None)
    _same_question(values, what)
    if what is not None:
        return largest_that_fits(Given(**{key: _only(key, value) for key, value in values.items()}), what)
    own = {"deadline": "deadline_s", "gpu": "gpus", "price_per_gpu_hour": "prices"}
    said = {name: values.pop(key) for key, name in own.items() if key in values}
    with watched(options) as watch:
        return sized(Wanted(given=Given(**values), **said), watch)


def _same_question(values: Mapping[str, Any], what: str | None) -> None:
    """Raise InputError CONFLICT for flags of the other question: machines to find, or the largest on given ones."""
    wrong = ("hardware",) if what is None else ("deadline", "price_per_gpu_hour", "time_budget")
    flag = next((f"--{key.replace('_', '-')}" for key in wrong if key in values), None)
    if flag is None:
        return
    if what is None:
        hint = "Name devices with --gpu, or ask for what is largest with --max."
        raise InputError(
            "CONFLICT",
            f"{flag} names machines, and without --max machines are what is looked for.",
            flag=flag,
            hint=hint,
        )
    raise InputError("CONFLICT", f"{flag} means nothing beside --max.", flag=flag, hint="Leave it out.")


def _only(key: str, value: Any) -> Any:
    """The one kind of device that machines are given with. Raises InputError CONFLICT for several."""
    if key != "gpu":
        return value
    if len(value) > 1:
        raise InputError("CONFLICT", "--max is about one kind of device.", flag="--gpu", value=",".join(value), hint="Name one.")  # fmt: skip
    return value[0]
