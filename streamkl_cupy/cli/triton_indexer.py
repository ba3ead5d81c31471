"""The KL of an indexer in Triton, a peer of `bench --op indexer_kl`: what one writes for it without this package.

Teacher's heads are added up inside a tile, since their log-sum-exps are known, so one pass gives the rows. The backward
makes the gradients of logits once, a strip of rows at a time, and multiplies by them for queries and for keys. Causal,
as many keys as rows, 16-bit elements, compact arrays: (B, heads, rows, columns), index keys (B, rows, columns), weights
and log-sum-exps (B, heads, rows) in float32. Tiles are chosen by Triton, which times them at the first call.

Kernels have more parameters than functions here have otherwise: Triton knows no structs. `forward` and `backward` have
those of any module that joins the bench.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
STRIP_BYTES = 64 << 20
SHARES = 4


def _tiles(*of):
    return [triton.Config({"BM": m, "BN": n}, num_warps=w, num_stages=s) for m, n, w, s in of]


SCORES = _tiles((64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3))
PRODUCTS = _tiles((64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2))


@triton.jit
def _rows(x, first, n, width: tl.constexpr, begin: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of some rows of a compact matrix; zeros behind its last row."""
    i = first + tl.arange(0, ROWS)
    at = i.to(tl.int64)[:, None] * width + begin + tl.arange(0, COLUMNS)[None, :]
    return tl.load(x + at, mask=(i < n)[:, None], other=0.0)


@triton.jit
def _products(q, k, m0, n0, n, DIM: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Of rows of a head, whose columns are a power of two and what is left."""
    s = tl.dot(_rows(q, m0, n, DIM, 0, BM, WIDE), tl.trans(_rows(k, n0, n, DIM, 0, BN, WIDE)))
    if DIM > WIDE:
        more = tl.trans(_rows(k, n0, n, DIM, WIDE, BN, DIM - WIDE))
        s = tl.dot(_rows(q, m0, n, DIM, WIDE, BM, DIM - WIDE), more, s)
    return s


@triton.jit
def _target(q, k, lse, m0, n0, n, scale2, heads, group, DIM: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """The teacher's heads added up."""
    i = m0 + tl.arange(0, BM)
    t = tl.zeros([BM, BN], tl.float32)
    for h in range(heads):
        own = tl.load(lse + h * n + i, mask=i < n, other=float("inf"))
        of = tl.cast(h // group, tl.int64) * n * DIM
        s = _products(q + tl.cast(h, tl.int64) * n * DIM, k + of, m0, n0, n, DIM, WIDE, BM, BN)
        t += tl.exp2(s * scale2 - own[:, None] * LOG2E)
    return t


@triton.jit
def _logits(q, k, w, m0, n0, n, scale2, heads, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Of the indexer, in base 2."""
    i = m0 + tl.arange(0, BM)
    y = tl.zeros([BM, BN], tl.float32)
    keys = tl.trans(_rows(k, n0, n, DIM, 0, BN, DIM))
    for h in range(heads):
        weight = tl.load(w + h * n + i, mask=i < n, other=0.0) * scale2
        s = tl.dot(_rows(q + tl.cast(h, tl.int64) * n * DIM, m0, n, DIM, 0, BM, DIM), keys)
        y += weight[:, None] * tl.maximum(s, 0.0)
    return y


@triton.autotune(SCORES, key=["n", "heads", "DIM"])
@triton.jit
def _log_sum_exps(q, k, lse, n, scale2, heads, group, DIM: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr):  # fmt: skip
    """The teacher's, of one head."""
    head = tl.program_id(1)
    b, h = head // heads, head % heads
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = m0 + tl.arange(0, BM)
    q += tl.cast(head, tl.int64) * n * DIM
    k += tl.cast(b * (heads // group) + h // group, tl.int64) * n * DIM
    top = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for n0 in range(0, tl.minimum(m0 + BM, n), BN):
        j = n0 + tl.arange(0, BN)
        s = _products(q, k, m0, n0, n, DIM, WIDE, BM, BN) * scale2
        s = tl.where((j[None, :] <= i[:, None]) & (j < n)[None, :], s, LOWEST)
        new = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        top = new
    tl.store(lse + tl.cast(head, tl.int64) * n + i, (top + tl.log2(total)) * LN2, mask=i < n)


@triton.autotune(SCORES, key=["n", "heads", "index_heads", "DIM"])
@triton.jit
def _states(q, k, lse, index_q, index_k, w, states, n, scale2, index_scale2, heads, group, index_heads, splits,
            DIM: tl.constexpr, WIDE: tl.constexpr, INDEX_DIM: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Of each row, over a part of the keys: the largest logit, the sum of the others' powers, of the target, and of its
    terms, which move with the largest logit."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    part, b = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    i = m0 + tl.arange(0, BM)
    q += b * heads * n * DIM
    k += b * (heads // group) * n * DIM
    index_q += b * index_heads * n * INDEX_DIM
    index_k += b * n * INDEX_DIM
    lse += b * heads * n
    w += b * index_heads * n
    span = tl.cdiv(tl.cdiv(n, BN), splits) * BN
    top = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    mass = tl.zeros([BM], tl.float32)
    terms = tl.zeros([BM], tl.float32)
    for n0 in range(part * span, tl.minimum(tl.minimum((part + 1) * span, m0 + BM), n), BN):
        j = n0 + tl.arange(0, BN)
        seen = (j[None, :] <= i[:, None]) & (j < n)[None, :]
        t = _target(q, k, lse, m0, n0, n, scale2, heads, group, DIM, WIDE, BM, BN)
        y = _logits(index_q, index_k, w, m0, n0, n, index_scale2, index_heads, INDEX_DIM, BM, BN)
        t = tl.where(seen, t, 0.0)
        y = tl.where(seen, y, LOWEST)
        new = tl.maximum(top, tl.max(y, 1))
        y -= new[:, None]
        total = total * tl.exp2(top - new) + tl.sum(tl.where(seen, tl.exp2(y), 0.0), 1)
        terms += (new - top) * mass + tl.sum(tl.where(t > 0, t * (tl.log2(t) - y), 0.0), 1)
        mass += tl.sum(t, 1)
        top = new
    rows = tl.num_programs(2) * splits * n
    at = states + (b * splits + part) * n + i
    tl.store(at, top, mask=i < n)
    tl.store(at + rows, total, mask=i < n)
    tl.store(at + 2 * rows, mass, mask=i < n)
    tl.store(at + 3 * rows, terms, mask=i < n)


@triton.jit
def _join(states, kl, index_lse, mass, n, splits, PARTS: tl.constexpr, BM: tl.constexpr):
    """Rows of their parts."""
    b = tl.cast(tl.program_id(1), tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.arange(0, PARTS)
    there = (part < splits)[:, None] & (i < n)[None, :]
    at = states + (b * splits + part)[:, None] * n + i[None, :]
    rows = tl.num_programs(1) * splits * n
    top = tl.load(at, mask=there, other=LOWEST)
    total = tl.load(at + rows, mask=there, other=0.0)
    z = tl.load(at + 2 * rows, mask=there, other=0.0)
    terms = tl.load(at + 3 * rows, mask=there, other=0.0)
    above = tl.max(top, 0)
    below = above[None, :] - top
    total = tl.sum(total * tl.exp2(-below), 0)
    terms = tl.sum(terms + below * z, 0)
    z = tl.sum(z, 0)
    tl.store(kl + b * n + i, LN2 * (terms / z + tl.log2(total / z)), mask=i < n)
    tl.store(index_lse + b * n + i, LN2 * (above + tl.log2(total)), mask=i < n)
    tl.store(mass + b * n + i, z, mask=i < n)


@triton.autotune(SCORES, key=["n", "heads", "index_heads", "DIM"])
@triton.jit
def _strip(q, k, lse, index_q, index_k, w, index_lse, mass, grad, strip, n, first, pitch, height, scale2, index_scale2,
           factor, heads, group, index_heads, DIM: tl.constexpr, WIDE: tl.constexpr, INDEX_DIM: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Gradients of the logits of some rows, zeros where a row does not see a key."""
    b = tl.cast(tl.program_id(2), tl.int64)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    m0, n0 = first + row, tl.program_id(0) * BN
    i, j = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    d = tl.zeros([BM, BN], tl.float32)
    if n0 < m0 + BM:
        q += b * heads * n * DIM
        k += b * (heads // group) * n * DIM
        t = _target(q, k, lse + b * heads * n, m0, n0, n, scale2, heads, group, DIM, WIDE, BM, BN)
        y = _logits(index_q + b * index_heads * n * INDEX_DIM, index_k + b * n * INDEX_DIM, w + b * index_heads * n,
                    m0, n0, n, index_scale2, index_heads, INDEX_DIM, BM, BN)  # fmt: skip
        of_row = tl.load(index_lse + b * n + i, mask=i < n, other=float("inf")) * LOG2E
        z = tl.load(mass + b * n + i, mask=i < n, other=1.0)
        g = tl.load(grad + b * n + i, mask=i < n, other=0.0) * factor
        d = g[:, None] * (tl.exp2(y - of_row[:, None]) - t / z[:, None])
        d = tl.where((j[None, :] <= i[:, None]) & (i < n)[:, None], d, 0.0)
    at = strip + (b * height + row + tl.arange(0, BM))[:, None] * pitch + j[None, :]
    tl.store(at, d.to(strip.dtype.element_ty), mask=(row + tl.arange(0, BM) < height)[:, None] & (j < pitch)[None, :])


@triton.autotune(PRODUCTS, key=["n", "index_heads", "DIM"])
@triton.jit
def _queries(strip, index_q, index_k, w, d_q, d_w, n, first, pitch, height, index_heads, DIM: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Gradients of queries of a head, and of its weights."""
    head = tl.cast(tl.program_id(0), tl.int64)
    b = head // index_heads
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    m0 = first + row
    i = m0 + tl.arange(0, BM)
    index_q += head * n * DIM
    index_k += b * n * DIM
    queries = _rows(index_q, m0, n, DIM, 0, BM, DIM)
    sums = tl.zeros([BM, DIM], tl.float32)
    for n0 in range(0, tl.minimum(m0 + BM, n), BN):
        keys = _rows(index_k, n0, n, DIM, 0, BN, DIM)
        d = tl.load(strip + (b * height + row + tl.arange(0, BM))[:, None] * pitch + n0 + tl.arange(0, BN)[None, :])
        open_ = tl.dot(queries, tl.trans(keys)) > 0
        sums = tl.dot(tl.where(open_, d, 0.0).to(keys.dtype), keys, sums)
    here = (i < n) & (row + tl.arange(0, BM) < height)
    weight = tl.load(w + head * n + i, mask=here, other=0.0)
    tl.store(d_w + head * n + i, tl.sum(sums * queries.to(tl.float32), 1), mask=here)
    at = d_q + head * n * DIM + i.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(at, (sums * weight[:, None]).to(d_q.dtype.element_ty), mask=here[:, None])


@triton.autotune(PRODUCTS, key=["n", "index_heads", "DIM"], restore_value=["sums"])
@triton.jit
def _keys(strip, index_q, index_k, w, sums, n, first, pitch, height, index_heads, shares, DIM: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Adds a share of a strip's gradients of keys."""
    n0, share, b = tl.program_id(0) * BN, tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    j = n0 + tl.arange(0, BN)
    keys = _rows(index_k + b * n * DIM, n0, n, DIM, 0, BN, DIM)
    found = tl.zeros([BN, DIM], tl.float32)
    begin = tl.maximum(n0 - first, 0) // BM + share
    for tile in range(begin, tl.cdiv(height, BM), shares):
        row = tile * BM
        m0 = first + row
        i = m0 + tl.arange(0, BM)
        at = strip + (b * height + row + tl.arange(0, BM))[:, None] * pitch + j[None, :]
        d = tl.trans(tl.load(at, mask=(row + tl.arange(0, BM) < height)[:, None], other=0.0)).to(tl.float32)
        for h in range(index_heads):
            head = b * index_heads + h
            weight = tl.load(w + head * n + i, mask=i < n, other=0.0)
            queries = _rows(index_q + head * n * DIM, m0, n, DIM, 0, BM, DIM)
            open_ = tl.dot(keys, tl.trans(queries)) > 0
            found = tl.dot(tl.where(open_, d * weight[None, :], 0.0).to(keys.dtype), queries, found)
    at = sums + ((b * shares + share) * n + j)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    there = (j < n)[:, None]
    tl.store(at, tl.load(at, mask=there, other=0.0) + found, mask=there)


def forward(q, k, index_q, index_k, weights, lse, index_scale):
    """KL, index_lse and the sum of the target of each row, and the teacher's log-sum-exps."""
    (b, heads, n, dim), group = q.shape, q.shape[1] // k.shape[1]
    index_heads, index_dim = index_q.shape[1], index_q.shape[3]
    wide, scale2 = 1 << (dim.bit_length() - 1), dim**-0.5 * LOG2E.value
    if lse is None:
        lse = weights.new_empty(b, heads, n)
        grid = lambda tile: (triton.cdiv(n, tile["BM"]), b * heads)  # noqa: E731
        _log_sum_exps[grid](q, k, lse, n, scale2, heads, group, DIM=dim, WIDE=wide)
    splits = max(min(-(-512 // max(n // 64 * b, 1)), 16), 1)
    states = weights.new_empty(4, b, splits, n)
    _states[lambda tile: (triton.cdiv(n, tile["BM"]), splits, b)](
        q, k, lse, index_q, index_k, weights, states, n, scale2, index_scale * LOG2E.value, heads, group, index_heads,
        splits, DIM=dim, WIDE=wide, INDEX_DIM=index_dim,
    )  # fmt: skip
    kl, index_lse, mass = (weights.new_empty(b, n) for _ in range(3))
    parts = triton.next_power_of_2(splits)
    _join[triton.cdiv(n, 128), b](states, kl, index_lse, mass, n, splits, PARTS=parts, BM=128)
    return kl, index_lse, mass, lse


def backward(grad, saved, q, k, index_q, index_k, weights, lse, index_scale):
    """Gradients of index_q, index_k and the weights, from what `forward` gave."""
    _, index_lse, mass, lse = saved
    (b, heads, n, dim), group = q.shape, q.shape[1] // k.shape[1]
    index_heads, index_dim = index_q.shape[1], index_q.shape[3]
    wide, scale2 = 1 << (dim.bit_length() - 1), dim**-0.5 * LOG2E.value
    pitch = -(-n // 128) * 128
    height = min(max(STRIP_BYTES // (2 * b * pitch) // 128, 1) * 128, pitch)
    strip = index_q.new_empty(b, height, pitch)
    d_q, d_w = index_q.new_empty(index_q.shape), weights.new_empty(weights.shape)
    sums = weights.new_zeros(b, SHARES, n, index_dim)
    for first in range(0, n, height):
        _strip[lambda tile: (triton.cdiv(pitch, tile["BN"]), triton.cdiv(height, tile["BM"]), b)](
            q, k, lse, index_q, index_k, weights, index_lse, mass, grad, strip, n, first, pitch, height, scale2,
            index_scale * LOG2E.value, index_scale, heads, group, index_heads, DIM=dim, WIDE=wide, INDEX_DIM=index_dim,
        )  # fmt: skip
        _queries[lambda tile: (b * index_heads, triton.cdiv(height, tile["BM"]))](
            strip, index_q, index_k, weights, d_q, d_w, n, first, pitch, height, index_heads, DIM=index_dim
        )
        _keys[lambda tile: (triton.cdiv(n, tile["BN"]), SHARES, b)](
            strip, index_q, index_k, weights, sums, n, first, pitch, height, index_heads, SHARES, DIM=index_dim
        )
    return d_q, sums.sum(1).to(index_k.dtype), d_w
