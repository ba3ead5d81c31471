"""Kernels' texts as the host's compiler reads them: it knows no GPU, but the assertions that hold a plan to its kernel.

Shared memory, what lies in it and in workspaces, and the sizes of structs are computed by plans and asserted in texts.
NVRTC compiles what the lot falls on, seconds each; this reads one text of every kernel and tile in hundredths.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkl_cupy.cli import catalogue
from streamkl_cupy.kernels.base import KernelPlan, KernelText
from streamkl_cupy.rules.divergences import DIVERGENCES

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

# What NVRTC knows of itself, declared only.
SHIM = r"""
#define __device__
#define __global__
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
struct int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
int2 make_int2(int, int);
float2 make_float2(float, float);
float4 make_float4(float, float, float, float);
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
struct Index { unsigned x, y, z; };
extern const Index threadIdx, blockIdx, gridDim;
template <class T> constexpr T max(T x, T y) { return x > y ? x : y; }
template <class T> constexpr T min(T x, T y) { return x < y ? x : y; }
constexpr int min(int x, int y) { return x < y ? x : y; }
float fmaf(float, float, float), fmaxf(float, float), fminf(float, float), fabsf(float), log2f(float), exp2f(float);
float logf(float), sqrtf(float), rsqrtf(float);
float __int_as_float(int), __uint_as_float(unsigned);
int __float_as_int(float), __ffs(unsigned), __popc(unsigned), __syncthreads_or(int);
int __reduce_min_sync(unsigned, int), __reduce_max_sync(unsigned, int);
unsigned __float_as_uint(float), __umulhi(unsigned, unsigned), __ballot_sync(unsigned, bool);
bool __any_sync(unsigned, bool), __all_sync(unsigned, bool);
void __syncwarp(), __syncthreads(), __threadfence();
void* __cvta_shared_to_generic(unsigned long);
unsigned long __cvta_generic_to_shared(const void*);
template <class T> T __shfl_sync(unsigned, T, int);
template <class T> T __shfl_xor_sync(unsigned, T, int);
template <class T> T __shfl_up_sync(unsigned, T, int);
template <class T> T __ldcg(const T*);
template <class T> T atomicAdd(T*, T);
template <class T> T atomicOr(T*, T);
template <class T> T atomicMin(T*, T);
template <class T> T atomicMax(T*, T);
template <class T> T atomicExch(T*, T);
"""


BOXES = {"fused_sm90": "kKeyBox", "indexer_stream_sm90": "kKeyBox", "attention_fused_sm90": "kRows / 2"}
"""Keys that come at a time, where that is not a tile of them; in one pass over both sides those of the score side."""


def loaded(kernel: KernelText) -> str:
    """What a kernel has to say of the boxes of its tensor maps: copies are counted in bytes, and of a wrong number it
    would wait for ever."""
    name = Path(kernel.entry).stem
    stationary = "q" if dict(kernel.constants).get("SKL_ROWS_ARE_QUERIES") else "k"
    side = kernel.task.side if name == "fused_sm90" and isinstance(kernel, KernelPlan) else None
    said = []
    for box in kernel.boxes:
        rows = "k" if box.name.endswith("_k") or box.name in ("key", "value") else "q"
        want = "kRows" if rows == stationary else "kColumns"
        if rows == "k" and not (side and box.name.startswith(side)):
            want = BOXES.get(name, want)
        said.append(f'static_assert({want} == {box.rows * box.heads}, "a box of {box.name}");\n')
    return "".join(said)


def registers_fit(kernel: KernelText) -> bool:
    """Whether warpgroups divide among them what a launch gives to each thread, the producer with the least."""
    told = {name: int(x) for name, x in kernel.constants if name.endswith("_REGISTERS") or name == "SKL_MIN_BLOCKS"}
    blocks = told.pop("SKL_MIN_BLOCKS", 1)
    if not told:
        return True
    all_equal = 65536 // (kernel.threads * blocks) // 8 * 8
    consumers = kernel.threads // 128 - len(told) + 1
    divided = sum(told.values()) + (consumers - 1) * told["SKL_CONSUMER_REGISTERS"]
    # A group gives some up, or takes more, by eights.
    odd = [x for x in told.values() if x % 8 or not 24 <= x <= 240]
    least = min(told.values()) == told["SKL_PRODUCER_REGISTERS"] < told["SKL_CONSUMER_REGISTERS"] == max(told.values())
    return not odd and least and divided <= all_equal * (consumers + len(told) - 1)


def errors(text: str) -> list[str]:
    """What the compiler has to say of a text, without making anything of it."""
    assert COMPILER
    command = [COMPILER, "-std=c++17", "-w", "-fsyntax-only", "-fmax-errors=5", "-x", "c++", "-"]
    done = subprocess.run(command, input=SHIM + text, capture_output=True, text=True)
    found = [line for line in done.stderr.splitlines() if "error" in line]
    assert bool(found) == (done.returncode != 0), done.stderr
    return found


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", ["attention_kl", "sparse_attention", "indexer_kl"])
def test_what_plans_promise_is_what_kernels_assert(
    arch: str, op: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kernel and tile one by lot, with other rules each time; other architectures have one of these two."""
    mask = str(rng.choice([*catalogue.MASK_CASES]))
    rules: dict[str, Any] = {
        "masks": ("none", mask),
        "divergences": (str(rng.choice([*DIVERGENCES])),),
        "scores": (tuple(str(x) for x in rng.choice([*catalogue.SCORE_CASES], 2)),),
        "extents": [catalogue.EXTENTS[rng.integers(len(catalogue.EXTENTS))]],
    }
    if op == "attention_kl":
        dims = [catalogue.DIMS[i] for i in rng.choice(len(catalogue.DIMS), 5, replace=False)]
        # The widest have keys of the score side in pieces.
        listed = catalogue.entries(arch, {*dims, max(catalogue.DIMS)}, **rules)[0]
    elif op == "sparse_attention":
        dims = [catalogue.ATTENTION_DIMS[i] for i in rng.choice(len(catalogue.ATTENTION_DIMS), 3, replace=False)]
        listed = catalogue.attention_entries(arch, dims, masks=("blocks", mask), scores=("dot",))
    else:
        listed = catalogue.indexer_entries(arch)[0]
        # A teacher with several key heads has kernels of its own.
        monkeypatch.setitem(catalogue._INDEXER_EXTENTS, "K", 4)
        listed += catalogue.indexer_entries(arch, [(128, 128), (192, 128)], catalogue.ELEMENT_TYPES[:1])[0]
        # So has a student without gates, which no list of what is compiled ahead has.
        monkeypatch.setattr(catalogue, "IndexOptions", functools.partial(catalogue.IndexOptions, relu=False))
        listed += catalogue.indexer_entries(arch, [(128, 128)], catalogue.ELEMENT_TYPES[:1])[0]
    chosen: dict[object, catalogue.Entry] = {}
    for i in rng.permutation(len(listed)):
        kernel = listed[i].kernel
        tile = kernel.tile if isinstance(kernel, KernelPlan) else kernel.smem_bytes
        chosen.setdefault((kernel.entry, tile, kernel.boxes), listed[i])
    texts = [(x, x.kernel.text + loaded(x.kernel)) for x in chosen.values()]
    for entry in listed:
        assert registers_fit(entry.kernel), entry
    wrong = [f"{entry.label} [{entry.kernel}]: {x}" for entry, text in texts for x in errors(text)]
    assert not wrong, f"{rules}: {len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)


def test_an_assertion_that_does_not_hold_is_heard() -> None:
    entry = next(x for x in catalogue.indexer_entries("sm_80")[0] if x.kernel.smem_bytes)
    more = entry.kernel.smem_bytes + 16
    text = entry.kernel.text.replace(f"SKL_SMEM_BYTES {more - 16}\n", f"SKL_SMEM_BYTES {more}\n")
    assert any("plan: smem_bytes" in line for line in errors(text)), entry
