"""Which architectures the built-in reference model can be, said without torch."""

from __future__ import annotations

from strategist.executor.obstacles import Obstacle
from strategist.facts.buildable import OWN_MODULE, departures
from strategist.facts.model import ModelShape


def model_obstacles(shape: ModelShape, tokens: int = 0) -> tuple[Obstacle, ...]:
    """Why the built-in reference model cannot be this architecture with sequences of `tokens`; empty when it can."""
    odd = departures(shape)
    return (_other(shape, odd),) if odd else position_obstacles(shape, tokens)


def _other(shape: ModelShape, odd: tuple[str, ...]) -> Obstacle:
    return Obstacle(
        code="UNSUPPORTED",
        place="model",
        value=shape.name,
        sentence=f"The built-in model cannot be {shape.name} ({', '.join(odd)}); it can be any decoder of RMSNorm or "
        "LayerNorm, rotary or learned positions, full or windowed attention, and feed-forward parts or routed experts, "
        "such as GPT-2, Llama, Mistral, Qwen, Mixtral.",
        hint=OWN_MODULE,
    )


def position_obstacles(shape: ModelShape, tokens: int) -> tuple[Obstacle, ...]:
    """A table of learned positions has a row for so many tokens and no more."""
    if not shape.learned_positions or tokens <= shape.learned_positions:
        return ()
    return (
        Obstacle(
            code="UNSUPPORTED",
            place="workload.seq_len",
            value=tokens,
            sentence=f"{shape.name} has {shape.learned_positions} learned positions, and the sequences have {tokens} tokens.",
            hint=f"Use --seq-len {shape.learned_positions} or less.",
        ),
    )
