"""Decoders behind an encoder whose sequences have a length of their own: what goes with which length, and how a question, a plan and its
readers say it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from strategist import Plan, predict, recommend
from strategist.document.load import load_plan, plan_from
from strategist.document.write import as_document, digest, dump
from strategist.emitters import EMITTERS, find_emitter
from strategist.emitters.emitter import Options
from strategist.errors import InputError, StrategistError
from strategist.executor.support import layout_obstacles, obstacles
from strategist.facts.attention import attention_FLOP
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_counts
from strategist.facts.model_config import shape_from_config
from strategist.facts.models import load_model
from strategist.facts.parameters import count, outer_parameters, over_matrices
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.memory.estimate import peak_memory
from strategist.memory.saved import habits_of, saved_tensors
from strategist.planner.check import faults
from strategist.planner.predict import predict_plan
from strategist.planner.sensitivity import assumptions
from strategist.reports.brief import model_words
from strategist.space.shares import elements, groups
from strategist.space.traffic import traffic
from strategist.timing.compute import product_sizes
from strategist.timing.estimate import model_FLOP, step_times
from tests.cli.harness import call
from tests.oracle.test_search import ROUNDING_NS
from tests.planner.test_layout_properties import PLAIN
from tests.plans import FLOAT32, make_plan
from tests.strategies import candidates, legal_candidates, trimmed

SMALL: dict[str, Any] = {"model": "t5-base", "hardware": "dgx-h100", "global_batch": 1024, "seq_len": 512}
T5 = {
    "model_type": "t5", "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "dropout_rate": 0.0, "is_gated_act": True, "n_positions": 64,
}  # fmt: skip
BART = {
    "model_type": "bart", "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "activation_function": "gelu",
    "dropout": 0.0, "tie_word_embeddings": True,
}  # fmt: skip


def job_of(model: Any = "t5-base", targets: int | None = None, *, inputs: int = 512, gpus: int = 8, **more: Any) -> Job:
    """A question about an encoder-decoder on some GPUs of one node."""
    shape = load_model(model) if isinstance(model, str) else model
    work = Workload(seq_len=inputs, target_len=targets, global_batch=16)
    return Job(cluster=trimmed("dgx-h100", gpus), model=shape, workload=work, profile=find_profile(), **more)


def with_targets(job: Job, targets: int | None) -> Job:
    """The job with targets of another length."""
    return replace(job, workload=replace(job.workload, target_len=targets))


@pytest.mark.slow
@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
@pytest.mark.parametrize(("inputs", "targets"), [(24, 24), (24, 10), (16, 40)])
def test_useful_FLOP_are_those_that_torch_counts(config: dict[str, Any], inputs: int, targets: int) -> None:
    """Products of transformers' own models, forward and backward, as torch counts them; weights that are no matrices left out."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    own = {name: value for name, value in config.items() if name not in ("model_type", "is_gated_act")}
    written = transformers.AutoConfig.for_model(config["model_type"], **own)
    model = transformers.AutoModelForSeq2SeqLM.from_config(written, attn_implementation="eager")
    ids, labels = (torch.randint(3, 90, (2, length)) for length in (inputs, targets))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, decoder_input_ids=labels, labels=labels).loss.backward()
    shape = shape_from_config(config)
    work = Workload(seq_len=inputs, target_len=targets, global_batch=2)
    head = shape.vocab * shape.hidden
    counted = count(shape).active - outer_parameters(shape).before + (head if shape.tied else 0)
    vectors = counted - head - over_matrices(shape, lambda matrix: matrix.weights)
    useful = model_FLOP(replace(job_of(shape), workload=work)) - 6 * vectors * inputs * 2
    assert useful == counter.get_total_flops()


def test_products_of_a_decoder_have_rows_of_its_own_tokens() -> None:
    """All but the keys and values of what the encoder gave; an encoder's have its inputs."""
    job = job_of(targets=128)
    layout = candidates([PLAIN | {"dp_replicate": 8, "micro_batch": 2}])
    for kind in layer_counts(job.model):
        layer = build_layer(job.model, kind)
        _, rows, _, _ = product_sizes(job, layer, layout)
        expected = [
            2 * (128 if kind.cross and matrix.name not in ("cross_k", "cross_v") else 512) for matrix in layer.matrices
        ]
        assert rows[0].tolist() == expected


def test_attention_to_the_encoder_meets_all_of_its_keys() -> None:
    """A query of the decoder meets the keys of its own sequence and those of the inputs."""
    shape = load_model("t5-base")
    decoder = next(kind for kind in layer_counts(shape) if kind.cross)
    width = shape.heads * shape.head_dim
    assert attention_FLOP(shape, decoder, 128, 512) == 4 * width * (128 + 512)
    assert attention_FLOP(shape, decoder, 512) == attention_FLOP(shape, decoder, 512, 512)


@pytest.mark.parametrize("attention", ["flash2", "unfused"])
def test_what_a_decoder_keeps_goes_with_its_targets_but_for_keys_of_the_inputs(attention: Any) -> None:
    """Rows of 128 targets behind 512 inputs, per token of the inputs; scores of each attention are queries times keys."""
    job = job_of(targets=128)
    job = replace(job, profile=replace(job.profile, attention=attention))
    encoder, decoder = layer_counts(job.model)
    alike, own = (
        {row.name: row.width for row in saved_tensors(job.model, decoder, habits_of(with_targets(job, targets)))}
        for targets in (None, 128)
    )
    assert own.keys() == alike.keys()
    share = {name: own[name] / width for name, width in alike.items() if width}
    assert {name for name, value in share.items() if value == 1.0} == {"cross_key", "cross_value", "cross_memory"}
    squares = {"scores": 1 / 16} if attention == "unfused" else {}
    assert {name: value for name, value in share.items() if value not in (0.25, 1.0)} == squares
    assert share.get("cross_scores", 0.25) == 0.25
    front = [saved_tensors(job.model, encoder, habits_of(with_targets(job, targets))) for targets in (None, 128)]
    assert front[0] == front[1]


def test_targets_as_long_as_the_inputs_are_the_same_question() -> None:
    """Saying the length of the inputs changes no byte and no nanosecond of any layout."""
    job = job_of(gpus=4)
    every = legal_candidates(job)
    said = with_targets(job, 512)
    assert (peak_memory(said, every).device == peak_memory(job, every).device).all()
    assert (step_times(said, every).step == step_times(job, every).step).all()
    assert model_FLOP(said) == model_FLOP(job)


@pytest.mark.parametrize("model", ["t5-base", "bart-large"])
def test_shorter_targets_cost_less_and_longer_ones_more(model: str) -> None:
    """Useful work, attention and the loss grow with every token of the targets; no step gets shorter, where launches hide them, and no
    layout holds less."""
    job = job_of(model, gpus=4)
    every = legal_candidates(job)
    every = every.where(np.flatnonzero((every["cp"] == 1) & (every["tp"] < 4)))
    asked = [with_targets(job, targets) for targets in (64, 128, 512, 768)]
    found = [(step_times(own, every), peak_memory(own, every).device) for own in asked]
    for (less, smaller), (more, larger) in pairwise(found):
        assert (less.step <= more.step + ROUNDING_NS).all()
        assert all((less.exposed[term] < more.exposed[term]).all() for term in ("attention", "elementwise", "loss"))
        assert (smaller <= larger).all()
    work = [model_FLOP(own) for own in asked]
    assert all(less < more for less, more in pairwise(work))


@pytest.mark.parametrize("sequence_parallel", [0, 1])
def test_tensor_parallelism_reduces_three_times_in_a_decoder_and_its_keys_with_the_inputs(
    sequence_parallel: int,
) -> None:
    """Twelve layers of each: four reductions of the inputs in an encoder's, six of the targets in a decoder's, one of the inputs for its keys,
    and the ends: two embeddings and the head."""
    job = job_of(targets=128)
    layout = PLAIN | {"dp_replicate": 4, "tp": 2, "micro_batch": 4, "sequence_parallel": sequence_parallel}
    columns = candidates([layout])
    group = next(iter(groups(job, columns)))
    sent = [row for row in traffic(job, group, elements(job.model, group)) if row.axis == "tp"]
    op = "reduce_scatter" if sequence_parallel else "all_reduce"
    hidden = {768 * 2 * 4 * 512: 12 * 4 + 12 + 1, 768 * 2 * 4 * 128: 12 * 6 + 2}
    found = {
        float(row.payload_CS[0, 0]): float(row.count_CS[0, 0])
        for row in sent
        if row.op == op and float(row.payload_CS[0, 0]) in hidden and row.count_CS[0, 0]
    }
    assert found == hidden


def test_a_document_says_targets_of_their_own_alone() -> None:
    """Plans of other questions stay what they were to the byte."""
    assert "target_len" not in as_document(Workload())
    assert as_document(Workload(target_len=128))["target_len"] == 128


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for T5 with short targets."""
    return recommend(**SMALL, target_len=128)


def test_a_plan_carries_what_it_was_asked(plan: Plan, tmp_path: Path) -> None:
    """The document has the length, is read back as it is, and is priced as it was; without it the targets are longer."""
    path = tmp_path / "plan.json"
    path.write_text(dump(plan))
    again = load_plan(str(path))
    assert again == plan
    assert again.workload.target_len == 128
    assert predict_plan(again).time.step_ns == plan.time.step_ns
    alike = replace(plan, workload=replace(plan.workload, target_len=None))
    assert predict_plan(alike).time.step_ns > plan.time.step_ns
    assert digest(alike) != digest(plan)
    assert "sequence 512 with targets of 128" in " ".join(call("explain", str(path)).out.split())
    assert call("check", str(path)).code == 0


def test_a_rate_counts_the_inputs(plan: Plan) -> None:
    """Tokens per second are those of the inputs, as T5's own tokens are counted; MFU counts both lengths."""
    seconds = plan.time.step.value
    assert plan.time.tokens_per_second == pytest.approx(512 * 1024 / seconds)
    job = replace(job_of(targets=128), workload=plan.workload)
    peak = 8 * (job.cluster.slowest.gpu.bf16_FLOPs or 0.0)
    assert plan.time.mfu == pytest.approx(model_FLOP(job) / (seconds * peak))


def test_predict_prices_the_same_layout_the_same(plan: Plan) -> None:
    """From Python, by a Workload and on the command line the layout of the plan has the plan's step."""
    layout = predict_plan(plan).layout
    step = plan.time.step_ns
    assert predict(**SMALL, strategy=layout, target_len=128).time.step_ns == step
    work = Workload(seq_len=512, target_len=128, global_batch=1024)
    assert predict("t5-base", "dgx-h100", strategy=layout, workload=work).time.step_ns == step
    ran = call(
        "predict", "--model", "t5-base", "--hardware", "dgx-h100", "--global-batch", "1024", "--seq-len", "512",
        "--target-len", "128", "--strategy", layout, "--json",
    )  # fmt: skip
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["workload"]["target_len"] == 128
    assert document["time"]["step_ns"] == step


def test_sides_with_other_targets_answer_other_questions(plan: Plan, tmp_path: Path) -> None:
    """A comparison shows the lengths and says that they differ."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(dump(plan))
    paths[1].write_text(dump(recommend(**SMALL, target_len=256)))
    out = " ".join(call("compare", *map(str, paths)).out.split())
    assert "with targets of 128" in out
    assert "The sides answer different questions: target length differs." in out


def test_the_length_is_an_assumption_of_encoder_decoders_unless_it_is_said(plan: Plan) -> None:
    """It is printed with its flag, and asked how far it may be off where it was said."""
    assert [own.value for own in recommend(**SMALL).assumptions if own.flag == "--target-len"] == [
        "512, as many tokens as the inputs have"
    ]
    assert all(own.flag != "--target-len" for own in plan.assumptions)
    varied = next(own for own in assumptions(job_of(targets=128)) if own.flag == "--target-len")
    more = varied.changed(2.0)
    assert more is not None
    assert more.workload.target_len == 256
    assert all(own.flag != "--target-len" for own in assumptions(job_of()))


@pytest.mark.parametrize(
    ("model", "given", "code"),
    [
        ("llama-2-7b", {"target_len": 128}, "CONFLICT"),
        ("t5-base", {"target_len": 0}, "RANGE"),
        ("t5-base", {"target_len": 2**25}, "RANGE"),
        ("t5-base", {"target_len": "short"}, "TYPE"),
        ("bart-large", {"target_len": 2048}, "FRAMEWORK_LEGALITY"),
        ("bart-large", {"seq_len": 2048, "target_len": 128}, "FRAMEWORK_LEGALITY"),
        ("whisper-small", {"seq_len": 1500}, "FRAMEWORK_LEGALITY"),
        ("t5-base", {"target_len": 128, "pin": "cp=2"}, "UNSUPPORTED"),
        ("t5-base", {"target_len": 114, "pin": "tp=4,sequence_parallel=1"}, "DIVISIBILITY"),
    ],
)
def test_targets_that_cannot_be_are_refused(model: str, given: dict[str, Any], code: str) -> None:
    """Models of one stack, no length, more than a decoder has positions for, and layouts that cut what does not divide."""
    with pytest.raises(StrategistError) as refused:
        recommend(model, "dgx-h100", **{"seq_len": 512, "global_batch": 64} | given)
    assert refused.value.code == code


def test_an_encoder_of_sound_has_positions_of_its_own() -> None:
    """Whisper reads 1500 positions in front of at most 448 tokens."""
    found = recommend("whisper-small", "dgx-h100", seq_len=1500, target_len=448, global_batch=64)
    assert found.workload.targets == 448


def test_tensor_parallelism_stays_open_where_targets_do_not_divide() -> None:
    """Inputs of 512 tokens divide by four and targets of 114 do not: tp is looked at without sequence parallelism."""
    every = legal_candidates(job_of(targets=114))
    four = every.where(np.flatnonzero(every["tp"] == 4))
    assert len(four)
    assert not four["sequence_parallel"].any()
    assert legal_candidates(job_of(targets=128)).where(np.flatnonzero(every["tp"] == 2))["sequence_parallel"].any()


def test_a_plan_with_targets_that_mean_nothing_is_not_sound(plan: Plan) -> None:
    """A hand-written length below one, or one of a model of one stack, is named; one that is no number is refused at the door."""
    wrong = replace(plan, workload=replace(plan.workload, target_len=0))
    assert faults(wrong) == ("workload.target_len is 0; it is at least 1.",)
    llama = recommend("llama-3.2-1b", "dgx-h100", global_batch=8)
    one_stack = replace(llama, workload=replace(llama.workload, target_len=128))
    assert any("workload.target_len is 128" in said for said in faults(one_stack))
    document = json.loads(dump(plan))
    document["workload"]["target_len"] = "many"
    with pytest.raises(InputError):
        plan_from(document, "PLAN")


def test_scripts_on_our_executor_train_such_a_plan_with_a_model_of_transformers(plan: Plan, tmp_path: Path) -> None:
    """The plan goes with a script that makes the model of a configuration; there is no built-in one to run."""
    assert layout_obstacles(plan) == ()
    assert [obstacle.place for obstacle in obstacles(plan)] == ["model"]
    path = tmp_path / "plan.json"
    path.write_text(dump(plan))
    for target in ("torchrun", "mp-spawn", "mpirun", "ray", "slurm"):
        folder = tmp_path / target
        assert call("emit", str(path), "--to", target, "--out", str(folder)).code == 0
        script = (folder / "train.py").read_text()
        assert "AutoModelForSeq2SeqLM.from_config" in script
        assert "make_model=make_model" in script
        compile(script, "train.py", "exec")
        assert load_plan(str(folder / "plan.json")).workload.target_len == 128


OF_PAIRS = ("transformers", "accelerate", "deepspeed")
"""Targets whose scripts train encoders with decoders, too."""


def test_targets_of_frameworks_that_train_decoders_alone_name_the_field(plan: Plan) -> None:
    """Files of three of them say how long a decoder's sequence is; the others refuse it by name."""
    for emitter in (one for one in EMITTERS if one.coverage is not None):
        said = " ".join(emitter.obstacles(plan))
        assert (emitter.name in OF_PAIRS) == ("workload.target_len = 128" not in said), emitter.name


@pytest.mark.parametrize("target", OF_PAIRS)
def test_scripts_of_transformers_models_have_samples_of_two_lengths(target: str) -> None:
    """As the plan says, or one where it says none; FSDP2, which tears the table that both halves have, is refused where it would do the work."""
    options = Options()
    plain, sharded = pair_plan(0), pair_plan(3)
    for own in (plain, replace(plain, workload=replace(plain.workload, target_len=128))):
        script = find_emitter(target).write(own, options)[PurePosixPath("train.py")]
        compile(script, "train.py", "exec")
        assert "AutoModelForSeq2SeqLM.from_config" in script
        assert "AutoModelForCausalLM" not in script
        assert 'workload.get("target_len", workload["seq_len"])' in script
        assert not list(find_emitter(target).obstacles(own))
    assert ("FSDP2" in " ".join(find_emitter(target).obstacles(sharded))) == (target != "deepspeed")


def pair_plan(zero: int) -> Plan:
    """A plan by hand for a small T5 on two ranks."""
    layout = {"dp_shard": 2, "zero": zero} if zero else {"dp_replicate": 2}
    return make_plan(shape_from_config(T5), seq_len=16, formats=FLOAT32, backend="nccl", **layout)


SCRIPT = """torchrun --nproc-per-node 8 pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
 --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 \\
 --micro-batch-size 8 --global-batch-size 64 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
"""


def test_megatrons_own_argument_is_read(tmp_path: Path) -> None:
    """A script of pretrain_t5.py says both lengths; another program looks at no length of a decoder."""
    path = tmp_path / "t5.sh"
    path.write_text(SCRIPT)
    ran = call("validate", str(path), "--model", "t5-base", "--hardware", "dgx-h100", "--json")
    work = json.loads(ran.out)[0]["prediction"]["workload"]
    assert (work["seq_len"], work["target_len"]) == (512, 128)
    path.write_text(SCRIPT.replace("pretrain_t5.py", "pretrain_gpt.py"))
    again = json.loads(call("validate", str(path), "--model", "t5-base", "--hardware", "dgx-h100", "--json").out)
    assert "target_len" not in json.dumps(again)


def test_a_model_is_told_with_the_layers_of_both_its_stacks() -> None:
    """A T5 has as many in its encoder again; one without words has no vocabulary to tell."""
    told = model_words(recommend("t5-base", "dgx-h100", seq_len=512)).replace("\N{NO-BREAK SPACE}", " ")
    assert "12 + 12 layers x 768" in told
    assert "vocab" not in model_words(recommend(replace(load_model("vit-l-16"), vocab=0), "dgx-h100"))
