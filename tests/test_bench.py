"""What benchmarks time, and what they say of it: on the CPU, where what they run is compared with what it should be."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import patterns
from streamkl_cupy.__main__ import main
from streamkl_cupy.cli import bench, context_parallel, indexer, report, shapes, sparse_attention
from streamkl_cupy.cli.cases import PASSES, Case
from streamkl_cupy.cli.peers import Ours
from streamkl_cupy.cli.shapes import Shape
from streamkl_cupy.compiler import nvrtc
from streamkl_cupy.errors import DriverError
from streamkl_cupy.testing import timing
from streamkl_cupy.testing.timing import Memory, Outcome, Timing

QUICK = ("--seconds", "0.001", "--rounds", "1")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the clock of a GPU, which a driver stands for that counts ---


class Cards:
    """CuPy on a GPU whose work takes as many milliseconds as it is told."""

    def __init__(self) -> None:
        self.now, self.free, self.log = 0.0, 1000, list[Any]()
        self.cuda = self.runtime = self
        self.capability = True

    def is_available(self) -> bool:
        return self.capability

    def Device(self) -> Any:
        return SimpleNamespace(compute_capability="90", attributes={"L2CacheSize": 50})

    def memGetInfo(self) -> tuple[int, int]:
        return self.free, 2000

    def deviceSynchronize(self) -> None:
        self.log.append("wait")

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: self.log.append("release"))

    def Event(self) -> Any:
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now)
        return event

    def get_elapsed_time(self, start: Any, stop: Any) -> float:
        return float(stop.at - start.at)

    def hold(self, grid: Any, block: Any, given: Any) -> None:
        self.log.append((grid, block, *given))
        self.now += 1000  # before the first event


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards()
    monkeypatch.setattr(nvrtc, "import_cupy", lambda: cards)
    loaded = SimpleNamespace(function=cards.hold)
    monkeypatch.setattr(nvrtc, "load", lambda text, symbol, arch: cards.log.append((symbol, arch)) or loaded)
    return cards


def test_a_gpu_is_timed_by_its_own_clock(cards: Cards) -> None:
    timer = timing.DeviceTimer()
    assert cards.log == [("hold", "sm_90")]
    assert (timer.cold_bytes, timer.capacity) == (100, 2000.0)
    cards.log.clear()

    def work(milliseconds: float) -> Any:
        def call() -> None:
            cards.now += milliseconds
            time.sleep(milliseconds / 1e3)

        return call

    found, host = timer.time([work(1.0), work(4.0), work(2.0)], hold=1.5)
    assert found == [1.0, 4.0, 2.0]
    assert 4.0 <= host < 400
    assert cards.log == [((1,), (1,), 3_000_000)] * 3 + ["wait"]
    cards.log.clear()
    timer.time([work(0.0)], hold=1e9)
    assert cards.log[0][2] == 10_000_000  # no longer than is bearable
    cards.capability = False
    with pytest.raises(DriverError, match="no usable NVIDIA driver"):
        timing.DeviceTimer()


def test_memory_of_a_gpu_is_its_peak_beyond_what_there_was(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both frameworks' allocators, of a call that has run before."""
    pytest.importorskip("cupy")
    timer = timing.DeviceTimer()
    hooks: list[Any] = []
    made = timing._peak_hook

    class Hook:
        def __enter__(self) -> Any:
            hooks.append(made(cards))
            return hooks[-1]

        def __exit__(self, *error: Any) -> None:
            pass

    monkeypatch.setattr(timing, "_peak_hook", lambda cupy: Hook())
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    monkeypatch.setattr(timing, "_torch", lambda: None)
    calls: list[int] = []

    def call() -> None:
        calls.append(len(hooks))
        if hooks:
            for size in (100, 300):
                hooks[0].malloc_postprocess(mem_size=size)
            hooks[0].free_postprocess(mem_size=300)
            hooks[0].malloc_postprocess(mem_size=250)
            cards.free -= 30

    assert timer.memory(call) == Memory(400, 30)
    assert calls == [0, 1]
    assert cards.log[-3:] == ["wait", "release", "wait"]
    hooks.clear()
    use = SimpleNamespace(
        reset_peak_memory_stats=lambda: None, memory_allocated=lambda: 70, max_memory_allocated=lambda: 90,
        empty_cache=lambda: cards.log.append("empty"),
    )  # fmt: skip
    monkeypatch.setattr(timing, "_torch", lambda: SimpleNamespace(cuda=use))
    assert timer.memory(call) == Memory(420, 30)
    assert cards.log[-4:] == ["wait", "release", "empty", "wait"]
    assert timer.memory(lambda: setattr(cards, "free", cards.free + 5)).driver == 0


@pytest.mark.parametrize("failures, error", [(1, ""), (2, "MemoryError: full")])
def test_a_second_attempt_after_memory_ran_out(failures: int, error: str) -> None:
    """Another variant's cached memory may have been in the way."""
    log: list[Any] = []

    class Timer(timing.HostTimer):
        def time(self, calls: Any, hold: float = 0.0) -> tuple[list[float], float]:
            log.append(len(calls))
            if len(log) > 1 and log.count(3) <= failures:  # after the warm-up
                raise MemoryError("full")
            return [1.0] * len(calls), 0.0

        def memory(self, call: Any) -> Memory:
            return Memory(7)

        def release(self) -> None:
            log.append("released")

    (found,) = timing.measure(
        [timing.Variant("one", lambda i: lambda: i)], Timer(), sets=3, rounds=1, seconds=0.003, warmup=0
    )
    assert log[:4] == [1, "released", 3, "released"]
    assert (found.error, found.out_of_memory) == (error, bool(error))
    assert found.samples == ([] if error else [1.0] * 3)
    assert log[4:] == [3, "released"] if error else [3]


# --- steps of trainers ---


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made for a GPU is made here, in float32 and on the CPU, and stands in a list."""
    torch = pytest.importorskip("torch")
    randn, ones, found = torch.randn, torch.ones, []

    def fresh(shape: Any, *, device: str, dtype: Any, **how: Any) -> Any:
        assert (device, dtype) == ("cuda", torch.bfloat16)
        found.append(randn(shape, **how))
        return found[-1]

    monkeypatch.setattr(torch, "randn", fresh)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: ones(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(shapes, "BACKENDS", {"cudnn": "MATH", "flash": "MATH"})
    return found


@pytest.mark.parametrize(
    "shape",
    [Shape("grouped", 2, 6, 3, 2, 5, 9, 8, 4, True), Shape("not causal", 1, 2, 2, 2, 7, 3, 4, 6, False)],
    ids=lambda shape: shape.name,
)
def test_steps_of_trainers_are_all_of_the_same_numbers(made: list[Any], shape: Shape) -> None:
    assert [tuple(x.shape) for x in shapes._inputs(shape)] == list(shape.shapes)
    for key in ("step", "eager", "compile"):
        made.clear()
        step = shapes.ours(shape, key) if key == "step" else shapes.plain(shape, key)
        for _ in range(2):  # gradients are of one step, not of all so far
            step()
        x = [t.detach().double().numpy() for t in made]
        _, want = streamkl_cupy.attention_kl_value_and_grad(*x, causal=shape.causal, reduction="sum")
        assert [t.grad is None for t in made] == [True, True, False, False]
        for leaf, grad in zip(made[2:], (want.student_q, want.student_k), strict=True):
            np.testing.assert_allclose(leaf.grad.numpy(), grad, rtol=1e-3, atol=1e-5, err_msg=key)
    made.clear()
    rows = shapes.ours(shape, "forward")()
    want_rows = streamkl_cupy.attention_kl_forward(*(t.double().numpy() for t in made), causal=shape.causal)
    np.testing.assert_allclose(rows.kl.numpy(), want_rows.kl, rtol=1e-4, atol=1e-6)
    for name in ("backward", "deterministic backward"):
        made.clear()
        grads = shapes.ours(shape, name)()
        x = [t.double().numpy() for t in made]
        kl = streamkl_cupy.attention_kl_forward(*x, causal=shape.causal)
        want = streamkl_cupy.attention_kl_backward(kl.kl, *x, saved=kl, causal=shape.causal)
        assert grads.teacher_q is None
        np.testing.assert_allclose(grads.student_k.numpy(), want.student_k, rtol=1e-3, atol=1e-5)


def called_once(variants: Any, timer: Any, *, rounds: int, seconds: float, before: Any) -> list[Outcome]:
    """In place of `measure`, which takes its time."""
    assert (rounds, seconds) == (1, 0.001)
    found = []
    for i, variant in enumerate(variants):
        before(variant)
        try:
            variant.prepare(0)()
            found.append(Outcome(Timing(1.0 + i, 2.0 + i, 3.0 + i, 4)))
        except AttributeError as error:
            found.append(Outcome(error=f"AttributeError: {error}"))
    return found


@pytest.mark.parametrize("grouped", [True, False])
def test_attention_beside_trainers_steps(made: list[Any], grouped: bool) -> None:
    torch = pytest.importorskip("torch")
    shape = Shape("square", 3, 4, 4, 2, 6, 6, 5, 8, True)
    step = shapes.attention(shape, "cudnn", grouped)
    step()
    step()
    heads = 2 if grouped else 4
    assert [tuple(x.shape) for x in made] == [(3, 4, 6, 8), (3, heads, 6, 8), (3, heads, 6, 8)]
    q, k, v = leaves = [x.detach().clone().requires_grad_() for x in made]
    k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
    logits = (q @ k.mT / 8**0.5).masked_fill(torch.full((6, 6), True).triu(1), -torch.inf)
    (logits.softmax(-1) @ v).sum().backward()
    for found, right in zip(made, leaves, strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-4, atol=1e-5)


def test_bench_of_shapes(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["bench", "--shapes", *QUICK, "--out", str(tmp_path), "--name", "small"]
    monkeypatch.setattr(shapes, "torch_missing", lambda: "no torch here")
    assert main(given) == 2
    assert "no torch here" in capsys.readouterr().err
    monkeypatch.setattr(shapes, "torch_missing", lambda: "")
    assert main([*given, "--peers", "numpy"]) == 2
    assert "--peers numpy has no step" in capsys.readouterr().err
    monkeypatch.setattr(shapes, "DeviceTimer", timing.HostTimer)
    monkeypatch.setattr(shapes, "measure", called_once)
    monkeypatch.setattr(shapes.environment, "card", lambda: "a card")
    costs = iter((Timing(0.01, 0.025, 0.03, 7), Timing(0.1, 0.2, 0.3, 8)))
    monkeypatch.setattr(shapes, "host_cost", lambda call, timer: (call(), next(costs))[1])
    small = Shape("some", 1, 2, 2, 1, 4, 4, 4, 4, True), Shape("others", 1, 2, 1, 2, 3, 4, 4, 8, False)
    monkeypatch.setattr(shapes, "SHAPES", small)
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "some: B=1 H=2 on 2 / 1, 4 x 4, D=4/4, causal\n" in text
    assert "others: B=1 H=2 on 1 / 2, 3 x 4, D=4/8\n" in text
    assert "host, streamkl: 25 us" in text
    rows = read(tmp_path / "small.csv")
    attention = {"some": ("cudnn, grouped", "cudnn", "flash, grouped", "flash"), "others": ("cudnn", "flash")}
    want = [
        (shape.name, name, peer)
        for shape in small
        for name, peer in (
            *((name, "streamkl") for name in shapes.OURS),
            *(("step", peer) for peer in ("eager", "compile", *attention[shape.name])),
        )
    ]
    want += [("tiny", "host", "streamkl"), ("tiny", "host", "attention")]
    assert [(row["name"], row["pass"], row["peer"]) for row in rows] == want
    assert {(row["status"], row["dtype"], row["card"], row["package"]) for row in rows} == {
        ("ok", "bfloat16", "a card", streamkl_cupy.__version__)
    }
    for i, row in enumerate(rows[:10]):
        assert [float(row[x]) for x in ("ms_p20", "ms_median", "ms_p80", "samples")] == [1 + i, 2 + i, 3 + i, 4]
    assert [(row["ms_median"], row["samples"]) for row in rows[-2:]] == [("0.025", "7"), ("0.2", "8")]
    # What is asked for, and a package that does not run, which is told by the exit code.
    costs = iter([Timing(0.1, 0.2, 0.3, 8)] * 2)
    monkeypatch.setattr(shapes, "SHAPES", small[:1])
    monkeypatch.setattr(shapes, "TINY", small[1])
    broken = SimpleNamespace(attention_kl=streamkl_cupy.attention_kl)
    monkeypatch.setattr(shapes, "api", broken)
    assert main([*given, "--peers", "streamkl", "eager"]) == 1
    rows = read(tmp_path / "small.csv")
    assert [row["status"] for row in rows[:5]] == ["failed", "failed", "failed", "ok", "ok"]
    assert rows[0]["note"].startswith("AttributeError: ")


def test_ratios_are_to_the_fastest_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape("one", 1, 2, 2, 2, 3, 4, 5, 6, False)

    def row(name: str, peer: str, ms: float | None) -> dict[str, Any]:
        return {"pass": name, "peer": peer, "status": "ok" if ms else "failed", "ms_median": ms}

    rows = [
        row("forward", "streamkl", 1.0), row("step", "streamkl", 3.0), row("step", "eager", 0.5),
        row("step", "cudnn", None), row("step", "cudnn, grouped", 2.0), row("step", "flash", 4.0),
    ]  # fmt: skip
    shown: list[Any] = []
    monkeypatch.setattr(report, "table", lambda title, columns, cells: shown.extend(cells))
    shapes.show(shape, rows)
    assert [cells[2:] for cells in shown] == [
        ("1.000", ""), ("3.000", "1.50"), ("0.500", "0.25"), ("failed", ""), ("2.000", "1.00"), ("4.000", "2.00"),
    ]  # fmt: skip
    shown.clear()
    shapes.show(shape, rows[:2])  # of none that ran
    assert [cells[3] for cells in shown] == ["", "nan"]


# --- the plain operation ---


def test_inputs_overflow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many sets as that takes, of which there is a most; where nothing is cached by one."""
    options = argparse.Namespace(rounds=1, seconds=0.001)
    case = Case("cpu", 1, 1, 8, 8, 4, 4, "float32", False, ("forward",))
    asked: list[int] = []
    monkeypatch.setattr(bench, "measure", lambda variants, timer, sets, **how: asked.append(sets) or [Outcome()])
    monkeypatch.setattr(bench, "verify", lambda case, given: "")
    for size in (0, 1, 3.5, 4, 1000):
        timer = SimpleNamespace(cold_bytes=int(size * case.input_bytes))
        bench.run_case(case, "numpy", [Ours()], timer, options, {})
    assert case.input_bytes == 4 * 4 * 8 * 4
    assert asked == [1, 2, 5, 5, 32]


def test_what_is_timed_where_nothing_is_said() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for device, want in (
        ("cuda", [Case("cuda", 1, 8, n, n, 128, 128, "bfloat16", False, PASSES) for n in (4096, 8192, 16384)]),
        ("cpu", [
            Case("cpu", 1, 1, n, n, 64, 64, "float32", False, PASSES if n < 16384 else ("forward",))
            for n in (1024, 2048, 4096, 16384)
        ]),
    ):  # fmt: skip
        assert bench.cases_of(parser.parse_args([]), device) == want
    for machine in context_parallel.MACHINES.values():
        for heads, key_heads, tokens in (*machine.shapes, machine.masked):
            # Two chunks for each of up to four ranks, and of blocks of the pattern in the call with masks.
            assert (tokens % 8, heads % key_heads) == (0, 0)
        assert machine.masked[2] % (4 * machine.block) == 0
    assert set(sparse_attention.SIZES) == set(indexer.SIZES) == set(sparse_attention.DENSE) == {"cuda", "cpu"}
    assert all(n % 128 == 0 for sizes in sparse_attention.SIZES.values() for n in sizes)


def test_what_a_row_of_the_bench_says() -> None:
    row = bench.Row("forward", "streamkl", "ours", "cuda")
    bench._fill(row, Outcome(Timing(1.0, 2.0, 4.0, 9), Memory(3 << 20, 5 << 20)), 6e12)
    assert (row.ms_p20, row.ms_median, row.ms_p80, row.samples) == (1, 2, 4, 9)
    assert (row.tflops, row.peak_bytes, row.driver_bytes) == (3000, 3 << 20, 5 << 20)
    row.share_of_matmul = 0.5
    cells = dict(zip(bench.COLUMNS[2:], bench.table_rows([row])[0][2:], strict=True))
    assert cells == {
        "ms": "2.000", "p20": "1.000", "p80": "4.000", "TFLOP/s": "3000.0", "of matmul": "50%", "than ours": "",
        "extra MiB": "3.0", "driver MiB": "5", "<": "",
    }  # fmt: skip
    bench._fill(row, Outcome(error="RuntimeError: no"), 6e12)
    assert (row.status, row.note) == ("failed", "RuntimeError: no")


# --- sparse attention ---


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("heads, rows, dense", [((4, 2), None, 2), ((2, 2), 1, 0)])
def test_peers_of_sparse_attention_see_the_same_pairs(
    heads: tuple[int, int], rows: int | None, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention in blocks wider than the pattern's, the last of which reaches beyond the sequence."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(sparse_attention, "FLEX_BLOCK", 48)
    shape = sparse_attention.Shape("cpu", 2, *heads, 8, 16, dense, rows is not None, True, True)
    case = sparse_attention.Case(shape, 112, 2, 2)
    found = sparse_attention.Bench(torch, case)
    pattern = case.pattern()
    assert pattern is not None
    assert (pattern.queries, pattern.keys, pattern.query_block) == (rows or 112, 112, 16)
    given: list[Any] = []

    class SparseAttention:
        def __init__(self, *how: Any, seq_dim: int) -> None:
            given.extend((*how, seq_dim))

        def to(self, device: str) -> Any:
            given.append(device)
            return lambda *x: x

    monkeypatch.setitem(sys.modules, "dkernel", SimpleNamespace(SparseAttention=SparseAttention))
    variants = found.variants()
    passes = ("forward",) if rows else ("forward", "backward")
    assert set(variants) == {(peer, name) for peer in ("streamkl", "flex", "dkernel") for name in passes}
    out = variants["streamkl", "forward"](0)().out
    torch.testing.assert_close(variants["flex", "forward"](0)(), out, rtol=1e-4, atol=1e-5)
    assert found.mask_ms is not None
    assert found.mask_ms > 0
    block, listed, axis, device = given
    assert (block, axis, device) == (16, 2, "cpu")
    np.testing.assert_array_equal(listed.numpy(), np.broadcast_to(pattern.dense(), (heads[0], *listed.shape[1:])))
    # Backwards of peers are of differentiable functions.
    for attend in (found.dense, lambda q, k, v: q * k.sum() + v.mean()):
        if rows:
            break
        x = [t.detach().requires_grad_() for t in found.given]
        want = torch.autograd.grad(attend(*x), x, found.grad)
        torch.testing.assert_close(found.peer("backward", attend)(0)(), want)
        torch.testing.assert_close(found.peer("forward", attend)(0)(), attend(*found.given))


def test_efficiency_is_dense_time_over_ours_and_the_reduction() -> None:
    shape = sparse_attention.Shape("cpu", 1, 2, 2, 8, 16, 0, False, False, False)
    case = sparse_attention.Case(shape, 64, 1, 2)
    pattern = case.pattern()
    assert pattern is not None
    some = SimpleNamespace(case=case, reduction=2.5)
    whole = SimpleNamespace(case=sparse_attention.Case(shape, 64), reduction=1.0)
    times: dict[str, float] = {}
    outcome = Outcome(Timing(9.0, 10.0, 11.0, 3), Memory(77))
    ours = sparse_attention.row_of(whole, "streamkl", "forward", Outcome(Timing(1, 8.0, 12, 3)), {})
    assert (ours["efficiency"], ours["extra_bytes"], ours["case"]) == (None, None, "dense")
    dense = sparse_attention.row_of(whole, "torch", "forward", outcome, times)
    assert (dense["efficiency"], times) == (1.0, {"forward": 10.0})
    row = sparse_attention.row_of(some, "streamkl", "forward", Outcome(Timing(4.0, 5.0, 6.0, 3), Memory(99)), times)
    assert row["efficiency"] == 0.8
    assert [row[x] for x in ("case", "n", "ms", "p20", "p80", "samples", "extra_bytes", "reduction", "status")] == [
        "1:2", 64, 5.0, 4.0, 6.0, 3, 99, 2.5, "ok",
    ]  # fmt: skip
    assert sparse_attention.line(row).endswith("5.000 ms   reduction 2.50   efficiency 0.80")
    assert sparse_attention.line({**row, "efficiency": None}).endswith("reduction 2.50")
    bad = sparse_attention.row_of(some, "flex", "backward", Outcome(error="E: no"), times)
    assert sparse_attention.line(bad).split() == ["64", "1:2", "flex", "backward", "E:", "no"]


def test_lines_are_printed_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code is of this package alone."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    for module, op, peers in (
        (sparse_attention, "sparse_attention", ["streamkl", "torch", "streamkl"]),
        (indexer, "indexer_kl", ["streamkl", "eager", "compile"]),
    ):
        few = ["--op", op, "--device", "cpu", "--sizes", "64", "--heads", "2", "--dims", "8", "--block", "16"]
        few += ["--patterns", "2:2", "--index-heads", "2", "--passes", "forward", "--out", str(tmp_path), "--name", op]
        for failing, code in (("none", 0), (peers[1], 0), ("streamkl", 1)):

            def measured(variants: Any, timer: Any, failing: str = failing, **how: Any) -> list[Outcome]:
                good, bad = Outcome(Timing(1.0, 2.0, 3.0, 4), Memory(5)), Outcome(error="E: no")
                return [bad if variant.title.split()[0] == failing else good for variant in variants]

            monkeypatch.setattr(module, "measure", measured)
            assert main(["bench", *few]) == code
            *lines, last = capsys.readouterr().out.splitlines()
            assert last == f"wrote {tmp_path / op}.csv"
            lines = [line for line in lines if " forward " in line]
            assert [next(x for x in line.split() if x in peers) for line in lines] == peers
            assert [("E: no" in line) for line in lines] == [x == failing for x in peers]
            assert len(read(tmp_path / f"{op}.csv")) >= 3


def test_pairs_of_a_pattern(rng: np.random.Generator) -> None:
    rows, keys = int(rng.integers(20, 40)), int(rng.integers(40, 70))
    pattern = patterns.sharded(3, window=16, stride=2, queries=rows, keys=keys, block=16, causal=True)
    seen = pattern.dense().repeat(16, -2).repeat(16, -1)[:, :rows, :keys]
    seen &= np.arange(keys) <= np.arange(rows)[:, None] + keys - rows
    assert sparse_attention.pairs(pattern) == seen.sum()


# --- the indexer ---


def test_modules_join_the_bench_of_an_indexer() -> None:
    torch = pytest.importorskip("torch")
    case = indexer.Case(24, 2, 4, 2, 3, 8, 5, "given")
    told: list[Any] = []

    class Module:
        def forward(self, *x: Any) -> str:
            told.append(x)
            return "saved"

        def backward(self, grad: Any, saved: str, *x: Any) -> str:
            told.append((grad, saved, *x))
            return "gradients"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **how: function)
        found = indexer.Bench(torch, case, "cpu", Module())
        variants = found.variants(indexer.PASSES)
    assert list(variants) == [
        (x, name) for name in indexer.PASSES for x in ("streamkl", "eager", "compile", "yardstick")
    ]
    x = (*found.teacher, *found.student, found.lse, found.options["index_scale"])
    assert [tuple(a.shape) for a in x[:6]] == [
        (2, 4, 24, 8),
        (2, 2, 24, 8),
        (2, 3, 24, 5),
        (2, 24, 5),
        (2, 3, 24),
        (2, 4, 24),
    ]
    assert found.options["index_scale"] == pytest.approx((3 * 5) ** -0.5)

    def same(got: Any, *want: Any) -> None:
        assert len(got) == len(want)
        assert all(a is b for a, b in zip(got, want, strict=True))

    assert variants["yardstick", "forward"](0)() == "saved"
    same(told.pop(), *x)
    for name, grad in (("value_and_grad", found.mean), ("backward", found.grad)):
        assert variants["yardstick", name](0)() == "gradients"
        same(told.pop(), grad, "saved", *x)
        same(told.pop(), *x)
    assert float(found.mean.sum()) == pytest.approx(1)
    # Passes of this package and of torch agree, with given log-sum-exps too.
    for name in ("backward", "value_and_grad"):
        ours = variants["streamkl", name](0)()
        grads = ours if name == "backward" else ours[1]
        torch.testing.assert_close(tuple(grads), variants["eager", name](0)(), rtol=1e-3, atol=1e-6)


def test_a_line_of_the_indexer_says_how_many_times_ours() -> None:
    case = indexer.Case(24, 2, 4, 2, 3, 8, 5, "made")
    ours: dict[str, float] = {}
    first = indexer.row_of(case, "streamkl", "forward", Outcome(Timing(1.0, 2.0, 3.0, 4), Memory(5)), ours)
    other = indexer.row_of(case, "eager", "forward", Outcome(Timing(1.5, 3.0, 3.5, 4)), ours)
    alone = indexer.row_of(case, "eager", "backward", Outcome(Timing(1.5, 3.0, 3.5, 4)), ours)
    assert [row["times_ours"] for row in (first, other, alone)] == [1.0, 1.5, None]
    assert [first[x] for x in ("ms", "p20", "p80", "samples", "extra_bytes", "lse")] == [2.0, 1.0, 3.0, 4, 5, "made"]
    assert other["extra_bytes"] is None
    assert indexer.line(alone).split() == ["24", "HI", "3", "eager", "backward", "3.000", "ms"]
    assert indexer.line(other).split() == ["24", "HI", "3", "eager", "forward", "3.000", "ms", "1.50", "times", "ours"]
    bad = indexer.row_of(case, "eager", "forward", Outcome(error="E: no"), ours)
    assert indexer.line(bad).endswith("E: no")


def test_cases_of_the_indexer() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    found = indexer.cases_of(parser.parse_args(["--op", "indexer_kl"]), "cuda")
    assert [(x.n, x.index_heads) for x in found] == [(n, h) for h in (8, 64) for n in (4096, 8192, 16384)]
    assert {x[1:4] + x[5:] for x in found} == {(1, 16, 1, 128, 128, "given")}
    words = "--op indexer_kl --sizes 16 --heads 4 --key-heads 2 --dims 6/5 --index-heads 3 --batch 7 --make-lse"
    assert indexer.cases_of(parser.parse_args(words.split()), "cpu") == [indexer.Case(16, 7, 4, 2, 3, 6, 5, "made")]


# --- sharded calls ---


def test_what_is_written_by_hand_over_ranks_is_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank; what its collectives do is torch's."""
    torch = pytest.importorskip("torch")

    def gather(out: Any, x: Any) -> None:
        out.copy_(x)

    dist = SimpleNamespace(all_gather_single=gather, reduce_scatter_single=gather)
    names = ("empty", "empty_like", "ones_like", "stack", "float64", "randn", "Generator")
    machine = context_parallel.MACHINES["cpu"]
    rank = context_parallel._Rank(
        SimpleNamespace(distributed=dist, **{name: getattr(torch, name) for name in names}), 0, 1, machine
    )
    full = rank._inputs((4, 2, 12), 5)
    assert [tuple(x.shape) for x in full] == [(1, 4, 12, 128), (1, 2, 12, 128)] * 2
    assert all(torch.equal(x, y) for x, y in zip(full, rank._inputs((4, 2, 12), 5), strict=True))
    forward, backward = rank._by_hand(full)
    rows = streamkl_cupy.attention_kl_forward(*full, causal=True)
    grads = streamkl_cupy.attention_kl_backward(torch.ones_like(rows.kl), *full, saved=rows, causal=True)
    teacher_k, student_k, parts = forward()
    torch.testing.assert_close((teacher_k, student_k), (full[1], full[3]))
    torch.testing.assert_close(torch.cat([part.kl for part in parts], -1), rows.kl)
    of_queries, of_keys = backward()
    torch.testing.assert_close(torch.cat(of_queries, -2), grads.student_q)
    torch.testing.assert_close(of_keys, grads.student_k)


def test_a_line_of_sharded_calls(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = dict.fromkeys(context_parallel.FIELDS)
    row |= {"heads": 8, "key_heads": 2, "tokens": 64, "strategy": "p2p", "forward_ms": 1.5, "backward_ms": 2.25}
    row |= {"forward_times_one": 1.25, "backward_times_one": 0.5}
    times = "forward 1.500 ms 1.25 x backward 2.250 ms 0.50 x"
    for more, how, end in (
        ({}, "p2p", ""),
        ({"ownership": "zigzag", "head_groups": 1}, "p2p, zigzag", ""),
        ({"ownership": "zigzag", "head_groups": 2, "mask": "window"}, "window: p2p, zigzag, 2 steps", ""),
        ({"right": True, "kl_off": 2e-7, "student_k_apart": 3e-3}, "p2p", " off 2e-07, 3e-03"),
        ({"right": False, "kl_off": 2e-1, "student_k_apart": 3e-3}, "p2p", " off 2e-01, 3e-03 WRONG"),
    ):
        context_parallel.show({**row, **more})
        assert " ".join(capsys.readouterr().out.split()) == f"8 over 2 x 64 {how} {times}{end}"


def test_turns_of_sharded_calls_are_medians_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = context_parallel._Rank(None, 0, 1, context_parallel.MACHINES["cpu"])
    clock = {"one": [8.0, 9.0, 10.0], "back": [1.0, 2.0, 30.0], "two": [3.0, 99.0, 2.0], "away": [4.0, 4.0, 8.0]}
    monkeypatch.setattr(rank, "_clock", lambda call: clock[call].pop(0))
    rows: list[dict[str, Any]] = [{}, {}]
    rank._take_turns(rows, [("one", "back"), ("two", "away")])
    assert rows == [
        {"forward_ms": 9.0, "backward_ms": 2.0, "forward_times_one": 1.0, "backward_times_one": 1.0},
        {"forward_ms": 3.0, "backward_ms": 4.0, "forward_times_one": 3.0, "backward_times_one": 0.5},
    ]
