"""Samples of unequal length: the rest of a sequence does not count."""

from __future__ import annotations

import torch

from strategist.executor.data import Sample, SyntheticTokens
from strategist.executor.loss import IGNORED


class RaggedTokens(SyntheticTokens):
    """SyntheticTokens cut after a length that depends on the sample's number; every seventh counts nothing at all."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        length = 0 if index % 7 == 0 else 1 + (index * 11) % self.seq_len
        counted = torch.arange(self.seq_len) < length
        return {"input_ids": sample["input_ids"], "labels": sample["labels"].where(counted, IGNORED)}
