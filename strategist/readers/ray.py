"""Scripts on Ray Train: what is written out in the calls of its classes. Names as in Ray 2.60.0, train/v2/api/config.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.errors import shown
from strategist.readers.foreign import Foreign, Reader, Source, finding, keys_of, near, told, whole
from strategist.readers.surroundings import is_python, shadows, tree_of

CLASSES = ("ScalingConfig", "TorchConfig")
MODULES = ("ray.train", "from ray import train")
"""What a script imports that uses Ray Train."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What the calls say in plain values, and their faults. Raises InputError PARSE for what is not Python."""
    tree = tree_of(source)
    calls = [(name, call) for call in ast.walk(tree) if isinstance(call, ast.Call) and (name := _class(call))]
    plain = {name: values_of(call) for name, call in calls}
    scaling, torch = plain.get("ScalingConfig", {}), plain.get("TorchConfig", {})
    backend = torch.get("backend")
    says = told(
        ranks=whole(scaling.get("num_workers")),
        backend=backend if isinstance(backend, str) else None,
    )
    unknown = (fault for name, call in calls for fault in _unknown(name, call))
    return Foreign(says=says, findings=(*shadows(tree, source.path), *unknown, *_devices(scaling)))


def _class(call: ast.Call) -> str | None:
    """The class of Ray's that is called, with or without its module."""
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name if name in CLASSES else None


def values_of(call: ast.Call) -> Mapping[str, Any]:
    """The words of a call whose values are written out."""
    found = {}
    for word in call.keywords:
        try:
            value = ast.literal_eval(word.value)
        except (ValueError, TypeError, RecursionError):
            continue
        if word.arg is not None:
            found[word.arg] = value
    return found


def _unknown(name: str, call: ast.Call) -> Iterator[Finding]:
    known = keys_of("ray", name)
    words = {"title": "Ray 2.60", "where": f"in {name}", "swallows": "Python stops"}
    for word in call.keywords:
        if word.arg is not None and word.arg not in known:
            key = shown(word.arg)
            yield finding("unknown-key", f"{name}.{key}", key=key, near=near(word.arg, known), **words)


def _devices(scaling: Mapping[str, Any]) -> Iterator[Finding]:
    """Workers that ask for devices and do not say that they use them."""
    resources = scaling.get("resources_per_worker")
    gpus = resources.get("GPU") if isinstance(resources, dict) else None
    if isinstance(gpus, int | float) and gpus > 0 and scaling.get("use_gpu", False) is False:
        yield finding("ray-devices", "ScalingConfig.resources_per_worker", gpus=gpus)


def recognises(source: Source) -> bool:
    """A Python script that imports Ray Train."""
    return is_python(source) and any(module in source.text for module in MODULES)


RAY = Reader(name="ray", title="Ray 2.60", recognises=recognises, read=read, profile="strategist")
