"""The numbers 0 to 19 in batches of 10, by the front end that is named: every rank writes what it was given, a list for each batch.

`torchrun --nproc-per-node 2 splits.py NAME FOLDER`, or `python splits.py mp-spawn FOLDER`, which starts its own ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 10


class Numbers(Dataset[dict[str, Tensor]]):
    """0 to 19."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index])}


def read(batches: Iterable[Any]) -> list[list[int]]:
    """The numbers of each batch."""
    return [batch["input_ids"].flatten().tolist() for batch in batches]


def by_sampler() -> list[list[int]]:
    """torch's own sampler, as scripts for torchrun have it."""
    dist.init_process_group("gloo")
    return read(DataLoader(Numbers(), batch_size=BATCH, sampler=DistributedSampler(Numbers(), shuffle=False)))


def by_fabric() -> list[list[int]]:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return read(fabric.setup_dataloaders(DataLoader(Numbers(), batch_size=BATCH)))


def by_lightning() -> list[list[int]]:
    from lightning import LightningModule, Trainer

    class Listens(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.heard = nn.Parameter(torch.zeros(())), []  # type: nn.Parameter, list[list[int]]

        def training_step(self, batch: Any) -> Tensor:
            self.heard += read([batch])
            return self.weight

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Listens()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(model, DataLoader(Numbers(), batch_size=BATCH))
    return model.heard


def by_accelerate(*, cut: bool = False) -> list[list[int]]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=cut))
    return read(accelerator.prepare(DataLoader(Numbers(), batch_size=BATCH)))


def by_transformers() -> list[list[int]]:
    from transformers import Trainer, TrainingArguments

    folder = os.environ.get("TMPDIR", "/tmp")
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, train_sampling_strategy="sequential",
        remove_unused_columns=False, report_to=[],
    )  # fmt: skip
    return read(Trainer(nn.Linear(1, 1), arguments, train_dataset=Numbers()).get_train_dataloader())


def by_strategist() -> list[list[int]]:
    from strategist.executor.build import build
    from tests.plans import FLOAT32, make_plan

    plan = make_plan(dp_replicate=2, micro_batch=BATCH, formats=FLOAT32)
    with build(plan, nn.Linear(1, 1)) as session:
        return read(session.loader(Numbers(), shuffle=False))


FRONT_ENDS: dict[str, Callable[[], list[list[int]]]] = {
    "torchrun": by_sampler,
    "mp-spawn": by_sampler,
    "fabric": by_fabric,
    "trainer": by_lightning,
    "accelerate": by_accelerate,
    "accelerate, split_batches": lambda: by_accelerate(cut=True),
    "transformers": by_transformers,
    "strategist": by_strategist,
}


def rank(index: int, name: str, folder: str) -> None:
    """One rank: what it was given, in a file of its own."""
    if name == "mp-spawn":
        os.environ |= {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    heard = FRONT_ENDS[name]()
    if dist.is_initialized():
        time.sleep(0.2)  # gloo's threads let go of the last tensors: as emitted scripts leave
        dist.destroy_process_group()  # a process that ends with open groups aborts now and then
    (Path(folder) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(heard), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "mp-spawn":
        torch.multiprocessing.spawn(rank, (sys.argv[1], sys.argv[2]), nprocs=2)
    else:
        rank(0, sys.argv[1], sys.argv[2])
