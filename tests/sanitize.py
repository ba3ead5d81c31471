"""A small matrix of problems to run under compute-sanitizer; `make sanitize` does, with each of its tools.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py --plant   # must fail

Every kernel family, full and ragged tiles, vector and element-wise loads, masks, grouped heads, split keys, all four
gradients. `--plant` adds one store beyond an allocation, to show that the run would have noticed.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import cupy

import streamkl_cupy
import streamkl_cupy.launch
from streamkl_cupy import arch, calls, planning
from streamkl_cupy.problem import INPUT_NAMES, STUDENT

PLANTED = 'extern "C" __global__ void planted(float* x, int n) { x[n + threadIdx.x] = 1.0f; }'


def problems(quick: bool) -> Any:
    dims = [(64, 64), (128, 128), (40, 72)] if quick else [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)]
    for (D_t, D_s), dtype in itertools.product(dims, ("float16", "float32")):
        for M, N, causal in ((1, 1, False), (130, 77, True), (65, 200, False)):
            yield (2, 4, M, 2, 1, N, D_t, D_s, dtype, {"causal": causal}, False)
    yield (1, 2, 70, 2, 2, 90, 64, 64, "float16", {"causal": True, "q_offset": -20}, True)
    yield (1, 1, 3, 1, 1, 5000, 64, 64, "float16", {}, False)


def run(families: tuple[arch.Family, ...], quick: bool) -> int:
    planning.families = lambda: families
    planning.make_plan.cache_clear()
    calls._ready.clear()
    calls._runners.clear()
    count = 0
    for B, H, M, H_t, H_s, N, D_t, D_s, dtype, options, strided in problems(quick):
        shapes = ((B, H, M, D_t), (B, H_t, N, D_t), (B, H, M, D_s), (B, H_s, N, D_s))
        step = 2 if strided else 1
        inputs = [cupy.random.standard_normal((*s[:3], s[3] * step)).astype(dtype)[..., ::step] for s in shapes]
        rows = streamkl_cupy.attention_kl_forward(*inputs, **options)
        wrt = INPUT_NAMES if D_t <= 256 else STUDENT
        for deterministic in (True, False):
            grads = streamkl_cupy.attention_kl_backward(
                cupy.ones_like(rows.kl), *inputs, rows.teacher_lse, rows.student_lse, rows.kl, wrt=wrt,
                deterministic=deterministic, **options,
            )  # fmt: skip
            if not all(bool(cupy.isfinite(x).all()) for x in (rows.kl, *grads) if x is not None):
                raise SystemExit(f"not finite: {shapes}, {dtype}, {options}")
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", action="store_true", help="end with a store out of bounds")
    parser.add_argument("--quick", action="store_true", help="fewer head dims")
    args = parser.parse_args()
    # Each array its own allocation: inside a pool's chunk a stray access would go unseen.
    cupy.cuda.set_allocator(None)
    capability = streamkl_cupy.launch.device_facts(cupy.cuda.Device().id)
    for families in (arch.families(), arch.families()[-1:]):
        names = [f.name for f in families]
        print(f"{capability.name}: {run(families, args.quick)} problems with kernels of {' and '.join(names)}")
    if args.plant:
        x = cupy.empty(8, cupy.float32)
        cupy.RawKernel(PLANTED, "planted")((1,), (32,), (x, 1 << 20))
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
