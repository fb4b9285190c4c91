"""Lets Accelerate, and Lightning with DeepSpeed, use gloo and CPU ranks as if they were several GPUs. Python loads it at start-up from
PYTHONPATH."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


class PatchOnImport:
    """Changes a module right after its first import, and costs nothing where that never happens."""

    def __init__(self, module: str, patch: Callable[[Any], None]) -> None:
        self.module, self.patch = module, patch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        assert spec is not None
        execute = spec.loader.exec_module  # type: ignore[union-attr]

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[union-attr, method-assign]
        return spec


def patch_accelerate(state: Any) -> None:
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


def patch_lightning(of_trainer: Any) -> None:
    """As many CUDA devices as are asked for, each of which is the CPU, and gloo between them; DeepSpeed's strategy takes them."""
    import torch
    from lightning.fabric.accelerators.cuda import CUDAAccelerator
    from lightning.fabric.strategies import deepspeed as of_fabric
    from lightning.pytorch.accelerators.cuda import CUDAAccelerator as CUDAOfTrainer

    for accelerator in (CUDAAccelerator, CUDAOfTrainer):
        accelerator.is_available = staticmethod(lambda: True)
        accelerator.parse_devices = staticmethod(lambda devices: list(range(devices)))
        accelerator.get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0) for _ in devices])
        accelerator.setup_device = lambda self, device: None
    for module in (of_fabric, of_trainer):
        module._validate_device_index_selection = lambda devices: None
        module.DeepSpeedStrategy._get_process_group_backend = lambda self: "gloo"


if "RANK" in os.environ:  # a rank, not the launcher
    for place, change in (
        ("accelerate.state", patch_accelerate),
        ("lightning.pytorch.strategies.deepspeed", patch_lightning),
    ):
        sys.meta_path.insert(0, PatchOnImport(place, change))  # type: ignore[arg-type]
