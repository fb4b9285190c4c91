"""Scripts of Megatron-LM and Megatron-DeepSpeed as people write them: each counts as the same job with everything written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import call
from tests.readers.reading import read_file
from tests.readers.test_as_written import exposed

SET = "export CUDA_DEVICE_MAX_CONNECTIONS=1\nNODES=2\nTP=4\n"
RUN = "torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py"
MODEL = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --bf16 --use-distributed-optimizer"  # fmt: skip
BATCH, VOCAB = "--global-batch-size 32", "--vocab-size 50257"
MESH = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
DEEPSPEED = f"{RUN} --tensor-model-parallel-size 2 {MODEL} {BATCH} {VOCAB} --deepspeed --zero-stage 1"


def asked(folder: Path, text: str, *more: str, name: str = "run.sh") -> Any:
    """`predict` of a script on two nodes of eight."""
    (folder / name).write_text(text, encoding="utf-8")
    return call("predict", str(folder / name), "--hardware", "dgx-h100:2", *more, "--json").document


def weight(found: dict[str, Any]) -> tuple[Any, ...]:
    """What is compared: the job, its layout, its memory and its time."""
    return tuple(found[part] for part in ("model", "workload", "mesh", "strategy", "memory", "time"))


def rules(folder: Path, text: str, *more: str, name: str = "run.sh") -> list[str]:
    (folder / name).write_text(text, encoding="utf-8")
    return [fault["rule"] for fault in call("validate", str(folder / name), *more, "--json").document[0]["findings"]]


WRITTEN = f"{SET}{RUN} {MESH} {MODEL} {BATCH} {VOCAB}\n"


@pytest.mark.parametrize(
    "line",
    [
        f"PP=$((NODES * 8 / TP))\n{RUN} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP {MODEL} {BATCH} {VOCAB}",
        f"{RUN} {MESH} {MODEL} --global-batch-size $(( NODES * 8 / TP / 4 * 32 )) {VOCAB}",
        f'AC=no\nARGS="{MESH} {MODEL} {BATCH}"\nif [ "$AC" = "yes" ]; then\n  ARGS="$ARGS --recompute-granularity full"\nfi\n{RUN} $ARGS {VOCAB}',
        f"{RUN} --tensor-model-parallel-size ${{1:-4}} --pipeline-model-parallel-size ${{PP:-4}} {MODEL} {BATCH} {VOCAB}",
        f"{RUN} {MESH} {MODEL} {BATCH}",
    ],
    ids=["degree", "batch", "branch", "defaults", "tokenizer"],
)  # fmt: skip
def test_a_script_counts_as_what_a_shell_makes_of_it(line: str, tmp_path: Path) -> None:
    """Sums, branches that are not taken, defaults, and the tokenizer that pretrain_gpt.py has unasked, GPT-2's."""
    assert weight(asked(tmp_path, SET + line)) == weight(asked(tmp_path, WRITTEN))


@pytest.mark.parametrize(
    ("old", "new", "choices", "beside"),
    [
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size $1", ["tp"], ["--strategy", "tp=4"]),
        (MESH, "--tensor-model-parallel-size $1 --pipeline-model-parallel-size $2", ["tp", "pp"], ["--strategy", "tp=4,pp=4"]),
        ("--micro-batch-size 1", "--micro-batch-size $MBS", ["--micro-batch"], ["--micro-batch", "1"]),
        (BATCH, "--global-batch-size $GBS", ["--global-batch"], ["--global-batch", "32"]),
        ("--seq-length 1024", "--seq-length $SEQ", ["--seq-len"], ["--seq-len", "1024"]),
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size $(cat tp)", ["tp"], ["--strategy", "tp=4"]),
    ],
)  # fmt: skip
def test_a_value_that_the_script_does_not_say_is_asked_for(
    old: str, new: str, choices: list[str], beside: list[str], tmp_path: Path
) -> None:
    """`predict` names the argument and its text and what to give; with that, the job is the one that is written out. `validate` warns."""
    text = WRITTEN.replace(old, new)
    error = asked(tmp_path, text)["error"]
    assert error["code"] == "E_MISSING"
    assert all(word in error["message"] for word in new.split()[:2])
    assert all(choice in error["hint"] for choice in choices)
    assert rules(tmp_path, text) == rules(tmp_path, text, "--hardware", "dgx-h100:2") == ["unknown-value"]
    assert weight(asked(tmp_path, text, *beside)) == weight(asked(tmp_path, WRITTEN))
    assert rules(tmp_path, text, "--hardware", "dgx-h100:2", *beside[:-2]) == ["unknown-value"]


def test_a_model_that_the_script_does_not_say_is_asked_for(tmp_path: Path) -> None:
    """Its sizes are variables of whoever starts it; with a model beside it they need not be known."""
    text = WRITTEN.replace("--num-layers 16", "--num-layers $LAYERS")
    error = asked(tmp_path, text)["error"]
    assert (error["code"], "--num-layers $LAYERS" in error["message"], "--model" in error["hint"]) == ("E_MISSING", True, True)  # fmt: skip
    named = ("--model", "llama-3.2-1b")
    assert weight(asked(tmp_path, text, *named)) == weight(asked(tmp_path, WRITTEN, *named))


def test_a_batch_that_is_not_said_is_one_micro_batch_a_rank(tmp_path: Path) -> None:
    """Micro-batch x data-parallel ranks (Megatron-LM d98e8a6, training/arguments.py); who names another has another."""
    text = f"{SET}{RUN} --tensor-model-parallel-size 4 {MODEL} {VOCAB}\n"
    found = asked(tmp_path, text)
    assert (found["workload"]["global_batch"], found["strategy"]["accumulation"]) == (1 * 2 * 8 // 4, 1)
    assert asked(tmp_path, text, "--global-batch", "32")["strategy"]["accumulation"] == 32 * 4 // 16
    unsaid = text.replace("--tensor-model-parallel-size 4", "--tensor-model-parallel-size $1")
    assert asked(tmp_path, unsaid, "--strategy", "tp=4")["workload"]["global_batch"] == 4


def test_kubernetes_puts_in_what_a_container_s_variables_hold(tmp_path: Path) -> None:
    """$(NAME) in its words, before a shell reads them; what comes from elsewhere is not known."""

    def job(line: str, **tp: Any) -> str:
        container = {"name": "pytorch", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}, "env": [{"name": "TP", **tp}]}  # fmt: skip
        command = {"command": ["bash", "-c"], "args": [SET.replace("TP=4\n", "") + line]}
        role = {"replicas": 1, "template": {"spec": {"containers": [container | command]}}}
        spec = {"pytorchReplicaSpecs": {"Master": role, "Worker": role}}
        return json.dumps({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "x"}, "spec": spec})  # fmt: skip

    line = f"{RUN} --tensor-model-parallel-size $(TP) --pipeline-model-parallel-size $(( 16 / TP )) {MODEL} {BATCH} {VOCAB}"
    assert weight(asked(tmp_path, job(line, value="4"), name="job.yaml")) == weight(asked(tmp_path, WRITTEN))
    elsewhere = job(line, valueFrom={"configMapKeyRef": {"name": "sizes", "key": "tp"}})
    assert asked(tmp_path, elsewhere, name="job.yaml")["error"]["code"] == "E_MISSING"
    assert "unknown-value" in rules(tmp_path, elsewhere, name="job.yaml")


@pytest.mark.parametrize(
    ("own", "same"),
    [
        ("--num-key-value-heads 4", "--group-query-attention --num-query-groups 4"),
        ("--num-experts 1", ""),
        ("--num-experts 8 --moe-expert-parallel-size 4 --enable-expert-tensor-parallelism", "--num-experts 8 --topk 1 --expert-interval 2 --moe-expert-parallel-size 4 --enable-expert-tensor-parallelism"),
        ("--normalization rmsnorm", "--normalization RMSNorm"),
        ("--normalization layernorm", "--normalization LayerNorm"),
        ("--ds-sequence-parallel-size 4", "--context-parallel-size 4 --cp-comm-type a2a"),
    ],
)  # fmt: skip
def test_megatron_deepspeed_s_names_count_as_megatron_s(own: str, same: str, tmp_path: Path) -> None:
    """Grouped queries, norms and Ulysses (Megatron-DeepSpeed 4efb479, megatron/arguments.py)."""
    found = asked(tmp_path, f"{DEEPSPEED} {own}\n")
    assert weight(found) == weight(asked(tmp_path, f"{DEEPSPEED} {same}\n"))
    assert rules(tmp_path, f"{DEEPSPEED} {own}\n") == []


def test_experts_of_megatron_deepspeed_are_where_it_puts_them(tmp_path: Path) -> None:
    """In the last of every so many layers, one for each token unless it is told otherwise; residual ones are refused."""
    experts = f"{DEEPSPEED} --num-experts 8 --moe-expert-parallel-size 4"
    unasked = asked(tmp_path, experts)
    own = WRITTEN.replace(MESH, "--tensor-model-parallel-size 2").rstrip()
    named = f"{own} --num-experts 8 --moe-router-topk 1 --moe-layer-freq ([0]+[1])*8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    assert unasked["model"] == asked(tmp_path, named.replace("([0]+[1])*8", "'([0]+[1])*8'"))["model"]
    assert (unasked["mesh"]["ep"], unasked["mesh"]["etp"]) == (4, 1)
    assert asked(tmp_path, f"{experts} --mlp-type residual")["error"]["code"] == "E_CHOICE"


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2"),
        ("--num-layers-per-virtual-pipeline-stage 4", "--num-virtual-stages-per-pipeline-rank 1"),
        ("--num-experts 8", "--num-experts 8 --expert-model-parallel-size 1 --expert-tensor-parallel-size 4"),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
    ],
)  # fmt: skip
def test_what_is_said_in_layers_or_not_at_all_is_said_in_numbers(short: str, long: str, tmp_path: Path) -> None:
    """Sixteen layers on four stages: two layers a virtual stage are two virtual stages; experts are cut as dense layers are unless they are said
    to be cut otherwise; three layers of chunks of two are all of them."""
    says = []
    for words in (short, long):
        (tmp_path / "run.sh").write_text(f"{SET}{RUN} {MESH} {MODEL} {BATCH} {VOCAB} {words}\n", encoding="utf-8")
        says.append(read_file(tmp_path / "run.sh", 16).says)
    assert says[0] == says[1]
    assert says[0]["virtual_stages"] == (2 if "-stage 2" in short else 1)
    assert says[0].get("etp") == (4 if "experts" in short else None)


@pytest.mark.parametrize(
    ("sizes", "kind", "inner"), [("1 4", "ring", None), ("2 2", "hierarchical", 2), ("4 1", "all-to-all", None)]
)
def test_a_level_of_one_rank_is_none(sizes: str, kind: str, inner: int | None, tmp_path: Path) -> None:
    """Sizes go from the inside out: groups of one rank exchange no heads, and one group is no ring."""
    words = f"--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {sizes}"
    (tmp_path / "run.sh").write_text(f"{SET}{RUN} {MESH} {MODEL} {BATCH} {VOCAB} {words}\n", encoding="utf-8")
    says = read_file(tmp_path / "run.sh", 64).says
    assert (says["context_parallel"], says.get("cp_inner")) == (kind, inner)


def test_megatron_deepspeed_wants_one_connection_for_sequence_parallelism_alone(tmp_path: Path) -> None:
    """It stops without CUDA_DEVICE_MAX_CONNECTIONS=1 there (4efb479, megatron/arguments.py)."""
    assert rules(tmp_path, f"{DEEPSPEED}\n") == []
    assert rules(tmp_path, f"{DEEPSPEED} --sequence-parallel\n") == ["megatron-connections"]


def test_a_stage_of_zero_that_is_not_said_is_asked_for(tmp_path: Path) -> None:
    """--zero-stage of Megatron-DeepSpeed decides how states are kept."""
    text = DEEPSPEED.replace("--zero-stage 1", "--zero-stage $ZERO")
    assert "zero=" in asked(tmp_path, text)["error"]["hint"]
    assert weight(asked(tmp_path, text, "--strategy", "zero=1")) == weight(asked(tmp_path, DEEPSPEED))


AWARE = "--use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (AWARE, 2 + 4 + 4),
        (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 2 + 2 + 1),
        (f"{AWARE} --main-params-dtype fp16 --exp-avg-dtype fp16", 2 + 2 + 4),
        (f"{AWARE} --fp8-format hybrid --fp8-recipe tensorwise --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 4 + 2 + 2),
    ],
)  # fmt: skip
def test_the_precision_aware_optimizer_holds_what_its_formats_hold(words: str, state: int, tmp_path: Path) -> None:
    """Masters in fp32 are the 16 bits that weights in bf16 lack, and moments are as wide as they are said to be
    (NVIDIA/TransformerEngine 04912bf, optimizers/fused_adam.py); unasked they are 12 bytes."""

    def held(text: str) -> float:
        found = asked(tmp_path, text)["memory"]["stages"][0]["terms"]
        return float(next(term["bytes"] for term in found if term["name"] == "optimizer"))

    plain = words[words.index("--fp8-format") : words.index("--exp-avg")] if "--fp8" in words else ""
    assert held(f"{WRITTEN.rstrip()} {words}\n") / held(f"{WRITTEN.rstrip()} {plain}\n") == pytest.approx(state / 12, rel=1e-4)  # fmt: skip


def test_main_gradients_in_bf16_take_half(tmp_path: Path) -> None:
    """They are summed and sent in bf16 then (Megatron-LM d98e8a6, training/arguments.py)."""
    found = asked(tmp_path, f"{WRITTEN.rstrip()} {AWARE} --main-grads-dtype bf16\n")
    formats = found["strategy"]["formats"]
    assert (formats["gradient"], formats["reduce"]) == ("bfloat16", "bfloat16")
    assert exposed(found) != exposed(asked(tmp_path, f"{WRITTEN.rstrip()} {AWARE}\n"))


MIXTURE = f"{RUN} {MODEL} --global-batch-size 128 {VOCAB} --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 16"  # fmt: skip
EACH = "--moe-token-dispatcher-type alltoall"
ONCE = "--moe-token-dispatcher-type flex"
IN_FP8 = "--moe-flex-dispatcher-backend ncclep --moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8"


def exchanged(folder: Path, words: str) -> int:
    """Exposed nanoseconds of the exchange with experts on two nodes of eight."""
    return exposed(asked(folder, f"{SET}{MIXTURE} {words}\n"))["ep"]


@pytest.mark.parametrize(
    ("words", "plain", "least", "most"),
    [
        (ONCE, EACH, 0.25, 0.45),
        (f"{ONCE} --moe-flex-dispatcher-backend hybridep", ONCE, 1.0, 1.0),
        (f"{EACH} --overlap-moe-expert-parallel-comm", EACH, 0.1, 0.9),
        (f"{ONCE} {IN_FP8}", f"{ONCE} --moe-flex-dispatcher-backend ncclep", 0.7, 0.8),
        (f"{EACH} --moe-router-num-groups 8 --moe-router-group-topk 4", EACH, 1.0, 1.0),
        (f"{ONCE} --moe-router-num-groups 2 --moe-router-group-topk 1", ONCE, 0.7, 0.95),
    ],
    ids=["one copy for each node", "the backend that is taken unasked", "overlap", "fp8", "groups, each copy", "groups"],
)  # fmt: skip
def test_ways_to_experts_are_those_of_the_script(
    words: str, plain: str, least: float, most: float, tmp_path: Path
) -> None:
    """Two nodes get one copy each of a token in place of four each; groups of which one is chosen lie on one of the two, inside of which
    as many copies are handed on."""
    assert least <= exchanged(tmp_path, words) / exchanged(tmp_path, plain) <= most


def test_megatron_bridge_says_the_same_ways_to_experts(tmp_path: Path) -> None:
    """By fields of its model, and by its section of overlap."""
    sizes = {
        "tensor_model_parallel_size": 1,
        "num_moe_experts": 64,
        "expert_model_parallel_size": 16,
        "moe_token_dispatcher_type": "flex",
    }
    table = {
        "model": sizes,
        "train": {"micro_batch_size": 1},
        "comm_overlap": {"overlap_moe_expert_parallel_comm": True},
    }
    (tmp_path / "job.json").write_text(json.dumps(table), encoding="utf-8")
    (tmp_path / "run.sh").write_text(f"{SET}{MIXTURE} {ONCE} --overlap-moe-expert-parallel-comm\n", encoding="utf-8")
    for name in ("job.json", "run.sh"):
        says = dict(call("validate", str(tmp_path / name), "--json").document[0]["says"])
        assert (says["dispatcher"], says["overlaps_experts"]) == ("deepep", True)
