"""How the indexer's gradients are cut on Hopper, by the kernels' own texts, compiled for the host: which keys rows see,
how work is numbered, what blocks of threads read of the strip and of operands, and what becomes of their sums.

A product adds 1 to each of its sums whose gradients were loaded, so that results count the products that were there.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from on_host import built, needs_compiler

from streamkl_cupy.kernels import (
    indexer_gated_join,
    indexer_gated_key_sm90,
    indexer_gated_query_sm90,
    indexer_rows,
    indexer_units,
)
from streamkl_cupy.kernels.base import KernelText
from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.kernels.indexer import GRID, IndexerShape, IndexerWork
from streamkl_cupy.kernels.structs import INDEXER, INDEXER_ROWS
from streamkl_cupy.rules import row_keys
from streamkl_cupy.rules.row_keys import RowKeys

pytestmark = needs_compiler
Array = NDArray[Any]
BLOCK = indexer_gated_key_sm90.KEY_BLOCK
TILE_BYTES, GATE_BYTES = 2 * GRID * GRID, 8 * GRID

ALL_THREADS = """
extern "C" void run(const {args}* args, const int* grid, int threads) {{
    gridDim = {{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])}};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {{
                work = [&] {{ {symbol}(*args); }};
                run_threads(threads);
            }}
}}
"""
ROLES = """
// Blocks one after the other, first the producer; what it copies is noted.
extern "C" int run_roles(const IndexerArgs* args, int blocks, long long* copies) {
    copied = copies;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        work = [&] { produce(*args, Layout{0}); };
        run_threads(32, 256);
        for (int warp = 0; warp < 8; ++warp) {
            work = [&] { consume(*args, Layout{0}, warp / 4); };
            run_threads(32, 32 * warp);
        }
    }
    return (copied - copies) / 2;
}
"""
ROUNDED = "return __float_as_uint(lo) >> 16 | (__float_as_uint(hi) & 0xffff0000u);"  # of what fits
LOADED = "r[0] = r[1] = r[2] = r[3] = 1;"
ROLE_BODIES = {
    "bulk_load": "*copied++ = reinterpret_cast<long long>(global); *copied++ = bytes;",
    "cp_async_16": "memcpy(memory + shared, global, bytes); memset(memory + shared + bytes, 0, 16 - bytes);",
    "ldmatrix_x4": LOADED,
    "ldmatrix_x4_trans": LOADED,
    "select_bytes": "return ~0u;",
    "multiply_operands": "for (int i = 0; i < N; ++i) for (auto& tile : out[i]) for (float& x : tile) x += a[i][0][0];",
    "pack_bf16": ROUNDED,
}


def launcher(folder: Path, kernel: KernelText, **bodies: str) -> Callable[..., None]:
    """Of a kernel whose threads wait for one another."""
    driver = ALL_THREADS.format(args=kernel.args.name, symbol=kernel.symbol)
    library = built(folder, kernel.name, kernel.text, driver, **bodies)

    def run(args: bytes, *grid: int) -> None:
        library.run(args, (ctypes.c_int * 3)(*(*grid, 1, 1)[:3]), kernel.threads)

    return run


def roles(folder: Path, kernel: KernelText) -> Callable[[bytes, int], Counter[tuple[int, int]]]:
    """Of a kernel that has some: the (address, bytes) of copies."""
    library = built(folder, kernel.name, f"static long long* copied;\n{kernel.text}", ROLES, **ROLE_BODIES)

    def run(args: bytes, blocks: int) -> Counter[tuple[int, int]]:
        copies = np.zeros((1 << 18, 2), np.int64)
        count = library.run_roles(args, blocks, ctypes.c_void_p(copies.ctypes.data))
        return Counter(map(tuple, copies[:count].tolist()))

    return run


@pytest.fixture(scope="module")
def rows_kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return launcher(tmp_path_factory.mktemp("rows"), indexer_rows.plan(GPUS["sm_90"]))


def seen_by(kernel: Callable[..., None], rule: RowKeys, B: int, M: int, N: int, **arrays: Array) -> tuple[Array, Array]:
    """Intervals of rows and of tiles of rows, as the kernel finds them."""
    rows = np.full((B, M, 2), -7, np.int32)
    tiles = np.full((B, -(-M // GRID), 2), -7, np.int32)
    bases = np.full((B, M), -7, np.int32)
    values: dict[str, Any] = dict.fromkeys(INDEXER_ROWS.leaves, 0)
    for name, x in arrays.items():
        wide = {"cu_seqlens_q": "q", "cu_seqlens_k": "k", "key_start": "start", "key_end": "end"}[name]
        values[f"wide_{wide}"] = int(x.dtype == np.int64)
        if x.ndim == 1:
            values[name] = x.ctypes.data
        else:
            values |= {f"{name}.{axis}": step for axis, step in zip(("batch", "row"), (M, 1))}
            values[f"{name}.pointer"] = x.ctypes.data
    values |= {"row_keys": rows.ctypes.data, "tile_keys": tiles.ctypes.data, "bases": bases.ctypes.data}
    values |= {"queries": M, "keys": N, "diagonal": int(rule.causal), "q_offset": rule.q_offset or 0}
    values |= {"offset_given": int(rule.q_offset is not None), "ratio": rule.compress_ratio}
    values["relative"] = int(rule.topk_relative)
    values["sequences"] = len(arrays["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in arrays else 0
    kernel(INDEXER_ROWS.pack(values), tiles.shape[1], B)
    expected = row_keys.intervals(rule, B, M, N, arrays)
    np.testing.assert_array_equal(rows, np.stack([expected.start, expected.end], -1))
    some = expected.start < expected.end  # ids of other rows name keys that these do not see
    np.testing.assert_array_equal(bases[some], expected.base[some])
    return rows, tiles


def test_which_keys_rows_see(rng: np.random.Generator, rows_kernel: Callable[..., None]) -> None:
    """As the CPU has it, whatever bounds arrays hold; of tiles all that any of their rows sees."""
    for _ in range(30):
        B, M, N = int(rng.integers(1, 3)), int(rng.integers(1, 200)), int(rng.integers(1, 200))
        causal, dtype = bool(rng.integers(3)), rng.choice([np.int32, np.int64])
        rule = RowKeys(causal=causal, topk_relative=bool(rng.integers(2)))
        if causal:
            offset = int(rng.integers(-M - 9, N + 9)) if rng.integers(2) else None
            rule = rule._replace(q_offset=offset, compress_ratio=int(rng.integers(1, 5)))
        arrays = {}
        if rng.integers(2):
            B, count = 1, int(rng.integers(1, 5))
            for name, total in (("q", M), ("k", N)):
                ends = np.sort(rng.integers(0, total + 1, count + 1))
                ends[0] = 0
                arrays[f"cu_seqlens_{name}"] = ends.astype(dtype)
            if not causal:
                rule = rule._replace(q_offset=None)
        if rng.integers(2):
            arrays["key_start"] = rng.integers(-9, N + 9, (B, M)).astype(dtype)
        if rng.integers(2):
            arrays["key_end"] = rng.integers(-9, N + 9, (B, M)).astype(dtype)
        rows, tiles = seen_by(rows_kernel, rule, B, M, N, **arrays)
        for b, t in np.ndindex(*tiles.shape[:2]):
            here = rows[b, t * GRID : (t + 1) * GRID]
            some = here[here[:, 1] > here[:, 0]]
            least, most = (some[:, 0].min(), some[:, 1].max()) if len(some) else (N, 0)
            assert tiles[b, t].tolist() == [least, most]


def test_every_product_is_there_once(
    rng: np.random.Generator, tmp_path: Path, rows_kernel: Callable[..., None]
) -> None:
    """Over strips, and over blocks of threads that begin and end anywhere; nothing is read that nobody has written."""
    facts, every = GPUS["sm_90"], frozenset(("TQ", "TK", "SQ", "SK"))
    depth, block_heads = int(rng.choice([40, 72, 128])), int(rng.choice([2, 4]))
    shape = IndexerShape("bfloat16", "bfloat16", "float32", 64, 0, depth, True, False, False, every, tiled=True)
    gradients = []
    for gated in (indexer_gated_key_sm90.KERNEL, indexer_gated_query_sm90.KERNEL):
        work = IndexerWork(shape, heads=block_heads)
        tile, _ = gated.choice(work, facts)
        assert tile
        gradients.append(roles(tmp_path, gated.plan(work, tile, facts)))
    kernels = Kernels(
        rows_kernel,
        launcher(tmp_path, indexer_units.plan(facts)),
        *gradients,
        launcher(tmp_path, indexer_gated_join.plan(shape, max(SHARES), facts), pack_bf16=ROUNDED),
    )
    numbers = rng.permutation([1, 2, 2]) if block_heads == 2 else rng.integers(3, 9, 3)
    for heads, (groups, key_heads) in zip(numbers.tolist(), ((1, 1), (3, 1), (2, 2)), strict=True):
        one_backward(rng, kernels, depth, groups, key_heads, heads)


class Kernels(NamedTuple):
    rows: Callable[..., None]
    units: Callable[..., None]
    keys: Callable[[bytes, int], Counter[tuple[int, int]]]
    queries: Callable[[bytes, int], Counter[tuple[int, int]]]
    join: Callable[..., None]


SHARES = (1, 3, 7, 40)


def one_backward(
    rng: np.random.Generator, kernels: Kernels, depth: int, groups: int, key_heads: int, heads: int
) -> None:
    B, M, N = 2, int(rng.integers(130, 300)), int(rng.integers(300, 800))
    all_heads, block_heads = groups * heads, indexer_gated_query_sm90.heads_of(heads)
    shares = int(rng.choice(SHARES))
    bounds = {"key_start": rng.integers(0, 2 * N, (B, M)).astype(np.int32)} if rng.integers(2) else {}
    rule = RowKeys(causal=True, q_offset=int(rng.integers(-150, 600)))
    _, tile_keys = seen_by(kernels.rows, rule, B, M, N, **bounds)
    grid, columns = tile_keys.shape[1], -(-depth // 16) * 16
    begin, end = tile_keys[..., 0] // GRID, -(-tile_keys[..., 1] // GRID)
    begin, end = (np.where(tile_keys[..., 0] < tile_keys[..., 1], x, 0) for x in (begin, end))
    operand = GRID * 128 * -(-depth // 64)

    weights = rng.integers(1, 4, (B, all_heads, M)).astype(np.float32)
    queries = rng.integers(-2, 3, (B, all_heads, M, depth)).astype(np.float32)
    live = rng.integers(0, 4, (B, groups, M)) > 0
    stats = np.where(live[..., None], np.float32((1, 1, 1, 0)), np.float32(0))
    halves = np.ascontiguousarray((queries.view(np.uint32) >> 16).astype(np.uint16))
    out_q, out_k = np.full((B, all_heads, M, depth), 7, np.uint16), np.full((B, key_heads, N, depth), 7, np.uint16)
    out_weights = np.full((B, all_heads, M), np.nan, np.float32)
    sums = np.zeros((B, key_heads, N, columns), np.float32)
    partials = np.full(shares * max(GRID * block_heads, BLOCK) * columns, np.nan, np.float32)
    flags = np.zeros((shares, 8), np.int32)
    there: dict[str, Array] = {"tile_keys": tile_keys, "weights": weights, "row_stats": stats, "key_sums": sums,
                               "partials": partials, "kept_sums": partials, "kept_flags": flags}  # fmt: skip
    arrays = {"index_q": halves, "out_q": out_q, "out_k": out_k, "out_weights": out_weights}
    common: dict[str, Any] = dict.fromkeys(INDEXER.leaves, 0) | {name: a.ctypes.data for name, a in there.items()}
    for name, array in arrays.items():
        fields = dict(zip(("batch", "head", "row", "column"), (x // array.itemsize for x in array.strides)))
        common |= {f"{name}.{field}": step for field, step in fields.items()} | {f"{name}.pointer": array.ctypes.data}
    common |= {"entries": B, "groups": groups, "queries": M, "keys": N, "index_heads": heads, "grid_tiles": grid,
               "index_key_heads": key_heads, "shares": shares, "head_blocks": -(-heads // block_heads),
               "strip": 1 << 40, "gates": 1 << 41, "weighted_queries": 1 << 42, "key_tiles": 1 << 43}  # fmt: skip

    cut = sorted({0, *rng.integers(1, grid, 2).tolist(), grid})
    for number, (first, last) in enumerate(pairwise(cut)):
        tiles, ends = last - first, end[:, first:last]
        blocks = -(-N // BLOCK) if last == grid else max(-(-int(ends.max()) * GRID // BLOCK), 1)
        widths, items = (np.full(B * tiles + 1, -7, np.int32) for _ in range(2))
        units = np.full(B * key_heads * blocks + 1, -7, np.int32)
        made = {"strip_widths": widths, "items": items, "units": units}
        args = INDEXER.pack(
            common
            | {name: x.ctypes.data for name, x in made.items()}
            | {"first_tile": first, "tiles": tiles, "strip_rows": tiles * GRID, "key_blocks": blocks}
            | {"strip_number": number}
        )
        kernels.units(args, 3)
        # Where each row tile's part of the strip begins.
        width = -(-ends * GRID // BLOCK) * (BLOCK // GRID)
        before = np.concatenate(([0], np.cumsum(width)))
        np.testing.assert_array_equal(widths, before)

        start = before[:-1].reshape(B, tiles)
        read, copies = Counter[tuple[int, int]](), kernels.queries(args, shares)
        for b, t, group in np.ndindex(B, tiles, groups):
            key_head = group if key_heads > 1 else 0
            for at in range(begin[b, first + t], end[b, first + t]):
                for block in range(0, heads, block_heads):
                    read[(1 << 43) + (((b * key_heads + key_head) * -(-N // GRID)) + at) * operand, operand] += 1
                    tile = start[b, t] * groups + group * width[b, t] + at
                    read[(1 << 40) + tile * TILE_BYTES, TILE_BYTES] += 1
                    for h in range(block, block + block_heads):  # some twice, where heads do not fill a block
                        head = group * heads + min(h, heads - 1)
                        tile = start[b, t] * all_heads + head * width[b, t] + at
                        read[(1 << 41) + tile * GATE_BYTES, GATE_BYTES] += 1
        assert copies == read

        read, copies = Counter(), kernels.keys(args, shares)
        strips = set()
        for b, t, head in np.ndindex(B, tiles, all_heads):
            for block in range(begin[b, first + t] // 4, -(-end[b, first + t] // 4)):
                query = (b * all_heads + head) * tiles + t
                read[(1 << 42) + query * operand, operand] += 1
                tile = start[b, t] * all_heads + head * width[b, t] + 4 * block
                read[(1 << 41) + tile * GATE_BYTES, 4 * GATE_BYTES] += 1
                tile = start[b, t] * groups + head // heads * width[b, t] + 4 * block
                strips.add(((1 << 40) + tile * TILE_BYTES, 4 * TILE_BYTES))
        assert {copy for copy in copies if copy[0] < 1 << 41} == strips
        assert Counter({copy: n for copy, n in copies.items() if copy[0] >= 1 << 41}) == read
        kernels.join(args, B * key_heads * blocks, BLOCK // indexer_gated_join.PART_KEYS)

    # Results count key tiles of rows, and row tiles and heads of keys.
    def wide(x: Array) -> Array:
        return (x.astype(np.uint32) << 16).view(np.float32)

    count = np.repeat(end - begin, GRID, 1)[:, None, :M] * np.repeat(live, heads, 1)
    np.testing.assert_array_equal(wide(out_q), np.broadcast_to((weights * count)[..., None], out_q.shape))
    np.testing.assert_array_equal(out_weights, queries.sum(-1) * count)
    at = np.arange(N) // GRID
    met = ((begin[..., None] <= at) & (at < end[..., None])).sum(1) * (all_heads // key_heads)
    np.testing.assert_array_equal(wide(out_k), np.broadcast_to(met[:, None, :, None], out_k.shape))
