"""Take the tables of embeddings out of a model whose plan has them on a parameter server."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.job import Job
from strategist.executor.tables import RemoteTable, tables_in


def serve_tables(model: nn.Module, job: Job) -> nn.Module:
    """`model` with something in the place of every table that asks the job's server for its rows.

    Raises ImpossibleError UNSUPPORTED where nobody serves, and as `tables_in`.
    """
    if job.plan.strategy.tables == "local":
        return model
    server = job.instruments.server
    if server is None:
        raise ImpossibleError(
            "UNSUPPORTED",
            "strategy.tables = server needs the process that holds them, which `build` alone does not start.",
            flag="$.strategy.tables",
            value="server",
            hint="Use `train`, which starts it, or give `build` instruments with a server: parameter_server.serving, inside "
            "parameter_server.beside_server.",
        )
    for name, table in tables_in(model).items():
        model.set_submodule(name, RemoteTable(name, table, server))
    return model
