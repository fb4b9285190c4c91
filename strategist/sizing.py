"""From a model, tokens and a deadline to machines: what was said becomes one question per kind and number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Any

from strategist import __version__
from strategist.ask import ASSUMED_GPU, Asked, Given, complete
from strategist.catalog import rows
from strategist.document.sizing import Largest, Machines, Sizing
from strategist.errors import InputError
from strategist.facts.model import ModelShape
from strategist.facts.resolved import Assumption, said_to_plan
from strategist.facts.sizes import named_sizes
from strategist.facts.workload import MAX_SEQ_LEN
from strategist.planner.kinds import UNEVEN
from strategist.planner.largest import What, largest
from strategist.planner.search import Pace, Question, Watch
from strategist.planner.size import Kind, answers, largest_looked_at, looked_at, require_legal, sizes
from strategist.records import dataclass, replace
from strategist.space.enumerate import divisors
from strategist.timing.rates import require_rate
from strategist.units import counted, format_count

MOST_POWER = 64
"""Power of two that an assumed batch keeps beside the odd part of a node's devices."""
MOST_NODES = 2048
"""Eight devices each make the largest machines whose failures are known (catalogue: reliability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be trained, in `given`, by when, and on which kinds of devices; prices are per device and hour, one for all or
    one for each kind. None means: not said."""

    given: Given
    deadline_s: float | None = None
    gpus: tuple[str, ...] | None = None
    prices: tuple[float, ...] = ()


def sized(wanted: Wanted, watch: Watch | None = None) -> Sizing:
    """The machines that would do; `watch` hears of every size that is looked at. Raises InputError MISSING, CONFLICT and what `complete` raises, NoPlanError when nothing fits
    or nothing is in time, ImpossibleError HARDWARE_FEATURE for devices without a rate in the number format."""
    if wanted.given.tokens is None:
        raise InputError("MISSING", "The length of the run is not known.", flag="--tokens", hint="Example: --tokens 1T.")  # fmt: skip
    _is_searched(wanted.given)
    names = wanted.gpus or (ASSUMED_GPU,)
    prices = _prices(wanted.prices, names)
    given, assumed = _with_batch(wanted.given, names)
    kinds = [_kind(given, name, price) for name, price in zip(names, prices, strict=True)]
    _are_different(kinds)
    for kind in kinds:
        require_rate(kind.ask(*kind.sizes[0]).job)
    pace = Pace(given.time_budget, watch)
    found: list[Machines] = []
    for kind in kinds:
        for machines in looked_at(kind, wanted.deadline_s, pace, found):
            found.append(machines)  # the next kind, and the next size of this, see it
    if not found and wanted.deadline_s is not None:
        found.extend(largest_looked_at(kinds, wanted.deadline_s))
    if not found:
        require_legal(kinds)
    ordered = tuple(sorted(found, key=lambda m: (m.gpus, m.run_seconds)))
    best = answers(ordered, wanted.deadline_s)
    work = kinds[0].ask(*kinds[0].sizes[0]).job
    said = [] if wanted.gpus else [Assumption(what="device", value=ASSUMED_GPU, flag="--gpu")]
    return Sizing(
        made_by=f"strategist {__version__}",
        model=work.model,
        workload=work.workload,
        deadline_s=wanted.deadline_s,
        assumptions=_each_once([*said, *assumed, *_failures(), *_each_of({n: _on(given, n, None, 1).assumptions for n in names})]),
        looked_at=ordered,
        least=best.least,
        cheapest=best.cheapest,
        fastest=best.fastest,
        unfinished=tuple(pace.left_out),
    )  # fmt: skip


def _prices(prices: Sequence[float], names: Sequence[str]) -> Sequence[float | None]:
    """A price per kind of device. Raises InputError CONFLICT where it is not clear which is whose."""
    if len(prices) not in (0, 1, len(names)):
        raise InputError(
            "CONFLICT", f"{len(prices)} prices do not say what {len(names)} kinds of devices cost.",
            flag="--price-per-gpu-hour", value=",".join(map(str, prices)), hint="Give one for all, or one for each --gpu.",
        )  # fmt: skip
    return [None] * len(names) if not prices else [*prices] * (len(names) if len(prices) == 1 else 1)


def _are_different(kinds: Sequence[Kind]) -> None:
    """Raise InputError CONFLICT for one device under two names, whose prices may differ."""
    names: dict[str, str] = {}
    for kind in kinds:
        name = kind.ask(*kind.sizes[0]).job.cluster.smallest.name
        if name in names:
            raise InputError(
                "CONFLICT", f"{names[name]} and {kind.gpu} are the same device, {name}.",
                flag="--gpu", value=f"{names[name]},{kind.gpu}", hint="Name every kind of device once.",
            )  # fmt: skip
        names[name] = kind.gpu


def _is_searched(given: Given) -> None:
    """Raise InputError CONFLICT for a technique that is looked at behind the search of one plan."""
    if UNEVEN in (given.also or ""):
        raise InputError(
            "CONFLICT", f"--also {UNEVEN} is looked at for one plan on nodes of several kinds; sizes are searched without.",
            flag="--also", value=UNEVEN, hint="Leave it out, and plan for the machines that you choose.",
        )  # fmt: skip


def _on(given: Given, gpu: str, gpus_per_node: int | None, nodes: int) -> Asked:
    return complete(replace(given, gpu=gpu, gpus_per_node=gpus_per_node or given.gpus_per_node, nodes=nodes))


def _with_batch(given: Given, gpus: Sequence[str]) -> tuple[Given, tuple[Assumption, ...]]:
    """The same batch on all machines: as said, else as many tokens as published runs take whatever their size, in a number of sequences that
    whole nodes of every kind divide."""
    if given.global_batch is not None:
        return given, ()
    jobs = [_on(given, gpu, None, 1).question.job for gpu in gpus]
    job = jobs[0]
    seq_len, of = job.workload.seq_len, "images_per_batch" if job.model.is_convolutional else "tokens_per_batch"
    row = next(row for row in rows("reliability") if row["name"] == of)
    batch = _divided(max(1, int(row["tokens"]) // seq_len), lcm(*(each.cluster.world for each in jobs)))
    in_tokens = f" = {counted(batch * seq_len, 'token', format_count(batch * seq_len))}"
    words = counted(batch, "image") if job.model.unit == "images" else counted(batch, "sequence") + in_tokens
    said = Assumption(
        what="global batch", value=f"{words} on all machines", flag="--global-batch", source=row["source"]
    )
    return replace(given, global_batch=batch), (said,)


def _divided(batch: int, devices: int) -> int:
    """The number nearest to a batch that so many devices divide, and up to 64 times as many: powers of two of sequences stay as they are for
    powers of two of devices."""
    odd = devices // (devices & -devices)
    if odd == 1:
        return batch
    unit: int = odd * min(MOST_POWER, 1 << (max(1, batch // odd).bit_length() - 1))
    return max(1, round(batch / unit)) * unit


def _failures() -> tuple[Assumption, ...]:
    """Where failures, restarts and checkpoints are from: nobody can say them of machines that do not exist yet."""
    seen = {row["name"]: row for row in rows("reliability")}
    row, rate = seen["interruptions"], seen["checkpoint_rate"]
    words = f"as {row['interruptions']} in {row['days']} days on {row['gpus']:,} devices; {seen['restart']['seconds'] // 60} min to start again; checkpoints at {rate['Bps_per_gpu'] / 1e6:.0f} MB/s per device"
    return (Assumption(what="failures", value=words, flag="(catalogue: reliability)", source=row["source"]),)


def _kind(given: Given, gpu: str, price: float | None) -> Kind:
    """One kind of device with its questions and sizes."""
    node = _on(given, gpu, None, 1).question.job.cluster.groups[0].node
    return Kind(
        gpu=gpu,
        ask=lambda gpus_per_node, nodes: _on(given, gpu, gpus_per_node, nodes).question,
        sizes=sizes(node.gpus, given.nodes or MOST_NODES, parts=given.gpus_per_node is None),
        price_per_gpu_hour=price,
    )


def _each_of(said: Mapping[str, tuple[Assumption, ...]]) -> Iterator[Assumption]:
    """What was assumed for every kind of device; what was not assumed of all alike names its own."""
    for name, own in said.items():
        for one in own:
            is_shared = all(one in others for others in said.values())
            yield one if is_shared else replace(one, what=f"{one.what} ({name})")


def _each_once(said: Sequence[Assumption]) -> tuple[Assumption, ...]:
    """Assumptions without repetitions; machines are not named where they are what is looked for."""
    return tuple(dict.fromkeys(said_to_plan(one, "--hardware") for one in said))


SEQUENCE_STEP = 1024
"""Sequences are tried in multiples of it, so that every degree up to it divides them."""
TWO_DIGITS = tuple(digits * 10**power for power in range(6, 13) for digits in range(10, 100))
"""Sizes of models with two significant digits, from 10 M to 99 T."""


def largest_that_fits(given: Given, what: What) -> Largest:
    """The largest sequence, model or micro-batch that fits on the machines of a question. Raises InputError CONFLICT where the
    question already says it, and what `complete` raises; NoPlanError when nothing fits, ImpossibleError HARDWARE_FEATURE for devices without
    a rate in the number format."""
    said = {"seq-len": given.seq_len, "model-size": given.model_size or given.model or given.model_config, "micro-batch": given.micro_batch}  # fmt: skip
    if said[what] is not None:
        raise InputError("CONFLICT", f"--max {what} asks for what --{what} says.", flag="--max", value=what, hint=f"Leave --{what} out.")  # fmt: skip
    _is_searched(given)
    asked = complete(replace(given, model_size="1B") if what == "model-size" else given)
    require_rate(asked.question.job)
    fields = {"seq-len": "seq_len", "model-size": "model_size", "micro-batch": "micro_batch"}
    batch = asked.question.job.workload.global_batch  # the same job at every value

    def ask(value: int) -> Question:
        told: dict[str, Any] = {fields[what]: str(value) if what == "model-size" else value}
        return complete(replace(given, global_batch=batch, **told)).question

    model = ask(MAX_SEQ_LEN).job.model if what == "seq-len" else asked.question.job.model
    ladders: dict[What, Sequence[int]] = {
        "seq-len": _lengths(model.learned_positions),
        "model-size": TWO_DIGITS,
        "micro-batch": divisors(batch),
    }
    found = largest(what, ladders[what], ask, is_ordered=what != "micro-batch", named=named_sizes())
    unsaid = {"seq-len": "sequence length", "model-size": "model"}.get(what)
    said_of = tuple(a for a in asked.assumptions if a.what != unsaid)
    return replace(found, positions=_positions(model) if what == "seq-len" else None, assumptions=said_of)


def _positions(model: ModelShape) -> int | None:
    """Positions that a model has or was made for; None where nobody says, as of a size, which has as many as it is asked for."""
    known = model.learned_positions or model.rotary_positions
    return known if 0 < known < MAX_SEQ_LEN else None


def _lengths(positions: int) -> Sequence[int]:
    """Sequences to try, up to all learned positions where there are some."""
    every = range(SEQUENCE_STEP, (positions or MAX_SEQ_LEN) + 1, SEQUENCE_STEP)
    return every if positions % SEQUENCE_STEP == 0 else (*every, positions)
