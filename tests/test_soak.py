"""A long run under pressure: many shapes, two threads on two streams, hardly any memory left, nothing grows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES, STUDENT
from streamkl_cupy.testing import problems

CALLS = 1000
LEFT_FREE = 2 << 30

SHAPES: tuple[dict[str, Any], ...] = (
    {"M": 1, "N": 1, "D_t": 16},
    {"M": 64, "N": 64, "D_t": 64, "H": 3},
    {"M": 129, "N": 1000, "D_t": 128, "D_s": 64, "H": 4, "student_key_heads": 2},
    {"M": 777, "N": 513, "D_t": 80, "B": 2},
    {"M": 1024, "N": 1024, "D_t": 128, "H": 8, "causal": True},
    {"M": 300, "N": 2048, "D_t": 64, "H": 2, "causal": True, "dtypes": "float32"},
    {"M": 256, "N": 256, "D_t": 256, "D_s": 128},
    {"M": 100, "N": 300, "D_t": 576, "D_s": 128, "H": 2},
    {"M": 4096, "N": 4096, "D_t": 64},
    {"M": 0, "N": 5, "D_t": 32},
    {"M": 5, "N": 0, "D_t": 32},
)


def handles() -> int:
    """Open files of this process: sockets, devices and libraries all count."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


class Job:
    """One problem on the GPU, with the results of its first, undisturbed call."""

    def __init__(self, number: int, shape: dict[str, Any], put: Any) -> None:
        case = problems.make(seed=number, **{"dtypes": "float16", **shape})
        types = [np.dtype(name) for name in case.dtype_of_inputs]
        self.inputs = [put(x.astype(dtype)) for x, dtype in zip(case.arrays, types)]
        self.options = {**case.options, "deterministic": True, "reduction": "sum"}
        self.wrt = STUDENT if shape["D_t"] > 256 else INPUT_NAMES
        self.expected = self.bits()

    def bits(self) -> list[bytes]:
        value, grads = streamkl_cupy.attention_kl_value_and_grad(*self.inputs, wrt=self.wrt, **self.options)
        results = [value, *(getattr(grads, name) for name in self.wrt)]
        return [np.asarray(x.cpu() if hasattr(x, "cpu") else x.get()).tobytes() for x in results]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_a_thousand_calls_under_pressure(framework: str) -> None:
    cupy = pytest.importorskip("cupy")
    if framework == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA")
        put, stream_type, use = (lambda x: torch.from_numpy(x).cuda()), torch.cuda.Stream, torch.cuda.stream
        in_use, release = torch.cuda.memory_allocated, torch.cuda.empty_cache
    else:
        put, stream_type = cupy.asarray, lambda: cupy.cuda.Stream(non_blocking=True)
        pool = cupy.get_default_memory_pool()
        use, in_use, release = (lambda stream: stream), pool.used_bytes, pool.free_all_blocks
    jobs = [Job(number, shape, put) for number, shape in enumerate(SHAPES)]
    runtime = cupy.cuda.runtime

    def at_rest() -> tuple[int, int, int]:
        runtime.deviceSynchronize()
        release()
        return in_use(), runtime.memGetInfo()[0], handles()

    release()
    ballast = runtime.malloc(max(runtime.memGetInfo()[0] - LEFT_FREE, 1 << 20))
    try:
        failures: list[str] = []

        def work(seed: int, calls: int) -> None:
            try:
                rng = np.random.default_rng(seed)
                with use(stream_type()):
                    for _ in range(calls):
                        job = jobs[rng.integers(len(jobs))]
                        if job.bits() != job.expected:
                            failures.append(f"other bits for {[x.shape for x in job.inputs]}")
            except Exception as error:
                failures.append(repr(error))

        def both(calls: int) -> None:
            threads = [threading.Thread(target=work, args=(seed, calls // 2)) for seed in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures[:3]

        # The first calls on new threads and streams make what later ones share.
        both(CALLS // 10)
        before = at_rest()
        both(CALLS)
        after = at_rest()
    finally:
        runtime.free(ballast)
    assert after[0] <= before[0], "memory in use grew"
    # The driver hands out memory in pieces of 2 MiB.
    assert after[1] >= before[1] - (4 << 20), "the driver's free memory shrank"
    assert after[2] <= before[2], "open handles grew"
