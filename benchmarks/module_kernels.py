"""What a layer of Transformers' own modules reads and writes beside its products, operation by operation: rows of the catalogue's `modules`; and what
its activations read, write and keep for backward: rows of `act_forms`.

`python -m benchmarks.module_kernels` runs two layers and one of GPT-2, BERT and Llama on a CPU, in bf16 and under autocast, and counts the bytes of the inputs
and results of every operation that torch dispatches. Nothing is timed. What a GPU does otherwise is put right: operations that CUDA's autocast runs in float32
(pytorch: aten/src/ATen/autocast_mode.h) get float32, dropout is one kernel, a softmax reads 16 bits and gives 32 at once, and gradients of a LayerNorm's weights
are a kernel that reads its input and their gradient once more (aten/src/ATen/native/cuda/layer_norm_kernel.cu, GammaBetaBackward).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN

WIDTH, FFN, HEADS, LENGTH, VOCABULARY = 128, 384, 4, 48, 160
"""Sizes that no two kinds of tensors share."""
HEAD = WIDTH // HEADS
NUMBERS = {"low": torch.bfloat16, "mixed": torch.bfloat16, "wide": torch.float32}
"""Formats of products: mixed ones are autocast's, with weights in float32."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
NOTHING = ("detach", "alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
"""Operations that move nothing: besides these, every view."""
FILLED = ("zeros", "zeros_like", "new_zeros", "ones_like", "full", "fill_", "zero_")
"""Operations that only write."""
WIDE = frozenset(
    {
        functional.layer_norm,
        functional.softmax,
        torch.softmax,
        torch.pow,
        Tensor.pow,
        torch.rsqrt,
        functional.cross_entropy,
    }
)


class Moved(TorchDispatchMode):
    """Bytes that operations read and write, by the width of the largest tensor in them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in NOTHING or name in PRODUCTS:
            return result
        read, written = _tensors((args, kwargs)), _tensors(result)
        if name in FILLED:
            read = []
        if name == "copy_":
            read = read[1:]
        every = [*read, *written]
        again = [read[0], read[1]] if name == "native_layer_norm_backward" else []
        kind = _kind(max(every, key=lambda tensor: tensor.numel()), name)
        self.bytes[kind] += sum(map(_bytes, [*every, *again]))
        return result


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that lie in memory: a dimension that is only repeated is read once."""
    return tensor.element_size() * prod(
        size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0
    )


def _kind(largest: Tensor, name: str) -> str:
    """What an operation belongs to, by the largest tensor in it."""
    shape = (1, 1, *largest.shape)
    if shape[-2:] == (LENGTH, LENGTH):
        return "score"
    if FFN in shape[-1:]:
        return "ffn"
    if HEAD in shape or HEAD // 2 in shape:
        return "head"
    return "dropout" if "dropout" in name else "stream"


class Cuda(TorchFunctionMode):
    """Torch's functions as they run on a GPU, under autocast or not."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.autocast = autocast

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.dropout:
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            return torch.native_dropout(args[0], probability, True)[0] if probability else args[0]
        if function in WIDE and self.autocast:
            args = tuple(_widened(value) for value in args)
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


class Model(NamedTuple):
    """A model of so many layers, and the name of its sort."""

    sort: str
    make: Callable[[int], nn.Module]


def _gpt2(layers: int) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=WIDTH, n_inner=FFN, n_head=HEADS, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False)  # fmt: skip
    return GPT2LMHeadModel(_eager(config))


def _bert(layers: int) -> nn.Module:
    config = BertConfig(num_hidden_layers=layers, hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=FFN, vocab_size=VOCABULARY)  # fmt: skip
    return BertForMaskedLM(_eager(config))


def _llama(layers: int) -> nn.Module:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=FFN, vocab_size=VOCABULARY, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(_eager(config))


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


MODELS = (Model("gpt2", _gpt2), Model("layernorm", _bert), Model("rmsnorm", _llama))


def moved(model: Model, layers: int, samples: int, numbers: str) -> tuple[Counter[str], Counter[str]]:
    """Bytes that forward and backward move, by kind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network, autocast = model.make(layers).train(), numbers == "mixed"
    network = network if autocast else network.to(NUMBERS[numbers])
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH))
    forward, backward = Moved(), Moved()
    with Cuda(autocast=autocast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), forward:
            loss = network(input_ids=tokens, labels=tokens).loss
        with backward:
            loss.backward()
    return forward.bytes, backward.bytes


def per_token(model: Model, numbers: str) -> Mapping[str, tuple[float, float]]:
    """Elements per token and layer in forward and backward, by kind: what a layer and two samples add, so that no weight counts."""
    both: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for layers, samples, sign in ((2, 4, 1), (2, 2, -1), (1, 4, -1), (1, 2, 1)):
        for total, found in zip(both, moved(model, layers, samples, numbers), strict=True):
            total.update({kind: sign * bytes_ for kind, bytes_ in found.items()})
    size = 2 * LENGTH * NUMBERS[numbers].itemsize
    return {
        kind: (both[0][kind] / size, both[1][kind] / size) for kind in ("stream", "head", "ffn", "dropout", "score")
    }


SUM = 6
"""Elements of a residual sum: two are read and one is written, in either pass."""
WRITTEN, READ_BACK = (2, 4)
"""Elements of a score that batched products read and write in forward and in backward: they are counted with the scores."""
AT_ONCE = 4
"""Elements by which a softmax is less on a GPU that reads 16 bits and gives float32, and gives 16 bits back, at once."""


def columns(model: Model, numbers: str) -> dict[str, float]:
    """The row of the catalogue, a third of both passes where it has one figure for them; an activation of several operations is a row of its own beside it."""
    found = per_token(model, numbers)
    third = {kind: sum(both) / 3 for kind, both in found.items()}
    at_once = AT_ONCE if model.sort == "rmsnorm" and numbers == "low" else 0
    operations = act_columns("gelu_new", numbers)["moved"] if model.sort == "gpt2" else 0.0
    forward, backward = (elements / (HEADS * LENGTH) - at_once for elements in found["score"])
    return {
        "norm": (third["stream"] / WIDTH - 2 * SUM / 3) / 2,
        "residual": SUM / 3,
        "rotary": third["head"] / (2 * WIDTH),
        "gated" if model.sort == "rmsnorm" else "plain": third["ffn"] / FFN - operations,
        "dropout": third["dropout"] / (2 * WIDTH),
        "score_forward_bytes": 2 * (forward + WRITTEN),
        "score_backward_bytes": 2 * (backward + READ_BACK),
    }


ONE_KERNEL = "gelu"
"""The form that is one kernel of torch, whose input and result are kept: the others are told by what they have beyond it."""
FORMS = ("gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "quick_gelu", "xielu")
"""Activations of Transformers that are several operations of torch; all other forms of GELU are one."""


def act_columns(form: str, numbers: str) -> dict[str, float]:
    """The row of the catalogue for one form of an activation: per number between the matrices, bytes that are kept and elements that are moved, a third
    of both passes, beyond those of a GELU that is one kernel."""
    kept, moved_bytes = _of_act(form, numbers)
    kept_at_once, moved_at_once = _of_act(ONE_KERNEL, numbers)
    return {
        "kept_bytes": kept - kept_at_once,
        "moved": (moved_bytes - moved_at_once) / (3 * NUMBERS[numbers].itemsize),
    }


def _of_act(form: str, numbers: str) -> tuple[float, float]:
    """Bytes per number that are kept from forward to backward between two matrices around an activation, and that both passes move there."""
    autocast, held = numbers == "mixed", dict[int, Tensor]()
    first, last = (nn.Linear(*ends, bias=False) for ends in ((WIDTH, FFN), (FFN, WIDTH)))
    network = nn.Sequential(first, ACT2FN[form], last)
    network = network if autocast else network.to(NUMBERS[numbers])
    given, counted = torch.randn(LENGTH, WIDTH, dtype=first.weight.dtype, requires_grad=True), Moved()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (LENGTH, FFN):
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Cuda(autocast=autocast), counted:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            saved_tensors_hooks(keep, lambda kept: kept),
        ):
            result = network(given)
        result.sum().backward()
    size = LENGTH * FFN
    return sum(map(_bytes, held.values())) / size, counted.bytes["ffn"] / size


if __name__ == "__main__":
    for model in MODELS:
        for numbers in NUMBERS:
            print(json.dumps({"sort": model.sort, "numbers": numbers, **columns(model, numbers)}))
    for form in FORMS:
        for numbers in NUMBERS:
            print(json.dumps({"name": form, "numbers": numbers, **act_columns(form, numbers)}))
