"""The built-in reference model: a decoder made from the facts of a catalogue row.

One assembler for GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023, arXiv 2302.13971, section 2.2) and their relatives,
dense or with experts: the shape says which norm, positions, attention and feed-forward part each layer has.
Shapes: B sequences, T tokens, H model width, V vocabulary.

The residual stream has the compute format whichever mechanism brings it: under autocast the embedding's output is cast
once and norms run outside autocast (which would lift them to float32), exactly as FSDP2 computes with cast weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from strategist.executor.architecture import position_obstacles
from strategist.executor.context import Context
from strategist.executor.models.adapters import ADAPTER, add_adapters, fill_adapter
from strategist.executor.models.attention import Attention
from strategist.executor.models.block import Block
from strategist.executor.models.cuts import WHOLE, block_styles
from strategist.executor.models.embedding import CutTable, TokenTable
from strategist.executor.models.experts import Routing
from strategist.executor.models.head import Head
from strategist.executor.models.norms import make_norm
from strategist.executor.models.positions import ALL_TOKENS, PositionTable, places
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.obstacles import refuse
from strategist.facts.constants import PLAIN, Constants
from strategist.facts.model import ModelShape, layer_sequence

INITIAL_STD = 0.02
"""Standard deviation of initial weights (GPT-2, Radford et al. 2019); output projections get 1/sqrt(2 layers) of it."""
OUTPUTS = (".o.weight", ".down.weight", ".experts.down")


class Decoder(ReferenceModel):
    """Tokens (B, T) to logits (B, T, V); a pipeline stage takes or gives hidden states (B, T, H) instead.

    `routing` says how experts are chosen (models/experts.py), `constants` what weights of others were trained with.
    """

    def __init__(self, shape: ModelShape, routing: Routing = "scored", constants: Constants = PLAIN) -> None:
        super().__init__()
        self.constants = constants
        self.shape, self.tied, self.token_ranks, self.token_part = shape, shape.tied, 1, 0
        self.tokens_here = ALL_TOKENS
        self.takes_tokens = self.gives_logits = True
        learned = shape.pos == "learned"
        self.token_embedding: TokenTable | None = TokenTable(shape.vocab, shape.hidden)
        self.position_embedding = PositionTable(shape.pos_rows, shape.hidden) if learned else None
        self.layers = nn.ModuleDict(
            {str(i): Block(shape, kind, routing, constants) for i, kind in enumerate(layer_sequence(shape))}
        )
        self.norm: nn.Module | None = make_norm(shape, constants)
        self.head: Head | None = Head(shape.hidden, shape.vocab, bias=shape.lm_head_bias)
        self.tie()
        if shape.adapters is not None:
            add_adapters(self, shape.adapters)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """`input_ids` are tokens on the first stage and hidden states on the others. With `labels` (B, T) the loss summed over
        those that count comes out instead of logits, a number."""
        h = self._embed(input_ids) if self.takes_tokens else input_ids
        shared = places(self.shape, h.shape[1] * self.token_ranks, h, self.tokens_here, self.constants)
        for block in self.layers.values():
            h = block(h, shared)
        if self.gives_logits and self.norm is not None and self.head is not None:
            h = self.head(self.norm(h), labels)
        return h

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embedded tokens (B, T, H), or this rank's part of T, with learned positions added where there are any."""
        h = _in_compute_format(self.token_embedding(tokens))  # type: ignore[misc]
        if self.position_embedding is None:
            return h
        refuse(position_obstacles(self.shape, self.tokens_here.whole(tokens.shape[1])))
        rows = self.tokens_here.places(tokens.shape[1], h.device).chunk(self.token_ranks)[self.token_part]
        return h + _in_compute_format(self.position_embedding(rows))

    def layer_count(self) -> int:
        """Layers of the whole model."""
        return self.shape.layers

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """Keep `layers`; a tied head keeps the embedding, which owns its weight, without using it for tokens."""
        for name in [name for name in self.layers if int(name) not in layers]:
            del self.layers[name]
        self.takes_tokens, self.gives_logits = embedding, head
        if not embedding and not (head and self.tied):
            self.token_embedding = None
        if not embedding:
            self.position_embedding = None
        if not head:
            self.norm, self.head = None, None

    def tie(self) -> None:
        """One parameter for embedding and head when the shape says so."""
        if self.tied and self.token_embedding is not None and self.head is not None:
            self.head.weight = self.token_embedding.weight

    def embedding(self) -> nn.Module | None:
        """The module that holds the token embedding's weight."""
        return self.token_embedding

    def embedding_parts(self) -> list[nn.Module]:
        """Token embedding and table of positions."""
        return [part for part in (self.token_embedding, self.position_embedding) if part is not None]

    def head_parts(self) -> list[nn.Module]:
        """Last norm and head."""
        return [part for part in (self.norm, self.head) if part is not None]

    def spread_tokens(self, ranks: int, index: int) -> None:
        """Hidden states between blocks hold the `index`-th 1/`ranks` of the tokens."""
        self.token_ranks, self.token_part = ranks, index

    def spread_context(self, context: Context) -> None:
        """This rank holds `context.share` of each sequence; attention reaches the rest."""
        self.tokens_here = context.share
        for module in self.layers.modules():
            if isinstance(module, Attention):
                module.context = context

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Embedding and head by vocabulary, blocks as models/cuts.py says.

        The head gives logits that stay cut by vocabulary, for a loss that is computed without gathering them.
        """
        between = Shard(1) if sequence_parallel else Replicate()
        ends: dict[str, ParallelStyle] = {}
        if self.token_embedding is not None:
            ends["token_embedding"] = CutTable(between)
        if self.head is not None:
            ends["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        if sequence_parallel:  # each rank sees its own tokens only
            own = {"position_embedding": self.position_embedding, "norm": self.norm}
            ends |= {name: WHOLE for name, part in own.items() if part is not None}
        blocks = {
            f"layers.{number}.{name}": style
            for number, block in self.layers.items()
            for name, style in block_styles(self.shape, block, between).items()
        }
        return ends | blocks

    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Zeros for biases, ones for norms, normal numbers for matrices; adapters as they say."""
        if ADAPTER in name:
            fill_adapter(name, weight, generator)
        elif name.endswith(".bias"):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
        else:
            std = INITIAL_STD / math.sqrt(2 * self.shape.layers) if name.endswith(OUTPUTS) else INITIAL_STD
            weight.normal_(0.0, std, generator=generator)


def _in_compute_format(h: Tensor) -> Tensor:
    device = h.device.type
    return h.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h
