"""Which architectures the built-in reference model can be, said without torch."""

from __future__ import annotations

from strategist.executor.obstacles import Obstacle
from strategist.facts.llama_like import departures
from strategist.facts.model import ModelShape


def model_obstacles(shape: ModelShape, tokens: int = 0) -> tuple[Obstacle, ...]:
    """Why the built-in reference model, a Llama-like decoder, cannot be this architecture with sequences of `tokens`;
    empty when it can."""
    odd = departures(shape)
    return (_no_llama(shape, odd),) if odd else window_obstacles(shape, tokens)


def _no_llama(shape: ModelShape, odd: tuple[str, ...]) -> Obstacle:
    return Obstacle(
        code="UNSUPPORTED",
        place="model",
        value=shape.name,
        sentence=f"The built-in model cannot be {shape.name} ({', '.join(odd)}); it can be any decoder of RMSNorm, "
        "rotary positions, full attention and a gated SiLU feed-forward part, such as Llama, Mistral, Qwen2, Qwen3.",
        hint="Give a module of yours to build() in a script, `strategist run PLAN -- python SCRIPT`; data-parallel plans run any.",
    )


def window_obstacles(shape: ModelShape, tokens: int) -> tuple[Obstacle, ...]:
    """The built-in model attends to everything, which is the same as a window only in sequences no longer than it."""
    if shape.window is None or tokens <= shape.window:
        return ()
    return (
        Obstacle(
            code="UNSUPPORTED",
            place="workload.seq_len",
            value=tokens,
            sentence=f"{shape.name} attends to a window of {shape.window} tokens; the built-in model attends to all of "
            f"{tokens}.",
            hint=f"Use --seq-len {shape.window} or less.",
        ),
    )
