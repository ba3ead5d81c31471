"""The options of the indexer's functions, checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..arguments import FAR, flag, integer
from ..ops import ATTENTION_KL
from ..ops.indexer_kl import ARRAYS
from ..options import TABLES

_KNOWN = TABLES[ATTENTION_KL.name]
NO_SCALE: Final = (
    "index_scale is missing; two conventions are in use, and the wrong one would be silent: pass index_scale=1.0 where "
    "index_weights have index heads ** -0.5 * index dim ** -0.5 in them (DeepSeek, Megatron-LM), or "
    "index_scale=index_q.shape[-1] ** -0.5 where they have not (TileLang's examples)"
)


class IndexOptions(NamedTuple):
    """The static ones."""

    index_scale: float
    teacher_scale: float | None = None
    relu: bool = True
    head_groups: int | None = None
    causal: bool = False
    q_offset: int | None = None
    compress_ratio: int = 1
    topk_relative: bool = False
    layout: str = "bhnd"
    deterministic: bool | None = None


NAMES: Final = tuple(spec.name for spec in ARRAYS)
_FROM_ONE = ("head_groups", "compress_ratio")


def parse(given: Mapping[str, Any]) -> IndexOptions:
    """Check options that were given by name; what is not among them has its default."""
    static: dict[str, Any] = {}
    for name in IndexOptions._fields:
        if name not in given or (given[name] is None and IndexOptions._field_defaults.get(name, 0) is None):
            continue
        value = given[name]
        if name == "index_scale":
            if value is inspect.Parameter.empty:
                raise TypeError(NO_SCALE)
            static[name] = _KNOWN["student_scale"].check(name, value)
        elif name in _FROM_ONE:
            static[name] = integer(name, value)
            if static[name] < 1:
                raise ValueError(f"{name}={value}; allowed are 1 and more")
        elif name in _KNOWN:
            static[name] = _KNOWN[name].check(name, value)
        else:
            static[name] = flag(name, value)
    if "index_scale" not in static:
        raise TypeError(NO_SCALE)
    options = IndexOptions(**static)
    if not options.causal and (options.q_offset is not None or options.compress_ratio != 1):
        name = "compress_ratio" if options.q_offset is None else "q_offset"
        raise ValueError(
            f"{name}={getattr(options, name)} says where the diagonal of causal lies, but there is none; pass "
            f"causal=True, or leave it out"
        )
    if options.q_offset is not None:
        options = options._replace(q_offset=max(-FAR, min(options.q_offset, FAR)))
    return options
