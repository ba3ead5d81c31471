"""A small matrix of problems to run under compute-sanitizer; `make sanitize` does, with each of its tools.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --every-lane
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py --plant   # must fail

Every kernel family, full and ragged tiles, vector and element-wise loads, masks, grouped heads, split keys, split
lists, all four gradients. Kernels let one lane arrive at a barrier for its warp, which racecheck takes for a race of
the others: with `--every-lane` all of them arrive. `--plant` adds one store beyond an allocation, to show that the run
would have noticed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import cupy
import numpy as np

import streamkl_cupy
from streamkl_cupy import call, patterns, planning
from streamkl_cupy.kernels import KERNELS, gpus, sm90, work_tiles
from streamkl_cupy.problem import INPUT_NAMES, STUDENT

PLANTED = 'extern "C" __global__ void planted(float* x, int n) { x[n + threadIdx.x] = 1.0f; }'


class Problem(NamedTuple):
    """Extents, types, options, and whether inner strides are 2."""

    B: int
    H: int
    M: int
    teacher_heads: int
    student_heads: int
    N: int
    D_t: int
    D_s: int
    dtype: str = "float16"
    options: Mapping[str, Any] = MappingProxyType({})
    strided: bool = False
    name: str = ""

    def __str__(self) -> str:
        about = self.name or str(dict(self.options))
        return f"{about} M={self.M} N={self.N} D={self.D_t}/{self.D_s} {self.dtype}"


def ints(*values: int) -> Any:
    return cupy.asarray(values, cupy.int32)


def problems(quick: bool) -> Iterator[Problem]:
    dims = [(64, 64), (128, 128), (40, 72), *([] if quick else [(192, 128), (256, 256), (576, 128)])]
    for (D_t, D_s), dtype in itertools.product(dims, ("float16", "float32")):
        for M, N, causal in ((1, 1, False), (130, 77, True), (65, 200, False), (300, 333, True)):
            yield Problem(2, 4, M, 2, 1, N, D_t, D_s, dtype, {"causal": causal})
    yield Problem(1, 2, 70, 2, 2, 90, 64, 64, options={"causal": True, "q_offset": -20}, strided=True)
    yield Problem(1, 1, 3, 1, 1, 5000, 64, 64)
    for M, teacher_heads, student_heads in ((16, 2, 2), (5, 1, 2), (40, 2, 1)):  # packed, mostly
        for D, options in ((64, {"causal": True}), (128, {"window": (700, 0)}), (64, {"key_lengths": ints(900, 0)})):
            yield Problem(2, 6, M, teacher_heads, student_heads, 1300, D, D, options=options, name="few")
    # The keys of a head in several tiles, and in one.
    for N, D_t, D_s in ((333, 64, 64), (333, 128, 128), (77, 64, 64), *(() if quick else ((333, 576, 128),))):
        pattern = patterns.from_dense(
            np.random.default_rng(1).random((4, 7, -(-N // 48))) < 0.3, queries=301, keys=N, block=(48, 48)
        )
        masks: dict[str, dict[str, Any]] = {
            "window": {"window": (40, 9)},
            "lengths": {"key_lengths": ints(0, min(N, 200)), "causal": True},
            "padded": {"key_lengths": ints(30, min(N, 200)), "query_lengths": ints(100, 7), "causal": True},
            "keys": {"key_mask": cupy.random.random((2, N)) < 0.5},
            "rows": {"query_mask": cupy.random.random((2, 301)) < 0.5, "window": (40, 9)},
            "blocks": {"block_mask": pattern, "causal": True},
            "packed": {
                "cu_seqlens_q": ints(0, 0, 270, 301),
                "cu_seqlens_k": ints(0, 50, min(N, 250), min(N, 320)),
                "causal": True,
            },
        }
        for name, options in masks.items():
            yield Problem(2, 4, 301, 2, 1, N, D_t, D_s, options=options, name=name)
    yield Problem(1, 140, 70, 140, 140, 197, 64, 64)  # in one of 256 keys


def run(families: tuple[str, ...], quick: bool, only: str) -> int:
    planning.KERNELS = {kind: tuple(x for x in kernels if x.family in families) for kind, kernels in KERNELS.items()}
    work_tiles.MIN_TILES_IN_LIST = 2  # small lists are split as long ones are
    planning.make_plan.cache_clear()
    planning._unsplit_plan.cache_clear()
    call._looks.clear()
    call._checked.clear()
    call._runners.clear()
    count = 0
    for x in problems(quick):
        if only not in str(x):
            continue
        count += 1
        step = 2 if x.strided else 1
        shapes = ((x.H, x.M, x.D_t), (x.teacher_heads, x.N, x.D_t), (x.H, x.M, x.D_s), (x.student_heads, x.N, x.D_s))
        if x.name == "packed":
            shapes = tuple((rows, heads, dim) for heads, rows, dim in shapes)
        else:
            shapes = tuple((x.B, *shape) for shape in shapes)
        inputs = [cupy.random.standard_normal((*s[:-1], s[-1] * step)).astype(x.dtype)[..., ::step] for s in shapes]
        rows = streamkl_cupy.attention_kl_forward(*inputs, **x.options)
        wrt = INPUT_NAMES if x.D_t <= 256 else STUDENT
        for deterministic in (True, False):
            grads = streamkl_cupy.attention_kl_backward(
                cupy.ones_like(rows.kl), *inputs, saved=rows, wrt=wrt,
                deterministic=deterministic, **x.options,
            )  # fmt: skip
            if not all(bool(cupy.isfinite(y).all()) for y in (rows.kl, *grads) if y is not None):
                raise SystemExit(f"not finite: {x}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", action="store_true", help="end with a store out of bounds")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="problems whose description has it, such as 'packed M=301'"
    )
    parser.add_argument("--every-lane", action="store_true", help="let all lanes arrive at barriers, for racecheck")
    parser.add_argument("--quick", action="store_true", help="fewer head dims")
    args = parser.parse_args()
    if args.every_lane:
        sm90.ARRIVING_LANES = 32
    # Each array its own allocation: inside a pool's chunk a stray access would go unseen.
    cupy.cuda.set_allocator(None)
    capability = gpus.device_facts(cupy.cuda.Device().id)
    for families in (("sm90", "sm80"), ("sm80",)):
        count = run(families, args.quick, args.only)
        print(f"{capability.name}: {count} problems with kernels of {' and '.join(families)}")
    if args.plant:
        x = cupy.empty(8, cupy.float32)
        cupy.RawKernel(PLANTED, "planted")((1,), (32,), (x, 1 << 20))
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
