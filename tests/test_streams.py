"""Order and lifetime on the GPU: streams, threads, memory that is reused early, and CUDA graphs.

A late or missing dependency shows only when the producer is late. So producers here sit behind a kernel that spins for
a few milliseconds, and memory that a call should still own is overwritten as soon as its owner lets go of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import attention_kl, attention_kl_backward, attention_kl_forward, warmup
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.gpu

CYCLES = 10_000_000  # about 6 ms
SHAPE = (1, 4, 256, 64)


def numbers(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float16) for _ in INPUT_NAMES]


def expected_kl(values: list[Any], **options: Any) -> Any:
    return reference.forward(*values, **options).kl


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == e.shape
    error = np.linalg.norm(a - e)
    assert error <= tolerance * np.linalg.norm(e), f"relative error {error / np.linalg.norm(e):.3g}"


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    torch.cuda.synchronize()
    return torch


@pytest.fixture
def cupy() -> Any:
    import cupy

    cupy.cuda.Device().synchronize()
    return cupy


@pytest.fixture
def spin(cupy: Any) -> Callable[[], None]:
    """Keeps CuPy's current stream busy."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    return lambda: kernel((1,), (1,), (np.int64(CYCLES),))


@pytest.fixture
def jax() -> Iterator[Any]:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")
    with jax.default_device(device):
        yield jax


# Streams


def test_torch_producer_on_the_same_side_stream(torch: Any) -> None:
    values = numbers()
    source = [torch.from_numpy(v).cuda() for v in values]
    expected = attention_kl_forward(*source).kl
    close(expected.cpu(), expected_kl(values))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(50):
        late = [torch.zeros_like(s) for s in source]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES // 10)
            for x, s in zip(late, source):
                x.copy_(s)
            kl = attention_kl_forward(*late).kl
        side.synchronize()
        assert torch.equal(kl, expected)


def test_torch_producer_on_another_stream(torch: Any) -> None:
    values = numbers()
    source = [torch.from_numpy(v).cuda() for v in values]
    expected = attention_kl_forward(*source).kl
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    late = [torch.zeros_like(s) for s in source]
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(producer):
            for x in late:
                x.zero_()
            torch.cuda._sleep(CYCLES // 10)
            for x, s in zip(late, source):
                x.copy_(s)
        consumer.wait_stream(producer)
        with torch.cuda.stream(consumer):
            kl = attention_kl_forward(*late).kl
            grads = attention_kl_backward(torch.ones_like(kl), *late, saved=attention_kl_forward(*late))
        producer.wait_stream(consumer)
        assert grads.student_q.shape == late[2].shape
        consumer.synchronize()
        assert torch.equal(kl, expected)


def test_torch_result_is_used_at_once(torch: Any) -> None:
    """On the caller's stream nothing but the stream's own order is needed."""
    source = [torch.from_numpy(v).cuda() for v in numbers()]
    expected = attention_kl_forward(*source).kl.sum().item()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        used = attention_kl(*source).sum()
    torch.cuda.current_stream().wait_stream(side)
    assert used.item() == pytest.approx(expected, rel=1e-6)


def test_torch_autograd_runs_on_the_streams_of_the_forward(torch: Any) -> None:
    values = numbers()
    source = [torch.from_numpy(v).cuda() for v in values]
    expected = reference.backward(np.ones(SHAPE[:3]), *values).value.student_q
    late = torch.zeros_like(source[2]).requires_grad_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        with torch.no_grad():
            late.copy_(source[2])
        loss = attention_kl(source[0], source[1], late, source[3], reduction="sum")
    loss.backward()
    torch.cuda.synchronize()
    close(late.grad.cpu(), expected, 1e-3)


def test_torch_memory_is_reused_only_in_stream_order(torch: Any) -> None:
    """2,000 calls on alternating streams; inputs are overwritten and freed right after the call."""
    sets = [numbers((1, 2, 96, 64), seed) for seed in range(4)]
    source = [[torch.from_numpy(v).cuda() for v in values] for values in sets]
    expected = [attention_kl_forward(*x).kl for x in source]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    worst = [torch.zeros((), device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for i in range(2000):
        which, s = i % 4, (i // 3) % 2
        with torch.cuda.stream(streams[s]):
            inputs = [x.clone() for x in source[which]]
            kl = attention_kl_forward(*inputs).kl
            for x in inputs:
                x.fill_(torch.nan)
            del inputs, x
            torch.maximum(worst[s], (kl - expected[which]).abs().max(), out=worst[s])
            if i % 5 == 0:  # a result that another stream reads, and that is dropped while it does
                other = streams[1 - s]
                other.wait_stream(streams[s])
                kl.record_stream(other)
                with torch.cuda.stream(other):
                    torch.maximum(worst[1 - s], (kl - expected[which]).abs().max(), out=worst[1 - s])
            del kl
    torch.cuda.synchronize()
    assert [w.item() for w in worst] == [0, 0]


def test_torch_inputs_dropped_at_once(torch: Any) -> None:
    source = [torch.from_numpy(v).cuda() for v in numbers()]
    expected = attention_kl_forward(*source).kl
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        inputs = [x.clone() for x in source]
        torch.cuda._sleep(CYCLES // 10)
        kl = attention_kl_forward(*inputs).kl
        del inputs
        with torch.cuda.stream(side):
            garbage = [torch.full_like(x, torch.nan) for x in source for _ in range(2)]
        same_stream = [torch.full_like(x, torch.nan) for x in source for _ in range(2)]
        torch.cuda.synchronize()
        assert torch.equal(kl, expected)
        del garbage, same_stream


def test_cupy_producer_on_the_current_stream(cupy: Any, spin: Callable[[], None]) -> None:
    source = [cupy.asarray(v) for v in numbers()]
    expected = attention_kl_forward(*source).kl
    late = [cupy.zeros_like(s) for s in source]
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        with side:
            for x in late:
                x.fill(0)
            spin()
            for x, s in zip(late, source):
                x[...] = s
            kl = attention_kl_forward(*late).kl
            total = kl.sum()
        side.synchronize()
        assert (kl == expected).all()
        assert float(total) == pytest.approx(float(expected.sum()), rel=1e-6)


class Foreign:
    """An array of a framework that fills its arrays on a stream of its own, and says what it was asked."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array, self.stream, self.asked = array, stream, []

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return FOREIGN

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.asked.append(stream)
        with self.stream:  # CuPy orders the consumer after its current stream
            return self.array.__dlpack__(stream=stream, **options)


def _taken(x: Any) -> Foreign:
    cupy = sys.modules["cupy"]
    return Foreign(cupy.from_dlpack(x), cupy.cuda.get_current_stream())


FOREIGN = SimpleNamespace(from_dlpack=_taken)


def test_foreign_producer_is_waited_for(cupy: Any, spin: Callable[[], None]) -> None:
    source = [cupy.asarray(v) for v in numbers()]
    expected = attention_kl_forward(*source).kl
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    late = [cupy.zeros_like(s) for s in source]
    attention_kl_forward(*(Foreign(x, producer) for x in late))  # of a type that is new, the first is looked at twice
    cupy.cuda.Device().synchronize()
    for _ in range(10):
        with producer:
            for x in late:
                x.fill(0)
            spin()
            for x, s in zip(late, source):
                x[...] = s
        foreign = [Foreign(x, producer) for x in late]
        with consumer:
            kl = attention_kl_forward(*foreign).kl
        consumer.synchronize()
        assert isinstance(kl, Foreign)
        assert (kl.array == expected).all()
        # The capsule is taken once, and the stream is named: None and -1 leave the order to chance.
        assert all(f.asked == [consumer.ptr] for f in foreign)


def test_foreign_memory_is_held_until_it_was_read(cupy: Any, spin: Callable[[], None]) -> None:
    source = [cupy.asarray(v) for v in numbers()]
    expected = attention_kl_forward(*source).kl
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    for _ in range(10):
        with producer:
            foreign = [Foreign(x.copy(), producer) for x in source]
        with consumer:
            spin()
            kl = attention_kl_forward(*foreign).kl
        del foreign
        with producer:  # the pool gives freed memory of this stream right back
            garbage = [cupy.full_like(x, cupy.nan) for x in source for _ in range(2)]
        cupy.cuda.Device().synchronize()
        assert (kl.array == expected).all()
        del garbage


def test_threads_have_streams_of_their_own(torch: Any, cupy: Any) -> None:
    values = numbers()
    source = [torch.from_numpy(v).cuda() for v in values]
    warmup(*source)
    expected = attention_kl_forward(*source).kl
    torch.cuda.synchronize()
    failures: list[str] = []
    start = threading.Barrier(4)

    def by_torch(number: int) -> None:
        stream = torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            for i in range(100):
                inputs = [torch.zeros_like(x) for x in source]
                torch.cuda._sleep(CYCLES // 100)
                for x, s in zip(inputs, source):
                    x.copy_(s)
                kl = attention_kl_forward(*inputs).kl
                if not torch.equal(kl, expected):
                    failures.append(f"torch thread {number}, call {i}")

    def by_cupy(number: int) -> None:
        start.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for i in range(100):
                kl = attention_kl_forward(*(cupy.asarray(v) for v in values)).kl
                right = cupy.asarray(expected)
                stream.synchronize()
                if not (kl == right).all():
                    failures.append(f"CuPy thread {number}, call {i}")

    threads = [threading.Thread(target=f, args=(i,)) for i, f in enumerate((by_torch, by_torch, by_cupy, by_cupy))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("per_thread", ["0", "1"])
def test_default_streams_of_a_process(per_thread: str, cupy: Any) -> None:
    """Legacy and per-thread default stream, which CuPy picks by an environment variable when it is imported."""
    program = textwrap.dedent(
        """
        import sys
        import numpy as np, cupy
        import streamkl_cupy
        rng = np.random.default_rng(0)
        values = [rng.standard_normal((1, 2, 128, 64)).astype(np.float16) for _ in range(4)]
        right = streamkl_cupy.attention_kl(*values)
        for _ in range(20):
            got = streamkl_cupy.attention_kl(*(cupy.asarray(v) for v in values))
            assert np.allclose(got.get(), right, rtol=1e-4, atol=1e-5)
        try:
            import torch
        except ImportError:
            sys.exit()
        for _ in range(20):
            got = streamkl_cupy.attention_kl(*(torch.from_numpy(v).cuda() for v in values))
            assert np.allclose(got.cpu().numpy(), right, rtol=1e-4, atol=1e-5)
        """
    )
    environment = {**os.environ, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": per_thread}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_current_device_is_restored(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    values = numbers()
    with cupy.cuda.Device(1):
        there = [cupy.asarray(v) for v in values]
        bad = cupy.zeros((1, 4, 256, 32), np.float16)
    with cupy.cuda.Device(0):
        kl = attention_kl_forward(*there).kl
        assert cupy.cuda.runtime.getDevice() == 0
        assert kl.device.id == 1
        with pytest.raises(ValueError, match="student_k"):
            attention_kl_forward(*there[:3], bad)
        assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        close(kl.get(), expected_kl(values))


# JAX


def test_jax_producer_is_not_awaited(jax: Any) -> None:
    import jax.numpy as jnp

    values = numbers()
    source = [jnp.asarray(v) for v in values]

    @jax.jit
    def slow(x: Any, square: Any) -> Any:
        square = jax.lax.fori_loop(0, 50, lambda i, s: jnp.tanh(s @ s), square)
        return x + (square[0, 0] * 0).astype(x.dtype)

    square = jnp.asarray(np.random.default_rng(1).standard_normal((2048, 2048)), jnp.float32)
    expected = attention_kl_forward(*source).kl
    close(expected, expected_kl(values))
    for _ in range(50):
        kl = attention_kl_forward(*(slow(x, square) for x in source)).kl
        assert (kl == expected).all()


def test_jax_donation_and_deletion(jax: Any) -> None:
    """200 steps whose buffers XLA takes back at once, with the caller deleting others in between."""
    import functools

    import jax.numpy as jnp

    values = [v.astype(np.float32) for v in numbers((1, 2, 64, 64))]
    teacher = [jnp.asarray(v) for v in values[:2]]

    def loss(q: Any, k: Any) -> Any:
        return attention_kl(*teacher, q, k, reduction="mean")

    def step(q: Any, k: Any) -> Any:
        grads = jax.grad(loss, (0, 1))(q, k)
        return q - grads[0], k - grads[1]

    donating = jax.jit(step, donate_argnums=(0, 1))
    keeping = jax.jit(functools.partial(step))
    given = [jnp.array(v) for v in values[2:]]
    kept = [jnp.array(v) for v in values[2:]]
    for i in range(200):
        given = list(donating(*given))
        kept = list(keeping(*kept))
        scratch = jnp.full_like(given[0], jnp.nan)
        value = loss(*given)
        scratch.delete()
        if i % 10 == 0:
            assert jnp.isfinite(value)
    for a, b in zip(given, kept):
        close(a, b, 1e-4)
    assert float(loss(*given)) < float(loss(*(jnp.asarray(v) for v in values[2:])))


def test_jax_scan_of_many_calls(jax: Any) -> None:
    import jax.numpy as jnp

    values = numbers((1, 2, 64, 64))
    x = [jnp.asarray(v) for v in values]

    def body(carry: Any, scale: Any) -> Any:
        return carry, attention_kl(x[0], x[1], x[2] * scale.astype(x[2].dtype), x[3], reduction="sum")

    scales = jnp.asarray([0.5, 1, 2, 1] * 25, jnp.float32)
    _, sums = jax.jit(lambda s: jax.lax.scan(body, 0, s))(scales)
    for i, c in enumerate((0.5, 1, 2, 1)):
        right = expected_kl([values[0], values[1], values[2] * np.float16(c), values[3]]).sum()
        close(sums[i::4], np.full(25, right), 1e-4)


# CUDA graphs


def test_torch_graph_after_warmup(torch: Any) -> None:
    sets = [numbers(seed=s) for s in range(4)]
    static = [torch.from_numpy(v).cuda() for v in sets[0]]
    grad = torch.ones(SHAPE[:3], device="cuda")
    warmup(*static, causal=True, wrt=INPUT_NAMES)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = attention_kl_forward(*static, causal=True)
        grads = attention_kl_backward(grad, *static, saved=rows, wrt=INPUT_NAMES, causal=True)
    allocated = None
    for i in range(10):
        values = sets[i % 4]
        for x, v in zip(static, values):
            x.copy_(torch.from_numpy(v))
        graph.replay()
        eager = attention_kl_forward(*static, causal=True)
        assert torch.equal(rows.kl, eager.kl)
        close(rows.kl.cpu(), expected_kl(values, causal=True))
        right = attention_kl_backward(grad, *static, saved=eager, wrt=INPUT_NAMES, causal=True)
        for a, b in zip(grads, right):
            close(a.float().cpu(), b.float().cpu(), 1e-3)
        del eager, right, a, b
        torch.cuda.synchronize()
        allocated = allocated or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == allocated


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch's word on leaves made on another stream
def test_torch_graph_with_autograd_and_a_weighted_mean(torch: Any) -> None:
    values = numbers()
    static = [torch.from_numpy(v).cuda() for v in values]
    static[2].requires_grad_()
    weight = torch.rand(SHAPE[2], device="cuda")

    def step() -> Any:
        loss = attention_kl(*static, row_weight=weight, reduction="mean")
        return loss, *torch.autograd.grad(loss, static[2])

    warmup(*static)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch's own first-time work, such as cuBLAS handles, is not ours to prepare
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step()
    for _ in range(3):
        with torch.no_grad():
            static[2].mul_(0.9)
        weight.uniform_()
        graph.replay()
        expected = step()
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6)
        close(grad.float().cpu(), expected[1].float().cpu(), 1e-3)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch's word on leaves made on another stream
def test_torch_make_graphed_callables(torch: Any) -> None:
    values = numbers()
    x = [torch.from_numpy(v).cuda() for v in values]

    class Loss(torch.nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return attention_kl(x[0], x[1], q, k, reduction="sum")

    warmup(*x)
    sample = [t.clone().requires_grad_() for t in x[2:]]
    graphed = torch.cuda.make_graphed_callables(Loss(), tuple(sample))
    for scale in (1.0, 0.5):
        q, k = ((t * scale).requires_grad_() for t in x[2:])
        loss = graphed(q, k)
        loss.backward()
        plain_q, plain_k = (t.detach().clone().requires_grad_() for t in (q, k))
        plain = Loss()(plain_q, plain_k)
        plain.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
        close(q.grad.float().cpu(), plain_q.grad.float().cpu(), 1e-3)
        close(k.grad.float().cpu(), plain_k.grad.float().cpu(), 1e-3)


def test_torch_cold_capture_is_refused_and_leaves_things_usable(torch: Any) -> None:
    values = numbers((1, 3, 67, 40))  # a shape that nothing else here uses, so nothing of it is loaded
    x = [torch.from_numpy(v).cuda() for v in values]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(streamkl_cupy.CaptureError, match="warmup"), torch.cuda.graph(graph):
        attention_kl_forward(x[0] * 1, *x[1:])  # the product: torch warns of a graph without a node
    close(attention_kl_forward(*x).kl.cpu(), expected_kl(values))
    torch.cuda.synchronize()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        kl = attention_kl_forward(*x).kl
    x[2].mul_(0.5)
    again.replay()
    close(kl.cpu(), expected_kl([*values[:2], values[2] * np.float16(0.5), values[3]]))


def test_cupy_graph(cupy: Any) -> None:
    sets = [numbers(seed=s) for s in range(3)]
    static = [cupy.asarray(v) for v in sets[0]]
    grad = cupy.ones(SHAPE[:3], np.float32)
    warmup(*static)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Fills the pool of this stream: memory that the pool would have to get from CUDA cannot be had in a capture.
        first = attention_kl_forward(*static)
        first_grads = attention_kl_backward(grad, *static, saved=first)
        stream.synchronize()
        del first, first_grads
        stream.begin_capture()
        rows = attention_kl_forward(*static)
        grads = attention_kl_backward(grad, *static, saved=rows)
        graph = stream.end_capture()
        for values in sets:
            for x, v in zip(static, values):
                x.set(v)
            graph.launch(stream)
            stream.synchronize()
            close(rows.kl.get(), expected_kl(values))
            right = reference.backward(np.ones(SHAPE[:3]), *values).value
            close(grads.student_q.get(), right.student_q, 1e-3)
            close(grads.student_k.get(), right.student_k, 1e-3)


def test_cupy_cold_capture_is_refused_and_leaves_things_usable(cupy: Any) -> None:
    values = numbers((1, 3, 71, 40))
    x = [cupy.asarray(v) for v in values]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(streamkl_cupy.CaptureError, match="warmup"):
                attention_kl_forward(*x)
        finally:
            stream.end_capture()
        kl = attention_kl_forward(*x).kl
        stream.synchronize()
    close(kl.get(), expected_kl(values))
