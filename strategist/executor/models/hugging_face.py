"""How Hugging Face's decoders are cut (transformers 5: Llama, Mistral, Mixtral, Qwen2, Qwen3, GPT-2).

Names follow transformers: src/transformers/models/llama/modeling_llama.py and its like. Nothing is imported from transformers: the
model is there, so its library is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import ImpossibleError
from strategist.executor.blocks import Passage
from strategist.executor.context import Context
from strategist.executor.models.hugging_face_styles import styles_of
from strategist.executor.splittable import Splittable
from strategist.records import dataclass

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""`config.model_type` and name of the classes whose pipeline and tensor-parallel cuts are tested here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What the parts of a decoder are called inside its base model. `positions` is a table that is added to the embedding, and
    `start` what both go through before the first layer, where there are such parts."""

    embedding: str
    layers: str
    norm: str
    positions: str = ""
    start: str = ""


OWN_ANATOMY = {
    "gpt2": Anatomy(embedding="wte", layers="h", norm="ln_f", positions="wpe", start="drop"),
}
"""Of families whose configuration has no plan for pipelines (transformers: src/transformers/models/gpt2/modeling_gpt2.py)."""
OWN_PLANS = {
    "gpt2": {
        "transformer.h.*.attn": "fused_heads",
        "transformer.h.*.attn.c_attn": "fused_columns",
        "transformer.h.*.attn.c_proj": "in_out_rowwise",
        "transformer.h.*.mlp.c_fc": "in_out_colwise",
        "transformer.h.*.mlp.c_proj": "in_out_rowwise",
        "lm_head": "colwise_gather_output",
    },
}
"""The same for tensor parallelism (Megatron-LM's cuts, arXiv 1909.08053, section 3)."""


def is_known(model: nn.Module) -> bool:
    """True for a causal language model of one of FAMILIES, also when FSDP2 has put a class of its own in front."""
    kinds = type(model).__mro__
    of_transformers = any(kind.__module__.startswith("transformers.") for kind in kinds)
    config: Any = getattr(model, "config", None)
    name = FAMILIES.get(config.model_type) if of_transformers and hasattr(model, "lm_head") else None
    return any(kind.__name__ == name for kind in kinds) and not getattr(config, "add_cross_attention", False)


def anatomy_of(config: Any) -> Anatomy:
    """Where the parts of a decoder are: its configuration's plan for pipelines names them in order."""
    plan = config.base_model_pp_plan
    if plan is None:
        return OWN_ANATOMY[config.model_type]
    embedding, layers, norm = plan
    return Anatomy(embedding=embedding, layers=layers, norm=norm)


class NoTerm(nn.Module):
    """Stands where another pipeline stage adds something: adds nothing."""

    def forward(self, given: Tensor) -> Tensor:
        """Zero, which changes neither shape nor format of what it is added to."""
        return torch.zeros((), device=given.device)


class HuggingFaceCuts(Splittable):
    """Keeps the model's skeleton: parts of other stages become passages, so that all names stay."""

    def __init__(self, model: Any) -> None:
        self.model, self.base = model, model.get_submodule(model.base_model_prefix)
        self.parts = anatomy_of(model.config)
        self.tied = bool(model.config.tie_word_embeddings)

    @property
    def _layers(self) -> Any:
        return self.base.get_submodule(self.parts.layers)

    def layer_count(self) -> int:
        """See Splittable."""
        return len(self._layers)

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """See Splittable."""
        for number in range(len(self._layers)):
            if number not in layers:
                self._layers[number] = Passage()
        if not embedding:
            self._leave_start(keeps_table=head and self.tied)
        if not head:
            self.base.register_module(self.parts.norm, Passage())
            self.model.lm_head = Passage()
        self.model.forward = partial(_stage_forward, self.model, self.base, embedding, head)

    def _leave_start(self, *, keeps_table: bool) -> None:
        """Leave to another stage what comes before the first layer, but for a table that is the head's weight, too."""
        others: dict[str, nn.Module] = {self.parts.positions: NoTerm(), self.parts.start: Passage()}
        if not keeps_table:
            others[self.parts.embedding] = Passage()
        for name, empty in others.items():
            if name:
                self.base.register_module(name, empty)

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """The model's own `tp_plan`, in torch's styles; the table is cut in any case, as the head is, which may be the same weight.

        Raises ImpossibleError UNSUPPORTED for sequence parallelism: these models take the number of tokens, for positions
        and masks, from the hidden states.
        """
        if sequence_parallel:
            raise ImpossibleError(
                "UNSUPPORTED",
                f"{type(self.model).__name__} cannot run with sequence parallelism.",
                flag="$.strategy.sequence_parallel",
                value=True,
                hint="Plan with --pin sequence_parallel=false, or use the built-in model.",
            )
        plan: dict[str, str] = OWN_PLANS.get(self.model.config.model_type, self.model.tp_plan)
        table = f"{self.model.base_model_prefix}.{self.parts.embedding}"
        return styles_of(self.model, {table: "embedding_rowwise"} | plan)

    def spread_tokens(self, ranks: int, index: int) -> None:
        """Nothing to say: tokens are never spread."""

    def spread_context(self, context: Context) -> None:
        """Raises ImpossibleError UNSUPPORTED: attention is the library's own, and looks at the tokens it is given."""
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{type(self.model).__name__} cannot run with context parallelism over {context.group.size()} ranks.",
            flag="$.mesh.cp",
            value=context.group.size(),
            hint="Plan with --pin cp=1, or use the built-in model.",
        )

    def tie(self) -> None:
        """See Splittable."""
        table = self.embedding()
        if self.tied and table is not None and not isinstance(self.model.lm_head, Passage):
            self.model.lm_head.weight = table.weight

    def embedding(self) -> nn.Module | None:
        """See Splittable."""
        module = self.base.get_submodule(self.parts.embedding)
        return None if isinstance(module, Passage) else module

    def embedding_parts(self) -> list[nn.Module]:
        """See Splittable."""
        names = (name for name in (self.parts.embedding, self.parts.positions) if name)
        return _present(self.base.get_submodule(name) for name in names)

    def head_parts(self) -> list[nn.Module]:
        """See Splittable."""
        return _present((self.base.get_submodule(self.parts.norm), self.model.lm_head))


def _present(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that no other stage has."""
    return [part for part in parts if not isinstance(part, (Passage, NoTerm))]


def _stage_forward(model: Any, base: Any, takes_tokens: bool, gives_logits: bool, input_ids: Tensor) -> Tensor:
    """Tokens or hidden states (B, T, H) to hidden states or logits. GPT-2's are a view, which schedules that make gradients in two
    parts cannot detach."""
    inputs = {"input_ids" if takes_tokens else "inputs_embeds": input_ids}
    hidden: Tensor = base(**inputs).last_hidden_state
    if gives_logits:
        return model.lm_head(hidden)  # type: ignore[no-any-return]
    return hidden.clone() if hidden._is_view() else hidden
