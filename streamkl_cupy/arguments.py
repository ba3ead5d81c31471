"""Arguments that are no arrays: plain values of them, and the words about those that are not allowed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

FAR = 2**40  # further than any two rows are apart


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {a_kind_of(value)}; allowed are {listed(allowed)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed are {listed(allowed)}")
    return value


def integer(name: str, value: Any) -> int:
    """A plain integer of any size."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError("a bool counts nothing")
        return operator.index(value)
    except Exception as cause:
        raise TypeError(f"{name}={value!r} is {a_kind_of(value)}; allowed is an integer") from cause


def flag(name: str, value: Any, others: str = "True and False") -> bool:
    """A plain bool; `others` is what else to say is allowed."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is {a_kind_of(value)}; allowed are {others}")
    return bool(value)


def listed(words: Iterable[str]) -> str:
    """Words in a sentence."""
    return ", ".join(f'"{word}"' for word in words)


def kind_of(x: Any) -> str:
    """Type name for a message."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def a_kind_of(x: Any) -> str:
    """The same with its article: "an int", "a numpy.ndarray"."""
    return with_article(kind_of(x))


def with_article(kind: str) -> str:
    """A type name as it is read aloud: "a uint8" begins with a consonant."""
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"
