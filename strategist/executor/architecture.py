"""Which architectures the built-in reference model can be, said without torch."""

from __future__ import annotations

from strategist.executor.obstacles import Obstacle
from strategist.facts.model import ModelShape


def model_obstacles(shape: ModelShape) -> tuple[Obstacle, ...]:
    """Why the built-in reference model, a Llama-like decoder, cannot be this architecture; empty when it can."""
    rows: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("kind", shape.kind, ("decoder",)),
        ("formula", shape.formula, ("stack",)),
        ("norm", shape.norm, ("rmsnorm",)),
        ("norms_per_layer", shape.norms_per_layer, (2,)),
        ("final_norm", shape.final_norm, (True,)),
        ("embed_norm", shape.embed_norm, (False,)),
        ("pos", shape.pos, ("rope",)),
        ("mlp_gated", shape.mlp_gated, (True,)),
        ("mlp_act", shape.mlp_act, ("silu",)),
        ("mlp_bias", shape.mlp_bias, (False,)),
        ("o_bias", shape.o_bias, (False,)),
        ("lm_head_bias", shape.lm_head_bias, (False,)),
        ("qk_norm", shape.qk_norm, ("", "head")),
        ("attn_sinks", shape.attn_sinks, (False,)),
        ("attn_gate", shape.attn_gate, (False,)),
        ("emb_dim", shape.emb_dim, (0, shape.hidden)),
        ("extra_parameters", shape.extra_parameters, (0,)),
        ("extra", shape.extra, ((),)),
    )
    parts = {"moe": shape.moe, "mla": shape.mla, "ssm": shape.ssm, "mix": shape.mix}
    odd = [f"{name} = {value}" for name, value, known in rows if value not in known]
    odd += [name for name, part in parts.items() if part is not None]
    if not odd:
        return ()
    return (
        Obstacle(
            code="UNSUPPORTED",
            place="model",
            value=shape.name,
            sentence=f"The built-in model cannot be {shape.name} ({', '.join(odd)}); it can be any decoder of RMSNorm, "
            "rotary positions, full attention and a gated SiLU feed-forward part, such as Llama, Mistral, Qwen2, Qwen3.",
            hint="Give your own module to build(); data-parallel plans run any.",
        ),
    )
