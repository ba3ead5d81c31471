"""A lock that a forked child can always take.

`os.fork` copies a lock as it is at that moment. One that another thread holds stays held in the child for ever, because
that thread does not exist there. What is guarded here is whole after every single step of whoever guards it, so a child
may go on with a lock of its own and with what it finds.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

forks = 0
"""How many forks lie between this process and the one that imported the package: a number that differs between a
process and everything forked from it, or that it was forked from."""


def _count() -> None:
    global forks
    forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_count)


class ForkLock:
    """A re-entrant lock, made anew in a forked child: `with lock():`.

    The call answers with the lock of this process, so that whoever forks inside the `with`, in a signal handler say,
    gives back in the child what it took. Nothing is registered, so a lock costs nothing when its owner is gone.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[int, AbstractContextManager[Any]] = {}

    def __call__(self) -> AbstractContextManager[Any]:
        # setdefault is one operation, so threads that come at the same time get the same lock.
        return self._locks.get(forks) or self._locks.setdefault(forks, threading.RLock())
