"""The few functions on whole arrays that strategies need, a file for each framework: none of these spell them alike.

Every module of this folder but `base` is one, and has its class as `LIBRARY`. What differentiates, or writes programs,
has a door besides, the module of `parallel/` with its name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from ...rules.registry import entries_of
from .base import Library, at

__all__ = ["LIBRARIES", "Library", "at", "known", "library_named", "library_of", "library_of_type"]

LIBRARIES: Final[dict[str, type[Library]]] = entries_of(__name__, __path__, "LIBRARY", ("base",))


_of_types: dict[type, str] = {}
"""Of arrays that there have been."""


def known(kind: type) -> str | None:
    """The library of arrays of a type, by where it lives, tracers' and subclasses' too; None of others."""
    for ancestor in kind.__mro__:
        root = ancestor.__module__.partition(".")[0].replace("jaxlib", "jax")
        if root in LIBRARIES:
            return root
    return None


def library_of_type(name: str, kind: type) -> str:
    """The same of what must be an array; `name` is what its caller knows it by."""
    found = known(kind)
    if found is None:
        raise TypeError(
            f"{name} is {kind.__name__}; allowed are arrays of {', '.join(LIBRARIES)}: sharded calls are built for "
            f"these"
        )
    _of_types[kind] = found
    return found


def library_of(name: str, x: Any) -> str:
    """The same of an array."""
    return _of_types.get(type(x)) or library_of_type(name, type(x))


@lru_cache(maxsize=len(LIBRARIES))
def library_named(name: str) -> Library:
    """The functions of a library that has been imported."""
    return LIBRARIES[name]()
