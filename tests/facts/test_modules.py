"""Live modules: exact counts by duck typing, structure only where every weight is accounted for, torch never imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

from strategist.errors import InputError
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_sequence
from strategist.facts.models import load_model
from strategist.facts.parameters import count, outer_parameters


class Weight:
    """A stand-in for a parameter: sizes, no numbers."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def numel(self) -> int:
        return prod(self.shape)


class Module:
    """A stand-in for nn.Module that offers what is read of one, without torch."""

    def __init__(self, **members: Any) -> None:
        self.weights = {k: v for k, v in members.items() if isinstance(v, Weight)}
        self.children = {k: v for k, v in members.items() if isinstance(v, Module)}
        for name, value in members.items():
            setattr(self, name, value)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield from self.children.items()

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Weight]]:
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for name, weight in module.weights.items():
                if not (remove_duplicate and id(weight) in seen):
                    yield f"{prefix}.{name}", weight
                seen.add(id(weight))


class ModuleList(Module):
    """Repeated blocks."""


class Block(Module):
    """One block of a tiny decoder."""


def decoder(tied: bool, layers: int = 3) -> Module:
    table = Weight(512, 64)
    embedding = Module(weight=table, num_embeddings=512, embedding_dim=64)
    head = Module(weight=table if tied else Weight(512, 64), in_features=64, out_features=512)
    blocks = {
        f"b{i}": Block(
            n_heads=8, n_kv_heads=4, q=Weight(64, 64), k=Weight(32, 64), v=Weight(32, 64), o=Weight(64, 64),
            gate=Weight(160, 64), up=Weight(160, 64), down=Weight(64, 160), norm1=Weight(64), norm2=Weight(64),
        )
        for i in range(layers)
    }  # fmt: skip
    return Module(embedding=embedding, layers=ModuleList(**blocks), norm=Module(weight=Weight(64)), head=head)


def numel(module: Module) -> int:
    return sum(weight.numel() for _, weight in module.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_decoder_is_recognised_without_torch(tied: bool) -> None:
    """A module whose weights are exactly a decoder's is that decoder, shared weights counted once."""
    module = decoder(tied)
    shape = load_model(module)
    assert (shape.kind, shape.layers, shape.hidden, shape.ffn_hidden) == ("decoder", 3, 64, 160)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab, shape.tied) == (8, 4, 8, 512, tied)
    assert count(shape).total == numel(module)


def test_unknown_weights_make_it_an_opaque_module() -> None:
    """One weight that no decoder has makes the module opaque; its count and its layers stay exact."""
    module = decoder(tied=False)
    module.children["layers"].children["b1"].weights["adapter"] = Weight(7, 3)
    shape = load_model(module)
    assert (shape.kind, shape.formula, shape.layers) == ("module", "module", 3)
    assert shape.parameters_stated == count(shape).total == numel(module)
    assert dict(shape.extra)["largest_layer_parameters"] == numel(module.children["layers"].children["b1"])
    assert shape.notes


def test_layers_of_an_opaque_module_add_up() -> None:
    """Layers and outer parts of an opaque module sum to its weights, whatever could be read of it."""
    module = decoder(tied=False)
    module.weights["stray"] = Weight(1001)
    shape = load_model(module)
    layers = sum(build_layer(shape, kind).parameters for kind in layer_sequence(shape))
    assert layers + outer_parameters(shape).total == numel(module)


def test_module_without_repeated_blocks_is_one_layer() -> None:
    """A module that repeats nothing is a single layer that holds all its weights."""
    module = Module(first=Module(weight=Weight(10, 20)), second=Module(weight=Weight(3)))
    shape = load_model(module)
    assert (shape.layers, count(shape).total, outer_parameters(shape).total) == (1, 203, 0)
    assert dict(shape.extra)["largest_layer_parameters"] == 203


def test_weights_shared_between_blocks_count_once() -> None:
    """Blocks that share a weight are counted with one copy of it, and nothing becomes negative."""
    shared = Weight(100)
    module = Module(layers=ModuleList(**{f"b{i}": Block(shared=shared, own=Weight(7)) for i in range(5)}))
    shape = load_model(module)
    assert (shape.layers, count(shape).total) == (5, 135)
    assert outer_parameters(shape).total >= 0


def test_module_without_weights_is_refused() -> None:
    """A module without parameters has no shape."""
    with pytest.raises(InputError) as caught:
        load_model(Module())
    assert caught.value.code == "EMPTY"


def test_configuration_of_a_module_is_used_and_checked() -> None:
    """A module with a configuration is read through it; a deviating count is kept as extra and told."""
    values = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
    module = decoder(tied=False)
    module.config = type("Config", (), {"to_dict": lambda self: values})()  # type: ignore[attr-defined]
    exact = load_model(module)
    assert (exact.extra_parameters, count(exact).total, exact.max_seq) == (0, numel(module), 128)
    module.weights["adapter"] = Weight(5, 5)
    adapted = load_model(module)
    assert (adapted.extra_parameters, count(adapted).total) == (25, numel(module))
    assert "+25" in adapted.notes[0]


def test_configuration_of_another_model_is_not_believed() -> None:
    """A configuration whose count is far from the module's is left aside, and the notes say so."""
    values = {"model_type": "llama", "hidden_size": 640, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
    module = decoder(tied=False)
    module.config = type("Config", (), {"to_dict": lambda self: values})()  # type: ignore[attr-defined]
    shape = load_model(module)
    assert shape.hidden == 64
    assert "its configuration describes" in shape.notes[0]


def test_reading_a_module_never_imports_torch() -> None:
    """Reading the shape of a module leaves torch unimported."""
    program = (
        "import sys\n"
        "from tests.facts.test_modules import decoder\n"
        "from strategist.facts.models import load_model\n"
        "load_model(decoder(tied=True))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
class TestTorch:
    """Real modules on the meta device."""

    def build(self, name: str) -> Any:
        import torch
        from torch import nn

        with torch.device("meta"):
            if name == "encoder":
                layer = nn.TransformerEncoderLayer(64, 8, 256, batch_first=True)
                return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            if name == "transformer":
                return nn.Transformer(64, 8, 2, 4, 256, batch_first=True)
            if name == "perceptron":
                return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    @pytest.mark.parametrize("name", ["encoder", "transformer", "perceptron", "convolution"])
    def test_counts_are_exact(self, name: str) -> None:
        """Every module's count equals the sum over its parameters."""
        module = self.build(name)
        assert count(load_model(module)).total == sum(weight.numel() for weight in module.parameters())

    def test_transformer_encoder_is_read(self) -> None:
        """torch's TransformerEncoder gives its depth, width, heads and feed-forward width, all weights explained."""
        shape = load_model(self.build("encoder"))
        assert (shape.kind, shape.layers, shape.hidden, shape.heads, shape.ffn_hidden) == ("decoder", 6, 64, 8, 256)
        assert (shape.norm, shape.mlp_gated, shape.qkv_bias) == ("layernorm", False, True)

    def test_largest_stack_is_taken(self) -> None:
        """Of two stacks the heavier one gives the layers, and the other is named."""
        shape = load_model(self.build("transformer"))
        assert (shape.kind, shape.layers) == ("module", 4)
        assert any("encoder.layers" in note for note in shape.notes)

    @pytest.mark.parametrize("name", ["recommender", "bags", "classifier"])
    def test_rows_that_nobody_writes_are_no_vocabulary(self, name: str) -> None:
        """A module that ends in a Linear of other outputs gives no logits over the rows of its tables; all weights count."""
        import torch
        from torch import nn

        with torch.device("meta"):
            table = {"bags": nn.EmbeddingBag, "recommender": nn.Embedding, "classifier": nn.Embedding}[name](50000, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            inside = (
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
                if name == "classifier"
                else nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            )
            module = nn.Sequential(table, inside, nn.Linear(64, 2))
        shape = load_model(module)
        assert (shape.vocab, shape.hidden, shape.tables) == (0, 64, ((50000, 64),))
        assert count(shape).total == sum(weight.numel() for weight in module.parameters())

    def test_plain_networks_are_opaque(self) -> None:
        """A perceptron is a module of repeated blocks without heads or vocabulary."""
        shape = load_model(self.build("perceptron"))
        assert (shape.kind, shape.layers, shape.heads, shape.vocab) == ("module", 3, 0, 0)
        assert any("Could not be read" in note for note in shape.notes)
