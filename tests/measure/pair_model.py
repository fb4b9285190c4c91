"""An encoder with a decoder made of the executor's own parts, as the formulas describe it: what a trace of it holds and sends is theirs to say.

Relative positions, which no term counts, are left out; tables of learned ones are not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.nn.functional import scaled_dot_product_attention as attend

from strategist.executor.context import Context
from strategist.executor.models.cuts import COLUMN, WHOLE
from strategist.executor.models.decoder import _in_compute_format
from strategist.executor.models.embedding import CutTable, TokenTable
from strategist.executor.models.feed_forward import FeedForward
from strategist.executor.models.head import Head
from strategist.executor.models.norms import make_norm
from strategist.executor.models.positions import PositionTable
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.splittable import nobody_said
from strategist.executor.tensor_styles import Entry, Exit, Linear, OutputLinear
from strategist.facts.constants import PLAIN
from strategist.facts.model import ModelShape


class Keys(nn.Module):
    """Keys and values (B, heads, S, D) of hidden states (B, S, H)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.k, self.v = (Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias) for _ in range(2))

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, values."""
        k, v = (part(given).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.k, self.v))
        return k, v


class Mixer(nn.Module):
    """Attention of a sequence to itself, or to what an encoder gave."""

    def __init__(self, shape: ModelShape, *, is_causal: bool) -> None:
        super().__init__()
        self.head_dim, self.is_causal = shape.head_dim, is_causal
        self.q = Linear(shape.hidden, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.keys = Keys(shape)
        self.o = OutputLinear(shape.heads * shape.head_dim, shape.hidden, bias=shape.o_bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """x (B, T, H) to the same shape."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.keys(x if memory is None else memory)
        mixed: Tensor = self.o(attend(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Norms in front of the parts where the model ends with a norm, else behind their sums."""

    def __init__(self, shape: ModelShape, *, decodes: bool) -> None:
        super().__init__()
        self.norms_first = shape.final_norm
        self.attention_norm, self.attention = make_norm(shape), Mixer(shape, is_causal=decodes)
        self.cross_norm, self.cross = (make_norm(shape), Mixer(shape, is_causal=False)) if decodes else (None, None)
        self.mlp_norm, self.mlp = make_norm(shape), FeedForward(shape, shape.ffn_hidden, bias=shape.mlp_bias)

    def forward(self, h: Tensor, memory: Tensor | None = None) -> Tensor:
        """h (B, T, H) to the same shape."""
        h = self._around(h, self.attention_norm, self.attention)
        if self.cross is not None and self.cross_norm is not None:
            h = self._around(h, self.cross_norm, self.cross, memory)
        return self._around(h, self.mlp_norm, self.mlp)

    def _around(self, h: Tensor, norm: nn.Module, part: nn.Module, *more: Tensor | None) -> Tensor:
        result: Tensor = h + part(norm(h), *more) if self.norms_first else norm(h + part(h, *more))
        return result


class Stack(nn.Module):
    """What stands before the layers of a half, the layers, and what follows them. The class of its layers is one for each half."""

    def __init__(self, shape: ModelShape, layers: int, *, decodes: bool) -> None:
        super().__init__()
        rows = shape.pos_rows if decodes else dict(shape.extra).get("enc_pos_rows", 0)
        self.positions = PositionTable(rows, shape.hidden) if shape.pos == "learned" else None
        self.embed_norm = make_norm(shape) if shape.embed_norm else None
        self.layers = nn.ModuleDict({str(i): Layer(shape, decodes=decodes) for i in range(layers)})
        self.norm = make_norm(shape) if shape.final_norm else None

    def forward(self, h: Tensor, length: int, memory: Tensor | None = None, part: tuple[int, int] = (1, 0)) -> Tensor:
        """Embedded tokens to the last hidden states."""
        h = _in_compute_format(h)
        if self.positions is not None:
            rows = torch.arange(length, device=h.device).chunk(part[0])[part[1]]
            h = h + _in_compute_format(self.positions(rows))
        if self.embed_norm is not None:
            h = self.embed_norm(h)
        for layer in self.layers.values():
            h = layer(h, memory)
        return h if self.norm is None else self.norm(h)


class Pair(ReferenceModel):
    """Two sequences of tokens to logits of the second."""

    constants = PLAIN

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.tied, self.part = shape, shape.tied, (1, 0)
        self.token_embedding = TokenTable(shape.vocab, shape.hidden)
        self.encoder = Stack(shape, shape.enc_layers, decodes=False)
        self.decoder = Stack(shape, shape.layers, decodes=True)
        self.head = Head(shape.hidden, shape.vocab, bias=shape.lm_head_bias)
        self.tie()

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, S) and (B, T) to (B, T, V)."""
        memory = self.encoder(self.token_embedding(input_ids), input_ids.shape[1], None, self.part)
        hidden = self.decoder(self.token_embedding(decoder_input_ids), decoder_input_ids.shape[1], memory, self.part)
        logits: Tensor = self.head(hidden, labels)
        return logits

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.token_embedding.weight

    def layer_count(self) -> int:
        raise nobody_said(self, "pp")

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        raise nobody_said(self, "pp")

    def spread_tokens(self, ranks: int, index: int) -> None:
        self.part = ranks, index

    def spread_context(self, context: Context) -> None:
        raise nobody_said(self, "cp")

    def embedding(self) -> nn.Module:
        return self.token_embedding

    def embedding_parts(self) -> list[nn.Module]:
        return []

    def head_parts(self) -> list[nn.Module]:
        return []

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        between = Shard(1) if sequence_parallel else Replicate()
        styles: dict[str, ParallelStyle] = {
            "token_embedding": CutTable(between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        for name, module in self.named_modules():
            if isinstance(module, Mixer):
                is_cross = name.endswith("cross")
                styles |= {name: Entry(between), f"{name}.q": COLUMN, f"{name}.o": Exit(between)}
                styles |= {f"{name}.keys": Entry(between)} if is_cross else {}
                styles |= {f"{name}.keys.k": COLUMN, f"{name}.keys.v": COLUMN}
            elif isinstance(module, FeedForward):
                own = ("gate", "up") if self.shape.mlp_gated else ("up",)
                styles |= {name: Entry(between), f"{name}.down": Exit(between)}
                styles |= {f"{name}.{matrix}": COLUMN for matrix in own}
            elif sequence_parallel and name.endswith(("norm", "positions")):
                styles[name] = WHOLE
        return styles

    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Small numbers, ones for norms."""
        if "norm" in name and not name.endswith(".bias"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
