"""Live modules that are not what their configuration says: frozen weights, cut layers, other heads, weights taken out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from strategist import predict, recommend
from strategist.errors import InputError
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.models import load_model
from strategist.facts.parameters import count
from strategist.facts.profile import find_profile
from strategist.memory.logits import loss_bytes_CS
from strategist.planner.predict import job_of, predict_plan
from strategist.planner.situation import one
from strategist.space.shares import groups
from tests.facts.test_modules import Module, Weight, decoder, numel

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
RANKS = 8
ASKED: dict[str, Any] = {"hardware": "dgx-h100", "seq_len": 128, "global_batch": 64}


def configured(module: Module, **changes: Any) -> Module:
    """The module with a configuration of Hugging Face's."""
    values = LLAMA | changes
    module.config = type("Config", (), {"to_dict": lambda self: values})()  # type: ignore[attr-defined]
    return module


def without(module: Module, *names: str) -> Module:
    """The module without some of its parts."""
    for name in names:
        del module.children[name]
    return module


def freeze(module: Module) -> Module:
    """The module, none of whose weights has a gradient."""
    for _, weight in module.named_parameters():
        weight.requires_grad = False  # type: ignore[attr-defined]
    return module


def headless(outputs: int = 0) -> Module:
    """A decoder as transformers has it without a language head: hidden states, or a matrix of labels."""
    module = without(configured(decoder(tied=False, layers=8)), "head")
    module.get_output_embeddings = lambda: None  # type: ignore[attr-defined]
    if outputs:
        module.children["score"] = Module(weight=Weight(outputs, 64), in_features=64, out_features=outputs)
    return module


def costs(module: Any, strategy: str = f"dp={RANKS},zero=2,mbs=1") -> Any:
    """What a layout of the module costs."""
    return predict(module, strategy=strategy, **ASKED)


def term(prediction: Any, name: str) -> int:
    """Bytes of a term of the fullest device; 0 where it has none."""
    return sum(term.bytes for term in prediction.memory.worst.terms if term.name == name)


def seconds(prediction: Any, name: str) -> int:
    """Nanoseconds of a term of the step."""
    return sum(term.exposed_ns for term in prediction.time.terms if term.name == name)


def logits_of(prediction: Any) -> float:
    """Bytes of all logits of one micro-batch in the loss's backward."""
    job = Job(
        cluster=prediction.cluster,
        model=prediction.model,
        workload=prediction.workload,
        profile=find_profile(),
    )
    candidate = one(micro_batch=1, dp_replicate=RANKS)
    return float(sum(loss_bytes_CS(job, group).sum() for group in groups(job, candidate)))


@pytest.mark.parametrize("is_configured", [True, False])
@pytest.mark.parametrize("frozen", [("embedding", "layers", "norm"), ("embedding",), ("layers",)])
@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (2, RANKS), (3, RANKS)])
def test_frozen_weights_have_no_gradient_and_no_state(
    is_configured: bool, frozen: tuple[str, ...], zero: int, shards: int
) -> None:
    """Gradients take 4 bytes and AdamW 8 of every trained weight and of no other, over the ranks that share them; weights take 4 of all."""
    module = decoder(tied=False, layers=8)
    module = configured(module) if is_configured else module
    for name in frozen:
        freeze(module.children[name])
    trained = numel(module) - sum(numel(module.children[name]) for name in frozen)
    found = costs(module, f"dp={RANKS},zero={zero},mbs=1")
    assert term(found, "gradients") == 4 * trained // shards
    assert term(found, "optimizer") == 8 * trained // shards
    assert term(found, "parameters") == 4 * numel(module) // shards
    assert [f"{trained:,} of {numel(module):,} weights" in hint.sentence for hint in found.hints if hint.code == "W_FROZEN"] == [True]  # fmt: skip


def test_frozen_weights_take_less_time_and_no_more_memory() -> None:
    """Every term of memory of a partly frozen module is at most that of the whole one, and its step is shorter."""
    module = configured(decoder(tied=False, layers=8))
    freeze(module.children["layers"])
    some, every = costs(module), costs(configured(decoder(tied=False, layers=8)))
    assert some.time.step.value < every.time.step.value
    assert all(term(some, whole.name) <= whole.bytes for whole in every.memory.worst.terms if whole.name != "slack")
    assert not [hint for hint in every.hints if hint.code == "W_FROZEN"]


def test_a_plan_remembers_what_is_trained() -> None:
    """The job of a plan for a partly frozen module trains the same share as the question did, and predicts the same memory."""
    module = configured(decoder(tied=False, layers=8))
    freeze(module.children["layers"])
    plan = recommend(module, **ASKED)
    assert job_of(plan).trainable == 1 - numel(module.children["layers"]) / numel(module)
    assert predict_plan(plan).memory == plan.memory


@pytest.mark.parametrize("strategy", ["pp=2,zero=0", "dp=8,zero=1"])
def test_parts_of_ranks_are_not_alike_when_some_are_frozen(strategy: str) -> None:
    """Where ranks own whole parts a partly frozen module is refused, and the same module is legal when all of it is trained."""
    module = configured(decoder(tied=False, layers=8))
    assert costs(module, strategy).legal
    freeze(module.children["layers"])
    assert [violation.rule for violation in costs(module, strategy).violations] == ["LEG703"]


def test_a_module_that_trains_nothing_is_refused() -> None:
    """A module without a trained weight has no training to plan."""
    with pytest.raises(InputError, match="requires_grad is False for all") as caught:
        load_model(freeze(configured(decoder(tied=False))))
    assert caught.value.code == "EMPTY"


@pytest.mark.parametrize("layers", [2, 5, 7, 11])
@pytest.mark.parametrize("strategy", ["dp=8,zero=2,mbs=1", "dp=4,pp=2,zero=0,mbs=1"])
def test_cut_layers_are_those_of_a_shorter_configuration(layers: int, strategy: str) -> None:
    """A module with other blocks than its configuration says costs what one with that configuration costs, to the byte and nanosecond."""
    if layers % 2 and "pp" in strategy:
        strategy = strategy.replace("dp=4,pp=2", "dp=8")
    cut = costs(configured(decoder(tied=False, layers=layers)), strategy)
    written = costs(configured(decoder(tied=False, layers=layers), num_hidden_layers=layers), strategy)
    assert (cut.memory, cut.time, cut.model.layers) == (written.memory, written.time, layers)
    assert any(f"It has {layers} layers where its configuration says 8" in note for note in cut.model.notes)


def test_the_first_of_several_sorts_of_layers_stay() -> None:
    """Of layers that alternate a cut module has the first ones, as the configuration orders them."""
    sorts = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"] * 2
    mixed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "layer_types": sorts}
    module = configured(decoder(tied=False, layers=5), **mixed)
    for block in module.children["layers"].children.values():
        block.weights |= {"bias_q": Weight(64), "bias_k": Weight(32), "bias_v": Weight(32)}
    whole = shape_from_config(LLAMA | mixed)
    cut = load_model(module)
    assert layer_sequence(cut) == layer_sequence(whole)[:5]
    assert (count(cut).total, cut.extra_parameters) == (numel(module), 0)


def test_a_module_without_a_head_has_no_logits() -> None:
    """Hidden states cost no logits and no loss, and every weight still counts."""
    bare, words = costs(headless()), costs(configured(decoder(tied=False, layers=8)))
    assert (term(bare, "logits"), seconds(bare, "loss")) == (0, 0)
    assert seconds(words, "loss") > 0
    assert term(bare, "parameters") == 4 * numel(headless()) // RANKS
    assert any("no output head of 512 words" in note for note in bare.model.notes)


@pytest.mark.parametrize("labels", [2, 17])
def test_logits_of_a_classifier_are_those_of_its_labels(labels: int) -> None:
    """What gives labels has as many logits a token as labels, and useful work of its own head instead of the words'."""
    shape = load_model(headless(labels))
    assert (shape.vocab, count(shape).total) == (labels, numel(headless(labels)))
    of_labels, of_words = costs(headless(labels)), costs(configured(decoder(tied=False, layers=8)))
    tokens = ASKED["seq_len"] * ASKED["global_batch"]
    assert 512 * logits_of(of_labels) == labels * logits_of(of_words) > 0
    assert of_words.time.model_FLOP - of_labels.time.model_FLOP == 6 * (512 - labels) * 64 * tokens
    assert seconds(of_labels, "loss") == pytest.approx(seconds(of_words, "loss") * labels / 512, abs=1)
    assert not [hint for hint in of_labels.hints if hint.code == "ADV801"]


def test_a_class_of_ones_own_keeps_its_words() -> None:
    """Without a word of transformers' about heads, a module that ends in hidden states may multiply by its table."""
    module = without(configured(decoder(tied=True, layers=8), tie_word_embeddings=True), "head")
    assert load_model(module).vocab == 512


def test_a_pruned_module_is_read_itself() -> None:
    """A module whose layers are narrower than its configuration says is read from its weights, and nothing is below zero."""
    module = configured(decoder(tied=False, layers=8), intermediate_size=200)
    shape = load_model(module)
    assert (shape.ffn_hidden, shape.layers, shape.extra_parameters) == (160, 8, 0)
    assert "weights less than its configuration describes" in shape.notes[0]


def test_a_missing_last_norm_is_told() -> None:
    """What is missing behind the layers is taken off there: the count is exact, and so is that of every layer."""
    module = without(configured(decoder(tied=False, layers=8)), "norm")
    shape = load_model(module)
    assert (count(shape).total, shape.extra_parameters) == (numel(module), -64)
    assert "taken off what lies behind the layers" in shape.notes[0]
    layer = build_layer(shape, layer_sequence(shape)[0]).parameters
    assert layer == numel(module.children["layers"].children["b0"])


def test_predicting_such_modules_never_imports_torch() -> None:
    """What is read of frozen weights, blocks and heads needs no torch."""
    program = (
        "import sys\n"
        "from tests.planner.test_live_modules import costs, freeze, headless\n"
        "module = headless(3)\n"
        "freeze(module.children['layers'].children['b0'])\n"
        "costs(module)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
class TestTransformers:
    """transformers' own classes, on the meta device."""

    def make(self, name: str, **changes: Any) -> Any:
        import torch
        import transformers

        with torch.device("meta"):
            config = transformers.LlamaConfig(**{k: v for k, v in (LLAMA | changes).items() if k != "model_type"})
            return getattr(transformers, name)(config)

    def test_layers_cut_off(self) -> None:
        """`model.model.layers = model.model.layers[:5]` costs what num_hidden_layers=5 costs."""
        cut = self.make("LlamaForCausalLM")
        cut.model.layers = cut.model.layers[:5]
        first, second = costs(cut), costs(self.make("LlamaForCausalLM", num_hidden_layers=5))
        assert (first.memory, first.time) == (second.memory, second.time)

    @pytest.mark.parametrize(
        ("name", "outputs"),
        [("LlamaForCausalLM", 512), ("LlamaModel", 0), ("LlamaForSequenceClassification", 3), ("LlamaForTokenClassification", 3)],
    )  # fmt: skip
    def test_heads(self, name: str, outputs: int) -> None:
        """Each class gives what its head gives, with all of its weights."""
        module = self.make(name, num_labels=3)
        shape = load_model(module)
        assert (shape.vocab, shape.layers) == (outputs, 8)
        assert count(shape).total == sum(weight.numel() for weight in module.parameters())

    @pytest.mark.parametrize(
        ("name", "outputs"), [("BertModel", 0), ("BertForSequenceClassification", 2), ("BertForMaskedLM", 1024)]
    )
    def test_encoders(self, name: str, outputs: int) -> None:
        """An encoder gives words where it has a head for these."""
        import torch
        import transformers

        with torch.device("meta"):
            config = transformers.BertConfig(
                vocab_size=1024, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
            )
            module = getattr(transformers, name)(config)
        shape = load_model(module)
        assert (shape.vocab, count(shape).total) == (outputs, sum(weight.numel() for weight in module.parameters()))
