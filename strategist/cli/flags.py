"""Flags as data: one row per flag, shared by the parsers, the help texts, the config file and shell completion."""

from __future__ import annotations

from strategist.facts.profile import AUTO, PURPOSES, frameworks, frontends
from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Without `metavar` it is a switch; `repeats` allows it several times; `choices` are its words."""

    name: str
    help: str
    metavar: str = ""
    repeats: bool = False
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The flag's name as an attribute and as a key of the config file."""
        return self.name.lstrip("-").replace("-", "_")


COMMON = (
    Flag("--json", "print one JSON document and nothing else, also for errors"),
    Flag("--quiet", "no report and no remarks; files, errors and the exit code tell"),
    Flag("--verbose", "print more"),
    Flag("--no-color", "plain text, as with NO_COLOR in the environment"),
)

OUTPUT = (
    Flag("--out", "write the document to a new file", "FILE"),
    Flag("--force", "replace the file named by --out"),
)

MODEL = (
    Flag("--model-size", "parameters: 350M, 7B, 1.5T, 6738415616, 7e9", "SIZE"),
    Flag("--model", "a catalogue name or a path to a Hugging Face config.json", "NAME_OR_PATH"),
    Flag("--model-config", "a path to a Hugging Face config.json", "PATH"),
)

HARDWARE = (
    Flag(
        "--hardware", "node type and count (dgx-h100:4, p4d.24xlarge:2), a hardware file, local or cpu", "NODE[:COUNT]"
    ),
    Flag("--gpu", "device, such as h100-sxm-80gb or rtx-4090", "NAME"),
    Flag("--gpus-per-node", "devices per node, 1 to 1024", "N"),
    Flag("--nodes", "nodes, 1 to 131072", "N"),
    Flag("--gpu-memory", "memory per device when it differs from the catalogue: 80GiB or 80GB", "SIZE"),
    Flag("--intra-bw", "rate per device inside a node, one direction: 450GB/s", "RATE"),
    Flag("--inter-bw", "rate of a whole node to others, one direction: 400Gb/s", "RATE"),
)

WORKLOAD = (
    Flag("--seq-len", "tokens per sequence", "N"),
    Flag("--target-len", "tokens per sequence of a decoder behind an encoder, where these are not as many", "N"),
    Flag("--global-batch", "sequences per optimizer step", "N"),
    Flag("--micro-batch", "fix the sequences per micro-batch and data rank", "N"),
    Flag("--grad-accum", "fix the micro-batches per optimizer step", "N"),
    Flag("--tokens", "length of the whole run in tokens: 1T, 100B", "N"),
    Flag("--precision", "number format of the matmuls", "WORD", choices=("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")),
    Flag("--optimizer", "optimizer", "WORD", choices=("adamw", "adamw8bit", "muon", "sgd")),
    Flag("--method", "train all weights, or adapters beside frozen ones", "WORD", choices=("full", "lora", "qlora")),
    Flag("--lora-rank", "rank of the adapters", "N"),
    Flag("--lora-targets", "matrices with adapters: q,v or q,k,v,o,gate,up,down", "WORD,..."),
    Flag(
        "--expert-imbalance", "tokens of the busiest rank's routed experts over the mean of the ranks, from 1", "RATIO"
    ),
    Flag("--headroom", "share of each device that must stay free, 0 to 0.5", "SHARE"),
    Flag("--price-per-gpu-hour", "price of one device for one hour, in your currency", "MONEY"),
)

CALIBRATION = (
    Flag("--calibration", "factors from `strategist calibrate`, instead of those that ship", "FILE"),
    Flag("--uncalibrated", "the formulas alone, without factors from measured runs"),
)

CHOICE = (
    Flag(
        "--policy",
        "who decides: the Hugging Face tables, or the predicted time alone",
        "WORD",
        choices=("hf", "fastest"),
    ),
    Flag("--objective", "what is best", "WORD", choices=("time", "cost", "memory", "simplicity")),
    Flag(
        "--frontend",
        "keep to layouts that a framework or launcher can run and say, counted as it runs them",
        "NAME",
        choices=frontends(),
    ),
    Flag("--pin", "fix choices: tp=4,pp=2,recompute=full", "KEY=VALUE,..."),
    Flag("--forbid", "leave techniques out: pp,offload", "WORD,..."),
    Flag("--also", "look at techniques too that a search leaves out: zb_h1,recompute_by_stage", "WORD,..."),
    Flag("--rules", "a folder with further rules (legality.toml, advice.toml, hf_decisions.toml)", "DIR", repeats=True),
    Flag("--top", "how many alternatives to show", "N"),
    *CALIBRATION,
    Flag("--verify", "trace the program of the chosen layout and of the next, and print traced memory (needs torch)"),
    Flag("--pareto", "also show what is traded: the front of time, memory and cost over all that fits"),
    Flag("--certificate", "also count what became of every layout, for `check --exhaustive`"),
    Flag("--sensitivity", "also find which assumption, changed by how much, would change the choice"),
    Flag("--allow-idle", "use fewer devices where that is better by the objective"),
    Flag("--time-budget", "stop searching after so many seconds, and take the best found until then", "SECONDS"),
    Flag("--search-log", "show the time and the survivors of each stage of the search"),
    Flag("--config", "read flags from a TOML file; the command line wins", "FILE"),
)

FRONTEND = (
    Flag(
        "--frontend",
        "keep to layouts that a framework or launcher can run and say, counted as it runs them; auto: rules choose it",
        "NAME",
        choices=(*frontends(), AUTO),
    ),
    Flag("--purpose", "for --frontend auto: what the job is for", "WORD", choices=PURPOSES),
)
"""Of `plan` alone: elsewhere nothing is left to choose a front end for."""

PLAN_CHOICE = tuple(own for flag in CHOICE for own in (FRONTEND if flag.name == "--frontend" else (flag,)))
PLAN_FLAGS = (*MODEL, *HARDWARE, *WORKLOAD, *PLAN_CHOICE, *OUTPUT, *COMMON)

PREDICT_FLAGS = (
    *MODEL,
    *HARDWARE,
    *(flag for flag in WORKLOAD if flag.name not in ("--tokens", "--price-per-gpu-hour")),
    Flag("--strategy", "the layout: dp=8,tp=2,pp=4,vp=2,mbs=1,zero=1,recompute=selective", "KEY=VALUE,..."),
    Flag("--framework", "whose kernels, number formats and habits count", "NAME", choices=frameworks()),
    *(flag for flag in CHOICE if flag.name in ("--frontend", "--rules", "--calibration", "--uncalibrated", "--config")),
    *OUTPUT,
    *COMMON,
)
