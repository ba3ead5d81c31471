"""The list of representative problems: what is compiled ahead of time, and what tests compile for every architecture.

Which kernel a problem gets hangs on head dims, element types, the mask, alignment and, through the choice of tile, on
how many rows there are. The list crosses these where they meet in a kernel and leaves out what only changes a number in
its arguments, such as scales, strides and batch.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

from .. import patterns
from ..arrays import ArrayView, cuda
from ..compiler import cache
from ..compiler import nvrtc as compiler
from ..concurrency.threads import usable_cores
from ..errors import CompilerError
from ..indexer import plan as index_plan
from ..indexer.problem import to_problem
from ..kernels import JOINS
from ..kernels.base import ELEMENT_CODES, PLANES, KernelPlan, KernelText, Work
from ..kernels.gpus import DeviceFacts, facts_for_arch
from ..kernels.work_tiles import Schedule
from ..ops import ATTENTION_KL_TO, INDEXER_KL, INDEXER_TARGET, SPARSE_ATTENTION, Op
from ..ops.indexer_kl import WRT
from ..options import IndexOptions
from ..planning import Plan, make_plan
from ..problem import Device, MaskSpec, Operand, Problem, Side, compact_strides
from ..rules.masks import MASKS, registers, together
from ..rules.scores import SCORES
from ..rules.scores.given import GIVEN

DIMS = (
    *((dim, dim) for dim in (16, 32, 64, 80, 96, 128, 160, 192, 256)),
    (64, 128),
    (128, 64),
    (192, 128),
    (320, 128),
    (384, 128),
    (512, 64),
    (576, 128),
)
"""(teacher, student); the unequal ones are shrunk students, latent attention and indexers."""

ATTENTION_DIMS = ((64, 64), (128, 128), (80, 48), (64, 128), (192, 128), (256, 256))
"""(queries and keys, values) of attention."""

INDEXER_DIMS = ((64, 64), (128, 64), (128, 128), (192, 128), (576, 128))
"""(teacher, indexer) of indexers."""

ARCHS = ("sm_80", "sm_90", "sm_120")
# What asks for code of its own: an interval, segments, holes, lists, holes on both sides, and all together.
MASK_CASES: dict[str, tuple[str, ...]] = {
    "none": (),
    **{part.name: (*part.beside, part.name) for part in MASKS.values()},
    "padding": ("causal", "keys", "query_mask"),
    "everything": together(),
}
# Of either side: a score, and within what its logits are kept. How much is a number in the arguments.
SCORE_CASES: dict[str, tuple[str, float | None]] = {
    **{name: (name, None) for name in SCORES},
    **{f"{name}+softcap": (name, 30.0) for name, score in SCORES.items() if score.proportional},
}
USUAL_SCORES = (Side.score, Side.score)
PLAIN = ("none", "causal")
SEQUENCES = 16
PATIENCE = 0.2  # seconds that an interrupt may wait


class Extents(NamedTuple):
    """Heads that queries and keys have, and rows of both."""

    heads: int
    key_heads: int
    queries: int
    keys: int


# Enough rows to fill any GPU, so few that planning prefers smaller tiles, few queries on a long cache, many heads whose
# keys fit one tile, and one key head and few keys, whose tiles several blocks share.
EXTENTS = (
    Extents(8, 8, 8192, 8192),
    Extents(1, 1, 512, 512),
    Extents(16, 4, 16, 8192),
    Extents(256, 256, 256, 256),
    Extents(256, 256, 256, 128),
    Extents(8, 1, 2048, 2048),
    Extents(2, 2, 16384, 64),
)


class ElementTypes(NamedTuple):
    """Types of both sides, with the precision of float32 products."""

    teacher: str
    student: str
    precision: str = "highest"

    def __str__(self) -> str:
        name = self.teacher if self.teacher == self.student else f"{self.teacher}/{self.student}"
        return name if "float32" not in name else f"{name} {self.precision}"


ELEMENT_TYPES = (
    ElementTypes("bfloat16", "bfloat16"),
    ElementTypes("float16", "float16"),
    ElementTypes("float32", "float32", "highest"),
    ElementTypes("float32", "float32", "high"),
    ElementTypes("bfloat16", "float32", "highest"),
    ElementTypes("float16", "bfloat16"),
)
# Element-wise loads differ by the size of an element, not by its type.
UNALIGNED = (ELEMENT_TYPES[0], ELEMENT_TYPES[2])
# What a mask hides is no matter of types either, but it takes registers.
MASKED = ELEMENT_TYPES[:3]


class Entry(NamedTuple):
    """One kernel of the list, with what it is for."""

    label: str
    kernel: KernelText


class Built(NamedTuple):
    """What came of compiling an entry: figures, or the error.

    `stored`: it is in the cache; `found`: it was there before, and the figures are those of when it was built.
    """

    entry: Entry
    registers: int = 0
    spill_bytes: int = 0
    notes: tuple[str, ...] = ()
    image_bytes: int = 0
    stored: bool = False
    error: str = ""
    found: bool = False


def problem(
    dims: tuple[int, int],
    types: ElementTypes,
    mask: str = "none",
    aligned: bool = True,
    extents: Extents = EXTENTS[0],
    divergence: str = Problem.divergence,
    scores: tuple[str, str] = USUAL_SCORES,
) -> Problem:
    """A problem of one batch entry; unaligned ones cannot use 16-byte loads. A teacher's score of `GIVEN` means that it
    is given."""
    packed = any(MASKS[name].packing for name in MASK_CASES[mask])

    def operand(heads: int, rows: int, dim: int, dtype: str) -> Operand:
        return Operand(heads, rows, dim, dtype, _four(compact_strides((1, heads, rows, dim))), aligned)

    def side(dim: int, dtype: str, case: str) -> Side:
        if case in GIVEN:
            q, k = operand(extents.heads, extents.queries, 0, dtype), operand(extents.heads, extents.keys, 0, dtype)
            return Side(q, k, 1.0, case)
        return Side(
            operand(extents.heads, extents.queries, dim, dtype),
            operand(extents.key_heads, extents.keys, dim, dtype),
            dim**-0.5,
            *SCORE_CASES[case],
        )

    return Problem(
        batch=1,
        heads=extents.heads,
        queries=extents.queries,
        keys=extents.keys,
        distributions=(side(dims[0], types.teacher, scores[0]), side(dims[1], types.student, scores[1])),
        mask=mask_spec(mask, extents.queries, extents.keys),
        device=Device("cuda"),
        rank=3 if packed else 4,
        settings=(("precision", types.precision),),
        sequences=SEQUENCES if packed else 0,
        divergence=divergence,
        **_given(operand(extents.heads, extents.queries, extents.keys, types.teacher), scores[0]),
    )


def _given(target: Operand, score: str) -> dict[str, Any]:
    return {"op": ATTENTION_KL_TO.name, "extras": (target,)} if score in GIVEN else {}


def attention_problem(
    dims: tuple[int, int],
    types: ElementTypes,
    mask: str = "none",
    aligned: bool = True,
    extents: Extents = EXTENTS[0],
    score: str = Side.score,
) -> Problem:
    """The same of attention; `dims` are those of queries and keys, and of values, `types` of one and the same type."""
    packed = any(MASKS[name].packing for name in MASK_CASES[mask])

    def operand(heads: int, rows: int, dim: int) -> Operand:
        return Operand(heads, rows, dim, types.teacher, _four(compact_strides((1, heads, rows, dim))), aligned)

    query, key = operand(extents.heads, extents.queries, dims[0]), operand(extents.key_heads, extents.keys, dims[0])
    return Problem(
        batch=1,
        heads=extents.heads,
        queries=extents.queries,
        keys=extents.keys,
        distributions=(Side(query, key, dims[0] ** -0.5, *SCORE_CASES[score]),),
        mask=mask_spec(mask, extents.queries, extents.keys),
        device=Device("cuda"),
        rank=3 if packed else 4,
        settings=(("precision", types.precision),),
        sequences=SEQUENCES if packed else 0,
        op=SPARSE_ATTENTION.name,
        extras=(operand(extents.key_heads, extents.keys, dims[1]),),
    )


def mask_spec(mask: str, queries: int, keys: int) -> MaskSpec:
    """A mask of the list. Its integers are no part of a kernel."""
    parts = [MASKS[name] for name in MASK_CASES[mask]]
    names = dict.fromkeys(name for part in parts for name in part.params)
    listed = any(part.listed for part in parts)
    pattern = patterns.local(keys // 8, queries=queries, keys=keys, causal=True) if listed else None
    return MaskSpec(MASK_CASES[mask], tuple((name, 0) for name in names), pattern)


def _four(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    b, h, r, d = strides
    return b, h, r, d


def entries(
    arch: str,
    dims: Iterable[tuple[int, int]] = DIMS,
    types: Iterable[ElementTypes] = ELEMENT_TYPES,
    masks: Iterable[str] = PLAIN,
    divergences: Iterable[str] = (Problem.divergence,),
    scores: Iterable[tuple[str, str]] = (USUAL_SCORES,),
    extents: Iterable[Extents] = EXTENTS,
) -> tuple[list[Entry], list[str]]:
    """Every distinct kernel of the list on a typical GPU of `arch`, and which problems have no kernel there, and why.

    Masks are names of `MASK_CASES`; the default are the two that most calls have, and the divergence and the scores
    that they have, of the teacher and the student by names of `SCORE_CASES`. Whether there is a kernel never hangs on
    extents, which tile it has does.

    Raises:
        ValueError: the architecture is not known.
    """
    facts = facts_for_arch(arch)
    found: dict[KernelPlan, Entry] = {}
    refused = []
    chosen, hidden, rules = tuple(types), tuple(masks), tuple(itertools.product(divergences, scores))
    sizes = tuple(extents)
    for pair in dims:
        for types_of in chosen:
            for mask, aligned, size, of_call in itertools.product(hidden, (True, False), sizes, rules):
                if not aligned and types_of not in UNALIGNED:
                    continue
                if mask not in PLAIN and (not aligned or types_of not in MASKED):
                    continue
                label = f"{pair[0]}/{pair[1]} {types_of} {mask}{'' if aligned else ' unaligned'}"
                divergence, score = of_call
                label += "" if divergence == Problem.divergence else f" {divergence}"
                label += "" if score == USUAL_SCORES else f" {'/'.join(score)}"
                try:
                    plan = make_plan(problem(pair, types_of, mask, aligned, size, *of_call), facts)
                except NotImplementedError as reason:
                    refused.append(f"{label}: {reason}")
                    continue
                _note(found, plan, facts, label)
    return list(found.values()), refused


def attention_entries(
    arch: str,
    dims: Iterable[tuple[int, int]] = ATTENTION_DIMS,
    types: Iterable[ElementTypes] = ELEMENT_TYPES,
    masks: Iterable[str] = PLAIN,
    scores: Iterable[str] = (Side.score,),
) -> list[Entry]:
    """The same of attention, whose operands have one type; every problem has its kernels.

    Raises:
        ValueError: the architecture is not known.
    """
    facts = facts_for_arch(arch)
    found: dict[KernelPlan, Entry] = {}
    alike = [x for x in types if x.teacher == x.student]
    for pair, type_of, mask, aligned, extents, score in itertools.product(
        dims, alike, masks, (True, False), EXTENTS, scores
    ):
        if not aligned and (type_of not in UNALIGNED or mask not in PLAIN):
            continue
        label = f"{pair[0]}/{pair[1]} {type_of} {mask}{'' if aligned else ' unaligned'}"
        label += "" if score == Side.score else f" {score}"
        _note(found, make_plan(attention_problem(pair, type_of, mask, aligned, extents, score), facts), facts, label)
    return list(found.values())


# Extents of the arrays of an indexer, by the letters of the record.
_INDEXER_EXTENTS = {"B": 1, "H": 16, "K": 1, "I": 64, "J": 1, "M": 4096, "N": 4096, "C": 2048}


def indexer_entries(
    arch: str, dims: Iterable[tuple[int, int]] = INDEXER_DIMS, types: Iterable[ElementTypes] = ELEMENT_TYPES
) -> tuple[list[Entry], list[str]]:
    """The same of the indexer, whose gate is a ReLU, and what is refused; rows see intervals, or what bits say."""
    facts = facts_for_arch(arch)
    found: dict[KernelText, Entry] = {}
    refused = []
    for pair, type_of, ids in itertools.product(dims, dict.fromkeys((x.teacher, x.student) for x in types), (0, 1)):
        label = f"{pair[0]}/{pair[1]} {ElementTypes(*type_of)}{' ids' if ids else ''}"
        try:
            # Gradients of float16 are not built.
            wrt = WRT if type_of[1] != "float16" else ()
            plan = index_plan.make_plan(_indexer_problem(INDEXER_KL, pair, type_of, ids), facts, wrt)
            of_target = index_plan.make_plan(_indexer_problem(INDEXER_TARGET, pair, type_of, ids), facts)
            requests = {"": (*plan.forward, *plan.backward), " target": of_target.forward}
        except NotImplementedError as error:
            refused.append(f"{label}: {error}")
            continue
        for what, kernels in requests.items():
            for kernel in kernels:
                found.setdefault(kernel, Entry(f"{kernel.name} {label}{what}", kernel))
    return list(found.values()), refused


def _indexer_problem(op: Op, dims: tuple[int, int], types: tuple[str, str], ids: int) -> Any:
    extents = {**_INDEXER_EXTENTS, "T": dims[0], "D": dims[1]}
    named = ["teacher_q", "teacher_k", *WRT, *(["topk_indices"] if ids else [])]
    views = {}
    for spec in op.operands:
        if spec.name in named:
            dtype = {"teacher": types[0], "index": types[1], "integer": "int32"}.get(spec.elements, "float32")
            shape = tuple(extents[x] for x in spec.letters.replace("G", ""))
            views[spec.name] = ArrayView(spec.name, "", cuda(0), dtype, shape, compact_strides(shape), 0, None)
    return to_problem(op, op.Inputs(*map(views.get, op.names)), IndexOptions(causal=True))


def _note(found: dict[KernelPlan, Entry], plan: Plan, facts: DeviceFacts, label: str) -> None:
    """Add the kernels of a plan that are not among the found ones."""
    # Whether keys are split hangs on the numbers of a call.
    join = JOINS[plan.problem.op]
    joined = plan.combine or join.plan(Work(plan.problem, plan.forward.task), plan.forward, facts)
    passes = [*(fused.main for fused in plan.fused), *(packed.kernel for packed in plan.mask_bits)]
    passes += [made.kernel for made in plan.saved_rows]
    # Of every pass that the divergence needs.
    forwards = [kernel for both in replace(plan, combine=joined).passes for kernel in both if kernel]
    for kernel in (*forwards, *(gradient for _, gradient in plan.gradients), *passes):
        # The launch is no part of the compiled text.
        compiled = replace(kernel, blocks=0, schedule=Schedule())
        found.setdefault(compiled, Entry(f"{kernel.name} {label}", kernel))


def hardest(listed: Sequence[Entry]) -> list[Entry]:
    """Of all entries that share a tile, a role, rules and sizes of elements, the one with the largest head dims, and of
    several such the last.

    Registers grow with the head dim, so a tile that holds its largest one without a spill mostly holds the others, and
    the types of 16 bits differ in one instruction. The faster float32 mode is left out: it is the precise one with less
    in it.
    """
    groups: dict[object, Entry] = {}
    for entry in listed:
        kernel = cast(KernelPlan, entry.kernel)
        constants = dict(kernel.constants)
        if constants.get("SKL_PLANES") == PLANES["high"]:
            continue
        group = (
            kernel.name,
            kernel.tile,
            *(rule for slot, rule in kernel.slots if slot != "mask"),
            *(constants.get(f"SKL_{side}_ELEMENT") == ELEMENT_CODES["float32"] for side in "TSA"),
            *(constants.get(f"SKL_{side}_SCORE") for side in "TSA"),
            constants.get("SKL_PACKED_ROWS"),
            constants.get("SKL_PASS"),
        )
        if group not in groups or _weight(entry) >= _weight(groups[group]):
            groups[group] = entry
    return list(groups.values())


def _weight(entry: Entry) -> tuple[int, ...]:
    constants: dict[str, Any] = dict(entry.kernel.constants)
    dims = [constants.get(f"SKL_{x}_DIM", 0) for x in ("T", "S", "A", "VALUE")]
    # Element-wise loads and a mask need registers of their own.
    structs = constants.get("SKL_MASK_PARTS", "")
    parts = tuple(part for part in MASKS.values() if part.struct in structs.split(", "))
    level = registers(parts, rows_are_keys=not constants.get("SKL_ROWS_ARE_QUERIES", 1))
    unaligned = not constants.get("SKL_TQ_VECTOR", constants.get("SKL_AQ_VECTOR", 1))
    return max(dims), sum(dims), unaligned, level, len(structs)


def build(
    listed: Sequence[Entry], jobs: int | None = None, store: bool = False, anew: bool = False
) -> Generator[Built, None, None]:
    """Compile entries in `jobs` processes (default: one per core), yielding each as it is done.

    With `store` the images also go to the cache on disk, each as soon as it is built, where a later call finds them.
    What is there already comes first and is not built again, unless `anew`. A caller who stops early, or is
    interrupted, ends the processes at once.

    Raises:
        CompilerError: a process was ended from outside.
    """
    missing = []
    names = cache.names() if store and not anew else []
    for entry in listed:
        found = compiler.cached_build(entry.kernel.text, entry.kernel.arch, listed=names) if names else None
        if found is None:
            missing.append(entry)
        else:
            yield _built(entry, found, stored=True, found=True)
    if not missing:
        return
    jobs = min(jobs or usable_cores(), len(missing))
    waiting = iter(missing)
    running: dict[Future[compiler.Build | str], Entry] = {}
    with _workers(jobs) as pool:
        while True:
            done: set[Future[compiler.Build | str]] = set()
            with _interrupts_held() as interrupted:
                # Few more than there are processes: the pipe never fills, and ending them leaves no thread writing.
                with _not_heard_by_children():
                    for entry in islice(waiting, jobs + 2 - len(running)):
                        running[pool.submit(_build_one, entry.kernel.text, entry.kernel.arch)] = entry
                while running and not done and not interrupted():
                    done, _ = futures.wait(running, PATIENCE, futures.FIRST_COMPLETED)
            if not running:
                return
            for future in done:
                try:
                    entry, build = running.pop(future), future.result()
                except BrokenProcessPool as error:
                    raise CompilerError(
                        "a process that compiles was ended from outside, by the system if memory ran out; the same "
                        "command goes on from here, with fewer --jobs in less memory"
                    ) from error
                if isinstance(build, str):
                    yield Built(entry, error=build)
                    continue
                # Stored here rather than where it was built: a process that is ended leaves no half of a file.
                stored = store and compiler.keep(entry.kernel.text, entry.kernel.arch, (), build) is not None
                yield _built(entry, build, stored)


def _built(entry: Entry, build: compiler.Build, stored: bool, found: bool = False) -> Built:
    return Built(entry, build.registers, build.spill_bytes, build.notes, len(build.image), stored=stored, found=found)


def _build_one(text: str, arch: str) -> compiler.Build | str:
    """In a worker: what the compiler made, or its complaint."""
    try:
        return compiler.build(text, arch)
    except CompilerError as error:
        return str(error)


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this block, whatever they are at where it is left by an exception."""
    # Spawned, because forking a process that has used CUDA or threads leaves a broken copy.
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_live_by, initargs=(theirs,))
    try:
        yield pool
    except BaseException:
        # A compile cannot be interrupted and may take long; the executor alone would wait for it.
        ours.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def _live_by(lifeline: Connection) -> None:
    """In a worker: end as soon as the other end of a pipe is closed, or its process is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the first process decides

    def watch() -> None:
        wait([lifeline])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of this block. Yields whether there was one: whoever waits in the block should ask.

    An exception from a signal's handler can fall anywhere, also where the executor has taken its locks, and then its
    threads wait for each other for ever.
    """
    if threading.current_thread() is not threading.main_thread():  # no other one hears signals
        yield lambda: False
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if heard and callable(before):
        before(heard[0], None)


@contextmanager
def _not_heard_by_children() -> Iterator[None]:
    """Processes that start in this block do not hear Ctrl-C, from their first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
