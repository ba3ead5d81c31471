"""Launches against a driver that only keeps books: in which context they come, and what is current afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import check_looked_up

import streamkl_cupy
from streamkl_cupy import arrays, launch, patterns, validate
from streamkl_cupy import call as calls
from streamkl_cupy import problem as problems
from streamkl_cupy.arrays import ArrayView
from streamkl_cupy.cli import catalogue
from streamkl_cupy.cli.catalogue import ELEMENT_TYPES
from streamkl_cupy.compiler.nvrtc import Loaded
from streamkl_cupy.errors import CaptureError
from streamkl_cupy.frameworks.base import known
from streamkl_cupy.kernels import tile_lists
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import parse
from streamkl_cupy.problem import INPUT_NAMES, MaskSpec, Operand, Side, compact_strides
from streamkl_cupy.rules.scores import SCORES

FEW_QUERIES = next(x for x in catalogue.EXTENTS if x.queries < x.keys)


class Driver:
    """Contexts per thread as CUDA has them: none in a thread that has not used the runtime, whose GPU is then 0."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.launches: list[int] = []
        self.capturing = False
        self.events: list[SimpleNamespace] = []
        self.fails = False

    # The driver's part

    def ctxGetCurrent(self) -> int:
        return getattr(self.thread, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:
        self.thread.context = context

    def launchKernel(self, *args: Any) -> None:
        if self.fails:
            raise RuntimeError("refused")
        self.launches.append(self.ctxGetCurrent())

    # The runtime's part

    class CUDARuntimeError(Exception):
        pass

    def setDevice(self, index: int) -> None:
        self.thread.context = primary(index)

    def streamIsCapturing(self, stream: int) -> bool:
        return self.capturing

    def memsetAsync(self, *args: Any) -> None:
        self.launches.append(self.ctxGetCurrent())

    def eventRecord(self, event: int, stream: int) -> None:
        self.events[event].done = False

    def event(self, **how: Any) -> SimpleNamespace:
        self.events.append(SimpleNamespace(ptr=len(self.events), done=True))
        return self.events[-1]


def primary(index: int) -> int:
    return 100 + index


@pytest.fixture(params=["sm_80", "sm_90"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(driver=made, runtime=made, Event=made.event, get_current_stream=lambda: stream)
    lists = SimpleNamespace(data=SimpleNamespace(ptr=4096))
    cupy = SimpleNamespace(cuda=cuda, asarray=lambda x: lists)

    def in_context(result: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            assert made.ctxGetCurrent(), "the driver has no context"
            return result

        return function

    launch._primary_context.cache_clear()
    for module in (launch, tile_lists):
        monkeypatch.setattr(module, "import_cupy", lambda: cupy)
    monkeypatch.setattr(launch, "device_facts", lambda index: facts_for_arch(request.param))
    monkeypatch.setattr(launch, "load", in_context(Loaded(1, None)))
    monkeypatch.setattr(launch, "encode", in_context(bytes(128)))
    yield made
    launch._primary_context.cache_clear()
    tile_lists._uploaded.clear()
    tile_lists._left.clear()


def view(name: str, shape: tuple[int, ...], device: int, dtype: str = "float16") -> ArrayView:
    return ArrayView(name, "torch", arrays.cuda(device), dtype, shape, compact_strides(shape), 1 << 20, None)


@pytest.fixture
def tensors_of_a_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch, whose tensors on the CPU pass for a GPU's."""
    torch = pytest.importorskip("torch")
    framework: Any = known("torch")
    monkeypatch.setattr(framework, "devices", {torch.device("cpu"): arrays.cuda(0)})
    monkeypatch.setattr(framework, "current_gpu", lambda: None)  # results are made on the CPU too
    monkeypatch.setattr(framework, "raw_stream", lambda index: 7)
    monkeypatch.setattr(calls, "backend", lambda device: launch)
    for kept in ("_looks", "_checked", "_runners"):
        monkeypatch.setattr(calls, kept, {})
    return torch


@pytest.mark.parametrize("way, most", [("loss", 37), ("step", 47), ("forward", 25), ("backward", 28)])
def test_a_call_like_one_before_is_looked_up(driver: Driver, way: str, most: int, tensors_of_a_gpu: Any) -> None:
    torch = tensors_of_a_gpu
    x = [torch.randn(1, 2, 128, 64, dtype=torch.bfloat16) for _ in INPUT_NAMES]
    rows = streamkl_cupy.attention_kl_forward(*x)
    grad = torch.ones_like(rows.kl)
    leaf = x[2].clone().requires_grad_()
    check_looked_up(
        {
            "loss": lambda: streamkl_cupy.attention_kl(*x, causal=True, reduction="mean"),
            "step": lambda: streamkl_cupy.attention_kl(*x[:2], leaf, x[3], reduction="sum").backward(),
            "forward": lambda: streamkl_cupy.attention_kl_forward(*x),
            "backward": lambda: streamkl_cupy.attention_kl_backward(grad, *x, saved=rows),
        }[way],
        most,
    )


def test_what_lies_ready_is_launched_in_the_context_of_the_arrays(
    driver: Driver, tensors_of_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, places = tensors_of_a_gpu, {}

    def allocate(like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:  # where the last one was
        return places.setdefault((shape, dtype), torch.empty(shape, dtype=getattr(torch, dtype)))

    monkeypatch.setattr(known("torch"), "allocate", allocate)
    x = [torch.randn(1, 2, 128, 64, dtype=torch.bfloat16) for _ in INPUT_NAMES]
    for _ in range(2):  # the second is known by its look, and packed under that
        streamkl_cupy.attention_kl_forward(*x)
    (runner,) = calls._runners.values()
    kept = len(runner._kept)  # type: ignore[attr-defined]

    def elsewhere(context: int) -> tuple[list[int], int]:
        driver.ctxSetCurrent(context)
        driver.launches.clear()
        streamkl_cupy.attention_kl_forward(*x)
        return driver.launches, driver.ctxGetCurrent()

    with ThreadPoolExecutor(1) as thread:
        for context in (0, primary(1), primary(0)):
            assert thread.submit(elsewhere, context).result() == ([primary(0)], context)
    assert len(runner._kept) == kept  # type: ignore[attr-defined]


class Problem:
    """Everything that a call hands to a Runner."""

    def __init__(self, device: int, **options: Any) -> None:
        shape = (1, 2, 128, 64)
        self.inputs = ATTENTION_KL.Inputs(*(view(name, shape, device) for name in INPUT_NAMES))
        rows = [view(name, shape[:3], device, "float32") for name in ("a", "b", "c", "d")]
        self.rows, self.saved = ATTENTION_KL.Results(*rows[:3]), ATTENTION_KL.Saved(*rows)
        self.gradients = ATTENTION_KL.Gradients(*(view(name, shape, device) for name in INPUT_NAMES))
        self.problem = validate.to_problem(ATTENTION_KL, self.inputs, parse(ATTENTION_KL, options)[0])
        self.runner = launch.Runner(self.problem)

    def forward(self) -> None:
        self.runner.forward(self.inputs, self.rows, 7, 1 << 20)

    def backward(self) -> None:
        self.runner.backward(self.inputs, self.saved, self.gradients, 7, 1 << 20)

    def warmup(self) -> None:
        self.runner.warmup(INPUT_NAMES)


@pytest.mark.parametrize("before", [0, primary(0), primary(1), 999], ids=["none", "first", "second", "foreign"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("call", ["forward", "backward", "warmup"])
def test_every_call_has_its_context_and_leaves_none(driver: Driver, call: str, device: int, before: int) -> None:
    problem = Problem(device)
    assert driver.ctxGetCurrent() == 0, "making ready left a context behind"

    def go() -> int:
        driver.ctxSetCurrent(before)
        for _ in range(2):
            getattr(problem, call)()
            assert driver.ctxGetCurrent() == before
        return threading.get_ident()

    go()
    driver.ctxSetCurrent(0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(go).result() != threading.get_ident()
    assert set(driver.launches) == ({primary(device)} if call != "warmup" else set())


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_failure_leaves_what_was_current(driver: Driver, call: str) -> None:
    problem = Problem(1)
    driver.fails = True
    driver.ctxSetCurrent(999)
    with pytest.raises(RuntimeError, match="refused"):
        getattr(problem, call)()
    assert driver.ctxGetCurrent() == 999


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_loading_is_not_captured(driver: Driver, call: str) -> None:
    problem = Problem(0)
    driver.capturing = True
    with pytest.raises(CaptureError, match=r"call streamkl_cupy\.warmup\(\.\.\.\) .* before the capture"):
        getattr(problem, call)()
    assert driver.launches == []
    problem.warmup()
    getattr(problem, call)()
    assert driver.launches


def test_a_call_like_the_one_before_looks_up_what_it_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(0)
    problem.forward()
    problem.backward()
    for plans in ("_forward", "_backward", "_kernel"):
        monkeypatch.delattr(launch.Runner, plans)
    before = len(driver.launches)
    problem.forward()
    problem.backward()
    assert len(driver.launches) == 2 * before


@pytest.mark.parametrize("score", sorted(SCORES))
def test_splits_are_joined_whatever_the_score_reads(driver: Driver, score: str) -> None:
    """The kernel that joins them is one for all scores, though these have numbers of their own."""
    problem = catalogue.problem((64, 128), ELEMENT_TYPES[0], extents=FEW_QUERIES, scores=(score, score))
    runner = launch.Runner(problem)
    assert runner.plan.combine
    call = Problem(0)
    runner.forward(call.inputs, call.rows, 7, 1 << 20)
    assert len(driver.launches) == 2


def test_gradients_of_keys_without_queries_are_zero(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head reads the keys, which have heads nonetheless."""
    cleared: list[tuple[int, ...]] = []
    monkeypatch.setattr(driver, "memsetAsync", lambda *args: cleared.append(args))
    q, k = (Operand(heads, 128, 64, "float16", (heads * 8192, 8192, 64, 1), True) for heads in (0, 2))
    side = Side(q, k, 1.0)
    runner = launch.Runner(problems.Problem(1, 0, 128, 128, (side, side), mask=MaskSpec(), device=arrays.cuda(0)))
    call = Problem(0)
    outputs = ATTENTION_KL.Gradients(
        *(view(name, (1, 2 if name.endswith("k") else 0, 128, 64), 0) for name in INPUT_NAMES)
    )
    outputs = ATTENTION_KL.Gradients(*(x and x._replace(ptr=i << 20) for i, x in enumerate(outputs, 1)))
    runner.backward(call.inputs, call.saved, outputs, 7)
    assert cleared == [(i << 20, 0, 2 * 2 * 128 * 64, 7) for i in (2, 4)]
    assert driver.launches == []


def scattered() -> patterns.BlockPattern:
    blocks = np.random.default_rng().random((2, 8, 8)) < 0.5
    blocks[..., 0] = True
    return patterns.from_dense(blocks, queries=128, keys=128, block=16)


def test_a_warmup_leaves_nothing_to_load(driver: Driver) -> None:
    """Whatever room a call has: while a graph is captured nothing can be loaded."""
    cold = Problem(0)
    driver.capturing = True
    for call in ("forward", "backward"):
        with pytest.raises(CaptureError, match=r"call streamkl_cupy.warmup\(...\) with the same arrays"):
            getattr(cold, call)()
    driver.capturing = False
    cold.warmup()
    driver.capturing = True
    for workspace in (0, 1 << 20):
        cold.runner.forward(cold.inputs, cold.rows, 7, workspace)
        for room in (None, 1, 1 << 16):
            cold.runner.backward(cold.inputs, cold.saved, cold.gradients, 7, workspace, room=room)


def test_kernels_walk_lists_of_their_own_tiles(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows a list is of, and how many a tile has, is what the kernel was compiled for."""
    asked: list[tuple[int, ...]] = []
    real = tile_lists.lists_for

    def lists_for(pattern: Any, *how: Any) -> Any:
        asked.append(how)
        return real(pattern, *how)

    monkeypatch.setattr(tile_lists, "lists_for", lists_for)
    pattern = scattered()
    for wrt in (INPUT_NAMES[:1], INPUT_NAMES[3:], INPUT_NAMES):
        problem = Problem(1, block_mask=pattern)
        plan = problem.runner.plan
        if wrt == INPUT_NAMES:
            problem.forward()
            problem.backward()
            own = [fused.main for fused in plan.fused] or [kernel for _, kernel in plan.gradients]
            expected = [plan.forward, *own]
        else:
            problem.runner.warmup(wrt)
            expected = [plan.forward, *(plan.gradient(name) for name in wrt)]
        wanted = [
            (1, kernel.tile.rows, kernel.tile.columns, not dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"],
             kernel.schedule.group, kernel.schedule.longest, kernel.tile.pairs)
            for kernel in expected
        ]  # fmt: skip
        assert asked == wanted
        asked.clear()


def test_lists_of_a_pattern_outlive_it_until_the_gpu_has_passed(driver: Driver) -> None:
    pattern = scattered()
    problem = Problem(0, block_mask=pattern)
    problem.forward()
    kept = list(tile_lists._uploaded[pattern.digest].values())
    assert kept
    del problem, pattern
    assert tile_lists._uploaded == {}
    assert tile_lists._left == kept
    other = scattered()
    Problem(0, block_mask=other).forward()
    assert set(kept) <= set(tile_lists._left), "given back while a kernel may be reading"
    for event in driver.events:
        event.done = True
    another = scattered()
    Problem(0, block_mask=another).forward()
    assert not set(kept) & set(tile_lists._left)


def test_lists_that_a_graph_has_captured_stay(driver: Driver) -> None:
    pattern = scattered()
    problem = Problem(0, block_mask=pattern)
    problem.forward()
    driver.capturing = True
    problem.forward()
    driver.capturing = False
    kept = list(tile_lists._uploaded[pattern.digest].values())
    del problem, pattern
    for event in driver.events:
        event.done = True
    other = scattered()
    Problem(0, block_mask=other).forward()
    assert set(kept) <= set(tile_lists._left)


def test_equal_patterns_share_lists_until_the_last_is_gone(driver: Driver) -> None:
    first = scattered()
    second = patterns.BlockPattern(first.row_offsets, first.key_blocks, *first.grid)
    Problem(0, block_mask=first).forward()
    (lists,) = tile_lists._uploaded[first.digest].values()
    digest = first.digest
    del first
    Problem(0, block_mask=second).forward()
    assert list(tile_lists._uploaded[digest].values()) == [lists]
    del second
    assert tile_lists._uploaded == {}
