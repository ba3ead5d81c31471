"""Time and memory, measured the way a sceptic would.

* Variants take turns, so that clocks and neighbours that drift hurt all of them alike.
* A GPU is timed by its own events. While the host enqueues a call the queue is held by a spinning kernel, so that what
  is timed is the device's work and not the host's haste; the host's cost has a measurement of its own.
* Inputs rotate through as many sets as overflow the cache twice.
* Warm-up lasts a time, not a number of calls. Results are medians, with the 20th and 80th percentile beside them.
"""

from __future__ import annotations

import gc
import importlib
import math
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import DriverError

Call = Callable[[], Any]

_HOLD = """
extern "C" __global__ void hold(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
_CYCLES_PER_MS = 2_000_000
_LONGEST_HOLD_MS = 5.0


class Timing(NamedTuple):
    """Milliseconds: 20th percentile, median, 80th percentile, and of how many samples."""

    p20: float
    median: float
    p80: float
    samples: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """Of at least one sample."""
        low, middle, high = (float(x) for x in np.percentile(milliseconds, [20, 50, 80]))
        return cls(low, middle, high, len(milliseconds))


class Memory(NamedTuple):
    """Peak bytes beyond the inputs: from the frameworks' allocators, and as missing from the driver afterwards.

    The second includes what no allocator knows of, and what the allocators keep for later; 0 on the CPU.
    """

    allocated: int
    driver: int = 0


class Variant(NamedTuple):
    """One thing to measure.

    `prepare(i)` makes a call on input set i ready, with what it must hold, such as a saved forward; the call it returns
    is timed once. `title` is for the reader.
    """

    title: str
    prepare: Callable[[int], Call]


@dataclass
class Outcome:
    """What came of a variant: figures, or `error` with `out_of_memory` telling the one expected kind."""

    timing: Timing | None = None
    memory: Memory | None = None
    error: str = ""
    out_of_memory: bool = False
    samples: list[float] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "ok" if not self.error else "out of memory" if self.out_of_memory else "failed"


class HostTimer:
    """Times calls that compute on the CPU before they return."""

    cold_bytes = 0
    least_visits = 1
    capacity = math.inf

    def time(self, calls: Sequence[Call], hold: float = 0.0) -> tuple[list[float], float]:
        """Milliseconds of each call, run one after another, and the host's largest."""
        result = []
        for call in calls:
            start = time.perf_counter()
            call()
            result.append((time.perf_counter() - start) * 1e3)
        return result, 0.0

    def memory(self, call: Call) -> Memory:
        """Peak of what NumPy and Python allocate during a call."""
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return Memory(max(peak - before, 0))

    def release(self) -> None:
        """Give back what is cached."""
        gc.collect()

    def synchronize(self) -> None:
        """Wait for the device: nothing runs behind the host's back here."""


class DeviceTimer:
    """Times what calls put on the current GPU's default stream, which CuPy and torch share.

    Raises:
        StreamKLError: no usable GPU.
    """

    least_visits = 3

    def __init__(self) -> None:
        from ..compiler.nvrtc import import_cupy, load

        cupy = self._cupy = import_cupy()
        if not cupy.cuda.is_available():
            raise DriverError("no usable NVIDIA driver or GPU: time on the CPU, or run doctor to see what is missing")
        device = cupy.cuda.Device()
        self._hold = load(_HOLD, "hold", f"sm_{device.compute_capability}").function
        self.cold_bytes = 2 * int(device.attributes["L2CacheSize"])
        self.capacity = float(cupy.cuda.runtime.memGetInfo()[1])

    def time(self, calls: Sequence[Call], hold: float = 0.0) -> tuple[list[float], float]:
        """Milliseconds on the device of each call, and the host's largest, the queue held for `hold` milliseconds."""
        event = self._cupy.cuda.Event
        cycles = np.int64(min(hold, _LONGEST_HOLD_MS) * _CYCLES_PER_MS)
        pairs = []
        host = 0.0
        for call in calls:
            start, stop = event(), event()
            self._hold((1,), (1,), (cycles,))
            start.record()
            began = time.perf_counter()
            # The result is dropped at once: its memory serves the next call, as in a program that moves on.
            call()
            host = max(host, (time.perf_counter() - began) * 1e3)
            stop.record()
            pairs.append((start, stop))
        self.synchronize()
        return [float(self._cupy.cuda.get_elapsed_time(*pair)) for pair in pairs], host

    def memory(self, call: Call) -> Memory:
        """Peak of both allocators during a call that has run before, so that nothing is compiled or loaded in it."""
        call()
        self.release()
        torch = _torch()
        base = 0
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        free = self._cupy.cuda.runtime.memGetInfo()[0]
        with _peak_hook(self._cupy) as hook:
            call()
            self.synchronize()
        peak = hook.peak
        if torch is not None:
            peak += torch.cuda.max_memory_allocated() - base
        return Memory(peak, max(free - self._cupy.cuda.runtime.memGetInfo()[0], 0))

    def release(self) -> None:
        """Give cached memory of both allocators back, so that neither starves the other."""
        self.synchronize()
        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()
        torch = _torch()
        if torch is not None:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._cupy.cuda.runtime.deviceSynchronize()


Timer = HostTimer | DeviceTimer


def _torch() -> Any:
    """torch where the program has put it to use on a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _peak_hook(cupy: Any) -> Any:
    """A CuPy memory hook that knows the peak. CuPy may be absent, so its class can only be derived from here."""

    class PeakHook(importlib.import_module("cupy.cuda.memory_hook").MemoryHook):  # type: ignore[misc]
        name = "streamkl_cupy peak"

        def __init__(self) -> None:
            self.used = self.peak = 0

        def malloc_postprocess(self, **block: Any) -> None:
            self.used += block["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **block: Any) -> None:
            self.used -= block["mem_size"]

    return PeakHook()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of any framework says that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "out of memory" in str(error).lower()
        or "Unable to allocate" in str(error)
    )


def measure(
    variants: Sequence[Variant],
    timer: Timer,
    *,
    sets: int = 1,
    rounds: int = 10,
    seconds: float = 0.3,
    warmup: float = 0.1,
    before: Callable[[Variant], None] = lambda variant: None,
) -> list[Outcome]:
    """Measure variants in turns; a variant that fails has its error noted and leaves the others alone.

    Args:
        variants: what to measure.
        timer: `HostTimer` or `DeviceTimer`.
        sets: input sets to rotate through.
        rounds: turns each variant gets.
        seconds: time after which a variant gets no more turns than the timer's least.
        warmup: seconds of calls before the first that counts.
        before: told of each variant before it is warmed up, and before each turn.
    """
    outcomes = [Outcome() for _ in variants]
    holds = [0.0] * len(variants)
    visits = [1] * len(variants)
    for index, (variant, outcome) in enumerate(zip(variants, outcomes)):
        before(variant)
        with _noting(outcome, timer):
            outcome.memory = timer.memory(lambda variant=variant: variant.prepare(0)())  # type: ignore[misc]
            estimate, host = _warm_up(variant, timer, sets, warmup)
            holds[index] = 2 * host + 0.02
            # Calls made ready at once hold their memory at once.
            room = 0.2 * timer.capacity / max(outcome.memory.allocated, 1)
            visits[index] = max(1, int(min(sets, room, math.ceil(seconds * 1e3 / rounds / estimate))))
        timer.release()
    for turn in range(rounds):
        order = list(enumerate(zip(variants, outcomes)))
        for index, (variant, outcome) in order if turn % 2 == 0 else reversed(order):
            spent = sum(outcome.samples)
            if outcome.error or (spent > seconds * 1e3 and turn >= timer.least_visits):
                continue
            before(variant)
            with _noting(outcome, timer):
                outcome.samples += _visit(variant, timer, range(turn, turn + visits[index]), sets, holds[index])
                if outcome.memory is not None and outcome.memory.allocated > timer.capacity / 8:
                    timer.release()
    for outcome in outcomes:
        if outcome.samples and not outcome.error:
            outcome.timing = Timing.of(outcome.samples)
    return outcomes


def _warm_up(variant: Variant, timer: Timer, sets: int, warmup: float) -> tuple[float, float]:
    """Call for `warmup` seconds; milliseconds of the last call, and the host's share of it."""
    began = time.perf_counter()
    turn = 0
    while True:
        (estimate,), host = timer.time([variant.prepare(turn % sets)])
        turn += 1
        if time.perf_counter() - began >= warmup:
            return max(estimate, 1e-3), host


def _visit(variant: Variant, timer: Timer, turns: range, sets: int, hold: float) -> list[float]:
    try:
        return _once(variant, timer, turns, sets, hold)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # Another variant's cached memory may have been in the way; only a second failure counts.
    timer.release()
    return _once(variant, timer, turns, sets, hold)


def _once(variant: Variant, timer: Timer, turns: range, sets: int, hold: float) -> list[float]:
    if timer.least_visits > 1:
        # One call that does not count brings back what the other variants drove out: code, clocks, cached memory.
        variant.prepare((turns.start - 1) % sets)()
    return timer.time([variant.prepare(turn % sets) for turn in turns], hold)[0]


class _noting:
    """Turns an exception into the outcome's error, and frees the memory that the failed call held."""

    def __init__(self, outcome: Outcome, timer: Timer) -> None:
        self._outcome, self._timer = outcome, timer
        self._quiet = warnings.catch_warnings()

    def __enter__(self) -> None:
        # Frameworks explain at length why a kernel of theirs does not run; the row says it in one line.
        self._quiet.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._quiet.__exit__(None, None, None)
        if not isinstance(error, Exception):
            return False
        lines = str(error).strip().splitlines()
        self._outcome.error = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
        self._outcome.out_of_memory = out_of_memory(error)
        # The frames of the traceback hold the arrays.
        error.__traceback__ = None
        del error, trace
        self._timer.release()
        return True


def host_cost(call: Call, timer: Timer, batch: int = 100, batches: int = 30) -> Timing:
    """What one call costs the host, in milliseconds, while the device keeps up.

    The device is waited for after every `batch` calls and outside the time, so that a full queue never blocks the host.
    """
    for _ in range(batch):
        call()
    samples = []
    for _ in range(batches):
        timer.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter() - start) * 1e3 / batch)
    timer.synchronize()
    return Timing.of(samples)
