"""The script of front ends for fine-tuning, which own model, data and loop: it gives them their file and the command's words."""

from __future__ import annotations

from pathlib import PurePosixPath

_SCRIPT = '''"""Train under {config} with {title}. Model, data and steps come from the command, all else from the file."""

import argparse
import json
import os
from pathlib import Path

{imports}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="folder or hub name of a model with its tokenizer")
{options}parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--seed", type=int, default=0, help="seed of whatever is random")
parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the optimizer, constant")
options = parser.parse_args()

here = Path(__file__).parent
plan = json.loads((here / "plan.json").read_text(encoding="utf-8"))
mesh, strategy = plan["mesh"], plan["strategy"]
started = int(os.environ.get("WORLD_SIZE", "1"))
if started != mesh["dp_replicate"] * mesh["dp_shard"]:
    raise SystemExit(f"{{started}} processes were started; the plan has another number.")
words = {{"max_steps": options.steps, "seed": options.seed, "learning_rate": options.learning_rate}}
if strategy["zero"]:
    words["deepspeed"] = str(here / "deepspeed.json")
{body}'''


def fine_tuning_script(title: str, config: PurePosixPath, *, imports: str, data: dict[str, str], body: str) -> str:
    """A training script. `data` are options of the command with their help; `body` hands `words` to the front end."""
    options = "".join(f'parser.add_argument("{name}", required=True, help="{words}")\n' for name, words in data.items())
    return _SCRIPT.format(title=title, config=config, imports=imports.rstrip("\n"), options=options, body=body)
