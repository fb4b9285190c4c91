"""Launch scripts for a shell or for Slurm: words, variables and directives; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from strategist.document.judgement import Finding
from strategist.errors import InputError, shown
from strategist.readers.foreign import Foreign, Reader, Source, finding, keys_of, odd_arguments, told, whole
from strategist.readers.shell import read_words, split
from strategist.records import dataclass

_SHORT = re.compile(r"-[A-Za-z]")
LONG = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-J": "--job-name"}
"""Long names of the short options of sbatch that are looked at."""

OFFLINE_SIGNS = ("HF_DATASETS_OFFLINE", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
"""Variables that people set against a missing network, and that do not stop the retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What stands in a script: its words in order, the variables it sets or unsets (None), Slurm's directives, and the
    names of their options as they are written."""

    words: tuple[str, ...]
    variables: Mapping[str, str | None]
    directives: Mapping[str, str]
    options: tuple[str, ...] = ()

    def option(self, *names: str) -> str | None:
        """The value of the last option of one of these names, dashes and underscores alike."""
        found = None
        wanted = {name.replace("_", "-") for name in names}
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") in wanted:
                found = value if equals else next(iter(self.words[index + 1 : index + 2]), None)
        return found

    def runs(self, program: str) -> bool:
        """Whether a word is this program, with or without its folder."""
        return any(word.rpartition("/")[2] == program for word in self.words)


def script_of(source: Source) -> Script:
    """The script of a file. Raises InputError PARSE where its quotes do not close."""
    try:
        words = split(source.text)
    except ValueError as problem:
        raise InputError(
            "PARSE",
            f"{shown(source.path)} is not a shell script: {problem}.",
            flag="FILE",
            value=source.path,
            hint="Close the quotes.",
        ) from None
    read, variables = read_words(words)
    options = tuple(name for name, _ in _options(source.text))
    return Script(words=read, variables=variables, directives=_directives(source.text), options=options)


def _directives(text: str) -> dict[str, str]:
    """Options of `#SBATCH` lines by their long names; one that sbatch would take for another has that one's name."""
    found: dict[str, str] = {}
    for name, value in _options(text):
        full = meant_by(name)
        found[full[0] if len(full) == 1 else name] = value
    return found


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Options of `#SBATCH` lines as they are written, short ones apart from what is glued to them, and their values."""
    for row in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        words = row.partition(" #")[0].split()
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if _SHORT.match(name):
                name, value = name[:2], value or name[2:]
            elif not name.startswith("--"):
                continue
            following = next(iter(words[index + 1 : index + 2]), "-")
            yield name, value or ("" if following.startswith("-") else following)


def meant_by(name: str) -> tuple[str, ...]:
    """The long options of sbatch that a written one may mean: itself, or all of which it is the beginning."""
    known = keys_of("sbatch")
    if name in LONG or name in keys_of("sbatch", "short"):
        return (LONG.get(name, name),)
    return (name,) if name in known else tuple(option for option in known if option.startswith(name))


def named_words(words: Sequence[str], ends: tuple[str, ...] = ("--",)) -> Iterator[tuple[str, str | None]]:
    """Options with two dashes and the word of each, behind an equals sign or behind it; None of a switch, which is followed by nothing or by
    a word that begins as another one does."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name != "--":
            following = next(iter(words[index + 1 : index + 2]), "--")
            yield name, value if equals else None if following.startswith(ends) else following


def started(script: Script) -> int | None:
    """Ranks that torchrun starts on all nodes, where the script says both numbers."""
    nodes, ranks = _nodes(script), _ranks_per_node(script)
    is_elsewhere = nodes is None and script.option("--nnodes") is not None  # in a variable of whoever starts the script
    return None if ranks is None or is_elsewhere else ranks * (nodes or 1)


def _nodes(script: Script) -> int | None:
    return whole(script.option("--nnodes")) or whole(script.directives.get("--nodes"))


def _ranks_per_node(script: Script) -> int | None:
    return whole(script.option("--nproc-per-node"))


def script_faults(script: Script) -> Iterator[Finding]:
    """Faults of what starts the ranks, whatever they run."""
    yield from _misspelt(script)
    yield from _tasks(script)
    yield from _launchers(script)
    yield from _hub(script)


def _misspelt(script: Script) -> Iterator[Finding]:
    """Options that sbatch takes for longer ones, and those that it does not know, unless a plugin of the site does."""
    known = (*keys_of("sbatch"), *keys_of("sbatch", "short"))
    meant = {name: meant_by(name) for name in script.options}
    for name, full in meant.items():
        if len(full) == 1 and name not in known:
            yield finding("sbatch-beginning", shown(name), key=shown(name), near=full[0])
    yield from odd_arguments((name for name, full in meant.items() if len(full) != 1), known, "sbatch")


def _tasks(script: Script) -> Iterator[Finding]:
    """One task per node starts torchrun; nodes and devices agree."""
    if not script.directives or not script.runs("torchrun"):
        return
    nodes, ranks = whole(script.directives.get("--nodes")), _ranks_per_node(script)
    tasks = whole(script.directives.get("--ntasks-per-node"))
    if tasks is None and nodes:
        tasks = (whole(script.directives.get("--ntasks")) or nodes) // nodes
    if tasks and tasks > 1 and script.runs("srun"):
        words = {"tasks": tasks, "ranks": ranks or tasks, "product": tasks * (ranks or tasks)}
        yield finding("torchrun-per-task", "#SBATCH --ntasks-per-node", **words)
    gpus = script.directives.get("--gpus-per-node") or script.directives.get("--gres", "")
    yield from unequal(script, nodes, whole(gpus.rpartition(":")[2]))


def unequal(script: Script, nodes: int | None, devices: int | None, *, names_nodes: bool = False) -> Iterator[Finding]:
    """Nodes and devices of each that a job asks for, and others that its torchrun counts with.

    names_nodes: whether what runs the job tells torchrun the nodes by a variable.
    """
    told, ranks = whole(script.option("--nnodes")), _ranks_per_node(script)
    if nodes and told and nodes != told:
        yield finding("nodes-differ", "--nnodes", nodes=nodes, told=told, name="--nnodes")
    alone = script.runs("torchrun") and script.option("--nnodes") is None and "PET_NNODES" not in script.variables
    if nodes and nodes > 1 and alone and not names_nodes:
        yield finding("nodes-alone", "torchrun", nodes=nodes)
    if devices and ranks and devices != ranks:
        yield finding("devices-differ", "--nproc-per-node", devices=devices, ranks=ranks, name="--nproc-per-node")


def _launchers(script: Script) -> Iterator[Finding]:
    if script.runs("deepspeed"):
        yield finding("deepspeed-local-rank", "deepspeed")
    if "torch.distributed.launch" in script.words:
        ranks = _ranks_per_node(script)
        yield finding("old-launcher", "torch.distributed.launch", words=f"--nproc-per-node {ranks}" if ranks else "")


def _hub(script: Script) -> Iterator[Finding]:
    """Signs that there is no network, without the variable that ends the retries."""
    if script.variables.get("HF_HUB_OFFLINE") == "1" or script.variables.get("TRANSFORMERS_OFFLINE") == "1":
        return
    signs = [name for name in OFFLINE_SIGNS if script.variables.get(name)]
    if signs:
        yield finding("hub-retries", signs[0], key=signs[0])


def read(source: Source, ranks: int | None) -> Foreign:
    """What a script that starts ranks says, and its faults."""
    script = script_of(source)
    count = started(script)
    found = list(script_faults(script))
    if count and ranks and count != ranks:
        found.append(finding("ranks-product", "--nproc-per-node", product=count, ranks=ranks))
    return Foreign(says=told(ranks=count, nodes=_nodes(script)), findings=tuple(found))


def is_script(source: Source) -> bool:
    """A text of a shell: its first line, its ending, or Slurm's directives say so."""
    head = source.text.lstrip()[:64].partition("\n")[0]
    is_shell = head.startswith("#!") and ("sh" in head.rpartition("/")[2])
    return is_shell or source.path.endswith((".sh", ".sbatch", ".slurm", ".bash")) or "\n#SBATCH " in source.text


SCRIPT = Reader(
    name="script",
    title="launch script",
    recognises=is_script,
    read=read,
    profile="strategist",
    commands=lambda source: source.text,
)
