"""A small matrix of calls of every operation under compute-sanitizer, with all of its tools; `make sanitize` does.

    python tests/sanitize.py [--jobs 16] [--limit 300] [--only TEXT] [--tools memcheck,racecheck,synccheck]

Every kernel file, own kernels of an architecture and the portable ones, full and ragged tiles, vector and element-wise
loads, masks, grouped heads, split keys, split lists, shared row tiles, all gradients. All kernels are compiled first;
then each tool watches the calls in several processes. What it says is printed with how far each process came, and so
is whether a store beyond an allocation, planted to that end, is noticed.

memcheck finds accesses out of bounds, racecheck missing barriers, synccheck divergent ones. Kernels let one lane arrive
at a barrier for its warp, which racecheck takes for a race of the others: for it all of them arrive.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy import call, parallel, patterns, planning
from streamkl_cupy.cli import catalogue
from streamkl_cupy.indexer import plan as index_plan
from streamkl_cupy.kernels import (
    KERNELS,
    gpus,
    join_states,
    sm90,
    work_tiles,
)
from streamkl_cupy.parallel import setup
from streamkl_cupy.problem import INPUT_NAMES, STUDENT, Device
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.testing import reference

PLANTED = 'extern "C" __global__ void planted(float* x, int n) { x[n + threadIdx.x] = 1.0f; }'
TOOLS = {"memcheck": 3, "racecheck": 6, "synccheck": 2}
"""By how slow they are: shares of the processes."""
SHARDED = "parallel.attention_kl"
FAMILIES = ("sm90 and sm80", "sm80")
PLANS: dict[str, Callable[..., Any]] = {
    "attention_kl": streamkl_cupy.plan,
    "attention_kl_to": streamkl_cupy.attention_kl_to_plan,
    "sparse_attention": streamkl_cupy.sparse_attention_plan,
    "indexer_kl": streamkl_cupy.indexer_kl_plan,
}
EVERY_KERNEL = dict(KERNELS)

Array = NDArray[Any]


class Case(NamedTuple):
    """A call: its operands and options, with arrays of the host, and what it is differentiated by."""

    about: str
    op: str
    arrays: tuple[Array | None, ...]
    wrt: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    strided: bool = False
    """Inner strides are 2."""

    def __str__(self) -> str:
        shapes = " ".join("-" if x is None else "x".join(map(str, x.shape)) for x in self.arrays)
        dtype = next(x.dtype for x in self.arrays[::-1] if x is not None)
        return f"{self.op} {self.about}: {shapes} {dtype}"


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def block_lists(rng: np.random.Generator, heads: int, queries: int, keys: int) -> patterns.BlockPattern:
    """A third of all blocks of 48 x 48."""
    grid = (heads, -(-queries // 48), -(-keys // 48))
    return patterns.from_dense(rng.random(grid) < 0.3, queries=queries, keys=keys, block=(48, 48))


class Matrix:
    """All cases, with random numbers of a seed: processes that share the work agree on what it is."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def random(self, *shape: int, dtype: str = "float16") -> Array:
        return self.rng.standard_normal(shape).astype(dtype)

    def some(self, of: tuple[str, ...], count: int) -> list[str]:
        return [of[i] for i in self.rng.choice(len(of), count, replace=False)]

    def divergence(
        self, about: str, M: int, N: int, dims: tuple[int, int], *, B: int = 2, H: int = 4,
        key_heads: tuple[int, int] = (2, 1), dtype: str = "float16", **options: Any,
    ) -> Case:  # fmt: skip
        """One of `attention_kl`; with packed sequences there is no axis of batches."""
        shapes = [(H, M, dims[0]), (key_heads[0], N, dims[0]), (H, M, dims[1]), (key_heads[1], N, dims[1])]
        packed = "cu_seqlens_q" in options
        shaped = [(rows, heads, dim) if packed else (B, heads, rows, dim) for heads, rows, dim in shapes]
        step = 2 if about == "strided" else 1
        arrays = tuple(self.random(*x[:-1], x[-1] * step, dtype=dtype) for x in shaped)
        wrt = INPUT_NAMES if dims[0] <= 256 else STUDENT
        return Case(about, "attention_kl", arrays, wrt, options, strided=step > 1)

    def masks(self, heads: int, M: int, N: int) -> dict[str, dict[str, Any]]:
        rng = self.rng
        return {
            "window": {"window": (40, 9)},
            "lengths": {"key_lengths": ints(0, min(N, 200)), "causal": True},
            "padded": {"key_lengths": ints(30, min(N, 200)), "query_lengths": ints(100, 7), "causal": True},
            "keys": {"key_mask": rng.random((2, N)) < 0.5},
            "rows": {"query_mask": rng.random((2, M)) < 0.5, "window": (40, 9)},
            "blocks": {"block_mask": block_lists(rng, heads, M, N), "causal": True},
            "packed": {
                "cu_seqlens_q": ints(0, 0, M - 31, M),
                "cu_seqlens_k": ints(0, 50, min(N, 250), min(N, 320)),
                "causal": True,
            },
        }

    def divergences(self) -> Iterator[Case]:
        for dims in ((64, 64), (128, 128), (40, 72), (192, 128), (256, 256), (576, 128)):
            # Of tiles for wide rows there are few, and a bound is no part of a tile: some of each, by lot.
            for dtype in self.some(("float16", "float32"), 2 if max(dims) <= 128 else 1):
                causal = bool(self.rng.integers(2))
                for M, N in ((1, 1), (130, 77), (65, 200), (300, 333)):
                    mask = "causal" if causal else "no mask"
                    yield self.divergence(mask, M, N, dims, dtype=dtype, B=1, causal=causal)
        more = {"causal": True, "q_offset": -20}
        yield self.divergence("strided", 70, 90, (64, 64), B=1, H=2, key_heads=(2, 2), **more)
        yield self.divergence("split keys", 3, 5000, (64, 64), B=1, H=1, key_heads=(1, 1))
        for M, heads in ((16, (2, 2)), (5, (1, 2)), (40, (2, 1))):  # packed, mostly
            for D, options in (
                (64, {"causal": True}),
                (128, {"window": (700, 0)}),
                (64, {"key_lengths": ints(900, 0)}),
            ):
                yield self.divergence("few queries", M, 1300, (D, D), H=6, key_heads=heads, **options)
        # The keys of a head in several tiles, and in one.
        for N, dims in ((333, (64, 64)), (333, (128, 128)), (77, (64, 64)), (333, (576, 128))):
            masks = self.masks(2, 301, N)
            for name in masks if (N, dims[0]) == (333, 64) else self.some(tuple(masks), 3):
                yield self.divergence(name, 301, N, dims, H=2, **masks[name])
        yield self.divergence("one tile of 256 keys", 70, 197, (64, 64), H=140, B=1, key_heads=(140, 140))
        sinks = {f"{side}_sink_logits": self.random(4, dtype="float32") for side in ("teacher", "student")}
        for dtype, causal in itertools.product(("float16", "float32"), (False, True)):
            for divergence in ("cosine", "jsd"):  # rows of moments, and two passes
                rule = {"divergence": divergence, "causal": causal}
                yield self.divergence(divergence, 130, 197, (64, 128), dtype=dtype, **rule)
            yield self.divergence("sinks", 130, 197, (64, 128), dtype=dtype, causal=causal, **sinks)

    def targets(self) -> Iterator[Case]:
        """A teacher that is given, for all heads or for each."""
        for (M, N), D, dtype in itertools.product(((130, 77), (300, 333)), (64, 128), ("float16", "float32")):
            heads = 1 if D == 64 else 4
            q, k = self.random(2, 4, M, D, dtype=dtype), self.random(2, 2, N, D, dtype=dtype)
            masks = {"none": {}, "causal": {"causal": True}, **self.masks(heads, M, N)}
            for name in ("none", "causal", "window", "keys", "blocks"):
                target = self.target((2, heads, M, N), masks[name])
                yield Case(f"{name} mask", "attention_kl_to", (target, q, k), STUDENT, masks[name])
        with np.errstate(divide="ignore"):
            target = np.log(self.target((1, 2, 70, 89), {"causal": True}))  # no whole vectors
        arrays = (target, self.random(1, 2, 70, 40), self.random(1, 2, 89, 40))
        yield Case("logarithms", "attention_kl_to", arrays, STUDENT, {"log_target": True, "causal": True})

    def target(self, shape: tuple[int, ...], mask: dict[str, Any]) -> Array:
        """Probabilities of what rows see."""
        seen = self.rng.random(shape) * reference.visible(shape, mask)
        return (seen / np.maximum(seen.sum(-1, keepdims=True), 1e-9)).astype("float32")

    def attention(self) -> Iterator[Case]:
        import ml_dtypes  # as bfloat16 is what all gradients of long rows have one pass in

        wrt = ("query", "key", "value")

        def case(
            about: str, H: int, K: int, M: int, N: int, dims: tuple[int, int], dtype: str, B: int = 1, **options: Any
        ) -> Case:
            element = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
            shapes = [(H, M, dims[0]), (K, N, dims[0]), (K, N, dims[1])]
            packed = "cu_seqlens_q" in options
            shaped = [(rows, heads, dim) if packed else (B, heads, rows, dim) for heads, rows, dim in shapes]
            arrays = tuple(self.random(*x, dtype="float32").astype(element) for x in shaped)
            return Case(about, "sparse_attention", arrays, wrt, options)

        for dims, dtype in itertools.product(
            ((64, 64), (128, 128), (80, 48), (192, 128), (33, 65)), ("float16", "float32")
        ):
            for M, N, causal in ((1, 1, False), (130, 77, True), (300, 333, True)):
                yield case("causal" if causal else "no mask", 4, 2, M, N, dims, dtype, causal=causal)
        for dims, dtype in (((64, 64), "float16"), ((128, 128), "float16"), ((128, 128), "bfloat16")):
            masks = self.masks(4, 301, 333)
            for name in masks if dtype == "bfloat16" else self.some(tuple(masks), 3):
                yield case(name, 4, 2, 301, 333, dims, dtype, B=2, **masks[name])
        yield case("softcap", 4, 4, 130, 197, (64, 64), "float16", softcap=20.0, causal=True)
        # Of decoders: keys split over blocks, and rows of several heads in a tile.
        for M, dims, dtype in itertools.product((1, 5), ((64, 64), (128, 128)), ("float16", "float32")):
            yield case("decoder", 8, 2, M, 5000, dims, dtype, causal=True)
        long_cache = patterns.sharded(8, window=256, stride=4, queries=4096, keys=4096, block=64, causal=True)
        last = long_cache.rows(4032, 4096)
        yield case("decoder of a pattern", 8, 2, 64, 4096, (128, 128), "float16", block_mask=last)

    def indexer(self) -> Iterator[Case]:
        import ml_dtypes  # as bfloat16 is what its gradients are built in

        def case(about: str, dtype: str, T: int, D: int, M: int = 150, N: int = 170, *, H: int = 4, J: int = 1,
                 K: int = 2, **options: Any) -> Case:  # fmt: skip
            element = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
            shapes = ((2, H, M, T), (2, K, N, T), (2, 4, M, D), (2, J, N, D), (2, 4, M))
            arrays: list[Array | None] = [self.random(*x, dtype="float32").astype(element) for x in shapes]
            options = {name: x.astype(element) if name.endswith("rope") else x for name, x in options.items()} | {
                "index_scale": 0.4
            }
            if "target" in options:
                arrays[:2] = [None, None]
            return Case(about, "indexer_kl", tuple(arrays), ("index_q", "index_k", "index_weights"), options)

        rng = self.rng
        for dtype in ("bfloat16", "float32"):
            for T, D in ((64, 32), (128, 128), (77, 41), (192, 72), (576, 192)):
                yield case("causal", dtype, T, D, causal=True)
            ids = rng.integers(-3, 175, (2, 150, 40))
            yield case("ids", dtype, 72, 64, topk_indices=ids, causal=True)
            if dtype == "bfloat16":
                yield case("ids of latent heads", dtype, 136, 72, H=70, K=1, topk_indices=ids, causal=True)
            lengths = rng.integers(-1, 45, (2, 2, 150)).astype(np.int32)
            both = np.stack([ids, ids[:, ::-1]], axis=1)
            yield case("ids of groups", dtype, 72, 64, J=2, head_groups=2, topk_indices=both, topk_length=lengths)
            yield case("some keys", dtype, 72, 64, key_mask=rng.random((2, 170)) < 0.6, relu=False)
            bounds = {"key_start": rng.integers(-2, 80, (2, 150)), "key_end": rng.integers(0, 180, (2, 150))}
            yield case("bounds", dtype, 72, 64, **bounds)
            yield case("compressed", dtype, 72, 64, N=50, compress_ratio=3, causal=True)
            ropes = {"teacher_q_rope": self.random(2, 4, 150, 16), "teacher_k_rope": self.random(2, 1, 170, 16)}
            yield case("rotary parts", dtype, 128, 64, K=1, causal=True, **ropes)
            yield case("target", dtype, 16, 128, target=rng.random((2, 150, 170)).astype("float32"), causal=True)

    def shards(self) -> Iterator[Case]:
        """Of two ranks in threads, whose rows have states over some of the keys."""
        for n, dtype in ((100, "float16"), (333, "float16")):
            arrays = tuple(self.random(2, heads, n, 64, dtype=dtype) for heads in (4, 2, 4, 2))
            yield Case("halves of the keys", SHARDED, arrays, INPUT_NAMES, {"causal": True})

    def __iter__(self) -> Iterator[Case]:
        yield from self.divergences()
        yield from self.shards()
        yield from self.targets()
        yield from self.attention()
        yield from self.indexer()


def name_of(kernel: Any) -> str:
    """Its file, as "forward_sm90"."""
    return Path(kernel.entry).stem


def kernels_of_shards(case: Case, options: dict[str, Any], arch: str) -> Iterator[Any]:
    """What joins rows, and the calls of both ranks."""
    facts = gpus.facts_for_arch(arch)
    yield from (join_states.plan(x, facts) for x in DIVERGENCES.values() if x.merging)
    for rank in range(2):
        mine = [parallel.shard(x, 2, rank, 2) for x in case.arrays]
        job, _ = setup.planned(rank, 2, mine, setup.plain("plan", options), setup.Asked(wrt=case.wrt))
        for part in job.stand_ins(rank, mine):
            plan = planning.make_plan(part.problem(Device("cuda")), facts)
            for step in (*plan.forward_steps(workspace=True), *plan.backward_steps(case.wrt)):
                yield from step.kernels


def kernels_of(case: Case, arch: str, deterministic: bool | None = None) -> list[Any]:
    """All that a case launches with any workspace, with equal bits from run to run and without, or as is said."""
    own = {name: x for name, x in case.options.items() if "sink" not in name}
    arrays = [None if x is None else x[..., :: 2 if case.strided else 1] for x in case.arrays]
    if case.op == SHARDED:
        return list(kernels_of_shards(case, own, arch))
    if case.op == "indexer_kl":
        plan = PLANS[case.op](*arrays, arch=arch, wrt=case.wrt, **own)
        assert isinstance(plan, index_plan.IndexerPlan)
        return [*plan.forward, *plan.backward]
    found = []
    for equal_bits in (True, False) if deterministic is None else (deterministic,):
        plan = PLANS[case.op](*arrays, arch=arch, wrt=case.wrt, deterministic=equal_bits, **own)
        found += [packed.kernel for packed in plan.mask_bits]
        for step in (*plan.forward_steps(workspace=True), *plan.backward_steps(case.wrt)):
            found += step.kernels
    return found


def call_it(case: Case, deterministic: bool) -> None:
    """On the GPU; results have to be finite."""
    import cupy

    def there(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name == "bfloat16":
            return cupy.asarray(x.view(np.uint16)).view(x.dtype)
        return cupy.asarray(x)

    given = [None if x is None else there(x)[..., :: 2 if case.strided else 1] for x in case.arrays]
    options = {name: there(x) for name, x in case.options.items()}
    if case.op == "sparse_attention":
        rows = streamkl_cupy.sparse_attention_forward(*given, deterministic=deterministic, **options)
        upstream = {"saved": rows, "grad_lse": cupy.ones_like(rows.lse), "wrt": case.wrt}
        found = streamkl_cupy.sparse_attention_backward(
            cupy.ones_like(rows.out), *given, **upstream, deterministic=deterministic, **options
        )
        results = (rows.out, *found)
    elif case.op == SHARDED:
        both = parallel.LocalWorld(2).run(lambda rank: shares(rank, given, options))
        results = tuple(itertools.chain(*both))
    elif case.op == "attention_kl":
        rows = streamkl_cupy.attention_kl_forward(*given, **options)
        found = streamkl_cupy.attention_kl_backward(
            cupy.ones_like(rows.kl), *given, saved=rows, wrt=case.wrt, deterministic=deterministic, **options
        )
        results = (rows.kl, *found)
    else:
        of_op = getattr(streamkl_cupy, f"{case.op}_value_and_grad")
        value, grads = of_op(*given, reduction="sum", wrt=case.wrt, deterministic=deterministic, **options)
        results = (value, *grads)
        if case.op == "indexer_kl" and deterministic and given[0] is not None:
            of_student = ("index_scale", "relu")
            own = {name: x for name, x in options.items() if name not in of_student}
            results = (*results, streamkl_cupy.indexer_target(*given[:2], rows=(17, 133), **own))
    if not all(bool(cupy.isfinite(x.astype("float32")).all()) for x in results if x is not None):
        raise SystemExit(f"not finite: {case}")


def shares(rank: Any, given: list[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a rank computes of its shards."""
    import cupy

    how = {**options, "group": rank, "strategy": "all_gather"}
    mine = [parallel.shard(x, 2, rank.rank, rank.size) for x in given]
    rows = parallel.attention_kl_forward(*mine, **how)
    return rows.kl, *parallel.attention_kl_backward(cupy.ones_like(rows.kl), *mine, saved=rows, wrt=INPUT_NAMES, **how)


def choose(families: str) -> None:
    """Plan with kernels of these families alone."""
    for kind, kernels in EVERY_KERNEL.items():
        KERNELS[kind] = tuple(x for x in kernels if x.family in families)
    work_tiles.MIN_TILES_IN_LIST = 2  # small lists are split as long ones are
    index_plan.STRIP_BYTES, index_plan.BITS_BYTES = 1 << 16, 1 << 13  # and so are small rows
    planning.make_plan.cache_clear()
    index_plan.make_plan.cache_clear()
    planning._unsplit_plan.cache_clear()
    call._looks.clear()
    call._checked.clear()
    call._runners.clear()


def rounds(cases: list[Case], arch: str) -> Iterator[tuple[str, list[Case]]]:
    """Families of kernels and the cases for them: of the portable ones those that had others in the first round."""
    for families in FAMILIES:
        choose(families)
        yield families, cases
        cases = [case for case in cases if any("sm90" in name_of(kernel) for kernel in kernels_of(case, arch))]


def watched(args: argparse.Namespace) -> None:
    """In a process under a tool: every n-th case."""
    import cupy

    warnings.simplefilter("ignore")  # of rows that see nothing
    began = time.monotonic()
    first, step = map(int, args.part.split("/"))
    # Each array its own allocation: inside a pool's chunk a stray access would go unseen.
    cupy.cuda.set_allocator(None)
    arch = gpus.device_facts(cupy.cuda.Device().id).flag
    for families, mine in rounds([x for x in Matrix(args.seed) if args.only in str(x)][first::step], arch):
        for number, case in enumerate(mine, start=1):
            seconds = time.monotonic() - began
            print(f"{seconds:.0f} s: {number} of {len(mine)} with kernels of {families}: {case}", flush=True)
            alike = kernels_of(case, arch, True) == kernels_of(case, arch, False)
            for deterministic in (True,) if alike else (True, False):
                call_it(case, deterministic)
    print("all done", flush=True)


def plant() -> None:
    """A store beyond an allocation."""
    import cupy

    cupy.cuda.set_allocator(None)
    x = cupy.empty(8, cupy.float32)
    cupy.RawKernel(PLANTED, "planted")((1,), (32,), (x, 1 << 20))
    cupy.cuda.Device().synchronize()


def compile_all(args: argparse.Namespace) -> None:
    """Have every kernel in the cache, also those whose every lane arrives: by processes, because threads
    wait for each other in the compiler."""
    import cupy

    facts = gpus.device_facts(cupy.cuda.Device().id)
    wanted: dict[tuple[str, str], catalogue.Entry] = {}
    # By racecheck's lanes and the others'.
    lanes = [
        *([sm90.ARRIVING_LANES] if {*args.tools.split(",")} - {"racecheck"} else ()),
        *([32] * ("racecheck" in args.tools)),
    ]
    for sm90.ARRIVING_LANES in lanes:
        counts = []
        for families, cases in rounds([x for x in Matrix(args.seed) if args.only in str(x)], facts.flag):
            counts.append(f"{len(cases)} with kernels of {families}")
            for kernel in itertools.chain.from_iterable(kernels_of(case, facts.flag) for case in cases):
                wanted.setdefault((kernel.text, kernel.arch), catalogue.Entry(name_of(kernel), kernel))
    began = time.monotonic()
    for built in catalogue.build(list(wanted.values()), args.jobs, store=True):
        if built.error:
            raise SystemExit(f"{built.entry.label}: {built.error}")
    print(f"{facts.name}: {', '.join(counts)}")
    print(f"{len(wanted)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), help="those of compute-sanitizer to use (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of all tools together")
    parser.add_argument("--limit", type=float, default=900, help="seconds, compiling included (900)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line has it, such as 'packed'")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the numbers")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--every-lane", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.every_lane:
        sm90.ARRIVING_LANES = 32
    if args.plant:
        plant()
    elif args.part:
        watched(args)
    elif args.compile:
        compile_all(args)
    else:
        sys.exit(drive(args))


def drive(args: argparse.Namespace) -> int:
    """Compile, start all tools, say what came of them; 0 if all was seen and nothing found but what was planted."""
    command = shutil.which("compute-sanitizer")
    if command is None:
        raise SystemExit("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    me = [sys.executable, __file__, f"--seed={args.seed}", f"--only={args.only}"]
    compiled = [*me, "--compile", f"--tools={args.tools}", f"--jobs={args.jobs}"]
    print(f"--seed {args.seed}", flush=True)
    began = time.monotonic()
    subprocess.run(compiled, check=True, timeout=args.limit)
    tools, devices = args.tools.split(","), os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    parts = {tool: max(args.jobs * TOOLS[tool] // sum(TOOLS[x] for x in tools), 1) for tool in tools}
    watch = [command, "--error-exitcode", "9", "--print-limit", "5"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for tool, part in [*((x, i) for x in tools for i in range(parts[x])), ("memcheck", -1)]:
            more = ["--plant"] if part < 0 else [f"--part={part}/{parts[tool]}"]
            more += ["--every-lane"] if tool == "racecheck" else []
            output, where = Path(folder, f"{tool}{part}"), {"CUDA_VISIBLE_DEVICES": devices[part % len(devices)]}
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*watch, "--tool", tool, *me, *more],
                    env={**os.environ, **where},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            running[tool, part] = process, output
        well = True
        for (tool, part), (process, output) in running.items():
            try:
                code = process.wait(max(began + args.limit - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            text = output.read_text(errors="replace")
            well = report(tool, part, code, text) and well
        print(f"{time.monotonic() - start:.0f} s with the tools, processes {parts}", flush=True)
    return 0 if well else 1


def report(tool: str, part: int, code: int, text: str) -> bool:
    """Whether a process did what it should; and say so."""
    said = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY.*)$", text, re.M)
    if part < 0:
        noticed = code == 9 and "Invalid __global__ write" in text
        print(f"{tool}: the planted store is {'noticed' if noticed else f'NOT noticed (status {code})'}", flush=True)
        return noticed
    lines = [line for line in text.splitlines() if not line.startswith("=")]
    good = code == 0 and lines[-1:] == ["all done"]
    reached = "all" if lines[-1:] == ["all done"] else f"until {lines[-1] if lines else 'nothing'}"
    print(f"{tool} {part}: {'; '.join(said) or f'status {code}'}; {reached}", flush=True)
    if not good:
        print("\n".join([*complaints(text)[:60], *lines[-3:]]), flush=True)
    return good


def complaints(text: str) -> list[str]:
    """What a tool said, each time behind the line of the case that it was about."""
    found, case = [], ""
    for line in text.splitlines():
        if not line.startswith("="):
            case = line
            continue
        if case:
            found.append(case)
            case = ""
        found.append(line)
    return found


if __name__ == "__main__":
    main()
