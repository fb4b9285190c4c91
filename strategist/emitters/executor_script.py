"""The parts that training scripts on strategist's own executor share, whatever starts their ranks."""

from __future__ import annotations

from collections.abc import Mapping

from strategist.document.plan import Plan
from strategist.emitters.emitter import rewritten

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


{own}plan = load_plan(str(Path(__file__).with_name("plan.json")))
'''
_OWN = """# Without further arguments this trains the plan's own model shape on synthetic tokens. For your job add
#   make_model=lambda: MyModel(...)   any nn.Module that returns logits or an object with .loss
#   dataset=MyDataset(...)            items with input_ids and labels; sharded by sample index, same order on any layout
"""
_OPTION = 'parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")\n'
_IMPORT = "from strategist.executor.train import StepResult, train\n"
_PLAN = 'plan = load_plan(str(Path(__file__).with_name("plan.json")))\n'

TRAIN_CALL = "train(plan, steps=options.steps, seed=options.seed, on_step=report)\n"
"""What every rank does."""

_PAIR: Mapping[str, str] = {
    _IMPORT: f"{_IMPORT}from transformers import AutoConfig, AutoModelForSeq2SeqLM, set_seed\n",
    _OPTION: f'{_OPTION}parser.add_argument("--model", required=True, help="folder or hub name of a transformers configuration")\n',
    _OWN: """# Without further arguments this trains on synthetic pairs. For your job add
#   dataset=MyDataset(...)   items with input_ids, decoder_input_ids and labels; sharded by sample index, same order on any layout
""",
    _PLAN: f'''{_PLAN}

def make_model() -> AutoModelForSeq2SeqLM:
    """The model with fresh weights. For trained ones: AutoModelForSeq2SeqLM.from_pretrained(options.model)."""
    set_seed(options.seed)
    config = AutoConfig.from_pretrained(options.model)
    if plan.mesh.tp > 1:  # ranks with the same hidden states would each draw for themselves
        for rate in [name for name in vars(config) if "dropout" in name]:
            setattr(config, rate, 0.0)
    return AutoModelForSeq2SeqLM.from_config(config)


''',
    TRAIN_CALL: TRAIN_CALL.replace("seed=", "make_model=make_model, seed="),
}
"""What stands in a script in place of what, where the plan is for an encoder with a decoder, which no built-in model is."""


def script_of(plan: Plan, script: str) -> str:
    """A script for the plan's model: as it is, or for an encoder with a decoder with one of transformers, which the command names."""
    return rewritten(script, _PAIR) if plan.model.enc_layers else script


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
    return _SCRIPT.format(how=how, imports=imports, own=_OWN) + body
