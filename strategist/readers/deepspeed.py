"""DeepSpeed's JSON. Keys and what becomes of unknown ones as in DeepSpeed 0.19.8, runtime/config.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding, Said
from strategist.facts.profile import AUTOCAST, ENGINE
from strategist.readers.foreign import (
    FORMATS,
    OPTIMIZERS,
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    batch_faults,
    finding,
    keys_of,
    section_of,
    switched,
    told,
    uncounted_optimizer,
    whole,
)

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOADS = (("offload_optimizer", 1, "1 to 3"), ("offload_param", 3, "3"))
HPZ = "zero_hpz_partition_size"
QGZ = "zero_quantized_gradients"
QUANTIZED = {"zero_quantized_weights": "deepspeed-quantized-weights", QGZ: "deepspeed-quantized-gradients"}
"""Switches of ZeRO++ that send fewer bits, and what they are found as."""
STRICT = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "fp16",
    "tensor_parallel",
)
LOOSE = ("", "torch_autocast", "data_types", "pipeline", "expert_parallel", "aio")
TABLES = Tables(
    framework="deepspeed",
    title="DeepSpeed 0.19",
    swallows=dict.fromkeys(LOOSE, "it ignores this one") | dict.fromkeys(STRICT, "it refuses the file"),
)


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults for a number of ranks, or for any."""
    table = source.table
    says = said_by(table, ranks)
    dp = None if ranks is None else ranks // _model_ranks(table)
    found = (
        *_keys(table),
        *_automatic(table),
        *_batch(table),
        *batch_faults(says, dp),
        *_zero(table),
        *_zero_plus_plus(table, ranks or _started(table, says)),
        *_formats(table),
        *uncounted(table),
    )
    return Foreign(says=says, findings=found)


def _model_ranks(table: Mapping[str, Any]) -> int:
    """Ranks that see the same samples: those of AutoTP and of Ulysses."""
    return _tensor_ranks(table) * _sequence_ranks(table)


def _tensor_ranks(table: Mapping[str, Any]) -> int:
    return whole(section_of(table, "tensor_parallel").get("autotp_size")) or 1


def _sequence_ranks(table: Mapping[str, Any]) -> int:
    return whole(table.get("sequence_parallel_size")) or 1


def said_by(table: Mapping[str, Any], ranks: int | None) -> Says:
    """What a table says of layout, batch and formats."""
    zero = section_of(table, "zero_optimization")
    batch, micro, accumulation = (whole(table.get(name)) for name in BATCH)
    dp = ranks // _model_ranks(table) if ranks else None
    if dp is None and batch and micro and accumulation and batch % (micro * accumulation) == 0:
        dp = batch // (micro * accumulation)
    if dp and micro and accumulation is None and batch and batch % (micro * dp) == 0:
        accumulation = batch // (micro * dp)
    stage = zero.get("stage", 0)
    split: dict[str, Said] = {} if dp is None else {"dp_shard" if stage else "dp_replicate": dp}
    layout = told(
        zero=stage if isinstance(stage, int) else None,
        offload=_offload(zero),
        micro_batch=micro,
        accumulation=accumulation,
    )
    size = told(global_batch=batch or (micro * accumulation * dp if micro and accumulation and dp else None))
    cp = _sequence_ranks(table)
    cuts = {"tp": _tensor_ranks(table), "cp": cp} | ({"context_parallel": "all-to-all"} if cp > 1 else {})
    optimizer = told(optimizer=OPTIMIZERS.get(str(_optimizer(table)).lower()))
    own = {"engine": engine_of(table)} | told(reduce_bucket=_reduce_bucket(zero) if stage else None)
    return layout | size | split | cuts | optimizer | _numbers(table) | own


BUCKET = 500_000_000
"""DeepSpeed's own reduce_bucket_size (DeepSpeed 0.19.8, runtime/zero/config.py)."""


def _reduce_bucket(zero: Mapping[str, Any]) -> Said:
    """Gradients for which ZeRO has room in the buffers from which it reduces them, a word where somebody else fills it in; stages 1 and 2 have two buffers
    where they reduce behind backward, and none of them is there where gradients are not made contiguous."""
    size = zero.get("reduce_bucket_size", BUCKET)
    if not isinstance(size, (int, float)) or isinstance(size, bool):
        return str(size)
    if "contiguous_gradients" in zero and not switched(zero, "contiguous_gradients"):
        return 0
    return int(size) * (2 if zero.get("stage") in (1, 2) and switched(zero, "overlap_comm") else 1)


def engine_of(table: Mapping[str, Any]) -> str:
    """The profile of what trains: weights in half precision beside masters, or in fp32 under autocast."""
    return AUTOCAST if switched(section_of(table, "torch_autocast"), "enabled") else ENGINE


def _optimizer(table: Mapping[str, Any]) -> Any:
    """The optimizer that DeepSpeed makes itself; None where the program gives it one."""
    return section_of(table, "optimizer").get("type")


def uncounted(table: Mapping[str, Any], before: str = "") -> Iterator[Finding]:
    """What predictions do not count; `before` leads to the table from a file that names it."""
    yield from uncounted_optimizer(f"{before}optimizer.type", _optimizer(table))


def _offload(zero: Mapping[str, Any]) -> str:
    devices = {name: section_of(zero, name).get("device", "none") for name, *_ in OFFLOADS}
    if "nvme" in devices.values():
        return "nvme"
    if devices["offload_param"] == "cpu":
        return "parameters"
    return "optimizer" if devices["offload_optimizer"] == "cpu" else "none"


def _numbers(table: Mapping[str, Any]) -> dict[str, Said]:
    """Formats of weights, gradients, reduction, compute and masters; nothing where whoever reads the file is to fill them in."""
    autocast = section_of(table, "torch_autocast")
    if switched(autocast, "enabled"):
        low = str(autocast.get("dtype", "bfloat16"))
        reduce = "float32" if autocast.get("lower_precision_safe_modules") == [] else low
        return {"parameter": "float32", "gradient": "float32", "reduce": reduce, "compute": low, "master": "none"}
    for short in ("bf16", "fp16"):
        if switched(section_of(table, short), "enabled"):
            low = FORMATS[short]
            gradient = FORMATS.get(str(section_of(table, "data_types").get("grad_accum_dtype", short)), low)
            reduce = FORMATS.get(str(table.get("communication_data_type", short)), low)
            return {"parameter": low, "gradient": gradient, "reduce": reduce, "compute": low, "master": "float32"}
    if any(section_of(table, short).get("enabled") == "auto" for short in ("bf16", "fp16")):
        return {}
    return {**dict.fromkeys(("parameter", "gradient", "reduce", "compute"), "float32"), "master": "none"}


def _keys(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that were removed, and keys that never were."""
    zero = section_of(table, "zero_optimization")
    removed = keys_of("deepspeed", "removed"), keys_of("deepspeed", "zero_optimization removed")
    yield from (
        finding("deepspeed-removed-key", key, key=key, where="at its top level") for key in table if key in removed[0]
    )
    yield from (
        finding("deepspeed-removed-key", f"zero_optimization.{key}", key=key, where="in zero_optimization")
        for key in zero
        if key in removed[1]
    )
    rest = {key: value for key, value in table.items() if key not in removed[0]}
    rest |= {"zero_optimization": {key: value for key, value in zero.items() if key not in removed[1]}} if zero else {}
    yield from TABLES.unknown(rest)


def _automatic(table: Mapping[str, Any], path: str = "") -> Iterator[Finding]:
    """Values that somebody else has to fill in. In the batch DeepSpeed stops, elsewhere it keeps the default."""
    for key, value in table.items():
        place = f"{path}{key}"
        if value == "auto" and place not in ("pipeline.stages",):
            does = "stops" if key in BATCH else "drops it"
            yield finding("deepspeed-auto", place, key=place, does=does)
        elif isinstance(value, dict):
            yield from _automatic(value, f"{place}.")


def _batch(table: Mapping[str, Any]) -> Iterator[Finding]:
    if not any(name in table for name in BATCH[:2]):
        yield finding("deepspeed-no-batch", BATCH[0])


def _zero(table: Mapping[str, Any]) -> Iterator[Finding]:
    zero = section_of(table, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        yield finding("deepspeed-stage", "zero_optimization.stage", stage=stage)
        return
    for name, least, needs in OFFLOADS:
        place, section = f"zero_optimization.{name}", section_of(zero, name)
        if section.get("device", "none") != "none" and stage < least:
            yield finding("deepspeed-offload-stage", place, key=name, needs=needs, stage=stage, least=least)
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            yield finding("deepspeed-nvme-path", place, key=name)


def _zero_plus_plus(table: Mapping[str, Any], ranks: int | None) -> Iterator[Finding]:
    """What the keys of ZeRO++ do to memory and numbers: no plan has a word for them."""
    zero = section_of(table, "zero_optimization")
    size, stage = _secondary_ranks(table), zero.get("stage", 0)
    on = {name: place for name, place in QUANTIZED.items() if switched(zero, name)}
    if stage != 3:
        for key in (*on, *((HPZ,) if size > 1 else ())):
            yield finding("deepspeed-zeropp-stage", f"zero_optimization.{key}", key=key, stage=stage)
        return
    for key, rule in on.items():
        yield finding(rule, f"zero_optimization.{key}")
    sent = FORMATS.get(str(table.get("communication_data_type")), _numbers(table).get("reduce"))
    if QGZ in on and sent not in (None, "float16"):
        yield finding("deepspeed-quantized-format", f"zero_optimization.{QGZ}", sent=sent)
    if size > 1:
        yield finding("deepspeed-hpz-copy", f"zero_optimization.{HPZ}", size=size)
        if ranks and ranks % min(size, ranks):
            yield finding("deepspeed-hpz-divides", f"zero_optimization.{HPZ}", size=size, ranks=ranks)


def _started(table: Mapping[str, Any], says: Says) -> int | None:
    """Ranks that the file itself is for, by its batch."""
    dp = says.get("dp_shard")
    return dp * _model_ranks(table) if isinstance(dp, int) else None


def _secondary_ranks(table: Mapping[str, Any]) -> int:
    """Ranks that share hpZ's second copy of the weights; 1 where there is none."""
    return whole(section_of(table, "zero_optimization").get(HPZ)) or 1


def on_nodes(source: Source, devices: int) -> Iterator[Finding]:
    """Faults for nodes of so many devices."""
    size = _secondary_ranks(source.table)
    if size > devices and section_of(source.table, "zero_optimization").get("stage") == 3:
        yield finding("deepspeed-hpz-node", f"zero_optimization.{HPZ}", size=size, devices=devices)


def _formats(table: Mapping[str, Any]) -> Iterator[Finding]:
    if all(switched(section_of(table, short), "enabled") for short in ("bf16", "fp16")):
        yield finding("deepspeed-two-formats", "bf16")


def recognises(source: Source) -> bool:
    """A table with a key that only DeepSpeed has."""
    return bool({*BATCH[:2], "zero_optimization", "zero_allow_untested_optimizer"} & set(source.table))


DEEPSPEED = Reader(
    name="deepspeed",
    title="DeepSpeed 0.19",
    recognises=recognises,
    read=read,
    profile=ENGINE,
    on_nodes=on_nodes,
)
