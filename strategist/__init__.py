"""strategist: the query optimiser of distributed training.

>>> from strategist import recommend
>>> plan = recommend("llama-3.1-8b", "dgx-h100:4", seq_len=8192, global_batch=1024)

Names are loaded when first used, so importing strategist costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategist.api import build, emit, explain, predict, recommend, rehearse, trace
    from strategist.document.load import load_observed, load_plan
    from strategist.document.observed import Observed
    from strategist.document.plan import Plan
    from strategist.document.prediction import Prediction
    from strategist.document.save import save_plan
    from strategist.errors import NoPlanError, StrategistError
    from strategist.facts.clusters import load_cluster
    from strategist.facts.hardware import Cluster, Gpu, Link, Node
    from strategist.facts.model import ModelShape
    from strategist.facts.models import load_model
    from strategist.facts.workload import Workload

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("build", "emit", "explain", "predict", "recommend", "rehearse", "trace"), "strategist.api"),
    "load_cluster": "strategist.facts.clusters",
    "load_model": "strategist.facts.models",
    **dict.fromkeys(("load_observed", "load_plan"), "strategist.document.load"),
    **dict.fromkeys(("Cluster", "Gpu", "Link", "Node"), "strategist.facts.hardware"),
    "ModelShape": "strategist.facts.model",
    "NoPlanError": "strategist.errors",
    "Observed": "strategist.document.observed",
    "Plan": "strategist.document.plan",
    "Prediction": "strategist.document.prediction",
    "save_plan": "strategist.document.save",
    "StrategistError": "strategist.errors",
    "Workload": "strategist.facts.workload",
}

__all__ = [
    "Cluster", "Gpu", "Link", "ModelShape", "NoPlanError", "Node", "Observed", "Plan", "Prediction", "StrategistError", "Workload",
    "__version__", "build", "emit", "explain", "load_cluster", "load_model", "load_observed", "load_plan", "predict",
    "recommend", "rehearse", "save_plan", "trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'strategist' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
