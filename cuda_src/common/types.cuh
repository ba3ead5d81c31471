// Integer names used everywhere; no CUDA header is needed or included.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum ElementCode { kBf16 = 0, kF16 = 1, kF32 = 2 };

// A half-open interval of rows, keys or tiles.
struct Range {
    int begin, end;
    __device__ bool contains(int i) const { return i >= begin && i < end; }
    __device__ bool empty() const { return end <= begin; }
    __device__ void intersect(Range other) {
        begin = max(begin, other.begin);
        end = min(end, other.end);
    }
};

// Where nothing is left out.
struct Everything {
    template <class... At>
    __device__ bool operator()(At...) const {
        return true;
    }
};

// Where nothing is to be done.
struct Nothing {
    template <class... At>
    __device__ void operator()(At...) const {}
};

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
