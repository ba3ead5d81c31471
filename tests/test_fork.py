"""A forked child never waits for a thread that does not exist there, and a fork never for one that computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import DriverError, arrays, call
from streamkl_cupy.concurrency import locks
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import Options

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

# What every program begins with: `children` forks, with alarms that end a process that waits for ever.
COMMON = """
import itertools, os, signal, sys, threading, time
import numpy as np
import streamkl_cupy
from streamkl_cupy import call, patterns
from streamkl_cupy.frameworks import dlpack
from streamkl_cupy.patterns import pattern

signal.alarm(240)  # the parent
fresh = itertools.count()

def arrays_of(rows=70, heads=2):
    rng = np.random.default_rng()
    return rng.standard_normal((4, 1, heads, rows, 16), np.float32)

def everything(rows=70):
    x = arrays_of(rows)
    scale = 0.2 + 1e-4 * next(fresh) + 1e-9 * os.getpid()  # a new problem, which is planned
    lengths = np.array([rows - 3], np.int32)
    blocks = patterns.local(32, queries=rows, block=16, causal=True) | patterns.sinks(1, queries=rows, block=16)
    blocks.tile_lists(32, 32)
    pattern.pattern_of(blocks.digest)
    for options in ({"causal": True}, {"key_lengths": lengths}, {"block_mask": blocks}):
        options["student_scale"] = scale
        streamkl_cupy.plan(*x, **options)
        streamkl_cupy.warmup(*x, **options)
        kl = streamkl_cupy.attention_kl(*x, **options)
        rows_of = streamkl_cupy.attention_kl_forward(*x, **options)
        assert np.array_equal(kl, rows_of.kl)
        streamkl_cupy.attention_kl_backward(np.ones_like(kl), *x, saved=rows_of, **options)
        streamkl_cupy.attention_kl_value_and_grad(*x, reduction="mean", **options)

def child(work):
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(30)
    code = 1
    try:
        code = work() or 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(program: str, *flags: str, threads: int = 2, before: str = "") -> str:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        [sys.executable, *flags, "-c", before + COMMON + program],
        cwd=ROOT, env={**os.environ, **counts}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


HELD = """
block = patterns.sinks(1, queries=64, block=16)
everything()
locks = {"building": call._building, "lent": dlpack._lent_lock, "alive": pattern._alive_lock, "lists": block._lock}
from streamkl_cupy.concurrency import threads
locks["BLAS"] = threads._holding

def own_lists():
    block.tile_lists(64, 64)
    everything()

for name, lock in locks.items():
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock() if callable(lock) else lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    code = ended(child(own_lists))
    over.set()
    holder.join()
    assert code == 0, (name, code)
    own_lists()  # the parent's lock is what it was
"""


def test_a_lock_that_another_thread_held_at_the_fork() -> None:
    run(HELD)


COMPUTING = """
stop = False

def keep_on(rows):
    while not stop:
        everything(rows)

threads = [threading.Thread(target=keep_on, args=(rows,)) for rows in (40, 600)]
for thread in threads:
    thread.start()
codes = []
for round in range(15):
    time.sleep(np.random.default_rng().uniform(0, 0.02))
    codes.append(ended(child(lambda: everything(70 if round % 3 else 600))))
stop = True
for thread in threads:
    thread.join()
assert codes == [0] * 15, codes
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_forks_while_other_threads_plan_and_compute(threads: int) -> None:
    run(COMPUTING, threads=threads)


MIDDLE = """
import streamkl_cupy.concurrency.threads as own

x = arrays_of(700, 4)
own.usable_cores = lambda: 2
expected = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum")
parent, codes = os.getpid(), []

def fork(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a fork that another one interrupts would double
    codes.append(ended(child(lambda: everything(600))))

def shoot(delay):
    time.sleep(delay)
    os.kill(parent, signal.SIGUSR1)

for round in range(6):
    signal.signal(signal.SIGUSR1, fork)
    threading.Thread(target=shoot, args=(np.random.default_rng().uniform(0.001, 0.02),)).start()
    while len(codes) == round:
        loss, grads = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum")
        assert loss == expected[0]
        assert all(np.array_equal(a, b) for a, b in zip(grads, expected[1]) if a is not None)
assert codes == [0] * 6, codes
"""


def test_a_signal_handler_forks_in_the_middle_of_a_call() -> None:
    """The parent's result is right, and the child can make calls of its own inside the one that it interrupts."""
    run(MIDDLE)


GOING_ON = """
import streamkl_cupy.concurrency.threads as own
from streamkl_cupy.numpy_backend.attention_kl import KLBlocks

if own.available() < 2:
    sys.exit(0)  # BLAS has no threads that could be held, and so the call has none
own.usable_cores = lambda: 2
x = arrays_of(700, 4)
expected = streamkl_cupy.attention_kl(*x)
real, main, pids = KLBlocks.forward, threading.get_ident(), []

def block(*given):
    if threading.get_ident() == main and not pids:
        time.sleep(0.05)  # the other thread is in the middle of something
        pids.append(os.fork())
        if pids == [0]:
            signal.alarm(30)
    return real(*given)

KLBlocks.forward = block
try:
    found = streamkl_cupy.attention_kl(*x)
except streamkl_cupy.StreamKLError as error:
    os._exit(7 if pids == [0] and "forked in the middle" in str(error) else 1)
assert pids != [0]
assert np.array_equal(found, expected)
assert ended(pids[0]) == 7
"""


def test_a_child_that_goes_on_with_a_call_of_several_threads_gets_an_error() -> None:
    run(GOING_ON)


LIMIT = """
import threadpoolctl
import streamkl_cupy.concurrency.threads as own

def counts():
    return [x.num_threads for x in own._libraries()]

before = counts()
held, over = threading.Event(), threading.Event()

def hold():
    def work(helpers):
        held.set()
        over.wait()

    own._one_thread_each(work)

holder = threading.Thread(target=hold)
holder.start()
held.wait()
assert set(counts()) <= {1}
code = ended(child(lambda: 0 if counts() == before else 3))
over.set()
holder.join()
assert code == 0, code
assert counts() == before
"""


def test_a_child_gets_the_threads_back_that_another_thread_held() -> None:
    pytest.importorskip("threadpoolctl")
    run(LIMIT)


QUIET = """
import streamkl_cupy.concurrency.threads as own

own.usable_cores = lambda: 2
everything(600)
assert threading.active_count() == 1, threading.enumerate()
code = ended(child(lambda: everything(600)))
assert code == 0, code
"""


EARLY = """
import ctypes, functools, os, signal

raised = 0

def interrupt(*_):
    global raised
    raised += 1
    raise KeyboardInterrupt

signal.signal(signal.SIGUSR1, interrupt)
# What is registered first is the last thing before the fork.
os.register_at_fork(before=functools.partial(ctypes.PyDLL(None)["raise"], int(signal.SIGUSR1)))
"""
SIGNALLED = """
everything()
try:
    code = ended(child(lambda: 0))
except KeyboardInterrupt:
    code = 0
assert (code, raised) == (0, 1)
signal.alarm(30)
everything()
"""


def test_a_signal_that_comes_during_a_fork() -> None:
    """What its handler raises ends the first function that is called after the fork; calls do not wait for its end."""
    run(SIGNALLED, before=EARLY)


def test_no_thread_is_left_for_a_fork_to_warn_of() -> None:
    run(QUIET, "-W", "error")


def test_cuda_is_refused_in_a_child_of_one_that_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shape:
        shape, dtype = (2, 8, 16), "float16"

    monkeypatch.setattr(call, "_cuda_generation", locks.forks - 1)
    views = call.outline(ATTENTION_KL, (Shape(), Shape(), Shape(), Shape()), arrays.cuda(0))
    with pytest.raises(DriverError, match=r"forked after its parent had used CUDA.*spawn"):
        call.prepare(ATTENTION_KL, views, Options())
    with pytest.raises(DriverError, match="spawn"):
        call.backend(arrays.cuda(0))


CUDA = """
import importlib

framework = sys.argv[1]
if framework == "cupy":
    import cupy
    x = [cupy.asarray(a).astype("float16") for a in arrays_of()]
else:
    import torch
    x = [torch.from_numpy(a).half().cuda() for a in arrays_of()]
streamkl_cupy.attention_kl_forward(*x)

def on_the_gpu():
    try:
        streamkl_cupy.attention_kl_forward(*x)
    except RuntimeError as error:
        print(type(error).__name__, error, flush=True)
        return 0
    return 4

code = ended(child(on_the_gpu))
assert code == 0, code
code = ended(child(everything))
assert code == 0, code
streamkl_cupy.attention_kl_forward(*x)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_a_child_of_one_that_used_cuda(framework: str) -> None:
    """CUDA arrays get an error that says what to do, and NumPy arrays are as good as ever."""
    pytest.importorskip(framework)
    said: Any = run(CUDA.replace("sys.argv[1]", repr(framework)))
    assert "spawn" in said
