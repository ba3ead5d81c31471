"""Threads of the CPU path: the same results whatever they do, errors as they are, and BLAS left as it was found."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import call, patterns
from streamkl_cupy.concurrency import locks, threads
from streamkl_cupy.numpy_backend import NumPyPlan
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.numpy_backend.attention_kl import KLBlocks
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing.problems import make, upstream

Set = Callable[[int], None]


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    """A test runner may have threads of its own."""
    _before.clear()
    _before.update(threading.enumerate())


def more_threads() -> int:
    """Threads that have come since the test began."""
    return len(set(threading.enumerate()) - _before)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Say how many threads a call may use, however small it is and whatever this machine has."""
    for name in ("LEAST_SHARED_SCORES", "LEAST_SHARED_SEQUENCE"):
        monkeypatch.setattr(cut, name, 0)
    for name in ("_looks", "_checked", "_runners"):
        monkeypatch.setattr(call, name, {})

    def choose(count: int) -> None:
        monkeypatch.setattr(threads, "available", lambda: count)
        call._looks.clear()
        call._checked.clear()
        call._runners.clear()

    return choose


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 x 16, however many threads there are."""
    for name, value in {
        "QUERY_TILE": 8,
        "KEY_TILE": 16,
        "BLOCK_ELEMENTS": 1024,
        "LONGEST_KEY_TILE": 64,
    }.items():
        monkeypatch.setattr(cut, name, value)


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """NumPy's BLAS set to three threads, on four cores; how many it has now."""
    control = pytest.importorskip("threadpoolctl", reason="needs threadpoolctl to look at BLAS")
    if not threads._libraries():
        pytest.skip("NumPy's BLAS is none that can be held to a number of threads")
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "quota", lambda: 4)
    with control.threadpool_limits(3, user_api="blas"):
        yield lambda: [library.num_threads for library in threads._libraries()]


def cases(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    mask = rng.random((2, 90)) < 0.4
    pattern = patterns.from_dense(rng.random((4, 5, 6)) < 0.4, queries=70, keys=90, block=16)
    ends = [np.array([0, *np.sort(rng.integers(0, n, 4)), n], np.int32) for n in (70, 90)]
    grouped = {"H": 4, "teacher_key_heads": 2, "student_key_heads": 1}
    return {
        "dense": {"B": 2, "H": 3},
        "one head": {"H": 1},
        "grouped": {"B": 2, **grouped},
        "causal": {"B": 2, **grouped, "causal": True},
        "window": {"H": 1, "window": (9, 4)},
        "lengths": {"B": 2, "H": 2, "key_lengths": np.array([90, 13], np.int32)},
        "key mask": {"B": 2, **grouped, "key_mask": mask},
        "pattern": {**grouped, "block_mask": pattern},
        "packed": {**grouped, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "causal": True},
    }


NAMES = tuple(cases(np.random.default_rng(0)))


def everything(case: Any, grad: Any) -> list[Any]:
    rows = streamkl_cupy.attention_kl_forward(*case.arrays, **case.options)
    grads = streamkl_cupy.attention_kl_backward(
        grad, *case.arrays, saved=rows, wrt=INPUT_NAMES, **case.options
    )  # fmt: skip
    return [*rows, *grads]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_right_and_bit_equal(numpy_only: Any, rng: Any, use: Set, name: str, dtype: str) -> None:
    """Sums have one order: neither the number of threads nor their timing is seen in a result."""
    options = cases(rng)[name]
    size = {"M": 70, "N": 90, "D_t": 8, "D_s": 4, "dtypes": dtype, "seed": int(rng.integers(1e6))}
    case = make(**size, **options)
    grad = upstream(rng, case.arrays[0].shape[:-1])
    use(3)
    numpy_only.judge(case, grad)
    found = [everything(case, grad) for _ in range(3)]
    for count in (1, 2, 5):
        use(count)
        found.append(everything(case, grad))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(1, 1, 900, 1100), (1, 5, 300, 300), (2, 3, 33, 2000), (1, 1, 40, 9000)])
@pytest.mark.parametrize("causal", [False, True])
def test_whole_tiles(numpy_only: Any, rng: Any, use: Set, shape: tuple[int, ...], causal: bool) -> None:
    B, H, M, N = shape
    case = make(B=B, H=H, M=M, N=N, D_t=16, seed=int(rng.integers(1e6)), causal=causal)
    grad = upstream(rng, (B, H, M))
    use(4)
    plan = streamkl_cupy.plan(*case.arrays, **case.options)
    assert isinstance(plan, NumPyPlan)
    assert plan.threads == min(4, plan.blocks)
    assert plan.threads > 1
    assert f"for each of {plan.threads} threads" in str(plan)
    numpy_only.judge(case, grad)
    for a, b in zip(everything(case, grad), everything(case, grad), strict=True):
        np.testing.assert_array_equal(a, b)


def test_small_problems_stay_in_their_thread(blas: Callable[[], list[int]]) -> None:
    assert threads.available() == 3
    small = make(M=64, N=64, D_t=64).arrays
    plan: Any = streamkl_cupy.plan(*small)
    assert plan.threads == 1
    assert plan.product <= cut.LEAST_SHARED_PRODUCT  # BLAS uses no threads either
    large: Any = streamkl_cupy.plan(*make(M=2000, N=2000, D_t=64).arrays)
    assert large.threads == 3


class Seen:
    """What blocks saw: their threads, and BLAS's number. Each waits for as many threads as are wanted, however late
    these start where the machine is busy, and a moment for one more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blas: Callable[[], list[int]]) -> None:
        self.threads: set[int] = set()
        self.blas: set[int] = set()
        self.wanted = 1
        come = threading.Condition()
        self.fail: Callable[[], None] = lambda: None
        real = KLBlocks.forward

        def block(*given: Any) -> Any:
            with come:
                self.threads.add(threading.get_ident())
                come.notify_all()
                come.wait_for(lambda: len(self.threads) >= self.wanted, 30)
            self.blas.update(blas())
            time.sleep(0.01)
            self.fail()
            return real(*given)

        monkeypatch.setattr(KLBlocks, "forward", block)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, blas: Callable[[], list[int]]) -> Seen:
    return Seen(monkeypatch, blas)


def test_threads_and_blas_are_counted(seen: Seen, blas: Callable[[], list[int]]) -> None:
    import threadpoolctl

    x = make(H=8, M=300, N=300, D_t=16).arrays
    seen.wanted = 3
    streamkl_cupy.attention_kl(*x)
    assert (len(seen.threads), seen.blas, set(blas())) == (3, {1}, {3})
    assert more_threads() == 0
    # As many as BLAS is set to, so that whoever wants one thread gets one.
    seen.threads.clear()
    seen.wanted = 1
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        streamkl_cupy.attention_kl(*x)
        assert (seen.threads, set(blas())) == ({threading.get_ident()}, {1})
    assert set(blas()) == {3}


def test_no_more_threads_than_cores(seen: Seen, blas: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    seen.wanted = 2
    streamkl_cupy.attention_kl(*make(H=8, M=300, N=300, D_t=16).arrays)
    assert (len(seen.threads), set(blas())) == (2, {3})


@pytest.mark.parametrize("where", ["caller", "helper"])
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_errors_reach_the_caller(seen: Seen, blas: Callable[[], list[int]], where: str, error: BaseException) -> None:
    main = threading.get_ident()
    blocks = []

    def fail() -> None:
        blocks.append(1)
        if (threading.get_ident() == main) == (where == "caller"):
            raise error

    seen.fail, seen.wanted = fail, 3
    x = make(H=60, M=300, N=300, D_t=4).arrays
    with pytest.raises(type(error)) as caught:
        streamkl_cupy.attention_kl(*x)
    assert caught.value is error
    assert len(blocks) < 30  # the others end too
    assert more_threads() == 0
    assert set(blas()) == {3}
    seen.fail = lambda: None
    assert np.isfinite(streamkl_cupy.attention_kl(*x)).all()


def test_an_error_in_the_backward_wakes_who_waits_for_a_turn(use: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one head follow each other; one that never comes must not be waited for."""
    use(3)
    reach, fails = threads.Turn.reach, threading.Event()

    def break_once(turn: threads.Turn, end: int) -> None:
        if not fails.is_set():
            fails.set()
            time.sleep(0.05)
            raise MemoryError("no room")
        reach(turn, end)

    x = make(M=1500, N=1500, D_t=16).arrays
    rows = streamkl_cupy.attention_kl_forward(*x)
    monkeypatch.setattr(threads.Turn, "reach", break_once)
    with pytest.raises(MemoryError, match="no room"):
        streamkl_cupy.attention_kl_backward(np.ones_like(rows.kl), *x, saved=rows)
    assert more_threads() == 0


class _Interrupt(BaseException):
    pass


def interrupted_after(steps: int, call: Callable[[], object]) -> bool:
    """Call, and raise after so many steps where a signal handler can run: as a function of the package begins, or of
    those that it waits in, and as a builtin that one of them calls returns."""
    left = [steps]
    mine = (threads.__file__, locks.__file__)
    waits = ("join", "_wait_for_tstate_lock", "wait", "notify_all")

    def look(frame: Any, event: str, _: Any) -> None:
        where, name = frame.f_code.co_filename, frame.f_code.co_name
        if event not in ("call", "c_return") or not (where in mine or (where == threading.__file__ and name in waits)):
            return
        if any(x.f_code is threading.Thread.start.__code__ for x, _ in traceback.walk_stack(frame)):
            return  # a thread that nobody has seen start may come a little later
        left[0] -= 1
        if left[0] == -1:
            raise _Interrupt  # which ends this looking, too

    sys.setprofile(look)
    try:
        call()
    except _Interrupt:
        return True
    finally:
        sys.setprofile(None)
    assert left[0] >= 0, "what was raised has not reached the caller"
    return False


def test_an_interrupt_leaves_nothing_behind(blas: Callable[[], list[int]]) -> None:
    """Wherever it comes: BLAS has its threads again, those of the call have done, and no fork waits for it."""
    main = threading.get_ident()
    at_work: list[int] = []

    def work(team: threads.Team[int]) -> None:
        for task in team:
            if threading.get_ident() != main:
                at_work.append(task)
                time.sleep(0.005)  # so that the caller is the one who waits
                at_work.remove(task)
            team.tell()

    steps = 0
    while interrupted_after(steps, lambda: threads.Team(iter(range(4)), 3, True).run(work)):
        left = at_work, threads._held.calls, threads._gate.depth()
        assert left == ([], {}, 0), (steps, left)
        assert set(blas()) == {3}, steps
        steps += 1
    assert steps > 20


def test_calls_in_several_threads(seen: Seen, blas: Callable[[], list[int]]) -> None:
    """They share the cores, whoever is last gives BLAS its threads back, and results are those of a call alone."""
    x = make(H=6, M=400, N=500, D_t=16).arrays
    expected = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum")
    found: list[Any] = []
    most: list[int] = []

    def call() -> None:
        for _ in range(3):
            most.append(more_threads())
            found.append(streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum"))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(found) == 12
    assert max(most) <= 4 + 3
    for value, grads in found:
        assert value == expected[0]
        for a, b in zip(grads, expected[1], strict=True):
            np.testing.assert_array_equal(a, b)
    assert seen.blas == {1}
    assert set(blas()) == {3}


def test_error_state_is_each_threads_own(use: Set) -> None:
    """Warnings are errors in these tests."""
    use(3)
    case = make("huge", M=900, N=300, D_t=8)
    arrays = [x.copy() for x in case.arrays]
    arrays[1][0, 0, 7] = np.inf
    before = np.geterr()
    with np.errstate(all="raise"):
        assert np.isnan(streamkl_cupy.attention_kl(*arrays, **case.options)).all()
    assert np.geterr() == before


def test_without_threadpoolctl_blas_keeps_its_threads(
    numpy_only: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "threadpoolctl", None)
    threads._libraries.cache_clear()
    try:
        assert threads.available() == 1
        case = make(M=600, N=600, D_t=16, seed=int(rng.integers(1e6)))
        numpy_only.judge(case, upstream(rng, (1, 1, 600)))
    finally:
        threads._libraries.cache_clear()


def test_a_call_in_a_finalizer_at_the_end_of_the_process() -> None:
    program = """
        import faulthandler, functools
        faulthandler.dump_traceback_later(30, exit=True)
        from streamkl_cupy.concurrency import threads
        threads.available = functools.partial(int, 3)  # a function of this module would keep it alive
        threads._libraries()
        class Last:
            def __del__(self):
                threads.Team(iter(range(4)), 3, True).run(lambda team: print(*team, flush=True))
        last = Last()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("0 1 2 3\n", 0), done.stderr


def test_no_thread_to_be_had(use: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of the system, or where the interpreter ends, the caller's thread does it all."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    use(3)
    x = make(H=4, M=300, N=300, D_t=16).arrays
    expected = streamkl_cupy.attention_kl(*x)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    np.testing.assert_array_equal(streamkl_cupy.attention_kl(*x), expected)


@pytest.mark.parametrize(
    "text, expected", [("max 100000", 1 << 16), ("150000 100000", 2), ("50000 100000", 1), (None, 1 << 16)]
)
def test_quota(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int) -> None:
    def read(path: Any) -> str:
        if str(path) == "/proc/self/cgroup":
            return "0::/some/slice\n"
        if str(path) == "/sys/fs/cgroup/some/cpu.max" and text:
            return text
        raise FileNotFoundError(path)

    monkeypatch.setattr(threads.Path, "read_text", read)
    assert threads.quota.__wrapped__() == expected
