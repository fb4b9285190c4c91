"""Names that calls of process groups had before torch 2.13, for machines where nothing newer can be had.

The package itself asks for 2.13. What a rehearsal needs of an older release is only that its group of noise answers to the
older names too (torch 2.11 torch/csrc/distributed/c10d/init.cpp).
"""

from __future__ import annotations

from strategist.measure.noise import NoiseGroup

OLDER = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def know_older_names() -> None:
    """Give the group of noise the older names; newer releases never call them."""
    for older, name in OLDER.items():
        setattr(NoiseGroup, older, getattr(NoiseGroup, name))
