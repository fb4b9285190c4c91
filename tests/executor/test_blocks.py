"""Which parts of a foreign module count as its blocks: what is wrapped, computed again and compiled one by one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_rows_of_several_stages_are_all_blocks() -> None:
    """A network in stages has a row of like blocks in each; none of them is left to the whole, and each may be exchanged by its name."""
    from torch import nn

    from strategist.executor.blocks import find_blocks

    class Block(nn.Linear):
        pass

    stages = nn.ModuleList(
        nn.ModuleDict({"rest": nn.Linear(4, 4), "row": nn.Sequential(*(Block(4, 4) for _ in range(depth)))})
        for depth in (1, 4, 2)
    )
    found = find_blocks(stages)
    assert list(found.blocks) == ["0.row.0", "1.row.0", "1.row.1", "1.row.2", "1.row.3", "2.row.0", "2.row.1"]
    found.exchange("1.row.2", nn.Identity())
    assert isinstance(stages.get_submodule("1.row.2"), nn.Identity)


def test_blocks_inside_blocks_are_parts_of_them() -> None:
    """A block that holds a row of its own kind is one block."""
    from torch import nn

    from strategist.executor.blocks import find_blocks

    class Block(nn.Module):
        def __init__(self, *inside: nn.Module) -> None:
            super().__init__()
            self.weight, self.row = nn.Linear(2, 2), nn.ModuleList(inside)

    model = nn.ModuleList([Block(Block(), Block()), Block(), Block()])
    assert list(find_blocks(model).blocks) == ["0", "1", "2"]


def test_a_plain_stack_is_its_blocks_and_a_bare_module_has_none() -> None:
    """The names are those inside the model, whatever stands around the stack."""
    from torch import nn

    from strategist.executor.blocks import find_blocks

    model = nn.ModuleDict({"before": nn.Linear(2, 2), "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    assert list(find_blocks(model).blocks) == ["layers.0", "layers.1"]
    assert not find_blocks(nn.Linear(2, 2)).blocks


def test_encoder_and_decoder_of_a_pair_are_both_in_blocks() -> None:
    """T5 has one class of blocks in two rows."""
    from transformers import T5Config, T5ForConditionalGeneration

    from strategist.executor.blocks import find_blocks

    model = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=2, vocab_size=32)
    )
    assert len(find_blocks(model).blocks) == 5


def test_layers_of_another_class_in_the_other_half_are_blocks_too() -> None:
    """BART's encoder and decoder have a class of layers each; what lies in no such place is none of them."""
    from transformers import BartConfig, BartForConditionalGeneration

    from strategist.executor.blocks import find_blocks

    sizes = {
        "d_model": 8,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "vocab_size": 32,
        "encoder_ffn_dim": 8,
    }
    model = BartForConditionalGeneration(BartConfig(encoder_layers=2, decoder_layers=3, decoder_ffn_dim=8, **sizes))
    assert list(find_blocks(model).blocks) == [
        "model.encoder.layers.0", "model.encoder.layers.1",
        "model.decoder.layers.0", "model.decoder.layers.1", "model.decoder.layers.2",
    ]  # fmt: skip
