"""Tables of embeddings as a rank has them that holds none: it pulls the rows that a batch names and pushes their gradients.

A worker pulls each row once, and its gradient goes back while autograd runs (Li et al. 2014, Scaling Distributed Machine Learning
with the Parameter Server, section 3). Who holds the tables is a `Server`: another process (parameter_server.py), or in a trace nobody.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strategist.errors import ImpossibleError

TABLES = (nn.Embedding, nn.EmbeddingBag)


class Server(Protocol):
    """Tables of embeddings by name and their optimizer, as a worker asks for them."""

    def distinct(self, ids: Tensor, rows: int, /) -> tuple[Tensor, Tensor]:
        """What `ids` name, each row of a table of `rows` once, and where among these each of the ids is."""

    def pull(self, name: str, ids: Tensor, /) -> Tensor:
        """Some rows of a table, on the device of the ids."""

    def push(self, name: str, ids: Tensor, gradient: Tensor, /) -> None:
        """Add the gradient of some rows, each named once, to the mean over all workers; returns when it has arrived."""

    def norm(self) -> Tensor:
        """The norm of all gradients, those of all workers added up."""

    def update(self, factor: Tensor, rate: float, /) -> None:
        """One step of the optimizer with `factor` times the gradients and `rate` times its learning rate. Called by every worker."""

    def forget(self) -> None:
        """Drop all gradients. Called by every worker."""

    def whole(self) -> dict[str, Tensor]:
        """The tables by the names of their weights in the model."""

    def state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Tables, and optimizer state as far as there is any or, `with_optimizer`, in any case, as a checkpoint names them: copies, on
        one of the workers; nothing on the others."""

    def take(self, state: dict[str, Tensor] | None, /) -> None:
        """Go on from what `state` gave, filled with other values; without it, forget what was made for that. Called by every worker."""


def tables_in(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Every table of embeddings in a model by its name. Raises ImpossibleError UNSUPPORTED for a model without any, and for tables
    that do more than give rows."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, TABLES)}
    shared = [
        n for n, p in model.named_parameters(remove_duplicate=False) if any(p is t.weight for t in found.values())
    ]
    odd = [n for n, t in found.items() if t.padding_idx is not None or t.max_norm is not None or t.scale_grad_by_freq]
    if not found or len(shared) > len(found) or odd:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{type(model).__name__} has no tables of embeddings that a server can hold: they must give rows and nothing else "
            "(no padding_idx, max_norm or scale_grad_by_freq), and share no weight.",
            flag="model",
            hint="Train it with tables=local.",
        )
    return found


class RemoteTable(nn.Module):
    """Stands where a table of embeddings was."""

    def __init__(self, name: str, table: nn.Embedding | nn.EmbeddingBag, server: Server) -> None:
        super().__init__()
        self.name, self.rows, self.server = name, table.num_embeddings, server
        self.mode = table.mode if isinstance(table, nn.EmbeddingBag) else None

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """What the table would give: a row for each id, or one for each bag of them."""
        named, places = self.server.distinct(ids, self.rows)
        wanted = torch.zeros((), requires_grad=torch.is_grad_enabled())  # without it autograd would not come back here
        rows: Tensor = Pulled.apply(wanted, self.name, named, self.server)  # type: ignore[no-untyped-call]
        if self.mode is None:
            return nn.functional.embedding(places, rows)
        return nn.functional.embedding_bag(places, rows, offsets, mode=self.mode)


class Pulled(torch.autograd.Function):
    """Rows of a table elsewhere."""

    @staticmethod
    def forward(context: Any, _wanted: Tensor, name: str, ids: Tensor, server: Server) -> Tensor:
        """The rows of `ids`, each of which is named once, on their device."""
        context.asked = name, ids, server
        return server.pull(name, ids)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Send the gradient of the rows, and wait until it has arrived."""
        name, ids, server = context.asked
        server.push(name, ids, gradient)
        return None, None, None, None
