"""Exact KL between attention rows over a million keys on one GPU, and its gradients over a quarter of that.

Written out, one head's pair of attention matrices at N = 1,048,576 would fill 8 TiB. Here the extra memory is three
numbers per row. The forward runs in chunks of query rows, so that there is progress to see; each chunk is exact by
itself. The second part is one call for the loss and its gradients to the student's queries and keys. Random rows are
checked against float64.

    python examples/long_context.py
    python examples/long_context.py --cpu --forward 4096 --backward 2048
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np
from _shared import array_library, install, need, whole

Array = Any  # numpy.ndarray or cupy.ndarray


class Memory:
    """Peak of the memory taken since the start: from CuPy's pool and from the driver, or by NumPy."""

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        if xp is np:
            tracemalloc.start()
            return
        xp.cuda.runtime.deviceSynchronize()
        self.pool = xp.get_default_memory_pool()
        self.pool.free_all_blocks()
        self.base, self.free = self.pool.total_bytes(), xp.cuda.runtime.memGetInfo()[0]

    def peak(self) -> int:
        """Bytes. The pool gives nothing back by itself, so what it holds now is the most it has held."""
        if self.xp is np:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak
        self.xp.cuda.runtime.deviceSynchronize()
        return max(self.pool.total_bytes() - self.base, self.free - self.xp.cuda.runtime.memGetInfo()[0])


def inputs(xp: ModuleType, n: int, dim: int, seed: int) -> list[Array]:
    """Queries and keys of a teacher and of a student, normal, in half precision."""
    rng = xp.random.default_rng(seed)
    return [rng.standard_normal((n, dim), dtype=np.float32).astype(np.float16) for _ in range(4)]


def host(x: Array) -> np.ndarray:
    return (x if isinstance(x, np.ndarray) else x.get()).astype(np.float64)


def exact_rows(arrays: list[Array], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL of a few rows in float64, and their dense student gradient to the queries for a loss that sums rows."""
    logs = []
    for q, k in (arrays[:2], arrays[2:]):
        logits = host(q[rows]) @ host(k).T * q.shape[-1] ** -0.5
        logits -= logits.max(axis=-1, keepdims=True)
        logs.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    p, q = np.exp(logs[0]), np.exp(logs[1])
    return (p * (logs[0] - logs[1])).sum(axis=-1), (q - p) @ host(arrays[3]) * arrays[3].shape[-1] ** -0.5


def report(what: str, n: int, seconds: float, flops: float, memory: int, matrices: int) -> None:
    """`matrices` float32 matrices of n x n elements are the least that writing the logits out would hold at once."""
    print(
        f"{what}, N = {n:,}: {seconds:.3f} s, {flops / seconds / 1e12:.1f} TFLOP/s, "
        f"{memory / 2**20:.1f} MiB of extra memory; written out {4 * matrices * n * n / 2**30:,.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/long_context.py --cpu --forward 4096 --backward 2048",
    )
    parser.add_argument("--forward", type=whole(1), default=1 << 20, metavar="N", help="rows and keys (%(default)s)")
    parser.add_argument(
        "--backward", type=whole(2), default=1 << 18, metavar="N", help="of the part with gradients (%(default)s)"
    )
    parser.add_argument(
        "--dim", type=whole(1, 256), default=64, metavar="D", help="head dimension of both sides (%(default)s)"
    )
    parser.add_argument(
        "--chunk", type=whole(1), default=1 << 16, metavar="N", help="query rows per step of the bar (%(default)s)"
    )
    parser.add_argument("--seed", type=whole(0), metavar="N", help="of the inputs; default: new ones each time")
    parser.add_argument("--cpu", action="store_true", help="use NumPy even where a GPU is usable")
    options = parser.parse_args()
    xp = array_library(options.cpu)
    if xp is np and max(options.forward, options.backward) > 1 << 16:
        parser.error("no GPU here, and the CPU would take hours; add --cpu --forward 4096 --backward 2048")
    streamkl = need("streamkl_cupy", install())
    tqdm = need("tqdm", install("examples")).tqdm
    seed = int(np.random.default_rng(options.seed).integers(2**31))

    def synchronize() -> None:
        if xp is not np:
            xp.cuda.runtime.deviceSynchronize()

    n, dim = options.forward, options.dim
    print(f"{xp.__name__} arrays, float16, one head, D = {dim}, seed {seed}")
    tq, tk, sq, sk = inputs(xp, n, dim, seed)
    streamkl.attention_kl(tq[: options.chunk], tk, sq[: options.chunk], sk)  # compiles and loads the kernel
    if n % options.chunk:
        streamkl.warmup(tq[-(n % options.chunk) :], tk, sq[-(n % options.chunk) :], sk)
    memory = Memory(xp)
    kl = xp.empty(n, "float32")
    synchronize()
    start = time.perf_counter()
    with tqdm(total=n, unit="row", unit_scale=True) as bar:
        for first in range(0, n, options.chunk):
            rows = slice(first, first + options.chunk)
            kl[rows] = streamkl.attention_kl(tq[rows], tk, sq[rows], sk)
            synchronize()
            bar.update(len(tq[rows]))
    report("forward", n, time.perf_counter() - start, 4.0 * n * n * dim, memory.peak(), 2)
    some = np.random.default_rng(seed).integers(n, size=3)
    error = float(np.abs(host(kl[some]) - exact_rows([tq, tk, sq, sk], some)[0]).max())
    print(f"mean KL {float(kl.mean()):.4f} nats; rows {some.tolist()} against float64: largest error {error:.1e} nats")
    assert error < 1e-5, "the forward is wrong"

    n = options.backward
    arrays = inputs(xp, n, dim, seed + 1)
    streamkl.attention_kl_value_and_grad(*arrays, reduction="sum")
    memory = Memory(xp)
    synchronize()
    start = time.perf_counter()
    # The sum: gradients of a mean over this many rows would be too small for float16.
    value, grads = streamkl.attention_kl_value_and_grad(*arrays, reduction="sum")
    synchronize()
    report("forward and backward", n, time.perf_counter() - start, 12.0 * n * n * dim, memory.peak(), 3)
    some = np.random.default_rng(seed).integers(n, size=3)
    want = exact_rows(arrays, some)[1]
    error = float(np.linalg.norm(host(grads.student_q[some]) - want) / np.linalg.norm(want))
    print(f"mean KL {float(value) / n:.4f} nats; gradient of these rows against float64: relative error {error:.1e}")
    assert error < 2e-3, "the gradient is wrong"
    print("Exact, and without a matrix.")


if __name__ == "__main__":
    main()
