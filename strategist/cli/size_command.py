"""`strategist size`: from a model, tokens and a deadline to machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import check_target, write_document
from strategist.cli.flags import CHOICE, COMMON, MODEL, OUTPUT, WORKLOAD, Flag
from strategist.cli.output import show_document, show_lines, width

if TYPE_CHECKING:
    from strategist.document.sizing import Sizing

FLAGS = (
    *MODEL,
    Flag("--deadline", "the run must end by then, failures included: 30d, 12h, 2w", "DURATION"),
    Flag("--gpu", "devices to choose from: h100-sxm,h200-sxm,b200", "NAME,..."),
    Flag(
        "--gpus-per-node", "devices per node, 1 to 1024; otherwise those of the reference node, and parts of one", "N"
    ),
    Flag("--nodes", "at most so many nodes (2048)", "N"),
    *(flag for flag in WORKLOAD if flag.name not in ("--micro-batch", "--grad-accum", "--price-per-gpu-hour")),
    Flag("--price-per-gpu-hour", "price of one device for one hour: one for all, or one for each --gpu", "MONEY,..."),
    *(flag for flag in CHOICE if flag.name in ("--frontend", "--forbid", "--config")),
    *OUTPUT,
    *COMMON,
)

COMMAND = Command(
    "size",
    "Find the least, the cheapest and the fastest machines for a model, a number of tokens and a deadline.",
    FLAGS,
    examples=(
        "strategist size --model 70B --tokens 1T --deadline 30d",
        "strategist size --model 70B --tokens 1T --deadline 30d --gpu h100-sxm,b200 --price-per-gpu-hour 2.5,5",
    ),
)


def run(options: Namespace) -> int:
    """Print the sizing. Exit 3 when nothing is in time."""
    from strategist.reports.sizing import sizing_text

    if options.out is not None:
        check_target(options.out, "--out", force=options.force)
    found = _sized(options)
    write_document(found, options)
    if options.json:
        show_document(found)
    elif not options.quiet:
        show_lines(sizing_text(found, width()), no_color=options.no_color)
    return 0


def _sized(options: Namespace) -> Sizing:
    """The answers to the flags. Raises InputError for them and NoPlanError when nothing is in time."""
    from strategist.ask import Given
    from strategist.cli.given import READERS, several, values_from
    from strategist.sizing import Wanted, sized
    from strategist.units import parse_duration

    lists = {name: several(READERS[name]) for name in ("gpu", "price_per_gpu_hour")}
    values = values_from(options, FLAGS, {**lists, "deadline": lambda text, flag: parse_duration(text, flag)})
    own = {"deadline": "deadline_s", "gpu": "gpus", "price_per_gpu_hour": "prices"}
    said = {name: values.pop(key) for key, name in own.items() if key in values}
    return sized(Wanted(given=Given(**values), **said))
