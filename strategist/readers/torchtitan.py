"""torchtitan's flags, in a launch script or in the file of flags that `emit` writes, as in torchtitan 0.3.0; and the TOML of the
releases before it, whose sections and keys have the same names, as in 0.2.2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Finding
from strategist.errors import shown
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.readers.foreign import (
    OPTIMIZERS,
    Foreign,
    Reader,
    Source,
    Unsaid,
    batch_faults,
    finding,
    keys_of,
    odd_arguments,
    told,
    uncounted_optimizer,
    unsaid,
    whole,
    without,
)
from strategist.readers.script import Script, is_script, named_words, script_faults, script_of, started
from strategist.reading import parse_toml, parser_of
from strategist.records import replace

Flags = Mapping[str, Any]
AXES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
NUMBERS = {
    **{f"parallelism.{key}": axis for axis, key in AXES.items()},
    "parallelism.expert_parallel_degree": "ep",
    "parallelism.pipeline_parallel_microbatch_size": "micro_batch",
    "parallelism.pipeline_parallel_layers_per_stage": "virtual_stages",
    "training.local_batch_size": "micro_batch",
    "training.global_batch_size": "global_batch",
    "training.seq_len": "seq_len",
}
"""Flags that are numbers, and the choices that they make."""
FOLLOWS = {
    "pp": ("zero", "micro_batch", "accumulation"),
    "dp_shard": ("zero",),
    "cp": ("zero",),
    "tp": ("sequence_parallel",),
}
"""Choices that follow from others: stages decide how a batch is split and whether gathered weights stay."""
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped_bfs",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
OLDER = {"training.local_batch_size": 8, "training.seq_len": 2048}
"""What the releases that read TOML do unasked (torchtitan 0.2.2, config/job_config.py)."""
RENAMED = {"training.batch_size": "training.local_batch_size", "training.compile": "compile.enable"}
"""Keys of 0.1 and what 0.2 calls them."""
RECOMPUTE = {"full": "full", "selective": "selective", "none": "none"}
CHOICE = "activation-checkpoint:"
CONVERTERS = "model.converters"
BACKEND = "parallelism.expert_parallel_comm_backend"
BACKENDS = {"standard": "alltoall"}
"""What 0.2 calls the dispatchers, where that is another word (torchtitan 0.2.2, config/job_config.py)."""
IN_FLOAT8 = ("float8", "mx", "mxfp8", "quantize.linear.float8", "quantize.linear.mx")
"""Converters after which matrices of all layers run in fp8, as 0.1, 0.2 and the table of 0.3's configurations call them."""
BESIDE = ("float8-experts", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
"""Those that stand beside them, for experts."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What the flags say, and their faults for a number of ranks: told, or those that the script starts."""
    if _is_toml(source):
        return _read_toml(source, ranks)
    script = script_of(source) if is_script(source) else None
    said, chosen = _flags(source, script)
    own = _registered(script)
    flags = {**own.get("flags", {}), **said}
    world = ranks or (started(script) if script else None)
    degrees = _degrees(flags, world)
    chosen = chosen or own.get("activation_checkpoint", "")
    says = _says(flags, degrees) | told(recompute=RECOMPUTE.get(chosen), dispatcher=own.get("dispatcher"))
    open_ones = _unsaid_of(flags)
    found = [
        *(script_faults(script) if script else ()),
        *_unknown(said),
        *_unregistered(script, own),
        *_pipeline(flags, degrees["pp"]),
        *_uncounted(flags),
    ]
    if not open_ones:
        found += [*_world(degrees, world), *batch_faults(says, degrees["dp_replicate"] * degrees["dp_shard"])]
    return Foreign(says=_said_alone(says, flags, open_ones), findings=tuple(found), unsaid=open_ones)


def _unsaid_of(flags: Flags) -> tuple[Unsaid, ...]:
    """What flags leave to whoever starts the script, with what follows from them."""
    found = unsaid(flags, NUMBERS, dashes="--")
    return (*found, *(replace(one, choice=choice) for one in found for choice in FOLLOWS.get(one.choice, ())))


def _said_alone(says: Mapping[str, Any], flags: Flags, open_ones: tuple[Unsaid, ...]) -> Mapping[str, Any]:
    """What is said beside what is left open: replicas, shards and the batch of all of them are not known where a degree is not."""
    if not {one.choice for one in open_ones} & set(AXES):
        return without(says, open_ones)
    whose = "accumulation" if "training.global_batch_size" in flags else "global_batch"
    return without(says, open_ones, "schedule", "dp_replicate", "dp_shard", whose)


def _is_toml(source: Source) -> bool:
    """Whether a file is one that releases before 0.3 read."""
    return parser_of(source.path, source.text) is parse_toml


def _read_toml(source: Source, ranks: int | None) -> Foreign:
    """What a file of an older release says; that the newest does not read it is a fault."""
    flags = _of_sections(source)
    degrees = _degrees(flags, ranks)
    says = _says(flags, degrees) | _recomputed(flags)
    faults = batch_faults(says, degrees["dp_replicate"] * degrees["dp_shard"])
    gone = finding("titan-toml", source.path.rpartition("/")[2])
    return Foreign(says=says, findings=(gone, *_world(degrees, ranks), *faults, *_uncounted(flags)))


def _of_sections(source: Source) -> dict[str, Any]:
    """The keys of sections as flags, under today's names, with what nobody said."""
    sections = ((name, keys) for name, keys in source.table.items() if isinstance(keys, dict))
    found = {f"{name}.{key}": value for name, keys in sections for key, value in keys.items()}
    return OLDER | {RENAMED.get(name, name): value for name, value in found.items()}


def _recomputed(flags: Flags) -> dict[str, Any]:
    """Selective recomputation is that of operations, or of every second layer or whatever layer is said."""
    mode = str(flags.get("activation_checkpoint.mode", "selective"))
    each = whole(flags.get("activation_checkpoint.selective_ac_option", 2))
    if mode == "selective" and each:
        return {"recompute": "full"} | ({"recompute_every": each} if each > 1 else {})
    return told(recompute=RECOMPUTE.get(mode))


def _model(source: Source, flag: str) -> ModelShape | None:
    """The catalogue's model of a configuration or a flavour, where it is one of those that have a name of their own elsewhere."""
    if _is_toml(source):
        said = _of_sections(source)
        words, place = f"{said.get('model.name', '')}_{said.get('model.flavor', '')}", "model.flavor"
    else:
        script = script_of(source) if is_script(source) else None
        words, place = str(dict(named_words(script.words)).get("--config") if script else ""), "--config"
    config = "".join(sign if sign.isalnum() else "_" for sign in words.lower())
    known = (row for row in rows("torchtitan_models") if f"{config}_".startswith(f"{row['config']}_"))
    found = max(known, key=lambda row: len(row["config"]), default=None)
    return None if found is None else load_model(found["model"], f"{flag}: {place}")


@cache
def _configs() -> Mapping[str, Mapping[str, Any]]:
    """The configurations that torchtitan's registries hold, by name: of each the flags that are read here."""
    return {row["config"]: row for row in rows("torchtitan_configs")}


def _registered(script: Script | None) -> Mapping[str, Any]:
    """The configuration behind --config, over which flags of the line win (torchtitan 0.3.0, config/manager.py); empty where it is none
    that is known."""
    return _configs().get((script.option("--config") if script else None) or "", {})


def _unregistered(script: Script | None, own: Mapping[str, Any]) -> Iterator[Finding]:
    """A warning for a configuration of which nobody knows what it sets."""
    name = script.option("--config") if script else None
    if name is not None and not own:
        yield finding("titan-config", "--config", name=shown(name))


def _flags(source: Source, script: Script | None) -> tuple[dict[str, Any], str | None]:
    """Flags by section and key, and the sub-command that chooses what is computed again."""
    if script is None:
        table = source.table
        return dict(table["flags"]), str(table.get("activation-checkpoint"))
    found: dict[str, Any] = {}
    for name, word in named_words(script.words, ("--", CHOICE)):
        found |= _flag(name, word) if "." in name else {}
    chosen = [word.removeprefix(CHOICE) for word in script.words if word.startswith(CHOICE)]
    return found, chosen[-1] if chosen else None


def _flag(name: str, value: str | None) -> dict[str, Any]:
    """One flag under its own name; a switch without a value is on, or off where its key begins with `no-`."""
    section, _, key = name.removeprefix("--").replace("-", "_").rpartition(".")
    if value is None and key.startswith("no_"):
        return {f"{section}.{key.removeprefix('no_')}": False}
    return {f"{section}.{key}": True if value is None else value}


def _degrees(flags: Flags, world: int | None) -> dict[str, int]:
    """Degrees of the axes. Shards that are not said, or said as -1, take the ranks that the others leave."""
    found = {axis: whole(flags.get(f"parallelism.{key}")) or 1 for axis, key in AXES.items()}
    if str(flags.get(f"parallelism.{AXES['dp_shard']}", -1)) == "-1" and world:
        found["dp_shard"] = max(1, world // prod(found.values()))
    return found


def _says(flags: Flags, degrees: Mapping[str, int]) -> dict[str, Any]:
    local, batch = whole(flags.get("training.local_batch_size")), whole(flags.get("training.global_batch_size"))
    micro = (whole(flags.get("parallelism.pipeline_parallel_microbatch_size")) or 1) if degrees["pp"] > 1 else local
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    batch = batch or (local * dp if local else None)
    steps = batch // (micro * dp) if batch and micro and batch % (micro * dp) == 0 else None
    reshards = str(flags.get("parallelism.fsdp_reshard_after_forward", "default"))
    never = reshards == "never" or (reshards == "default" and degrees["pp"] > 1)  # each micro-batch would gather again
    is_sharded = degrees["dp_shard"] * degrees["cp"] > 1  # distributed/parallel_dims.py, fsdp_enabled
    low = set(_listed(flags, CONVERTERS)) & set(IN_FLOAT8)
    compute = "float8" if low else str(flags.get("training.mixed_precision_param", "bfloat16"))
    says: dict[str, Any] = dict(degrees) | told(
        micro_batch=micro,
        global_batch=batch,
        accumulation=steps if steps is not None else 1 if micro else None,
        seq_len=whole(flags.get("training.seq_len")),
        ep=whole(flags.get("parallelism.expert_parallel_degree")) or 1,
        zero=0 if not is_sharded else 2 if never else 3,
        schedule=_schedule(flags, degrees["pp"]),
        layers_per_stage=whole(flags.get("parallelism.pipeline_parallel_layers_per_stage")),
        compute=compute,
        parameter=str(flags.get("training.dtype", "float32")),
        master="none",
        reduce=str(flags.get("training.mixed_precision_reduce", "float32")),
        optimizer=OPTIMIZERS.get(str(flags.get("optimizer.name", "adamw")).lower()),
    )
    if BACKEND in flags:
        says["dispatcher"] = BACKENDS.get(str(flags[BACKEND]), str(flags[BACKEND]))
    says["sequence_parallel"] = degrees["tp"] > 1 and _on(flags, "parallelism.enable_sequence_parallel", usual=True)
    says["compile"] = _on(flags, "compile.enable", usual=False) and "model" in _listed(
        flags, "compile.components", "model,loss"
    )
    says["offload"] = "parameters" if _on(flags, "training.enable_cpu_offload", usual=False) else "none"
    return says


def _on(flags: Flags, name: str, *, usual: bool) -> bool:
    return str(flags.get(name, usual)).lower() == "true"


def _listed(flags: Flags, name: str, usual: str = "") -> tuple[str, ...]:
    """Words of a list, which stands in a file as one, and on a line with commas."""
    said = flags.get(name, usual)
    return tuple(map(str, said if isinstance(said, list) else str(said).split(",")))


def _schedule(flags: Flags, pp: int) -> str | None:
    return "none" if pp == 1 else SCHEDULES.get(str(flags.get("parallelism.pipeline_parallel_schedule", "1F1B")))


def _unknown(flags: Flags) -> Iterator[Finding]:
    known = keys_of("torchtitan")
    yield from odd_arguments((name for name in flags if name not in known), known, "torchtitan 0.3")


def _world(degrees: Mapping[str, int], world: int | None) -> Iterator[Finding]:
    product = prod(degrees.values())
    if world and product != world:
        yield finding("ranks-product", "parallelism", product=product, ranks=world)


def _pipeline(flags: Flags, pp: int) -> Iterator[Finding]:
    if pp == 1:
        return
    if not _on(flags, "training.disable_cuda_graphs", usual=False):
        yield finding("titan-graphs-in-a-pipeline", "training.disable_cuda_graphs")
    local = whole(flags.get("training.local_batch_size")) or 8
    micro = whole(flags.get("parallelism.pipeline_parallel_microbatch_size")) or 1
    if local % micro:
        yield finding("titan-micro-batches", "training.local_batch_size", batch=local, micro=micro)


def _uncounted(flags: Flags) -> Iterator[Finding]:
    """An optimizer, and converters of layers, that no prediction counts."""
    yield from uncounted_optimizer("optimizer.name", flags.get("optimizer.name"))
    names = [name for name in _listed(flags, CONVERTERS) if name]
    counted = IN_FLOAT8 + (BESIDE if set(names) & set(IN_FLOAT8) else ())
    for name in names:
        if name not in counted:
            yield finding("titan-converter", CONVERTERS, name=shown(name))


def recognises(source: Source) -> bool:
    """A table of flags, a script with flags of sections, or the TOML of older versions."""
    flags = source.table.get("flags")
    if isinstance(flags, dict):
        return any(str(name).startswith("parallelism.") for name in flags)
    if _is_toml(source):
        return "parallelism" in source.table and "training" in source.table
    said = "\n".join(line for line in source.text.splitlines() if not line.lstrip().startswith("#"))
    return is_script(source) and ("--parallelism." in said or "torchtitan" in said)


TORCHTITAN = Reader(
    name="torchtitan", title="torchtitan 0.3", recognises=recognises, read=read, profile="fsdp2", model=_model
)
