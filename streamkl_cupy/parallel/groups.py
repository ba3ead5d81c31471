"""Whatever is handed in as a group, as `Ranks`."""

from __future__ import annotations

from typing import Any

from ..arguments import a_kind_of
from .communicators import MpiRanks
from .libraries import LIBRARIES
from .ranks import LocalRank, Ranks


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
    raise TypeError(
        f"group is {a_kind_of(group)} beside {library} arrays; allowed are an mpi4py communicator "
        f"for NumPy arrays, and a rank of streamkl_cupy.parallel.LocalWorld"
    )
