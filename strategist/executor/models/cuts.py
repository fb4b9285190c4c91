"""Where tensor parallelism cuts the parts of a block: Megatron-LM's cuts (arXiv 1909.08053, section 3; with sequence
parallelism arXiv 2205.05198, section 4.2.2).

Attention and feed-forward gather their input once, not once per matrix. Experts are cut like a feed-forward part, every
one over all ranks: each rank routes all tokens the same way, and one reduction adds up what routed and shared experts give.
Experts that lie whole on some ranks need no cut: each rank sends them its own tokens, of which sequence parallelism leaves it a
part, and shared experts are cut for themselves.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.executor.models.experts import MixtureOfExperts
from strategist.executor.tensor_styles import Border, Cut, Entry, Exit
from strategist.facts.model import ModelShape

COLUMN, ROW, WHOLE = Cut(Shard(0)), Cut(Shard(1)), Cut(Replicate())


def block_styles(shape: ModelShape, block: nn.Module, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Module name within the block to style; `between` is how hidden states lie between blocks."""
    styles: dict[str, ParallelStyle] = {"attention": Entry(between), "attention.o": Exit(between)}
    styles |= dict.fromkeys(("attention.q", "attention.k", "attention.v"), COLUMN)
    if shape.qk_norm:  # each rank sees its own heads only, so the weight's gradient must be added over tp
        styles |= {"attention.q_norm": WHOLE, "attention.k_norm": WHOLE}
    if isinstance(between, Shard):  # and here its own tokens
        styles |= {"attention_norm": WHOLE, "mlp_norm": WHOLE}
    return styles | _feed_forward(shape, block.get_submodule("mlp"), between)


def _feed_forward(shape: ModelShape, part: nn.Module, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    if isinstance(part, MixtureOfExperts):
        return _experts(shape, part, between)
    return {"mlp": Entry(between), "mlp.down": Exit(between)} | _columns(shape, "mlp")


def _columns(shape: ModelShape, name: str) -> dict[str, ParallelStyle]:
    return dict.fromkeys((f"{name}.gate", f"{name}.up") if shape.mlp_gated else (f"{name}.up",), COLUMN)


def _experts(shape: ModelShape, mixture: MixtureOfExperts, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Weights of the router depend on what the experts give, of which each rank has a term, or on tokens of which it has some:
    their gradient is a term too."""
    lie_whole = mixture.apart is not None and not mixture.apart.are_cut
    styles: dict[str, ParallelStyle] = {"mlp.router": WHOLE}
    if not lie_whole:
        styles |= {"mlp": Border(between)}
    if mixture.apart is None:
        styles |= {"mlp.experts": COLUMN}
    if mixture.shared is not None:
        ends = (
            {"mlp.shared": Entry(between), "mlp.shared.down": Exit(between)} if lie_whole else {"mlp.shared.down": ROW}
        )
        styles |= ends | _columns(shape, "mlp.shared")
    if mixture.shared_gate is not None:
        styles |= {"mlp.shared_gate": WHOLE}
    return styles
