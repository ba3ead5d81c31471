"""The kernels that gather chosen keys, each run on the host as a whole, with a meaning for what it asks the GPU.

Every thread of a block is a coroutine. Copies arrive at once; products are those of the operands that lie in registers
and in shared memory, swizzled as the hardware reads them.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkl_cupy.kernels import indexer_gathered_sm90, indexer_listed_sm90
from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.kernels.indexer import OPERANDS, IndexerShape, IndexerWork
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
static void barrier_arrive(int number, int count) {
    const int phase = numbered[number].second;
    if (++numbered[number].first == count) numbered[number] = {0, phase + 1};
}
static void cp_async_16(unsigned to, const void* from, int bytes) {
    memset(memory + to, 0, 16);
    memcpy(memory + to, from, bytes);
}
static float of_bf16(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
// Element of a row and column, from where a descriptor begins; transposed, the rows are those of the depth.
static float at_descriptor(unsigned long long d, bool transposed, int row, int k) {
    if (transposed) std::swap(row, k);
    const unsigned chunk = (d >> 16 & 0x3fff) << 4, column = k;
    const unsigned at = ((d & 0x3fff) << 4) + (transposed ? column / 64 * chunk : 0) + row * 128 + column % 64 * 2;
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
                sum += rows[e / 2][k] * at_descriptor(b, B, 8 * n + threadIdx.x % 4 * 2 + e % 2, k);
            d[n][e] = sum;
        }
}
template <bool HALF, int A, int B, int TILES>
static void wgmma(float (&d)[TILES][4], unsigned long long a, unsigned long long b, int keep) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int n = 0; n < TILES; ++n)
        for (int e = 0; e < 4; ++e) {
            float sum = keep ? d[n][e] : 0.f;
            for (int k = 0; k < 16; ++k)
                sum += at_descriptor(a, A, row + e / 2 * 8, k) *
                       at_descriptor(b, B, 8 * n + threadIdx.x % 4 * 2 + e % 2, k);
            d[n][e] = sum;
        }
}
static void stmatrix_x4(unsigned to, const unsigned (&x)[4]) {
    unsigned all[32];
    together(to, [&](const unsigned* x) { return memcpy(all, x, sizeof(all)), 0; });
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(memory + all[8 * i + lane / 4] + 4 * (lane % 4), &x[i], 4);
}
static void global_add(float* to, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i) to[i] += x[i];
}
static unsigned pack_bf16(float lo, float hi) {
    const auto rounded = [](float x) {
        const unsigned y = __float_as_uint(x);
        return y + 0x7fff + (y >> 16 & 1) >> 16;
    };
    return rounded(lo) | rounded(hi) << 16;
}
static float exp2_approx(float x) { return exp2f(x); }
static float log2_approx(float x) { return log2f(x); }
"""
NAMES = ("mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "barrier_sync", "barrier_arrive", "cp_async_16",
         "wgmma", "exp2_approx", "log2_approx", "stmatrix_x4", "global_add", "pack_bf16")  # fmt: skip
DRIVER = r"""
extern "C" void run_blocks(const IndexerArgs* args, int blocks) {
    for (int i = 0; i < blocks; ++i) {
        barriers.clear(), numbered.clear(), memset(memory, 0xff, sizeof(memory));
        blockIdx.x = i, gridDim.x = blocks;
        work = [=] { %s(*args); };
        run_threads(384);
    }
}
"""


@pytest.fixture(autouse=True)
def stages(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as there can be, or more."""
    monkeypatch.setattr(indexer_gathered_sm90, "MOST_STAGES", int(rng.choice([14, 17, 24])))


def on_host(folder: Path, work: IndexerWork, kernel: Any) -> ctypes.CDLL:
    """A kernel for Hopper."""
    tile, reason = kernel.choice(work, GPUS["sm_90"])
    assert tile is not None, reason
    plan = kernel.plan(work, tile, GPUS["sm_90"])
    text = re.sub(rf"(__device__ inline (?:void|float|u32)) ({'|'.join(NAMES)})\(", r"\1 text_\2(", plan.text)
    return built(folder, kernel.stem, MEANINGS + text, DRIVER % plan.symbol)


class Call:
    """Random operands of two batch entries and two groups, and what kernels read of them."""

    def __init__(self, rng: np.random.Generator, gated: bool) -> None:
        T, R, D = ((64, 32, 72), (136, 0, 64))[int(rng.integers(2))]
        vectors = frozenset(OPERANDS)
        shape = IndexerShape("bfloat16", "bfloat16", "float32", T, R, D, gated, True, False, vectors)
        B, G, N, M, H, HI = self.sizes = 2, 2, 333, 9, int(rng.integers(65, 129)), int(rng.integers(1, 65))
        chosen = 150
        self.work = IndexerWork(shape, "rows", False, N, HI, H, chosen)

        def bf16(*of: int) -> np.ndarray:
            return (rng.standard_normal(of).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

        self.arrays = {
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
        lse2 = rng.uniform(3, 9, (B, G * H, M)).astype(np.float32)
        lse2[:, 1, ::3] = np.inf
        self.rows = {
            "row_keys": interval, "bits": np.ascontiguousarray(packed).view(np.uint32), "lse2": lse2,
            "weights": rng.standard_normal((B, G * HI, M)).astype(np.float32),
        }  # fmt: skip
        self.numbers = {"bits_batch": G * M * words, "bits_group": M * words, "bits_row": words, "entries": B}
        self.numbers |= {"groups": G, "queries": M, "keys": N, "teacher_heads": H, "index_heads": HI, "splits": 1}
        self.numbers |= {"index_key_heads": G, "tiles": 1, "grid_tiles": 1, "teacher_group": G * H, "rope_group": G * H}
        tq, tk, rq, rk, iq, ik = self.operands = [
            (a.astype(np.uint32) << 16).view(np.float32).astype(float) for a in self.arrays.values()
        ]
        teacher = np.einsum("bhmd,bnd->bhmn", tq, tk[:, 0]) + (R > 0) * np.einsum("bhmd,bnd->bhmn", rq, rk[:, 0])
        self.teacher = 0.1 * teacher.reshape(B, G, H, M, N)
        keys = np.arange(N)
        self.seen = bits & ((interval[..., :1] <= keys) & (keys < interval[..., 1:]))[:, None]
        self.masses = np.exp2(self.teacher - lse2.reshape(B, G, H, M)[..., None]).sum(2)
        self.scores = np.einsum("bghmd,bgnd->bghmn", iq.reshape(B, G, HI, M, D), ik)
        self.weights = self.rows["weights"].reshape(B, G, HI, M)[..., None]
        self.logits = 0.3 * (self.weights * self.gated(self.scores)).sum(2)
        self.magnitudes = 0.3 * np.abs(self.weights * self.scores).sum(2)

    def gated(self, scores: np.ndarray) -> np.ndarray:
        return np.maximum(scores, 0) if self.work.shape.gated else scores

    def run(self, library: ctypes.CDLL, **places: np.ndarray) -> None:
        """Three blocks; beside regions, places are tensors of which the kernel has strides."""
        values: dict[str, Any] = dict.fromkeys(INDEXER.leaves, 0) | self.numbers
        values |= {"teacher_numbers.scale": 0.1, "student_numbers.scale": 0.3}
        for name, array in {**self.arrays, **self.rows, **places}.items():
            if name in values:
                values[name] = array.ctypes.data
                continue
            fields = ("batch", "head", "row", "column")[: array.ndim]
            steps = [x // array.itemsize for x in array.strides]
            values |= {f"{name}.{field}": step for field, step in zip(fields, steps)}
            values[f"{name}.pointer"] = array.ctypes.data
        library.run_blocks(ctypes.c_char_p(INDEXER.pack(values)), 3)


@needs_compiler
def test_states_of_rows(rng: np.random.Generator, tmp_path: Path) -> None:
    call = Call(rng, bool(rng.integers(2)))
    B, G, _, M, *_ = call.sizes
    states = np.full((B * G, M, 4), np.nan, np.float32)
    call.run(on_host(tmp_path, call.work, indexer_gathered_sm90.KERNEL), states=states)
    for index in np.ndindex(B, G, M):
        r, total, mass, terms = states[index[0] * G + index[1], index[2]].astype(float)
        a, b = call.masses[index][call.seen[index]], call.logits[index][call.seen[index]]
        if len(a) == 0:
            assert (r < -1e30, total, mass, terms) == (True, 0, 0, 0)
            continue
        off = 1e-6 * call.magnitudes[index][call.seen[index]].max()  # a logit, which is a sum of both signs
        assert abs(r - b.max()) <= off
        expected = [np.exp2(b - r).sum(), a.sum(), (a * (np.log2(a) - b + r)).sum()]
        size = np.array([0, 0, np.abs(a * (np.log2(a) - b + r)).sum() + a.sum()])
        np.testing.assert_array_less(
            np.abs(np.array([total, mass, terms]) - expected), (2e-5 + off) * (np.abs(expected) + size) + 1e-30
        )


@needs_compiler
def test_log_sum_exps_of_heads(rng: np.random.Generator, tmp_path: Path) -> None:
    call = Call(rng, True)
    B, G, _, M, H, _ = call.sizes
    found = np.full((B, G * H, M), np.nan, np.float32)
    call.run(on_host(tmp_path, call.work._replace(ending="lse"), indexer_gathered_sm90.KERNEL), out_lse=found)
    with np.errstate(divide="ignore"):
        expected = np.log((np.exp2(call.teacher) * call.seen[:, :, None]).sum(-1))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=2e-6, atol=2e-6)


@needs_compiler
def test_gradients(rng: np.random.Generator, tmp_path: Path) -> None:
    """Scores leave those of logits, which the other kernel multiplies by."""
    call = Call(rng, bool(rng.integers(2)))
    B, G, N, M, _, HI = call.sizes
    D = call.work.shape.index_dim
    stats = np.zeros((B, G, M, 4), np.float32)
    stats[..., 0] = rng.uniform(5, 9, (B, G, M))
    stats[..., 1:3] = rng.uniform(0.1, 1, (B, G, M, 2))
    stats[0, 1, 5] = 0  # without a gradient
    most = indexer_gathered_sm90.most_keys(call.work)
    listed = np.full((B, G, 64, most), np.nan, np.float32)
    places = {"row_stats": stats, "listed": listed}
    call.run(on_host(tmp_path, call.work._replace(ending="list"), indexer_gathered_sm90.KERNEL), **places)
    of_queries = np.full((B, G * HI, M, D), 0xFFFF, np.uint16)
    of_weights, depth = np.full((B, G * HI, M), np.nan, np.float32), -(-D // 16) * 16
    sums = np.zeros((B, G, N, depth), np.float32)
    places |= {"out_q": of_queries, "out_weights": of_weights, "key_sums": sums}
    call.run(on_host(tmp_path, call.work, indexer_listed_sm90.KERNEL), **places)

    lse2, inverse, u = (stats[..., i, None].astype(float) for i in range(3))
    d = call.seen * u * (np.exp2(call.logits - lse2) - inverse * call.masses)
    for index in np.ndindex(B, G, M):
        expected = d[index][call.seen[index]]
        if stats[index][2] != 0:
            off = 2e-5 + 1e-6 * call.magnitudes[index][call.seen[index]].max(initial=0)
            parts = np.exp2(call.logits[index] - lse2[index]) + inverse[index] * call.masses[index]
            size = (u[index] * parts)[call.seen[index]]
            assert (np.abs(listed[index][: len(expected)] - expected) <= off * size).all()
    iq, ik = call.operands[4].reshape(B, G, HI, M, D), call.operands[5]
    gates = (call.scores > 0) if call.work.shape.gated else np.ones_like(call.scores)
    factors = d[:, :, None] * call.weights * gates
    found = (of_queries.astype(np.uint32) << 16).view(np.float32).reshape(B, G, HI, M, D)
    for got, formula, a, b in (
        (found, "bghmn,bgnd->bghmd", factors, ik),
        (sums[..., :D], "bghmn,bghmd->bgnd", factors, iq),
        (of_weights.reshape(B, G, HI, M), "bghmn,bghmn->bghm", d[:, :, None] + 0 * gates, call.gated(call.scores)),
    ):
        size = np.einsum(formula, np.abs(a), np.abs(b))
        np.testing.assert_array_less(np.abs(got - np.einsum(formula, a, b)), 0.01 * size + 1e-5)
    assert not found[0, 1, :, 5].any()
    assert not of_weights.reshape(B, G, HI, M)[0, 1, :, 5].any()
