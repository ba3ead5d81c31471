"""Threads for one call on the CPU: each takes whole blocks, while NumPy's BLAS keeps to one thread for each of them.

The threads of a BLAS library share a product and wait for each other at its end. The products of a tile are small, so
on busy cores that is mostly waiting, and the passes between the products have one thread in any case. Threads over
blocks seldom wait, and all of the work is theirs. They live as long as the call.

As many are used as BLAS itself would use: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and
threadpoolctl.threadpool_limits keep their meaning, and 1 means that there are no others. Holding BLAS to one thread
concerns the whole process, so the first call that does it takes note of the number and the last one gives it back.

A fork waits until no thread computes here, at most for a tile: OpenBLAS ends its threads before a fork, and where one
is in the middle of a product, the parent can wait for it for ever.

Ctrl-C, or whatever a signal handler raises, can come between any two steps of the caller's thread, also of those that
give back. So each of these says how things are to be, not what is to change, and is done again where it was cut short.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import StreamKLError
from . import locks
from .locks import ForkLock

try:
    import threadpoolctl
except ImportError:
    # An environment that was made before the package required it, or without what it requires: BLAS's own threads serve
    # there, as fast as they can.
    threadpoolctl = None

R = TypeVar("R")
T = TypeVar("T")

# Whoever waits for a thread looks up this often whether it still exists: a forked child has none but its own. A fork
# waits no longer than that either, in case what computes cannot go on before it.
PATIENCE = 1.0


_forking: list[None] = []
"""An entry for each fork that goes on now. Builtin functions alone change it: in a function of Python's own a signal
handler can run, as one does whose signal came during the fork, and what it raised would leave the entry here."""


class _Gate:
    """Keeps forks and computing threads apart.

    Whoever computes says so first and looks for forks then, and a fork does it the other way round, so that one of the
    two sees the other without a lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}

    def depth(self) -> int:
        """How often this thread has entered."""
        return self._inside.get(threading.get_ident(), 0)

    def enter(self, depth: int = 1) -> None:
        """Begin to compute, once nobody forks; may be nested."""
        me, inside = threading.get_ident(), self._inside
        before = inside.get(me, 0)
        inside[me] = before + depth
        while _forking and not before:
            del inside[me]
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: not _forking, PATIENCE)
            inside[me] = depth

    def leave(self, depth: int) -> None:
        """Be as deep inside as before."""
        me = threading.get_ident()
        if depth:
            self._inside[me] = depth
            return
        self._inside.pop(me, None)
        if _forking:
            self.tell()

    def inside(self, step: Callable[[], R]) -> R:
        """What a step gives that computes."""
        before = self.depth()
        try:
            self.enter()
            return step()
        finally:
            try:
                self.leave(before)
            except BaseException:
                self.leave(before)
                raise

    def outside(self, step: Callable[[], object] = lambda: None) -> None:
        """Let others fork, in the middle of computing and while a step is done that does not."""
        depth = self._inside.pop(threading.get_ident())
        try:
            self.tell()
            step()
        finally:
            self.enter(depth)

    def wait(self) -> None:
        """Until no other thread computes: who forks in the middle of it, in a signal handler, has not to wait for
        itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside.keys() - {threading.get_ident()}, PATIENCE)

    def tell(self) -> None:
        """Wake those who wait."""
        with self._changed:
            self._changed.notify_all()


class _Library:
    """A BLAS library whose number of threads any thread may set.

    threadpoolctl lets one thread of a process set OpenBLAS's and ignores all others, so that they do not fight. Here
    they take turns, and the number is given back, so OpenBLAS is asked itself.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self.set_num_threads: Callable[[int], Any] = controller.set_num_threads
        if controller.internal_api == "openblas":
            for prefix, suffix in product(("", "scipy_"), ("", "64_", "_64")):
                name = f"{prefix}openblas_set_num_threads{suffix}"
                self.set_num_threads = getattr(controller.dynlib, name, self.set_num_threads)

    @property
    def num_threads(self) -> int:
        return int(self._controller.num_threads or 0)


class _Held:
    """The calls that hold BLAS to one thread now, with the helpers of each, and what BLAS had before."""

    def __init__(self) -> None:
        self.calls: dict[object, int] = {}
        self.before: list[tuple[_Library, int]] = []

    def take(self, call: object, wanted: int) -> int:
        """Hold BLAS for a call; gives how many of the threads wanted are to be had."""
        with _holding():
            if not self.calls:
                self.before = [(library, library.num_threads) for library in _libraries()]
            self.calls[call] = 0
            for library, _ in self.before:
                library.set_num_threads(1)
            if wanted:
                # Calls at the same time share the cores. A result hangs on its plan, not on who computed what of it.
                taken = len(self.calls) + sum(self.calls.values())
                self.calls[call] = max(min(wanted, available() - taken), 0)
            return self.calls[call]

    def end(self, call: object) -> None:
        """Nothing is held for a call any more."""
        with _holding():
            self.calls.pop(call, None)
            if not self.calls:
                self.give_back()

    def give_back(self) -> None:
        for library, count in self.before:
            library.set_num_threads(count)
        self.before = []


_gate = _Gate()
_held = _Held()
_holding = ForkLock()


def _after_fork_in_child() -> None:
    global _gate, _held
    _forking.clear()
    held, _gate, _held = _held, _Gate(), _Held()
    if held.calls:  # they are not here to give it back
        held.give_back()


if hasattr(os, "register_at_fork"):
    # What comes before a fork is called last one first, what comes after it first one first.
    os.register_at_fork(before=lambda: _gate.wait(), after_in_child=_after_fork_in_child)
    os.register_at_fork(before=partial(_forking.append, None), after_in_parent=_forking.pop)
    os.register_at_fork(after_in_parent=lambda: _gate.tell())


@cache
def _libraries() -> tuple[_Library, ...]:
    """What holds NumPy's BLAS to a number of threads; nothing where that cannot be done in every thread."""
    if threadpoolctl is None:
        return ()
    # It walks over what the process has loaded, which is nothing to be cut short by a fork.
    found = _gate.inside(lambda: threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers)
    # A wheel of NumPy brings its own library, and others in the process are none of our business.
    package = Path(np.__file__).resolve().parent
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    own = [x for x in found if Path(x.filepath).resolve().parent in folders]
    if not own and "accelerate" in _build_name():
        return ()  # it chooses for itself, and what was found is another package's
    chosen = own or found
    # Over OpenMP, OpenBLAS takes the number of the thread that calls, and threads start with their own.
    if any(x.internal_api == "openblas" and getattr(x, "threading_layer", "") == "openmp" for x in chosen):
        return ()
    return tuple(_Library(x) for x in chosen if x.num_threads)


def _build_name() -> str:
    built: Any = np.show_config(mode="dicts")
    return str(built.get("Build Dependencies", {}).get("blas", {}).get("name", "")).lower()


def available() -> int:
    """Threads that a call may use: as many as BLAS is set to use, but no more than there are cores for them."""
    libraries = _libraries()
    if not libraries:
        return 1
    with _holding():
        counts = [count for _, count in _held.before] if _held.calls else [x.num_threads for x in libraries]
    return max(min(*counts, usable_cores(), quota()), 1)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def quota() -> int:
    """How many cores' time the control groups of this process let it have, rounded up; else many."""
    least = float(1 << 16)
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return int(least)
    inner = next((line[3:] for line in lines if line.startswith("0::")), "/")
    root = Path("/sys/fs/cgroup")
    folder = root / inner.lstrip("/")
    for level in (folder, *folder.parents):
        if level != root and root not in level.parents:
            break
        try:
            allowed, period = (level / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if allowed != "max":
            least = min(least, int(allowed) / int(period))
    return max(-int(-least // 1), 1)


def _one_thread_each(work: Callable[[int], object], wanted: int = 0) -> None:
    """Hold BLAS to one thread, together with whoever else does, while a work is done; it is told how many of the
    threads wanted are to be had."""
    gate, held, me = _gate, _held, object()
    try:
        work(gate.inside(lambda: held.take(me, wanted)))
    finally:
        try:
            gate.inside(lambda: held.end(me))
        except BaseException:
            gate.inside(lambda: held.end(me))
            raise


class Stopped(Exception):
    """Ends the work of a thread where another one of its call has failed."""


class _Helper(threading.Thread):
    """One more thread of a team. To wait for its end ask `over` first: after a `join` that an interrupt has cut short,
    Python takes a thread for ended that still runs, up to version 3.12."""

    def __init__(self, work: Callable[[], None], number: int) -> None:
        super().__init__(name=f"streamkl_cupy-{number}")
        self._work = work
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.over.set()


class Team(Generic[T]):
    """The threads of one call: they take its tasks in order, and wait for each other only where a `Turn` says so.

    Args:
        tasks: What there is to do; asked for the next one by whichever thread is free.
        size: How many threads are to share them, the caller's among them.
        hold: Whether BLAS would use threads of its own, and so is held to one.
    """

    def __init__(self, tasks: Iterator[T], size: int, hold: bool) -> None:
        self.size = size
        self._hold = hold or size > 1
        self.lock = threading.RLock()
        self._tasks = tasks
        self._changed = threading.Condition(self.lock) if size > 1 else None
        self._stopped = False
        self._error: BaseException | None = None
        self._gate = _gate
        self._generation = locks.forks

    def run(self, work: Callable[[Team[T]], None]) -> None:
        """Call `work` in every thread, and raise what any of them raises.

        `work` iterates over the team, which hands every task to one thread.
        """
        if self._hold:
            _one_thread_each(lambda helpers: self._run(work, helpers), self.size - 1)
        else:
            self._run(work, 0)

    def _run(self, work: Callable[[Team[T]], None], helpers: int) -> None:
        others: list[_Helper] = []
        try:
            for number in range(1, helpers + 1):
                if sys.is_finalizing():
                    break  # in a finalizer: no thread begins any more, and up to Python 3.11 its start waits for that
                other = _Helper(partial(self._help, work), number)
                others.append(other)
                try:
                    other.start()
                except RuntimeError:
                    break  # the system, or an interpreter that ends, gives no more threads; the work needs none
            self._share(work)
        except Stopped:
            pass  # of what another thread raised, and this one raises below
        except BaseException:
            self._stop(None)
            raise
        finally:
            try:
                self._join(others)
            except BaseException:
                # They write to the caller's arrays, so they end before the call does.
                self._stop(None)
                self._join(others)
                raise
        if others:
            self._check_forked()
        if self._error is not None:
            raise self._error

    def _join(self, others: list[_Helper]) -> None:
        for other in others:
            while other.ident is not None and self._generation == locks.forks and not other.over.wait(PATIENCE):
                pass
            while other.is_alive():
                other.join(PATIENCE)

    def __iter__(self) -> Iterator[T]:
        while True:
            self.pause()
            with self.lock:
                task = next(self._tasks, None)
            if task is None:
                return
            yield task

    def pause(self) -> None:
        """Between two steps of a task: end where the call has failed, and let others fork."""
        if self._stopped:
            raise Stopped
        if _forking:
            self._gate.outside()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Sleep until something is so; `tell` says that it may be."""
        if self._changed is None:
            return  # alone, with all that came before done
        with self.lock:
            if ready():
                return

        def sleep(changed: threading.Condition = self._changed) -> None:
            with self.lock:
                while not self._stopped and not ready():
                    changed.wait(PATIENCE)
                    self._check_forked()

        self._gate.outside(sleep)
        self.pause()

    def tell(self) -> None:
        """Wake those who wait."""
        if self._changed is not None:
            with self.lock:
                self._changed.notify_all()

    def _share(self, work: Callable[[Team[T]], None]) -> None:
        def compute() -> None:
            with np.errstate(all="ignore"):  # of this thread
                work(self)

        self._gate.inside(compute)

    def _help(self, work: Callable[[Team[T]], None]) -> None:
        try:
            self._share(work)
        except Stopped:
            pass
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        with self.lock:
            self._stopped = True
            self._error = self._error or error
        self.tell()

    def _check_forked(self) -> None:
        if self._generation != locks.forks:
            raise StreamKLError(
                "this process was forked in the middle of a call, by a signal handler or a finalizer, and the threads "
                "that shared its work exist in the parent only; in such a child, leave with os._exit or an exec"
            )


class Turn:
    """The place of one task in a row of tasks that add to the same sums: each adds to a key after those before it.

    All walk over the keys in ascending order, so they follow each other at a distance instead of waiting for the end,
    and every sum has its order whatever the threads do.
    """

    __slots__ = ("_before", "_reached", "_team")
    DONE = 1 << 62

    def __init__(self, team: Team[Any], before: Turn | None) -> None:
        self._team, self._before, self._reached = team, before, 0

    def wait(self, end: int) -> None:
        """Until all before have added what they have to add to keys below `end`."""
        if self._before is not None:
            self._team.wait(lambda: self._may_add(end))

    def reach(self, end: int) -> None:
        """Nothing more is added to keys below `end`; `DONE` after the last."""
        self._reached = end
        self._team.tell()

    def _may_add(self, end: int) -> bool:
        turn = self
        while (before := turn._before) is not None:
            if before._reached == Turn.DONE:
                turn._before = before._before
            elif before._reached < end:
                return False
            else:
                turn = before
        return True
