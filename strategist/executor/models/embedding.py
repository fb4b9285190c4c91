"""The table of tokens, cut by vocabulary under tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3).

torch's own row-wise style does the same forward, but its gradient is the whole table on every rank, of which all but one
part is dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import InternalError
from strategist.executor.tensor_styles import distribute, leave, part_here


class TokenTable(nn.Embedding):
    """Rows of tokens. Cut, it gives zero for tokens whose row lies elsewhere, and `leave` adds up what the ranks give."""

    first_row = 0
    leave: Callable[[Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to (B, T, H), or to this rank's part of T under sequence parallelism."""
        table = part_here(self.weight)
        if self.leave is None:
            return nn.functional.embedding(tokens, table)
        row = tokens - self.first_row
        elsewhere = (row < 0) | (row >= len(table))
        found = nn.functional.embedding(row.masked_fill_(elsewhere, 0), table)
        return self.leave(found.masked_fill_(elsewhere[..., None], 0.0))


class CutTable(ParallelStyle):
    """Leave each rank its rows of a TokenTable; its hidden states leave in `layout`."""

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TokenTable):
            raise InternalError(
                "INTERNAL", f"{type(module).__name__} is no table of tokens, so it cannot be cut by rows."
            )
        rows = -(-module.num_embeddings // device_mesh.size())
        distribute(module, "weight", device_mesh, Shard(0))
        module.first_row = rows * device_mesh.get_local_rank()
        module.leave = partial(leave, device_mesh, self.layout)
        return module
