"""Tensors that lie one behind the other in one that nobody holds, as torch's distributed checkpoints are shown them.

A tiled matrix is in a checkpoint what it is without tiles: one tensor, of which a rank writes and reads the rows of its parts
(torch.distributed._checkpointable, the protocol that DTensor follows too). So is one of several matrices side by side (bundles.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem


class Stacked(Tensor):
    """Some DTensors as one of `length` in the dimension `along`: its shape and number format, in the memory of one number (torch would give
    memory to a tensor on the meta device). Each of `parts` begins at one of `firsts`; what a rank has nothing of may be left out. A
    part is looked up by the place in the whole at which what this rank has of it begins."""

    parts: list[Any]
    firsts: list[int]
    along: int

    @staticmethod
    def __new__(cls, parts: list[Any], firsts: list[int], length: int, along: int = 0) -> Stacked:
        """The whole of `parts`, none of whose values is copied."""
        size = (*parts[0].shape[:along], length, *parts[0].shape[along + 1 :])
        whole: Stacked = Tensor._make_subclass(cls, torch.empty(1, dtype=parts[0].dtype).expand(size))
        whole.parts, whole.firsts, whole.along = parts, firsts, along
        return whole

    def with_parts(self, parts: list[Any]) -> Stacked:
        """The same whole of other values."""
        return Stacked(parts, self.firsts, self.shape[self.along], self.along)

    def _held(self) -> Iterator[tuple[Any, WriteItem]]:
        """The parts of which this rank has anything, with what torch would write of each."""
        for first, part in zip(self.firsts, self.parts, strict=True):
            for item in part.__create_write_items__("", part):
                if item.tensor_data.chunk.sizes.numel():
                    yield part, self._shifted(item, first)

    def _shifted(self, item: WriteItem, first: int) -> WriteItem:
        data: Any = item.tensor_data
        offsets = torch.Size(offset + first * (dim == self.along) for dim, offset in enumerate(data.chunk.offsets))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=data.chunk.sizes)
        index = MetadataIndex(item.index.fqn, offsets)
        return replaced(item, index=index, tensor_data=replaced(data, chunk=chunk, size=self.size()))

    def __create_write_items__(self, fqn: str, _itself: object) -> list[WriteItem]:
        """What this rank writes."""
        return [replaced(item, index=replaced(item.index, fqn=fqn)) for _, item in self._held()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank reads."""
        return [item.tensor_data.chunk for _, item in self._held() if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """What begins at a place of the whole."""
        found: Tensor = next(part for part, item in self._held() if item.index.offset == index.offset).to_local()
        return found
