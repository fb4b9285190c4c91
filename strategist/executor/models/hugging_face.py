"""How Hugging Face's decoders of the Llama family are cut (transformers 5: Llama, Mistral, Qwen2, Qwen3).

Names follow transformers: src/transformers/models/llama/modeling_llama.py. Nothing is imported from transformers: the
model is there, so its library is.
"""

from __future__ import annotations

from fnmatch import fnmatch
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from strategist.errors import ImpossibleError
from strategist.executor.blocks import Passage
from strategist.executor.context import Context
from strategist.executor.splittable import Splittable

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`config.model_type` of the classes whose pipeline and tensor-parallel cuts are tested here."""


def is_known(model: nn.Module) -> bool:
    """True for a causal language model of one of FAMILIES, also when FSDP2 has put a class of its own in front."""
    of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    config: Any = getattr(model, "config", None)
    return of_transformers and hasattr(model, "lm_head") and config.model_type in FAMILIES


class HuggingFaceCuts(Splittable):
    """Keeps the model's skeleton: parts of other stages become passages, so that all names stay."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tied = bool(model.config.tie_word_embeddings)

    def layer_count(self) -> int:
        """See Splittable."""
        return len(self.model.model.layers)

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """See Splittable."""
        base = self.model.model
        for number in range(len(base.layers)):
            if number not in layers:
                base.layers[number] = Passage()
        if not embedding and not (head and self.tied):
            base.embed_tokens = Passage()
        if not head:
            base.norm, self.model.lm_head = Passage(), Passage()
        self.model.forward = partial(_stage_forward, self.model, embedding, head)

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """The model's own `tp_plan`, in torch's styles.

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
        names = [name for name, module in self.model.named_modules() if not isinstance(module, Passage)]
        return {
            name: _style(self.model, kind)
            for pattern, kind in self.model.tp_plan.items()
            for name in names
            if fnmatch(name, pattern)
        }

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
        if self.tied and self.embedding() is not None and not isinstance(self.model.lm_head, Passage):
            self.model.lm_head.weight = self.model.model.embed_tokens.weight

    def embedding(self) -> nn.Module | None:
        """See Splittable."""
        module = self.model.model.embed_tokens
        return None if isinstance(module, Passage) else module

    def embedding_parts(self) -> list[nn.Module]:
        """See Splittable."""
        module = self.embedding()
        return [] if module is None else [module]

    def head_parts(self) -> list[nn.Module]:
        """See Splittable."""
        parts = (self.model.model.norm, self.model.lm_head)
        return [part for part in parts if not isinstance(part, Passage)]


def _stage_forward(model: Any, takes_tokens: bool, gives_logits: bool, input_ids: Tensor) -> Tensor:
    """Tokens or hidden states (B, T, H) to hidden states or logits."""
    inputs = {"input_ids" if takes_tokens else "inputs_embeds": input_ids}
    hidden: Tensor = model.model(**inputs).last_hidden_state
    return model.lm_head(hidden) if gives_logits else hidden


def _style(model: nn.Module, kind: str) -> ParallelStyle:
    """One entry of a tp_plan (transformers: src/transformers/integrations/tensor_parallel.py) as torch's style.

    The gathered head is left cut by vocabulary, because the loss is computed on the parts.
    """
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        # a norm over the width of each head: every rank sees its own heads, so gradients must be added over tp
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    if kind not in styles:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{type(model).__name__} asks for the tensor-parallel style {kind!r}; known are {', '.join(styles)}.",
            flag="$.mesh.tp",
            value=kind,
            hint="Plan with tp = 1.",
        )
    return styles[kind]
