"""Which layouts fit, and by how little others miss: a bound answers first, only what it allows is weighed in full."""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.memory.estimate import least_memory, peak_memory
from strategist.space.candidates import Candidates, Column, Mask
from strategist.units import format_gib

FEW = 2**11
"""Rows that are weighed sooner than bounded."""
NEAREST = 2**2
"""Rows that are weighed first when the leanest is looked for, and how many times as many the next time."""


class Weights:
    """Bytes of some layouts, (C,) each: `device` is the peak where it is `known` and elsewhere a bound that the peak is
    never below; `host` is what offloading takes of the host. With `later` the rows that the bound allows are `waiting`."""

    def __init__(self, job: Job, candidates: Candidates, *, later: bool = False) -> None:
        self.job, self.candidates = job, candidates
        if len(candidates) <= FEW:
            peaks = peak_memory(job, candidates)
            self.device, self.host = peaks.device, peaks.host
        else:
            floors = least_memory(job, candidates)
            self.device, self.host = floors.device, floors.host
        self.known: Mask = np.full(len(candidates), len(candidates) <= FEW)
        possible = self.fits & ~self.known
        missed = np.flatnonzero(~possible & ~self.known)
        possible[self.nearest(missed, NEAREST)] = (
            True  # the nearest miss is asked for later, and costs less in this company
        )
        self.waiting = np.flatnonzero(possible)
        if not later:
            self.weigh(self.waiting)

    @classmethod
    def unseen(cls, job: Job, candidates: Candidates) -> Weights:
        """Weights of which none is asked for yet: zeros."""
        own = object.__new__(cls)
        own.job, own.candidates, own.waiting = job, candidates, np.zeros(0, np.int64)
        own.device, own.host = (np.zeros(len(candidates), np.int64) for _ in range(2))
        own.known = np.zeros(len(candidates), np.bool_)
        return own

    @property
    def fits(self) -> Mask:
        """Layouts whose device peak and host share are within what the machines offer."""
        return fits(self.job, self.candidates, self.device, self.host)

    def leanest(self, *among: Column) -> tuple[int, ...]:
        """Of each of some sets of rows the first with the smallest peak."""
        few = NEAREST
        while True:
            found = tuple(int(rows[self.device[rows].argmin()]) for rows in among)
            unknown = [self.nearest(rows, few) for rows, row in zip(among, found, strict=True) if not self.known[row]]
            if not unknown:
                return found
            self.weigh(np.array(sorted(set(np.concatenate(unknown).tolist()))))
            few *= NEAREST

    def nearest(self, rows: Column, few: int) -> Column:
        """A few with the smallest bounds among rows that are not weighed yet and may undercut those that are."""
        known = self.known[rows]
        least = self.device[rows[known]].min(initial=np.iinfo(np.int64).max)
        unknown = rows[~known & (self.device[rows] <= least)]
        return unknown[self.device[unknown].argsort(kind="stable")[:few]]

    def bound(self, rows: Column) -> None:
        """Bound some rows that are not weighed."""
        floors = least_memory(self.job, self.candidates.where(rows))
        self.device[rows], self.host[rows] = floors.device, floors.host

    def weigh(self, rows: Column) -> None:
        """Weigh some rows in full."""
        if len(rows):
            peaks = peak_memory(self.job, self.candidates.where(rows))
            self.device[rows], self.host[rows], self.known[rows] = peaks.device, peaks.host, True

    def where(self, keep: Mask | Column) -> Weights:
        """The weights of some of the layouts, none of them waiting."""
        part = Weights.unseen(self.job, self.candidates.where(keep))
        part.device, part.host, part.known = self.device[keep], self.host[keep], self.known[keep]
        return part


def fits(job: Job, candidates: Candidates, device: Column, host: Column) -> Mask:
    """Candidates whose device peak is under the usable bytes and whose host share is under the host's memory, (C,): both together under
    those of a device that shares it."""
    on_device = device <= job.usable_bytes
    on_host = host <= host_bytes_per_device(job) - job.cluster.shares_host * device
    has_drives = job.cluster.without_drive is None
    on_disk = np.full(len(candidates), True) if has_drives else ~candidates.is_word("offload", "nvme")
    return on_device & on_host & on_disk


def shortfall(job: Job, device: int, host: int) -> str:
    """What a layout that does not fit, with so many bytes of a device and of its host, lacks, in words."""
    if device > job.usable_bytes:
        return f"over by {format_gib(device - job.usable_bytes)}"
    room, bare = max(0, host_bytes_per_device(job) - job.cluster.shares_host * device), job.cluster.without_drive
    if host > room or bare is None:
        return f"offloading takes {format_gib(host)} of host memory per device, and {format_gib(room)} are free for it"
    return f"no drive of {bare.name} is known"


def lacking(job: Job, candidate: Candidates) -> str:
    """What the only row of `candidate` lacks to fit, in words; empty where it fits."""
    peaks = peak_memory(job, candidate)
    if fits(job, candidate, peaks.device, peaks.host)[0]:
        return ""
    return shortfall(job, int(peaks.device[0]), int(peaks.host[0]))


def host_bytes_per_device(job: Job) -> int:
    """Host memory that offloading may use per device: nine tenths of the poorest node's, shared evenly; 0 if unknown. Of devices that share
    it with their host all that they may use themselves, which is the same memory."""
    if job.cluster.shares_host:
        return job.usable_bytes
    return min(int(0.9 * (group.node.ram_bytes or 0) / group.node.gpus) for group in job.cluster.groups)
