"""What somebody must know about a model before tensor or pipeline parallelism may cut it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import ImpossibleError
from strategist.executor.context import Context


def nobody_said(model: nn.Module, axis: str) -> ImpossibleError:
    """The error UNSUPPORTED for a module that an axis would cut in a way that nobody described."""
    return ImpossibleError(
        "UNSUPPORTED",
        f"{axis} cuts the model itself, and nobody said how {type(model).__name__} may be cut.",
        flag=f"$.mesh.{axis}",
        value=type(model).__name__,
        hint="Use the built-in model or a Llama, Mistral, Mixtral, Qwen2, Qwen3 or GPT-2 of transformers, for tp also a T5, mT5, BART or mBART, for pp "
        "a Sequential whose blocks run in order, or plan with data parallelism only.",
    )


class Splittable(ABC):
    """How a model is cut into pipeline stages and across tensor-parallel ranks.

    A model of ours is one itself; for other people's models it is an object beside the model. Parameter names never
    change, whatever is cut away: stage 3 of 4 calls layer 17 what the whole model calls it.
    """

    tied: bool
    """True when the head uses the embedding's weight."""

    @abstractmethod
    def layer_count(self) -> int:
        """Layers of the whole model; asked before anything is cut."""

    @abstractmethod
    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """Drop every part that another stage owns; afterwards `forward` takes and gives what this stage does.

        A stage without the embedding takes hidden states instead of tokens, one without the head gives hidden states
        instead of logits. The stage with a tied head keeps the embedding's weight.
        """

    @abstractmethod
    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Module name to style, for the modules this stage has."""

    @abstractmethod
    def spread_tokens(self, ranks: int, index: int) -> None:
        """Say that `ranks` ranks share the tokens of each hidden state between blocks (sequence parallelism).

        This rank has the `index`-th part of them.
        """

    @abstractmethod
    def spread_context(self, context: Context) -> None:
        """Say that this rank holds some tokens of each sequence only, and attend with `context` to the others."""

    @abstractmethod
    def tie(self) -> None:
        """Make head and embedding share one parameter again, after a step gave each its own; nothing when untied."""

    @abstractmethod
    def embedding(self) -> nn.Module | None:
        """The module that holds the token embedding's weight; None on a stage without it."""

    @abstractmethod
    def embedding_parts(self) -> list[nn.Module]:
        """The modules before the first layer: embedding, learned positions; the tables are only looked up."""

    @abstractmethod
    def head_parts(self) -> list[nn.Module]:
        """The modules behind the last layer, in order: last norm and head; empty on a stage without them."""
