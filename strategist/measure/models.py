"""Where a traced model comes from: the plan's shape, a live module, or somebody's function. Never its values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from strategist.errors import THEIRS_LIMIT, InputError, StrategistError, shown
from strategist.executor.architecture import model_obstacles
from strategist.executor.models import model_from_shape
from strategist.executor.obstacles import refuse
from strategist.facts.model import ModelShape
from strategist.measure.program import emptied

MakeModel = Callable[[], nn.Module]


def shape_model(shape: ModelShape) -> MakeModel:
    """The built-in model of a shape, whose experts all get the same number of tokens. Raises ImpossibleError UNSUPPORTED at once when there is none."""
    refuse(model_obstacles(shape))
    return lambda: model_from_shape(shape, routing="balanced")


def real_model(shape: ModelShape) -> MakeModel:
    """The built-in model of a shape as it trains: its router decides. Raises ImpossibleError UNSUPPORTED at once."""
    refuse(model_obstacles(shape))
    return lambda: model_from_shape(shape)


def valued_model(model: Any) -> MakeModel:
    """A module with its values, or what a function makes. Raises InputError TYPE for anything else. Calling it raises
    InputError for a function: TYPE when it gives something else, KIND when it raises."""
    if is_module(model):
        return lambda: model  # a forked process changes its own copy
    if not callable(model):
        raise _wrong_type(model, "model")

    def careful() -> nn.Module:
        try:
            made = model()
        except (StrategistError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise _failed(model, problem, "Call it to see the traceback.") from problem
        if not is_module(made):
            raise _wrong_type(made, "--model-fn")
        return made  # type: ignore[no-any-return]

    return careful


def is_module(value: object) -> bool:
    """Whether a value is a live module rather than a way to make one."""
    return isinstance(value, nn.Module)


def given_model(model: Any) -> MakeModel:
    """A live module, without its values. Raises InputError TYPE for anything else."""
    if not is_module(model):
        raise _wrong_type(model, "model")
    return lambda: emptied(copy.deepcopy(model), "meta")


def function_name(make: object) -> str:
    """A function as people call it."""
    return str(getattr(make, "title", None) or getattr(make, "__qualname__", None) or type(make).__name__)


def made_model(make: Callable[[], Any]) -> MakeModel:
    """The module that a function makes on the meta device.

    Calling it raises InputError: TYPE when it gives something else, UNSUPPORTED_DEVICE when it touches CUDA, KIND when it
    raises.
    """

    def careful() -> nn.Module:
        try:
            with torch.device("meta"), _without_cuda():
                model = make()
        except StrategistError:
            raise
        except Exception as problem:
            raise _refusal(make, problem) from problem
        if not isinstance(model, nn.Module):
            raise _wrong_type(model, "--model-fn")
        return emptied(model, "meta")

    return careful


class _TouchesCuda(Exception):
    """A function of the user's asked for a GPU."""


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Every way to the GPU passes one function of torch's, which refuses inside."""
    before = torch.cuda._lazy_init
    torch.cuda._lazy_init = _refuse_cuda
    try:
        yield
    finally:
        torch.cuda._lazy_init = before


def _refuse_cuda() -> None:
    raise _TouchesCuda


def _wrong_type(value: object, flag: str) -> InputError:
    return InputError(
        "TYPE",
        f"{flag} must give a torch.nn.Module, not {shown(type(value).__name__)}.",
        flag=flag,
        value=type(value).__name__,
        hint="Return the module itself.",
    )


def _refusal(make: object, problem: Exception) -> InputError:
    if isinstance(problem, _TouchesCuda):
        name = shown(function_name(make))
        return InputError(
            "UNSUPPORTED_DEVICE",
            f"{name} touches CUDA; a trace needs no device and gives it none.",
            flag="--model-fn",
            value=name,
            hint="Build the module without .cuda() and device='cuda'; it is made on the meta device.",
        )
    return _failed(make, problem, "Call it under torch.device('meta') to see the traceback.")


def _failed(make: object, problem: Exception, hint: str) -> InputError:
    name = shown(function_name(make))
    said = f"{name} failed: {type(problem).__name__}: {shown(problem, THEIRS_LIMIT)}."
    return InputError("KIND", said, flag="--model-fn", value=name, hint=hint)
