"""`strategist emit`: launch files for a Plan."""

from __future__ import annotations

import os
from collections.abc import Iterator

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_lines, show_text, width
from strategist.document.load import load_plan
from strategist.document.plan import Plan
from strategist.emitters import EMITTERS, find_emitter, proofs
from strategist.emitters.emitter import Emitter, Options
from strategist.emitters.quoting import drive_folder, environment, host_name, job_name, port
from strategist.emitters.releases import releases_needed
from strategist.emitters.zero_plus_plus import changes, checked_words
from strategist.errors import InputError, shown
from strategist.records import replace
from strategist.reports.lines import table
from strategist.writing import Written, check_target, made_folder, write_files

FLAGS = (
    Flag("--to", "the target; without it that of the plan's front end", "NAME"),
    Flag("--list", "list the targets"),
    Flag("--out", "the folder to write into; it is made when it does not exist", "DIR"),
    Flag("--force", "replace files that exist"),
    Flag("--job-name", "name of the job", "NAME"),
    Flag("--master-addr", "host name of the first node", "HOST"),
    Flag("--master-port", "port of the rendezvous, 1024 to 65535", "PORT"),
    Flag("--nvme-path", "for offload=nvme: the folder on a drive of each node", "DIR"),
    Flag("--zeropp", "for DeepSpeed's files: some of ZeRO++'s hpz, qwz, qgz, with commas between", "WORDS"),
    Flag("--env", "a variable for the launch script, such as NCCL_P2P_DISABLE=1", "NAME=VALUE", repeats=True),
    Flag("--allow-env", "allow variables that are not on the list"),
    *COMMON,
)


COMMAND = Command(
    "emit",
    "Write launch files for a Plan.",
    FLAGS,
    (replace(PLAN, optional=True),),
    examples=(
        "strategist emit plan.json --to torchrun --out job",
        "strategist emit plan.json --to slurm --out job --job-name llama-8b --env NCCL_SOCKET_IFNAME=eth0",
        "strategist emit --list",
    ),
)


def run(options: Namespace) -> int:
    """Write the files of one target, or list the targets."""
    if options.list:
        return _list(as_json=options.json, no_color=options.no_color)
    for flag, value in (("PLAN", options.plan), ("--out", options.out)):
        if value is None:
            raise InputError(
                "MISSING",
                f"emit needs {flag}.",
                flag=flag,
                hint="Example: strategist emit plan.json --to torchrun --out job.",
            )
    from strategist.api import emit  # the planner and NumPy: help and misspelt flags need neither

    named = find_emitter(options.to) if options.to is not None else None
    extras = Options(
        job_name=job_name(options.job_name) if options.job_name is not None else "strategist",
        master_addr=host_name(options.master_addr) if options.master_addr is not None else None,
        master_port=port(options.master_port) if options.master_port is not None else None,
        nvme_path=drive_folder(options.nvme_path) if options.nvme_path is not None else None,
        zeropp=checked_words(options.zeropp.split(",")) if options.zeropp is not None else (),
        env=environment(options.env, allow_all=options.allow_env),
    )
    plan = load_plan(options.plan)
    emitter, why = (named, ()) if named is not None else _of_its_front_end(plan)
    files = emit(plan, emitter.name, extras)
    notes = [*why, *_notes(plan, extras), *releases_needed(files)]
    folder = _folder(options.out)
    targets = {os.path.join(folder, str(name)): text for name, text in files.items()}
    runnable = {path for path in targets if os.path.basename(path) in emitter.executables}
    with made_folder(folder, "--out"):
        write_files([Written(path, text, 0o755 if path in runnable else 0o644) for path, text in targets.items()], "--out", force=options.force)  # fmt: skip
    if options.json:
        show_document({"target": emitter.name, "files": sorted(targets), "notes": notes})
    elif not options.quiet:
        show_text("\n".join((*(f"wrote {path}" for path in targets), *notes)))
    return 0


def _of_its_front_end(plan: Plan) -> tuple[Emitter, tuple[str, ...]]:
    """The target when nobody names one, and why it is that."""
    from strategist.frontend import target_of

    name, why = target_of(plan)
    return find_emitter(name), (f"front end: {why}",)


def _notes(plan: Plan, extras: Options) -> Iterator[str]:
    """What to know before the files are launched."""
    if plan.cluster.origin == "assumed":
        yield "The hardware of this plan was assumed: plan again with --hardware before you launch it elsewhere."
    yield from changes(plan, extras.zeropp)


def _list(*, as_json: bool, no_color: bool) -> int:
    if as_json:
        show_document([_described(emitter) for emitter in EMITTERS])
    else:
        rows = [(e.name, proofs()[e.name]["proof"], f"{e.title} ({', '.join(e.axes)})") for e in EMITTERS]
        show_lines(table(rows, width(), indent=0), no_color=no_color)
    return 0


def _described(emitter: Emitter) -> dict[str, object]:
    """A target as a document: what it can express, for which versions, and how far that was proven."""
    proof = proofs()[emitter.name]
    return {
        "name": emitter.name,
        "axes": list(emitter.axes),
        "versions": emitter.versions,
        "title": emitter.title,
        "proof": proof["proof"],
        "evidence": proof["evidence"],
    }


def _folder(path: str) -> str:
    """The folder, which may be missing. Raises InputError for hostile names and for files in the way."""
    check_target(path.rstrip("/") or path, "--out", force=True) if not os.path.isdir(path) else None
    if os.path.exists(path) and not os.path.isdir(path):
        raise InputError(
            "NOT_A_FILE",
            f"--out: {shown(path)} is a file, not a folder.",
            flag="--out",
            value=path,
            hint="Name a folder.",
        )
    return path
