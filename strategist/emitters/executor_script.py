"""The parts that training scripts on strategist's own executor share, whatever starts their ranks."""

from __future__ import annotations

_SCRIPT = '''"""Train under plan.json on strategist's executor{how}.

Yours to edit: the plan is read, nothing is baked in.
"""

import argparse
{imports}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
options = parser.parse_args()


def report(number: int, result: StepResult) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {{number}}  loss {{result.loss:.4f}}  {{result.tokens / result.seconds:,.0f}} tokens/s", flush=True)


# Without further arguments this trains the plan's own model shape on synthetic tokens. For your job add
#   make_model=lambda: MyModel(...)   any nn.Module that returns logits or an object with .loss
#   dataset=MyDataset(...)            items with input_ids and labels; sharded by sample index, same order on any layout
plan = load_plan(str(Path(__file__).with_name("plan.json")))
'''

TRAIN_CALL = "train(plan, steps=options.steps, seed=options.seed, on_step=report)\n"
"""What every rank does."""


def executor_script(
    body: str,
    *,
    how: str = "",
    standard: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    train: str = "from strategist.executor.train import StepResult, train",
) -> str:
    """A training script: `body` says how the ranks come to `TRAIN_CALL`.

    how: words of its first line. standard, others: lines that import from the standard library, besides os and
    pathlib, and from elsewhere, besides strategist. train: the line that imports what the ranks do.
    """
    own = (*sorted(("import os", *standard)), "from pathlib import Path")
    foreign = sorted(
        (*others, "from strategist import load_plan", train),
        key=lambda line: (line.startswith("from"), line.split()[1]),
    )
    imports = "\n".join((*own, "", *foreign, ""))
    return _SCRIPT.format(how=how, imports=imports) + body
