"""`strategist sweep`: which family wins where, over sizes of models, nodes and devices."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import CALIBRATION, CHOICE, COMMON, HARDWARE, OUTPUT, WORKLOAD, Flag
from strategist.cli.output import watched, width

FLAGS = (
    Flag("--model-size", "sizes of models: 1B,7B,70B", "SIZE,..."),
    Flag("--gpu", "devices: h100-sxm,rtx-4090", "NAME,..."),
    Flag("--gpus-per-node", "devices per node, 1 to 1024; otherwise those of the reference node", "N"),
    Flag("--nodes", "numbers of nodes: 1,4,16", "N,..."),
    *(flag for flag in HARDWARE if flag.name in ("--intra-bw", "--inter-bw")),
    *(flag for flag in WORKLOAD if flag.name not in ("--tokens", "--price-per-gpu-hour")),
    *(flag for flag in CHOICE if flag.name in ("--policy", "--objective", "--frontend", "--pin", "--forbid", "--also", "--rules", "--time-budget", "--config")),
    *CALIBRATION,
    *OUTPUT,
    *COMMON,
)  # fmt: skip

COMMAND = Command(
    "sweep",
    "Show which family wins where: sizes of models, numbers of nodes, kinds of devices.",
    FLAGS,
    examples=(
        "strategist sweep --model-size 1B,7B,70B --nodes 1,4,16",
        "strategist sweep --model-size 7B,13B --nodes 1,2 --gpu h100-sxm,rtx-4090 --gpus-per-node 8",
    ),
)
SIZES, GPUS, NODES = ("1B", "7B", "13B", "70B"), ("h100-sxm-80gb",), (1, 2, 4, 8)
"""What is varied when nothing is said."""


def run(options: Namespace) -> int:
    """Print the diagram."""
    from strategist.ask import Given
    from strategist.cli.given import READERS, several, values_from
    from strategist.reports.sweep import sweep_text
    from strategist.sweep import Grid, sweep

    check_out(options)
    varied = {name: several(READERS[name]) for name in ("model_size", "gpu", "nodes")}
    values = values_from(options, FLAGS, varied)
    sizes, gpus, nodes = (values.pop(*pair) for pair in (("model_size", SIZES), ("gpu", GPUS), ("nodes", NODES)))
    with watched(options) as watch:
        found = sweep(Grid(given=Given(**values), model_sizes=sizes, gpus=gpus, nodes=nodes), watch)
    deliver(found, options, lambda: sweep_text(found, width()))
    return 0
