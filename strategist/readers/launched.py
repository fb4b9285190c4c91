"""Launch lines of programs that take TrainingArguments: torchrun, accelerate or deepspeed, a program, and its arguments. Names as in
Transformers 5.23 and Accelerate 1.15, commands/launch.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Said
from strategist.facts.model import ModelShape
from strategist.readers.accelerate import ACCELERATE
from strategist.readers.beside import files_given, table_named
from strategist.readers.foreign import Foreign, Reader, Source, finding, told, unsaid, whole, without
from strategist.readers.programs import FOLDER, MODELS, TRAINERS, arguments_read, loaded, model_of, trainer_of
from strategist.readers.programs import recognises as recognises_recipe
from strategist.readers.script import Script, is_script, named_words, script_faults, script_of, started
from strategist.readers.transformers import LENGTHS, OPTION, read_factory, recognises_factory
from strategist.readers.transformers import recognises as recognises_arguments
from strategist.records import replace

DEGREES = ("zero", "offload", "dp_replicate", "dp_shard", "tp", "cp", "context_parallel")
"""What a launcher says where it says anything of a layout."""

NUMBERS = {OPTION: "micro_batch", "gradient_accumulation_steps": "accumulation"}
"""Arguments that are numbers, and the choices that they make."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_SCRIPT = re.compile(r"(?:.*/)?trl/scripts/(\w+)\.py|trl\.scripts\.(\w+)", re.ASCII)
PROGRAMS = ("torchrun", "accelerate", "deepspeed", "trl")
"""What starts programs that train."""
CHOSEN = "accelerate_config"
"""TRL's name for accelerate's file: a path, or the name of one that TRL brings along (TRL 1.16.0, cli/accelerate_config.py)."""
LISTED = "lora_target_modules"
LAUNCHER = "the launcher"
"""Where a launch line starts other ranks than there are."""
Table = Mapping[str, Any]


def read(source: Source, ranks: int | None) -> Foreign:
    """What a launch line says, and what is wrong with it."""
    script = script_of(source)
    launcher, table = _given(source, script)
    count = _ranks(script, launcher)
    inside = replace(source, value=table)
    trainer = _trainer(script.words) or trainer_of(table)
    said = (
        read_factory(inside, ranks or count)
        if recognises_factory(inside)
        else arguments_read(inside, ranks or count, trainer)
    )
    says = dict(said.says)
    if script.runs("accelerate") or CHOSEN in table:
        says = _beside_accelerate(says, _accelerate_says(source, launcher, table, ranks or count), table)
    says |= loaded(table, says)
    open_ones = unsaid(table, NUMBERS, dict.fromkeys(LENGTHS, "seq_len"), "--")
    open_ones += unsaid(launcher, {}, {"zero_stage": "zero"}, "--")
    found = [*script_faults(script), *said.findings]
    if count and ranks and count != ranks:
        found.append(finding("ranks-product", LAUNCHER, product=count, ranks=ranks))
    return Foreign(says=without(says, open_ones) | told(ranks=count), findings=tuple(found), unsaid=open_ones)


def _given(source: Source, script: Script) -> tuple[Table, Table]:
    """What the launcher is given, and the program: on the line, and under it in a recipe."""
    launcher, own = _around_the_program(script)
    return launcher, {**_recipe(source), **own}


def _around_the_program(script: Script) -> tuple[Table, Table]:
    """Options before the program that is started, and those behind it."""
    words = script.words
    sign = next((index for index, word in enumerate(words) if _name(word) in (OPTION, *MODELS)), len(words))
    program = max((index for index in range(sign) if _is_program(words, index)), default=None)
    if program is None:
        return {}, _options(words)
    return _options(words[:program]), _options(words[program + 1 :])


def _is_program(words: Sequence[str], index: int) -> bool:
    """Whether a word is a file or a module that a launcher starts, and none of the launchers themselves."""
    before = words[index - 1] if index else ""
    is_module = before in ("-m", "--module") and words[index] not in LAUNCHERS
    return is_module or words[index].endswith(".py")


def _name(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Options by their names without dashes; one without a word behind it is a switch."""
    found = {_name(name): True if word is None else word for name, word in named_words(words)}
    return found | ({LISTED: _listed(words)} if LISTED in found else {})


def _listed(words: Sequence[str]) -> list[str]:
    """The words of the one option with several that is looked at."""
    start = next(index for index, word in enumerate(words) if _name(word) == LISTED)
    _, _, first = words[start].partition("=")
    behind = takewhile(lambda word: not word.startswith("-"), words[start + 1 :])
    return [first] if first else list(behind)


def _trainer(words: Sequence[str]) -> str:
    """Which of TRL's trainers a line starts, by its command or its script; "" for another program."""
    by_script = (match[1] or match[2] for match in map(_SCRIPT.fullmatch, words) if match)
    by_command = (word for before, word in pairwise(words) if before.rpartition("/")[2] == "trl")
    return next((name for name in (*by_script, *by_command) if name in TRAINERS), "")


def _ranks(script: Script, launcher: Table) -> int | None:
    """Ranks that the line starts, where it says so: on all nodes, which accelerate counts and deepspeed does not."""
    if script.runs("accelerate"):
        return whole(launcher.get("num_processes"))
    each, nodes = whole(launcher.get("num_gpus")), whole(launcher.get("num_nodes"))
    if each and nodes is None and ({"hostfile", "num_nodes"} & set(launcher) or "-H" in script.words):
        return None  # as many nodes as another file or a variable says
    return each * (nodes or 1) if each else started(script)


def _accelerate_says(source: Source, launcher: Table, given: Table, ranks: int | None) -> Mapping[str, Said]:
    """What accelerate's file and its own options say; nothing of a layout where it takes a file that is not here."""
    path = launcher.get("config_file", given.get(CHOSEN))
    named: Table = next((row["config"] for row in rows("trl_launches") if row["name"] == path and CHOSEN in given), {})
    table = dict(table_named(source, path) or named) if isinstance(path, str) else {}
    table |= told(num_processes=ranks, mixed_precision=launcher.get("mixed_precision"))
    if "use_deepspeed" in launcher:
        section = told(
            zero_stage=whole(launcher.get("zero_stage")), deepspeed_config_file=launcher.get("deepspeed_config_file")
        )
        table |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    elif "use_fsdp" in launcher:
        section = {name: word for name, word in launcher.items() if name.startswith("fsdp_")}
        table |= {"distributed_type": "FSDP", "fsdp_config": section}
    elif "multi_gpu" in launcher:
        table["distributed_type"] = "MULTI_GPU"
    if "distributed_type" not in table:
        return {}
    return ACCELERATE.read(Source(path=source.path, text=source.text, value=table), None).says


def _beside_accelerate(says: Mapping[str, Said], launched: Mapping[str, Said], table: Table) -> dict[str, Said]:
    """Trainer's words with the launcher's layout; formats and recomputation are whoever's says any."""
    own = {name: word for name, word in says.items() if name not in DEGREES or "deepspeed" in table or "fsdp" in table}
    layout = {name: word for name, word in launched.items() if name in DEGREES}
    if says.get("compute") == "float32" and "compute" in launched:
        layout["compute"] = launched["compute"]
    if launched.get("recompute") == "full":
        layout["recompute"] = "full"
    if "optimizer" in launched:  # DeepSpeed's own, beside which Trainer makes none
        layout["optimizer"] = launched["optimizer"]
    if "gradient_accumulation_steps" not in table and "accumulation" in launched:
        layout["accumulation"] = launched["accumulation"]
    return own | layout


def recognises(source: Source) -> bool:
    """A script that gives a program a batch in Trainer's words, or a recipe that has one, or that trains a model that it names: with
    Trainer's own batch, then."""
    if not is_script(source):
        return False
    said = source.text.replace("-", "_")
    names_a_model = f"__{MODELS[0]}" in said and f"__{FOLDER}" in said
    return f"__{OPTION}" in said or bool(_recipe(source)) or (names_a_model and _trains(script_of(source)))


def _trains(script: Script) -> bool:
    """Whether a script starts ranks or says that it trains, rather than something else with a model and a folder."""
    starts = any(script.runs(program) for program in PROGRAMS) or any(word in LAUNCHERS for word in script.words)
    return starts or any(_name(word) == "do_train" for word in script.words)


def _model(source: Source, flag: str) -> ModelShape | None:
    """The model that the program is given."""
    _, table = _given(source, script_of(source))
    return model_of(table, flag, "--")


def _recipe(source: Source) -> Table:
    """The arguments in a file that the program is given, behind --config or as a word, where they are those of a training."""
    given = (inside for inside in files_given(source) if recognises_recipe(inside) or recognises_arguments(inside))
    return next((inside.table for inside in given), {})


LAUNCHED = Reader(
    name="hugging-face-script",
    title="Hugging Face launch script",
    recognises=recognises,
    read=read,
    profile="hf-trainer",
    model=_model,
)
