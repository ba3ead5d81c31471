"""An array of all ranks as one, for operations that have no sharded call of their own."""

from __future__ import annotations

from typing import Any

from ..arguments import integer
from .groups import ranks_of
from .libraries import LIBRARIES, library_of
from .moving import gathered
from .setup import LIMIT, agreed_shards
from .shards import Runs


def gather(x: Any, axis: int, *, group: Any = None, ownership: Any = "zigzag") -> Any:
    """The shards of all ranks in the order of positions: keys for any operation whose rows are the rank's own.

    Under PyTorch's autograd its gradient is this rank's part of the sum over all ranks, added up in float32.

    Args:
        x: This rank's shard, of NumPy, CuPy or PyTorch. In JAX, `jax.lax.all_gather` is what there is.
        axis: Its axis of positions.
        group: As for `streamkl_cupy.parallel.attention_kl`.
        ownership: Likewise; of an `Ownership`, that of its keys.

    Returns:
        The whole array, the same on every rank.

    Raises:
        ValueError: shards that do not fit together, on every rank.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy.parallel import LocalWorld, gather, shard
        >>> whole = np.arange(8)
        >>> parts = LocalWorld(2).run(lambda rank: gather(shard(whole, 0, rank.rank, 2), 0, group=rank))
        >>> [part.tolist() for part in parts]
        [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    library = library_of("x", x)
    ranks = ranks_of(group, library)
    axis = integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} of an array of {x.ndim} axes; allowed are {-x.ndim} to {x.ndim - 1}")
    axis %= x.ndim
    key = ("gather", type(x), tuple(x.shape), x.dtype, axis, ownership if isinstance(ownership, str) else None)
    owners: tuple[Runs, ...] | None = ranks.jobs.get(key)
    if owners is None:
        owners = agreed_shards(ranks, x, axis, ownership)
        if isinstance(ownership, str):
            while len(ranks.jobs) >= LIMIT:
                ranks.jobs.pop(next(iter(ranks.jobs)), None)
            ranks.jobs[key] = owners
    if LIBRARIES[library].autograd:
        from .torch import gathered_by_autograd

        return gathered_by_autograd(ranks, x, axis, owners)
    return gathered(ranks, x, axis, owners)
