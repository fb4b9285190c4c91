"""Lets Accelerate use gloo and CPU ranks as if they were several GPUs. Python loads it at start-up from PYTHONPATH."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any


class PatchOnImport:
    """Changes accelerate.state right after its first import, and costs nothing where that never happens."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "accelerate.state":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        assert spec is not None
        execute = spec.loader.exec_module  # type: ignore[union-attr]

        def execute_and_patch(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[union-attr, method-assign]
        return spec


def patch(state: Any) -> None:
    """gloo as a backend of several devices, each of which is the CPU; DDP without device numbers."""
    import torch
    from accelerate.utils import DistributedType
    from torch.nn.parallel import DistributedDataParallel

    def backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> tuple[str, Any]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: Any) -> None:
        self.device = torch.device("cpu")

    first = DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any) -> None:
        first(self, module, **more)

    state.PartialState._prepare_backend = backend
    state.PartialState.set_device = device
    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]


if "RANK" in os.environ:  # a rank, not the launcher
    sys.meta_path.insert(0, PatchOnImport())  # type: ignore[arg-type]
