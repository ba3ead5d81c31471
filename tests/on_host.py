"""Kernels' own texts, compiled for the host: which memory they read and write is the same on a CPU.

Instructions do nothing; threads take turns where they ask one another, and a barrier waits for all.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TYPES = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __align__(...)
using std::max;
using std::min;
struct int2 { int x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return __float_as_uint(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static struct { unsigned x, y, z; } threadIdx, blockIdx, gridDim;
static unsigned char memory[240 << 10];
inline void* __cvta_shared_to_generic(size_t x) { return memory + x; }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
"""

THREADS = r"""
// Threads of a block one after the other, each as far as it needs others; one by itself has what the others would have.
struct Threads {
    struct Warp {
        long long values[2][32];  // of one question and the next
        int asked[32] = {};
    };
    int count, here = 0, synced = 0;
    ucontext_t all;
    std::vector<ucontext_t> at;
    std::vector<char> stacks;
    std::vector<bool> over;
    std::vector<Warp> warps;
    explicit Threads(int count) : count(count), at(count), stacks(count << 16), over(count), warps((count + 31) / 32) {}
};
static Threads* threads = nullptr;
static int first_thread = 0;
inline int this_one() { return threadIdx.x - first_thread; }
inline void others() { swapcontext(&threads->at[this_one()], &threads->all); }
template <class T, class Of>
auto together(T x, Of of) {
    T seen[32];
    std::fill(seen, seen + 32, x);
    if (threads) {
        Threads::Warp& warp = threads->warps[this_one() / 32];
        const int lane = threadIdx.x % 32, question = warp.asked[lane]++;
        memcpy(&warp.values[question % 2][lane], &x, sizeof(T));
        do others();
        while (*std::min_element(warp.asked, warp.asked + 32) <= question);
        for (int i = 0; i < 32; ++i) memcpy(&seen[i], &warp.values[question % 2][i], sizeof(T));
    }
    return of(seen);
}
inline void __syncwarp() {
    together(0, [](const int*) { return 0; });
}
inline void __syncthreads() {
    if (!threads) return;
    const int before = threads->synced;
    if (++threads->here == threads->count) threads->here = 0, ++threads->synced;
    do others();
    while (threads->synced == before);
}
static std::function<void()> work;
static void work_of_one() {
    work();
    threads->over[this_one()] = true;
}
// So many threads do the work, the first of this number.
inline void run_threads(int count, int first = 0) {
    Threads some(count);
    threads = &some, first_thread = first;
    for (int i = 0; i < count; ++i) {
        getcontext(&some.at[i]);
        some.at[i].uc_stack = {some.stacks.data() + (i << 16), 0, 1 << 16};
        some.at[i].uc_link = &some.all;
        makecontext(&some.at[i], work_of_one, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < count; ++i) {
            threadIdx.x = first + i;
            if (some.over[i]) continue;
            more = true;
            swapcontext(&some.all, &some.at[i]);
        }
    }
    threads = nullptr, first_thread = 0;
}
"""

QUESTIONS = r"""
template <class T>
T __shfl_sync(unsigned, T x, int from) { return together(x, [=](const T* all) { return all[from % 32]; }); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
    return together(x, [=](const T* all) { return all[threadIdx.x % 32 ^ by]; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
    const int lane = threadIdx.x % 32;
    return together(x, [=](const T* all) { return all[lane < by ? lane : lane - by]; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return together(int(x), [](const int* all) {
        unsigned y = 0;
        for (int i = 0; i < 32; ++i) y |= unsigned(all[i]) << i;
        return y;
    });
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
inline int __reduce_min_sync(unsigned, int x) {
    return together(x, [](const int* all) { return *std::min_element(all, all + 32); });
}
inline int __reduce_max_sync(unsigned, int x) {
    return together(x, [](const int* all) { return *std::max_element(all, all + 32); });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __threadfence() {}
template <class T>
T __ldcg(const T* x) {
    return *x;
}
template <class T>
T exchanged(T* to, T x) {
    std::swap(*to, x);
    return x;
}
inline int atomicAdd(int* to, int x) { return exchanged(to, *to + x); }
inline int atomicExch(int* to, int x) { return exchanged(to, x); }
inline int atomicMin(int* to, int x) { return exchanged(to, min(*to, x)); }
inline int atomicMax(int* to, int x) { return exchanged(to, max(*to, x)); }
"""


def on_host(text: str, **bodies: str) -> str:
    """A kernel without its instructions: what they give is 0, gates are open, and nobody waits. Those that are named
    have other bodies."""
    for there, instead in {"u32 r;": "u32 r = 0;", "u32 mask;": "u32 mask = ~0u;", "u32 done;": "u32 done = 1;",
                           "float y;": "float y = 0.f;", "private:": "public:"}.items():  # fmt: skip
        text = text.replace(there, instead)
    text = re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"static unsigned char \1[1];", text)
    for name, body in bodies.items():
        text, count = re.subn(
            rf"(\b{name}\([^;{{}}]*\) )\{{(?:[^\n]*\}}|.*?\n\}})\n", rf"\1{{ {body} }}\n", text, flags=re.DOTALL
        )
        assert count, name
    out, at = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        depth, end = 1, found.end()
        while depth:
            string = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, end)
            depth += 0 if string else (text[end] == "(") - (text[end] == ")")
            end = string.end() if string else end + 1
        out += [text[at : found.start()], "(void)0"]
        at = end
    return "".join((*out, text[at:]))


def built(folder: Path, name: str, text: str, driver: str, threads: str = THREADS, **bodies: str) -> ctypes.CDLL:
    """The library of a kernel's text and what drives it; `threads`: how threads of a block go on."""
    assert COMPILER
    source = folder / f"{name}.cpp"
    source.write_text(TYPES + threads + QUESTIONS + on_host(text, **bodies) + driver)
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, source, "-o", source.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))
