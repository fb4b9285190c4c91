"""How any `nn.Sequential` is cut into pipeline stages, nested ones with their blocks included; in no other way."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import ImpossibleError
from strategist.executor.blocks import NAMED, Passage
from strategist.executor.context import Context
from strategist.executor.splittable import Splittable, nobody_said
from strategist.facts.modules import Sequence, sequence_of


class SequentialCuts(Splittable):
    """Keeps the skeleton: parts of other stages become passages, so that all names stay. The layers are those that the planner counted:
    the blocks of the largest stack of like ones, each with what follows it."""

    tied = False

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model

    def layer_count(self) -> int:
        """See Splittable. Raises ImpossibleError UNSUPPORTED for a module that does more than to call its parts."""
        return len(self._sequence().layers)

    def _sequence(self) -> Sequence:
        found = sequence_of(self.model)
        if found is None:
            raise nobody_said(self.model, "pp")
        return found

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """See Splittable. Raises ImpossibleError UNSUPPORTED for a weight that parts of two stages share."""
        found = self._sequence()
        first = 0 if embedding else found.layers[layers.start]
        end = len(found.parts) if head else found.layers[layers.stop]
        names = [name for name, _ in found.parts]
        self._check_ownership(set(names[first:end]), names)
        for name in (*names[:first], *names[end:]):
            parent, _, own = name.rpartition(".")
            self.model.get_submodule(parent).register_module(own, Passage())
        mine = [names[found.layers[number]].rpartition(".") for number in layers]
        vars(self.model)[NAMED] = mine[0][0], tuple(own for *_, own in mine)
        self.model.register_forward_hook(_own_memory)

    def _check_ownership(self, kept: set[str], names: Iterable[str]) -> None:
        owners: dict[int, str] = {}
        for name in names:
            for weight in self.model.get_submodule(name).parameters():
                other = owners.setdefault(id(weight), name)
                if (other in kept) != (name in kept):
                    raise ImpossibleError(
                        "UNSUPPORTED",
                        f"The parts {other} and {name} of {type(self.model).__name__} share a weight and would lie on different stages.",
                        flag="$.mesh.pp",
                        value=name,
                        hint="Give each part weights of its own, or plan with --pin pp=1.",
                    )

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Raises ImpossibleError UNSUPPORTED: nobody said how its matrices may be cut."""
        raise nobody_said(self.model, "tp")

    def spread_tokens(self, ranks: int, index: int) -> None:
        """Nothing to say: tensors are never cut."""

    def spread_context(self, context: Context) -> None:
        """Raises ImpossibleError UNSUPPORTED: nobody said what a sequence is in it."""
        raise nobody_said(self.model, "cp")

    def tie(self) -> None:
        """Nothing is tied."""

    def embedding(self) -> nn.Module | None:
        """Nobody said which part that is."""
        return None

    def embedding_parts(self) -> list[nn.Module]:
        """See `embedding`."""
        return []

    def head_parts(self) -> list[nn.Module]:
        """See `embedding`."""
        return []


def _own_memory(_model: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """What a stage gives, in memory of its own: schedules that make gradients in two parts cannot detach a view."""
    return output.clone() if output._is_view() else output
