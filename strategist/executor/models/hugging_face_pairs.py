"""How Hugging Face's encoders with a decoder are cut over tensor-parallel ranks (transformers 5: T5, mT5, BART, mBART), and in no other way.

Names follow transformers: src/transformers/models/t5/modeling_t5.py, src/transformers/models/bart/modeling_bart.py. The cuts are those of
Megatron-LM (arXiv 1909.08053, section 3) for each attention, that to the encoder included.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import ImpossibleError
from strategist.executor.context import Context
from strategist.executor.models.hugging_face_styles import styles_of
from strategist.executor.splittable import Splittable, nobody_said

T5 = {
    "shared": "embedding_rowwise",
    "*.embed_tokens": "embedding_rowwise",
    "*Attention": "own_heads",
    "*Attention.[qkv]": "colwise",
    "*Attention.o": "rowwise",
    "*.relative_attention_bias": "colwise",
    "*.DenseReluDense.wi": "colwise",
    "*.DenseReluDense.wi_[01]": "colwise",
    "*.DenseReluDense.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}
"""Patterns of module names and transformers' words for how they are cut. A table of relative positions has a column for each head."""
BART = {
    "model.shared": "embedding_rowwise",
    "*.embed_tokens": "embedding_rowwise",
    "*attn.[qkv]_proj": "colwise",
    "*attn.out_proj": "rowwise",
    "*.layers.*.fc1": "colwise",
    "*.layers.*.fc2": "rowwise",
    "lm_head": "colwise_gather_output",
    "": "cut_logits_bias",
}
PLANS: dict[str, dict[str, str]] = {
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": BART,
    "MBartForConditionalGeneration": BART,
}
"""Names of the classes whose tensor-parallel cuts are tested here."""


def is_pair(model: nn.Module) -> bool:
    """True for an encoder with a decoder of one of PLANS, also when FSDP2 has put a class of its own in front."""
    return _class_of(model) is not None


def _class_of(model: nn.Module) -> str | None:
    names = (kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    return next((name for name in names if name in PLANS), None)


class PairCuts(Splittable):
    """Two rows of layers, every layer of the second of which reads what the first gave: matrices are cut, rows and tokens are not."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tied = (
            model.lm_head.weight is model.get_input_embeddings().weight
        )  # which configurations of T5 do not tell

    def layer_count(self) -> int:
        """Raises ImpossibleError UNSUPPORTED: nobody said where a pipeline may cut two rows of layers."""
        raise nobody_said(self.model, "pp")

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """See `layer_count`."""
        raise nobody_said(self.model, "pp")

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Each attention by its heads, feed-forward parts by their width, tables and head by the vocabulary. Raises ImpossibleError
        UNSUPPORTED for sequence parallelism: these models take the number of tokens from the hidden states."""
        if sequence_parallel:
            raise self._whole_tokens("$.strategy.sequence_parallel", "sequence parallelism", "sequence_parallel=false")
        return styles_of(self.model, PLANS[_class_of(self.model) or ""])

    def _whole_tokens(self, flag: str, what: str, pin: str) -> ImpossibleError:
        return ImpossibleError(
            "UNSUPPORTED",
            f"{type(self.model).__name__} cannot run with {what}: its attention looks at all tokens that it is given.",
            flag=flag,
            hint=f"Plan with --pin {pin}.",
        )

    def spread_tokens(self, ranks: int, index: int) -> None:
        """Nothing to say: tokens are never spread."""

    def spread_context(self, context: Context) -> None:
        """Raises ImpossibleError UNSUPPORTED: attention is the library's own, and looks at the tokens it is given."""
        raise self._whole_tokens("$.mesh.cp", f"context parallelism over {context.group.size()} ranks", "cp=1")

    def tie(self) -> None:
        """One table for both rows, and for the head where it is tied."""
        table = self.model.get_input_embeddings().weight
        ends = [self.model.get_encoder().embed_tokens, self.model.get_decoder().embed_tokens]
        for end in (*ends, self.model.lm_head) if self.tied else ends:
            end.weight = table

    def embedding(self) -> nn.Module | None:
        """The table that both rows share."""
        table: nn.Module = self.model.get_input_embeddings()
        return table

    def embedding_parts(self) -> list[nn.Module]:
        """None: three modules have one table, which stays with the whole model."""
        return []

    def head_parts(self) -> list[nn.Module]:
        """See `embedding_parts`."""
        return []
