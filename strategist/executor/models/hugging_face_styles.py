"""The words of transformers' tensor-parallel plans (src/transformers/integrations/tensor_parallel.py), and a few of ours for layers
whose weights are x in times out, as styles of torch.

Layers of transformers that know no DTensors compute with the parts of their weights that lie on the rank, and so do ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from strategist.errors import ImpossibleError
from strategist.executor.blocks import Passage
from strategist.executor.bundles import Bundle, distribute_bundle
from strategist.executor.tensor_styles import distribute, enter, leave, part_here

EXPERTS = "moe_tp_experts"
"""The word for a module whose weights are those of all experts, one behind the other; a plan says of each weight how it is cut."""
STACKED = {"colwise": Bundle(1, 1), "packed_colwise": Bundle(1, 2), "rowwise": Bundle(2, 1)}
"""How weights (experts, out, in) are cut, by the word for it; a packed one is gate and up below each other."""

GROUPED = "grouped_mm"
"""How transformers computes experts unless told otherwise (src/transformers/integrations/moe.py)."""
GROUPED_WIDTH = 8
"""Numbers of a matrix' row must fill 16 bytes (PyTorch 2.13: aten/src/ATen/native/GroupedMMUtils.h), also in 16 bits."""


class Seen:
    """A module as its own forward sees it, with other values of some attributes."""

    def __init__(self, module: nn.Module, **others: object) -> None:
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class InOut(ParallelStyle):
    """Cut a layer whose weight is in x out, and whose forward knows the outputs as `nf` (transformers: pytorch_utils.Conv1D): by its
    outputs, which may be a bundle of `count` matrices, or by its inputs."""

    def __init__(self, *, by_inputs: bool = False, count: int = 1) -> None:
        self.by_inputs, self.count = by_inputs, count

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.by_inputs:
            distribute(module, "weight", device_mesh, Shard(0))
            module.forward = partial(_terms, device_mesh, module)
            return module
        distribute_bundle(module, "weight", device_mesh, Bundle(1, self.count))
        # of a bundle whole on each rank, which takes its columns: FSDP2 would cut the vector where its matrices lie
        distribute(module, "bias", device_mesh, Shard(0) if self.count == 1 else Replicate())
        module.forward = partial(_columns, device_mesh, self.count, module)
        return module


def _columns(mesh: DeviceMesh, count: int, module: Any, hidden: Tensor) -> Tensor:
    """This rank's columns, of each matrix of a bundle some."""
    weight, bias = part_here(module.weight), part_here(module.bias)
    if count > 1:
        bias = bias.view(count, mesh.size(), -1)[:, mesh.get_local_rank()].flatten()
    seen = Seen(module, weight=weight, bias=bias, nf=weight.shape[1])
    columns: Tensor = type(module).forward(seen, enter(mesh, Replicate(), hidden))
    return columns


def _terms(mesh: DeviceMesh, module: Any, hidden: Tensor) -> Tensor:
    """The sum of what the ranks' rows give, and the bias."""
    weight = part_here(module.weight)
    term: Tensor = type(module).forward(Seen(module, weight=weight, bias=weight.new_zeros(())), hidden)
    whole: Tensor = leave(mesh, Replicate(), term) + module.bias
    return whole


class FusedHeads(ParallelStyle):
    """Tell attention how many of its fused layer's columns are queries, keys and values here. Raises ImpossibleError DIVISIBILITY
    where heads would be torn."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if module.num_heads % ranks:
            raise ImpossibleError(
                "DIVISIBILITY",
                f"{type(module).__name__} has {module.num_heads} heads, which tp = {ranks} cannot split evenly.",
                flag="$.mesh.tp",
                value=ranks,
                hint="Choose a tp that divides it.",
            )
        module.split_size //= ranks
        attention: nn.Module = module
        return attention


class OwnHeads(ParallelStyle):
    """Tell attention that makes something for each of its heads, as T5's does for relative positions, how many of them are here."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.n_heads //= device_mesh.size()
        attention: nn.Module = module
        return attention


class CutLogitsBias(ParallelStyle):
    """Leave each rank of a buffer `final_logits_bias` (1, V) what is added to its part of the logits."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.get_buffer("final_logits_bias")
        module.register_buffer("final_logits_bias", distribute_tensor(whole, device_mesh, (Shard(1),)))
        return module


class StackedExperts(ParallelStyle):
    """Cut every expert over all ranks, each of which routes all tokens alike: hidden states and the experts' weights go in, terms of
    the sum over ranks come out. `words` says how each of the parameters is cut. Raises ImpossibleError DIVISIBILITY where a rank's part
    has no equal width, or one that torch's product of groups refuses."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self.words = words

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, word in self.words.items():
            bundle = STACKED[word]
            distribute_bundle(module, name, device_mesh, bundle)
            _require_whole_rows(module, bundle.width(module.get_parameter(name)), device_mesh.size())
        module.forward = partial(_work, device_mesh, module, tuple(self.words))
        return module


def _require_whole_rows(module: Any, width: int, ranks: int) -> None:
    here = width // ranks
    if module.config._experts_implementation == GROUPED and here % GROUPED_WIDTH:
        raise ImpossibleError(
            "DIVISIBILITY",
            f"{type(module).__name__} of width {width} leaves {here} to each of {ranks} ranks; torch's grouped_mm takes rows of whole "
            f"16 bytes, which are {GROUPED_WIDTH} numbers of 16 bits.",
            flag="$.mesh.tp",
            value=ranks,
            hint="Choose a smaller tp, or set experts_implementation of the model's configuration to eager.",
        )


def _work(
    mesh: DeviceMesh,
    module: Any,
    cut: tuple[str, ...],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What the parts of the experts give, added up. A rank's part says of the choice's weights a part, too; they are taken in the
    format that they are multiplied in, so that the sum of what is said is rounded once (transformers keeps them in float32)."""
    kind = torch.promote_types(top_k_weights.dtype, hidden_states.dtype)
    hidden, weights = (enter(mesh, Replicate(), value) for value in (hidden_states, top_k_weights.to(kind)))
    seen = Seen(module, **{name: part_here(module.get_parameter(name)) for name in cut})
    return leave(mesh, Replicate(), type(module).forward(seen, hidden, top_k_index, weights))


def styles_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Module name to style for those modules of this stage that a plan's patterns name."""
    modules = [name for name, module in model.named_modules() if not isinstance(module, Passage)]
    words = {name: word for pattern, word in plan.items() for name in modules if fnmatch(name, pattern)}
    weights = _words_of_weights(model, plan)
    _require_experts(model, words, weights)
    return {
        name: StackedExperts(weights[name]) if word == EXPERTS else _style(model, word) for name, word in words.items()
    }


def _words_of_weights(model: nn.Module, plan: Mapping[str, str]) -> Mapping[str, dict[str, str]]:
    """What a plan says of single weights, by module."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, _ in model.named_parameters():
        for word in (word for pattern, word in plan.items() if fnmatch(path, pattern)):
            module, _, name = path.rpartition(".")
            found[module][name] = word
    return found


def _require_experts(model: nn.Module, words: Mapping[str, str], weights: Mapping[str, dict[str, str]]) -> None:
    """Raise ImpossibleError UNSUPPORTED for weights that a plan cuts one by one and that are no experts', or in unknown ways."""
    for module, own in weights.items():
        for name, word in own.items():
            if words.get(module) != EXPERTS or word not in STACKED:
                raise _unknown(model, f"{word!r} for {module}.{name}", tuple(STACKED))


def _style(model: nn.Module, word: str) -> ParallelStyle:
    """One word of a plan. The gathered head is left cut by vocabulary, because the loss is computed on the parts."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        # a norm over the width of each head: every rank sees its own heads, so gradients must be added over tp
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
        "in_out_colwise": InOut(),
        "in_out_rowwise": InOut(by_inputs=True),
        "fused_columns": InOut(count=3),
        "fused_heads": FusedHeads(),
        "own_heads": OwnHeads(),
        "cut_logits_bias": CutLogitsBias(),
    }
    if word not in styles:
        raise _unknown(model, repr(word), tuple(styles))
    return styles[word]


def _unknown(model: nn.Module, said: str, known: tuple[str, ...]) -> ImpossibleError:
    return ImpossibleError(
        "UNSUPPORTED",
        f"{type(model).__name__} asks for the tensor-parallel style {said}; known are {', '.join(known)}.",
        flag="$.mesh.tp",
        value=said,
        hint="Plan with tp = 1.",
    )
