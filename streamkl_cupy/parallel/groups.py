"""Whatever is handed in as a group, as `Ranks`."""

from __future__ import annotations

from typing import Any

from ..arguments import a_kind_of
from ..compiler.nvrtc import import_cupy
from .communicators import MpiRanks, NcclRanks
from .libraries import LIBRARIES
from .ranks import LocalRank, Ranks, known_ranks

_known: dict[Any, NcclRanks] = {}


def ranks_of(group: Any, library: str) -> Ranks:
    """The ranks of a process group, a mesh dimension, a communicator or a `LocalWorld`."""
    if isinstance(group, LocalRank):
        return group
    if LIBRARIES[library].groups:
        from .torch import ranks_of_torch

        return ranks_of_torch(group)
    root = type(group).__module__.partition(".")[0]
    if root == "mpi4py" and hasattr(group, "Get_size"):
        return MpiRanks(group)
    if root == "cupyx" and hasattr(group, "reduce_scatter"):
        return known_ranks(_known, group, lambda communicator: NcclRanks(communicator, import_cupy()))
    raise TypeError(
        f"group is {a_kind_of(group)} beside {library} arrays; allowed are a communicator of "
        f"cupyx.distributed for CuPy arrays, one of mpi4py for NumPy's, and a rank of streamkl_cupy.parallel.LocalWorld"
    )
