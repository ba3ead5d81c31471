"""The kernel that gathers chosen keys, run on the host as a whole: its own text, with a meaning for what it asks the GPU.

Every thread of a block is a coroutine. Copies arrive at once; products are those of the operands that lie in registers
and in shared memory, swizzled as the hardware reads them.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.kernels.indexer import OPERANDS, Ending, IndexerShape, IndexerWork
from streamkl_cupy.kernels.indexer_gathered_sm90 import KERNEL
from streamkl_cupy.kernels.structs import INDEXER
from tests.on_host import built, needs_compiler

MEANINGS = r"""
#include <map>
struct HostBarrier { int arrivals, pending, phase; };
static std::map<unsigned, HostBarrier> barriers;
static std::map<int, std::pair<int, int>> numbered;  // threads that are there, phase
static void mbarrier_init(unsigned at, unsigned arrivals) { barriers[at] = {int(arrivals), int(arrivals), 0}; }
static void mbarrier_arrive(unsigned at) {
    HostBarrier& b = barriers[at];
    if (--b.pending == 0) ++b.phase, b.pending = b.arrivals;
}
static void mbarrier_wait(unsigned at, unsigned parity) {
    while ((barriers[at].phase & 1) == int(parity)) others();
}
static void barrier_sync(int number, int count) {
    const int phase = numbered[number].second;
    if (++numbered[number].first == count) numbered[number] = {0, phase + 1};
    while (numbered[number].second == phase) others();
}
static void cp_async_16(unsigned to, const void* from, int bytes) {
    memset(memory + to, 0, 16);
    memcpy(memory + to, from, bytes);
}
static float of_bf16(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
// Element of a row and column of 64, from where a descriptor begins.
static float at_descriptor(unsigned long long d, int row, int column) {
    const unsigned start = (d & 0x3fff) << 4, at = start + row * 128 + column * 2;
    return of_bf16(*reinterpret_cast<unsigned short*>(memory + (at ^ (at >> 7 & 7) << 4)));
}
template <bool HALF, int B, int TILES>
static void wgmma(float (&d)[TILES][4], const unsigned (&a)[4], unsigned long long b, int keep) {
    float rows[2][16];
    for (int i = 0; i < 4; ++i) {
        unsigned all[32];
        together(a[i], [&](const unsigned* x) { return memcpy(all, x, sizeof(all)), 0; });
        for (int lane = 0; lane < 4; ++lane)
            for (int j = 0; j < 2; ++j)
                rows[i % 2][i / 2 * 8 + 2 * lane + j] =
                    of_bf16(all[threadIdx.x % 32 / 4 * 4 + lane] >> 16 * j & 0xffff);
    }
    for (int n = 0; n < TILES; ++n)
        for (int e = 0; e < 4; ++e) {
            float sum = keep ? d[n][e] : 0.f;
            for (int k = 0; k < 16; ++k)
                sum += rows[e / 2][k] * at_descriptor(b, 8 * n + threadIdx.x % 4 * 2 + e % 2, k);
            d[n][e] = sum;
        }
}
template <bool HALF, int A, int B, int TILES>
static void wgmma(float (&d)[TILES][4], unsigned long long a, unsigned long long b, int keep) {
    for (int n = 0; n < TILES; ++n)
        for (int e = 0; e < 4; ++e) {
            float sum = keep ? d[n][e] : 0.f;
            for (int k = 0; k < 16; ++k)
                sum += at_descriptor(a, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + e / 2 * 8, k) *
                       at_descriptor(b, 8 * n + threadIdx.x % 4 * 2 + e % 2, k);
            d[n][e] = sum;
        }
}
static float exp2_approx(float x) { return exp2f(x); }
static float log2_approx(float x) { return log2f(x); }
"""
NAMES = ("mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "barrier_sync", "cp_async_16", "wgmma", "exp2_approx")
DRIVER = r"""
extern "C" void run_blocks(const IndexerArgs* args, int blocks) {
    for (int i = 0; i < blocks; ++i) {
        barriers.clear(), numbered.clear(), memset(memory, 0xff, sizeof(memory));
        blockIdx.x = i, gridDim.x = blocks;
        work = [=] { streamkl_indexer_gathered(*args); };
        run_threads(384);
    }
}
"""


def with_meanings(text: str) -> str:
    for name in (*NAMES, "log2_approx"):
        text, count = re.subn(rf"(__device__ inline (?:void|float)) {name}\(", rf"\1 text_{name}(", text)
        assert count, name
    return MEANINGS + text


@needs_compiler
@pytest.mark.parametrize("ending", ["rows", "lse"])
def test_a_call_on_the_host(rng: np.random.Generator, tmp_path: Path, ending: Ending) -> None:
    T, R, D = ((64, 32, 72), (136, 0, 64))[int(rng.integers(2))]
    vectors = frozenset(OPERANDS)
    shape = IndexerShape("bfloat16", "bfloat16", "float32", T, R, D, bool(rng.integers(2)), True, False, vectors)
    B, G, N, M, H, HI = 2, 2, 333, 67, int(rng.integers(65, 129)), int(rng.integers(1, 65))
    chosen = 150
    work = IndexerWork(shape, ending, False, N, HI, H, chosen)
    tile, reason = KERNEL.choice(work, GPUS["sm_90"])
    assert tile is not None, reason
    text = KERNEL.plan(work, tile, GPUS["sm_90"]).text
    library = built(tmp_path, "gathered", with_meanings(text), DRIVER)

    def bf16(*of: int) -> np.ndarray:
        return (rng.standard_normal(of).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    arrays = {
        "teacher_q": bf16(B, G * H, M, T), "teacher_k": bf16(B, 1, N, T), "rope_q": bf16(B, G * H, M, max(R, 8)),
        "rope_k": bf16(B, 1, N, max(R, 8)), "index_q": bf16(B, G * HI, M, D), "index_k": bf16(B, G, N, D),
    }  # fmt: skip
    interval = np.sort(rng.integers(0, N + 1, (B, M, 2)), -1).astype(np.int32)
    interval[0, 3] = 0
    bits = np.zeros((B, G, M, N), bool)
    for index in np.ndindex(B, G, M):
        bits[index][rng.choice(N, int(rng.integers(chosen + 1)), replace=False)] = True
    words = -(-N // 32)
    packed = np.packbits(np.pad(bits, [(0, 0)] * 3 + [(0, 32 * words - N)]), axis=-1, bitorder="little")
    packed = np.ascontiguousarray(packed).view(np.uint32)
    lse2 = rng.uniform(3, 9, (B, G * H, M)).astype(np.float32)
    lse2[:, 1, ::3] = np.inf
    weights = rng.standard_normal((B, G * HI, M)).astype(np.float32)
    states = np.full((B * G, M, 4), np.nan, np.float32)
    found_lse = np.full((B, G * H, M), np.nan, np.float32)
    row_keys = np.ascontiguousarray(interval)
    values = dict.fromkeys(INDEXER.leaves, 0)
    for name, array in arrays.items():
        steps = [x // 2 for x in array.strides]
        fields = ("batch", "head", "row", "column", "pointer")
        values |= dict(zip((f"{name}.{field}" for field in fields), (*steps, array.ctypes.data), strict=True))
    if arrays["teacher_k"].shape[1] == 1:
        values |= {"teacher_group": G * H, "rope_group": G * H}
    values |= {f"out_lse.{x}": y for x, y in zip(("batch", "head", "row"), (x // 4 for x in found_lse.strides))}
    places = {"row_keys": row_keys, "bits": packed, "lse2": lse2, "weights": weights, "states": states}
    values |= {name: array.ctypes.data for name, array in places.items()} | {"out_lse.pointer": found_lse.ctypes.data}
    values |= {"bits_batch": G * M * words, "bits_group": M * words, "bits_row": words, "entries": B, "groups": G}
    values |= {"queries": M, "keys": N, "teacher_heads": H, "index_heads": HI, "index_key_heads": G, "splits": 1}
    values |= {"tiles": 2, "grid_tiles": 2, "teacher_numbers.scale": 0.1, "student_numbers.scale": 0.3}
    library.run_blocks(ctypes.c_char_p(INDEXER.pack(values)), 3)

    tq, tk, rq, rk, iq, ik = ((a.astype(np.uint32) << 16).view(np.float32).astype(float) for a in arrays.values())
    teacher = np.einsum("bhmd,bnd->bhmn", tq, tk[:, 0]) + (R > 0) * np.einsum("bhmd,bnd->bhmn", rq, rk[:, 0])
    teacher = 0.1 * teacher.reshape(B, G, H, M, N)
    keys = np.arange(N)
    seen = bits & ((interval[..., :1] <= keys) & (keys < interval[..., 1:]))[:, None]
    if ending == "lse":
        with np.errstate(divide="ignore"):
            expected = np.log((np.exp2(teacher) * seen[:, :, None]).sum(-1))
        np.testing.assert_allclose(found_lse.reshape(expected.shape), expected, rtol=2e-6, atol=2e-6)
        return
    t = np.exp2(teacher - lse2.reshape(B, G, H, M)[..., None]).sum(2)
    scores = np.einsum("bghmd,bgnd->bghmn", iq.reshape(B, G, HI, M, D), ik)
    gated = np.maximum(scores, 0) if shape.gated else scores
    logits = 0.3 * (weights.reshape(B, G, HI, M)[..., None] * gated).sum(2)
    for index in np.ndindex(B, G, M):
        r, total, mass, terms = states[index[0] * G + index[1], index[2]].astype(float)
        a, b = t[index][seen[index]], logits[index][seen[index]]
        assert r == pytest.approx(b.max(initial=-2e30), rel=1e-5)
        expected = [np.exp2(b - r).sum(), a.sum(), (a * (np.log2(a) - b + r)).sum()]
        size = 1 + np.abs(a * (np.log2(a) - b + r)).sum()
        np.testing.assert_allclose([total, mass, terms], expected, rtol=2e-5, atol=2e-5 * size)
