"""Per-head sparse patterns for the block_mask option of `attention_kl`.

A pattern is a frozen value made once on the host: for each head, which blocks of keys each block of queries visits.

    >>> from streamkl_cupy import patterns
    >>> size = {"queries": 1024, "causal": True}
    >>> pattern = patterns.local(128, **size) | patterns.sinks(4, **size)
    >>> round(pattern.density, 2)
    0.43

`sharded` makes the family of S2-Attention (arXiv:2407.17678): a local band, and stripes that differ per head so that
the heads of a layer together see everything. `BlockPattern.coverage` says whether they do, `BlockPattern.plot` shows
it.
"""

from .families import CoverageWarning, from_csr, from_dense, full, local, phi3_small, sharded, sinks, strided
from .pattern import BlockPattern, Coverage
from .tiles import TileLists

__all__ = [
    "BlockPattern",
    "Coverage",
    "CoverageWarning",
    "TileLists",
    "from_csr",
    "from_dense",
    "full",
    "local",
    "phi3_small",
    "sharded",
    "sinks",
    "strided",
]
