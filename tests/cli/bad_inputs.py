"""The corpus of refused and accepted inputs, and how each of its rows is typed."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.harness import ROOT, plan_file

CORPUS = ROOT / "tests/data/bad_inputs.csv"


@dataclass(frozen=True)
class Row:
    """One row: where the value goes, the value as it is written in the file, and what must happen."""

    flag: str
    value: str
    expected: str

    @property
    def ends(self) -> tuple[int, str | None]:
        """Exit code and error code that the row demands of the way it is typed here."""
        if (self.flag, self.value) in RULED:
            return RULED[self.flag, self.value]
        said = re.match(r"exit=(\d)(?:; code=(E_\w+))?", self.expected)
        if said is None:
            raise ValueError(f"the row {self} does not say how it ends")
        return int(said[1]), said[2]

    def __str__(self) -> str:
        return f"{self.flag} {self.value[:60]}"


def corpus() -> list[Row]:
    """Every row, in the order of the file."""
    with open(CORPUS, encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def typed(value: str) -> str:
    r"""The value as a user types it: \u0000, \x1b and \n in the file stand for the character."""
    return re.sub(r"\\(u[0-9a-f]{4}|x[0-9a-f]{2}|n)", lambda m: m[0].encode().decode("unicode_escape"), value)


Words = list[str]
Case = Callable[[Path], Words]
"""From an empty folder to the words after `strategist`."""

NODE = ("--hardware", "dgx-h100")
SMALL_JOB = ("plan", "--model", "llama-debug")
FLAT = '{"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 2}'
PAIRS = [
    {"a": "gpu0", "b": "gpu1", "kind": "nvlink", "bw": "50GB/s"},
    {"a": "gpu2", "b": "gpu3", "kind": "nvlink", "bw": "50GB/s"},
]
ALIAS_BOMB = "a: &a [x, x]\n" + "".join(
    f"{word}: &{word} [{', '.join([f'*{before}'] * 8)}]\n" for before, word in zip("abcdef", "bcdefg", strict=True)
)
LLAMA: Mapping[str, Any] = json.loads((ROOT / "tests/data/configs/llama-2-7b.json").read_text(encoding="utf-8"))


def size(row: Row) -> Case:
    """A model size."""
    return lambda folder: ["plan", "--model-size", typed(row.value), *NODE]


def job(row: Row) -> Case:
    """A flag of a small job on one node."""
    return lambda folder: [*SMALL_JOB, *NODE, row.flag, typed(row.value)]


def device(row: Row) -> Case:
    """A flag that describes machines; the device is named unless the row names it."""
    named = [] if row.flag == "--gpu" else ["--gpu", "h100-sxm-80gb"]
    return lambda folder: [*SMALL_JOB, *named, row.flag, typed(row.value)]


def hardware(name: str, content: str | bytes) -> Case:
    """A hardware file of some content."""
    return lambda folder: [*SMALL_JOB, "--hardware", written(folder, name, content)]


def config(changes: Mapping[str, Any]) -> Case:
    """A Llama's configuration with some keys changed."""
    return lambda folder: [
        "plan", *NODE, "--model-config", written(folder, "config.json", json.dumps({**LLAMA, **changes}))
    ]  # fmt: skip


def emitted(row: Row) -> Case:
    """A flag of `emit`."""
    return lambda folder: [
        "emit", plan_file(folder), "--to", "slurm", "--out", str(folder / "job"), row.flag, typed(row.value)
    ]  # fmt: skip


def written(folder: Path, name: str, content: str | bytes) -> str:
    """The path of a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def pipe(folder: Path) -> Words:
    """A pipe nobody writes to."""
    os.mkfifo(folder / "pipe.json")
    return [*SMALL_JOB, "--hardware", str(folder / "pipe.json")]


def edited(folder: Path) -> Words:
    """A plan whose reason was rewritten after it was sealed."""
    path = Path(plan_file(folder))
    path.write_text(path.read_text(encoding="utf-8").replace('"made_by": "', '"made_by": "not '), encoding="utf-8")
    return ["run", str(path)]


def other_machine(folder: Path) -> Words:
    """A plan for eight cards of a kind that this machine has not got."""
    old = ("--gpu", "v100-sxm2-32gb", "--gpus-per-node", "8", "--precision", "fp32")
    return ["run", plan_file(folder, "--model", "llama-debug", *old)]


def without_checkpoint(folder: Path) -> Words:
    """A run that was killed while it saved for the first time."""
    (folder / "RUN/checkpoints/step-000000010").mkdir(parents=True)
    return ["resume", str(folder / "RUN")]


def out(name: str) -> Case:
    """A plan written under some name in the folder."""
    return lambda folder: [*SMALL_JOB, *NODE, "--out", str(folder / typed(name))]


def existing(folder: Path) -> Words:
    """A plan written over a file."""
    return [*SMALL_JOB, *NODE, "--out", written(folder, "p.json", "old")]


def leading_dash(folder: Path) -> Words:
    """Given as --out=-p.json, relative to the working folder."""
    return [*SMALL_JOB, *NODE, "--out=" + os.path.relpath(folder) + "/-p.json"]


PREFIXES: Mapping[str, Callable[[Row], Case]] = {
    "--model-size": size,
    **dict.fromkeys(("--gpus-per-node", "--nodes", "--gpu", "--gpu-memory", "--inter-bw"), device),
    **dict.fromkeys(("--job-name", "--master-port", "--env"), emitted),
    **dict.fromkeys(
        ("--seq-len", "--global-batch", "--precision", "--optimizer", "--headroom", "--price-per-gpu-hour", "--tokens",
         "--objective", "--pin"), job),
}  # fmt: skip
"""Flags whose value is typed as it stands."""

CASES: Mapping[tuple[str, str], Case] = {
    ("--model-size + --model", "7B + llama-3-8b"): lambda f: [
        "plan", "--model-size", "7B", "--model", "llama-3-8b", *NODE
    ],
    ("--model", "llama-3-8"): lambda f: ["plan", "--model", "llama-3-8", *NODE],
    ("--model", "org/name offline and not in catalog"): lambda f: ["plan", "--model", "org/name", *NODE],
    ("--gpu-memory", "80GB vs 74.5GiB"): lambda f: [*SMALL_JOB, "--gpu", "h100-sxm-80gb", "--gpu-memory", "80GB"],
    ("--hardware", "missing.json"): lambda f: [*SMALL_JOB, "--hardware", "missing.json"],
    ("--hardware", "a directory"): lambda f: [*SMALL_JOB, "--hardware", str(f)],
    ("--hardware", "/dev/zero"): lambda f: [*SMALL_JOB, "--hardware", "/dev/zero"],
    ("--hardware", "a FIFO with no writer"): pipe,
    ("--hardware", "truncated JSON"): hardware("a.json", FLAT[:-9]),
    ("--hardware", "JSON with NaN"): hardware("a.json", '{"nodes": [{"gpu_count": NaN}]}'),
    ("--hardware", "JSON with duplicate key gpus"): hardware("a.json", '{"gpus": [], "gpus": [], "gpu": "h100"}'),
    ("--hardware", "JSON nested 200000 deep"): hardware("a.json", "[" * 200_000),
    ("--hardware", "UTF-16 file"): hardware("a.json", FLAT.encode("utf-16")),
    ("--hardware", "UTF-8 with BOM"): hardware("a.json", b"\xef\xbb\xbf" + FLAT.encode()),
    ("--hardware", 'gpu_count: "8" (string)'): hardware("a.json", '{"nodes": [{"gpu": "h100", "gpu_count": "8"}]}'),
    ("--hardware", "gpu_count: true"): hardware("a.json", '{"nodes": [{"gpu": "h100", "gpu_count": true}]}'),
    ("--hardware", "link to a GPU id that does not exist"): hardware(
        "a.json", json.dumps({"nodes": [{"gpu": "h100", "gpu_count": 2, "links": [{**PAIRS[0], "b": "gpu9"}]}]})
    ),
    ("--hardware", "disconnected node graph"): hardware(
        "a.json", json.dumps({"nodes": [{"gpu": "h100", "gpu_count": 4, "links": PAIRS}]})
    ),
    ("--hardware", "YAML: !!python/object/apply:os.system"): hardware(
        "a.yaml", "gpu: !!python/object/apply:os.system ['touch canary']"
    ),
    ("--hardware", "YAML alias bomb (330 bytes expanding to 52 MB as JSON)"): hardware("a.yaml", ALIAS_BOMB),
    ("--hardware", "YAML nodes: 010"): hardware("a.yaml", "gpu: h100\nnodes: 010\n"),
    ("--hardware", "YAML duplicate key"): hardware("a.yaml", "gpu: h100\nnodes: 1\nnodes: 2\n"),
    ("--model-config", "num_hidden_layers -1"): config({"num_hidden_layers": -1}),
    ("--model-config", "num_hidden_layers 1e9"): config({"num_hidden_layers": 10**9}),
    ("--model-config", "num_key_value_heads 3 with 32 heads"): config({"num_key_value_heads": 3}),
    ("--model-config", "num_key_value_heads 64 with 32 heads"): config({"num_key_value_heads": 64}),
    ("--model-config", "auto_map pointing to remote code"): config(
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    ),
    ("--model-config", "_attn_implementation_internal set to a hub repository"): config(
        {"_attn_implementation_internal": "evil/kernel"}
    ),
    ("--model-config", "model_type unknown"): config({"model_type": "lama"}),
    ("--model-config", "vision-language config with vision_config.num_attention_heads 1"): lambda f: [
        "plan", *NODE, "--model-config", written(f, "config.json", json.dumps(
            {"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model",
             "num_attention_heads": 1}, "projector_hidden_act": "gelu"}))
    ],
    ("--model-config", "num_experts 1 top_k 1"): config(
        {"model_type": "mixtral", "num_local_experts": 1, "num_experts_per_tok": 1}
    ),
    ("--model-config", "file is a pickle or .pt"): lambda f: [
        "plan", *NODE, "--model-config", written(f, "model.pt", b"\x80\x04cos\nsystem\n(S'touch canary'\ntR.")
    ],
    ("--model-config", "name field contains </script><img onerror=1>"): config(
        {"_name_or_path": "</script><img onerror=1>"}
    ),
    ("--seq-len + --pin", "4095 + cp=2"): lambda f: [*SMALL_JOB, *NODE, "--seq-len", "4095", "--pin", "cp=2"],
    ("--global-batch", "1 with 8 GPUs and dp only"): lambda f: [
        *SMALL_JOB, *NODE, "--global-batch", "1", "--forbid", "tp,pp,cp"
    ],
    ("--grad-accum", "16 with 32 data-parallel ranks and total semantics"): lambda f: [
        *SMALL_JOB, "--hardware", "dgx-h100:4", "--global-batch", "16", "--grad-accum", "16", "--pin", "dp=32"
    ],
    ("--precision", "bf16 on v100"): lambda f: [
        *SMALL_JOB, "--gpu", "v100-sxm2-32gb", "--precision", "bf16"
    ],
    ("--pin", "tp=3 on 8 GPUs"): lambda f: [*SMALL_JOB, *NODE, "--pin", "tp=3"],
    ("--pin", "tp=16 with 8 GPUs per node"): lambda f: [
        "plan", "--model-size", "7B", "--hardware", "dgx-h100:2", "--pin", "tp=16"
    ],
    ("--pin + --forbid", "tp=4 + tp"): lambda f: [*SMALL_JOB, *NODE, "--pin", "tp=4", "--forbid", "tp"],
    ("--pin", "ep=16 with 8 experts"): lambda f: [
        "plan", "--model", "mixtral-8x7b", "--hardware", "dgx-h100:4", "--pin", "ep=16"
    ],
    ("--config", "unknown key in strategist.toml"): lambda f: [
        *SMALL_JOB, "--config", written(f, "strategist.toml", 'nodes = 2\nseq_length = 4096\n')
    ],
    ("--config", "TOML syntax error"): lambda f: [*SMALL_JOB, "--config", written(f, "a.toml", "nodes = = 2\n")],
    ("--out", "existing file"): existing,
    ("--out", "/nonexistent/dir/p.json"): lambda f: [*SMALL_JOB, *NODE, "--out", "/nonexistent/dir/p.json"],
    ("--out", "path with newline or leading dash"): out(r"a\nb.json"),
    ("--out", "name of 300 characters"): out("x" * 300),
    ("--env", "LD_PRELOAD=x"): lambda f: [
        "emit", plan_file(f), "--to", "torchrun", "--out", str(f / "job"), "--env", "LD_PRELOAD=x"
    ],
    ("run", "plan.json edited by hand (digest differs)"): edited,
    ("run", "plan for 8 ranks on a 4-GPU machine"): other_machine,
    ("run", "no command after --"): lambda f: ["run", plan_file(f), "--"],
    ("resume", "folder without a complete checkpoint"): without_checkpoint,
    ("export", "--to deepspede"): lambda f: [
        "emit", plan_file(f), "--to", "deepspede", "--out", str(f / "job")
    ],
    ("plan", "terminal width 20"): lambda f: [*SMALL_JOB, *NODE],
    ("unknown command", "strategist pln"): lambda f: ["pln"],
    ("compare", "one plan only"): lambda f: ["compare", plan_file(f)],
    ("diff", "two files of different kinds"): lambda f: [
        "diff", plan_file(f), written(f, "seen.json", '{"format": "strategist-observed/1"}')
    ],
}  # fmt: skip
"""Rows whose value is a description."""

OWED: Mapping[tuple[str, str], str] = {
    ("doctor", "NVML library missing"): "later: doctor",
}
"""Rows of commands that do not exist yet, with the issue that owes them."""

RULED: Mapping[tuple[str, str], tuple[int, str | None]] = {
    ("--gpu", "mi300x"): (0, None),
    ("--model-config", "auto_map pointing to remote code"): (0, None),
    ("--grad-accum", "16 with 32 data-parallel ranks and total semantics"): (3, "E_BATCH_SPLIT"),
    ("--env", "LD_PRELOAD=x"): (2, "E_ENV_DENIED"),
    ("unknown command", "strategist pln"): (2, "E_CHOICE"),
}
"""Rows that allow two ends or leave one open, and the one row that the exit codes overrule: an illegal combination of
valid values ends with 3."""

APART: tuple[tuple[str, str], ...] = (
    ("--out", "file on a full disk"),
    ("plan", "stdout closed early (piped to head)"),
    ("plan", "HOME unset and cache folder read-only"),
)
"""Rows that need a process of their own: test_out.py and test_processes.py."""


def case_of(row: Row) -> Case:
    """How a row is typed."""
    described = CASES.get((row.flag, row.value))
    return described or PREFIXES[row.flag](row)
