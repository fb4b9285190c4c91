"""FLOP of one operation on local tensors: multiply and add count as two.

The formulas are PyTorch's (torch/utils/flop_counter.py); only the attention operation of CPUs is missing there, and it
does what flash attention does. Matrix products and attention count, everything else does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flop_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOP of a call; 0 for what does not count."""
    formula = _formulas().get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def costs_flop(func: Any) -> bool:
    """Whether an operation is a matrix product or attention."""
    return func._overloadpacket in _formulas()


def is_attention(func: Any) -> bool:
    """Whether an operation is attention, forward or backward."""
    return "scaled_dot_product" in func._schema.name


@cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    aten = torch.ops.aten
    return dict(flop_registry) | {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }


def _attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
