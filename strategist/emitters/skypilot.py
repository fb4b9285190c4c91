"""SkyPilot: a task that rents the plan's nodes, and the torchrun files that it runs there.

Keys as in SkyPilot 0.14.1, sky/utils/schemas.py; names of accelerators as in sky/utils/gpu_names.py, which does not tell SXM
from PCIe; variables as in sky/skylet/constants.py.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.places import ranks_per_node, refuse_uneven_batch
from strategist.emitters.quoting import fitting_name
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import EXECUTOR_AXES, layout_comment
from strategist.emitters.torchrun import write as write_torchrun
from strategist.errors import ImpossibleError, shown

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
_RUN = """\
export NODE_RANK="$SKYPILOT_NODE_RANK"
export MASTER_ADDR="$(head -n1 <<< "$SKYPILOT_NODE_IPS")"
exec bash launch.sh
"""


def resources(plan: Plan) -> dict[str, Any]:
    """What every node has. Raises ImpossibleError UNSUPPORTED for uneven batches and devices that SkyPilot has no name for."""
    ranks, gpu = ranks_per_node(plan), plan.cluster.smallest
    refuse_uneven_batch(plan, "skypilot")
    if plan.strategy.backend == "gloo":
        return {"cpus": f"{ranks}+"}
    found = [row["accelerator"] for row in rows("skypilot_accelerators") if row["gpu"] == gpu.name]
    if not found:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"skypilot cannot express this plan: it has no name for the device {shown(gpu.name)} of its cluster.",
            flag="--to",
            value="skypilot",
            hint="Emit it to torchrun, and start launch.sh on machines of your own.",
        )
    return {"accelerators": {found[0]: ranks}}


def write(plan: Plan, options: Options) -> Files:
    """The torchrun files and task.yaml; launch it from this folder. Raises InputError NAME."""
    words = "SkyPilot takes letters and digits, joined by one or two dots, dashes or underscores"
    task = {
        "name": fitting_name(options.job_name, _NAME, words),
        "num_nodes": plan.cluster.nodes,
        "workdir": ".",
        "resources": resources(plan),
        "run": _RUN,
    }
    comments = (
        layout_comment(plan).removeprefix("# "),
        "Add `setup:` where the machines lack torch 2.13 and strategist.",
    )
    return dict(write_torchrun(plan, options)) | {PurePosixPath("task.yaml"): yaml_text(task, comments)}


SKYPILOT = Emitter(
    name="skypilot",
    title="SkyPilot task that starts torchrun on every node, with strategist's executor",
    engine="strategist",
    versions="SkyPilot 0.14, torch 2.13",
    write=write,
    placed=resources,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
