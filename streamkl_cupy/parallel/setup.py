"""From what a rank is called with to the job that all ranks agree on.

Ranks compare what they were called with in one small collective, before any that carries data, so that a mistake is an
error on all of them and nobody waits for ever. What they agreed on is kept: a call like one before compares nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import call as calls
from ..arguments import choice, flag, integer, listed, with_article
from ..frameworks import describe
from ..ops import ATTENTION_KL
from ..options import MASK_ARRAYS, REDUCTIONS, SHARED, Options, parse
from ..rules.divergences import DIVERGENCES
from ..rules.divergences.interface import Divergence
from ..rules.masks import ARRAYS, MASKS, packing
from ..validate import wanted, weights
from .blocks import Whole
from .engine import KEYS, NAMES, QUERIES, Engine, Launching
from .job import MERGING, STRATEGIES, Axes, Job
from .libraries import LIBRARIES, known, library_named, library_of, library_of_type
from .ranks import Ranks
from .shards import OWNERSHIPS, Ownership, Runs, check_owned, length, owned
from .traffic import traffic

MERGED = tuple(name for name, x in DIVERGENCES.items() if x.merging is not None)
"""Divergences whose states of rows merge."""
LIMIT = 256
MOST_RUNS = 4
"""Of a rank whose keys are used shard by shard."""
_POSITIONAL = tuple(dict.fromkeys(name for part in MASKS.values() for name in part.options))
"""Options that say something of positions."""
_UNKEPT = frozenset((*MASK_ARRAYS, *(name for part in MASKS.values() if part.listed for name in part.options)))
"""Those that hold memory."""
_COMPARED = ("shapes and dtypes", "options", "masks", "strategy", "ownership", "gradients", "reduction")
_NOT_BUILT = ("return_entropy", "dense_teacher_lse", "teacher_sink_logits", "student_sink_logits")


class Asked(NamedTuple):
    """How a call is to be shared out."""

    strategy: str = "auto"
    ownership: Any = "zigzag"
    head_groups: int | None = None
    wrt: tuple[str, ...] = ()
    reduction: str = "none"
    keep: bool = True
    """Whether what was gathered for rows is kept for gradients."""
    weight: Any = None
    """Type, shape and dtype of the weights of the rank's rows."""


def asked_of(weight: Any) -> Any:
    """What ranks compare and keep of the weights of rows."""
    return None if weight is None else (type(weight), getattr(weight, "shape", None), getattr(weight, "dtype", None))


class Plain(NamedTuple):
    """A call as the plain operation has it, its options checked."""

    options: Options
    masks: Mapping[str, Any]
    given: Mapping[str, Any]


class _Agreed(NamedTuple):
    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    strategy: str
    groups: int
    why: str


_agreed: dict[Any, _Agreed] = {}


def plain(function: str, given: Mapping[str, Any]) -> Plain:
    """Options that were given by name, without those that only say how to share out."""
    refuse_not_built(given)
    for name in given:
        if name not in SHARED[ATTENTION_KL.name]:
            raise TypeError(
                f"{function}() has no option {name!r}; there are those of streamkl_cupy.attention_kl, and group, "
                f"axis_name, strategy, ownership, head_groups"
            )
    options, _ = parse(ATTENTION_KL, given)
    masks = {name: given[name] for name in MASK_ARRAYS if given.get(name) is not None}
    others = {name: x for name, x in given.items() if name not in MASK_ARRAYS and name not in _POSITIONAL}
    return Plain(options, masks, others)


def refuse_not_built(given: Mapping[str, Any]) -> None:
    """Say by name which options of the plain operation there are not."""
    for name in given:
        if name in _NOT_BUILT:
            raise NotImplementedError(
                f"{name} is not built for keys that several calls hold; there are the options of "
                f"streamkl_cupy.attention_kl but for {listed(_NOT_BUILT)}"
            )


def look(inputs: Sequence[Any], given: Mapping[str, Any], asked: Asked) -> Any:
    """How a call looks, hashable; None where it holds arrays of masks or a pattern, which nothing may keep."""
    for name, x in given.items():
        if x is not None and name in _UNKEPT:
            return None
    key = (
        tuple([(type(x), x.shape, x.dtype, x.device) if hasattr(x, "device") else x for x in inputs]),
        tuple([(name, type(x), x) for name, x in given.items()]),
        asked,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def kept_job(
    function: str, ranks: Ranks, engine: Engine, inputs: Sequence[Any], given: Mapping[str, Any], asked: Asked
) -> Job:
    """The job of a call: that of one before which looked the same, or what the ranks agree on."""
    key = look(inputs, given, asked)
    found: Job | None = None if key is None else ranks.jobs.get(key)
    if found is None:
        found = job_of(ranks, engine, inputs, lambda: plain(function, given), asked)
        if key is not None:
            while len(ranks.jobs) >= LIMIT:
                ranks.jobs.pop(next(iter(ranks.jobs)), None)
            ranks.jobs[key] = found
    return found


def job_of(
    ranks: Ranks, engine: Engine, inputs: Sequence[Any], read: Callable[[], Plain], asked: Asked, anew: bool = False
) -> Job:
    """What to do, the same on every rank; or the error that says on every rank why not. With `anew` ranks forget all
    that they have agreed on, and compare what they were called with. A rank that cannot even read its call says so to
    the others."""
    trouble: Exception | None = None
    numbers = [0] * (3 + len(_COMPARED))
    key: Any = None
    if anew:
        ranks.jobs.clear()
        for agreed_key in [x for x in _agreed if x[0] == ranks.key]:
            _agreed.pop(agreed_key, None)
    try:
        call = read()
        axes = _axes(inputs, call)
        for name, x in zip(NAMES, inputs):
            ranks.check(name, x)
        _check_asked(inputs, asked)
        compared = _compared(inputs, axes, call, asked)
        local = tuple(inputs[i].shape[axes.rows] for i in (QUERIES[0], KEYS[0]))
        key = (ranks.key, local, compared)
        if key in _agreed:
            return _job(ranks, engine, inputs, call, axes, _agreed[key])
        numbers = [1, *local, *map(_digest, compared)]
    except Exception as error:
        trouble = error
    table = ranks.exchange(numbers, inputs[2])
    if trouble is not None:
        raise trouble
    refusing = [rank for rank, row in enumerate(table) if not row[0]]
    if refusing:
        raise RuntimeError(f"rank {ranks.rank} could call, but {_ranks_named(refusing)} could not: the error is there")
    for at, what in enumerate(_COMPARED, start=3):
        others = [rank for rank, row in enumerate(table) if row[at] != table[0][at]]
        if others:
            mine = compared[at - 3]
            raise ValueError(
                f"{what} differ between rank 0 and {_ranks_named(others)}; all ranks of a group call "
                f"with the same. Here, on rank {ranks.rank}: {mine}"
            )
    rows, keys = _owners(asked.ownership, [row[1] for row in table], [row[2] for row in table])
    _check_whole(inputs, axes, call, (rows, keys), ranks.rank)
    agreed = _Agreed(rows, keys, *_chosen(ranks.size, inputs, axes, call, asked, (rows, keys)))
    while len(_agreed) >= LIMIT:
        _agreed.pop(next(iter(_agreed)), None)
    _agreed[key] = agreed
    return _job(ranks, engine, inputs, call, axes, agreed)


def _ranks_named(numbers: Sequence[int]) -> str:
    return ", ".join(f"rank {number}" for number in numbers)


def agreed_shards(ranks: Ranks, x: Any, axis: int, ownership: Any) -> tuple[Runs, ...]:
    """Who holds which positions of an array, after all ranks have compared what else it is."""
    trouble: Exception | None = None
    numbers = [0] * 3
    try:
        ranks.check("x", x)
        compared = (*x.shape[:axis], *x.shape[axis + 1 :]), str(x.dtype), axis, named_ownership(ownership)
        numbers = [1, x.shape[axis], _digest(compared)]
    except Exception as error:
        trouble = error
    table = ranks.exchange(numbers, x)
    if trouble is not None:
        raise trouble
    if others := [rank for rank, row in enumerate(table) if row[0] * row[2] != table[0][0] * table[0][2]]:
        raise ValueError(
            f"shards differ between rank 0 and {_ranks_named(others)} in more than their length; all "
            f"ranks of a group call with the same. Here, on rank {ranks.rank}: {compared}"
        )
    lengths = [row[1] for row in table]
    return _owners(ownership, lengths, lengths)[1]


def job_without_exchange(ranks: Ranks, engine: Engine, inputs: Sequence[Any], call: Plain, asked: Asked) -> Job:
    """The same where all ranks run one program, so that shapes and options are equal, and arrays have no values yet."""
    packed = packing(call.masks)
    if packed is not None:
        first = next(name for name in call.masks if name in packed.bounds)
        raise NotImplementedError(
            f"{first} is not built inside of shard_map: which calls a rank makes depends on bounds, which have no "
            f"values there. A batch of padded sequences with key_lengths and query_lengths is; with PyTorch, packed "
            f"sequences are too"
        )
    axes = _axes(inputs, call)
    _check_asked(inputs, asked)
    rows, keys = (inputs[i].shape[axes.rows] for i in (QUERIES[0], KEYS[0]))
    owners = _owners(asked.ownership, [rows] * ranks.size, [keys] * ranks.size)
    _check_whole(inputs, axes, call, owners, 0)
    agreed = _Agreed(owners[0], owners[1], *_chosen(ranks.size, inputs, axes, call, asked, owners))
    return _job(ranks, engine, inputs, call, axes, agreed)


class Anyone(NamedTuple):
    """A rank that plans and moves nothing."""

    rank: int
    size: int
    key: Any = None


def planned(rank: int, size: int, inputs: Sequence[Any], call: Plain, asked: Asked) -> tuple[Job, str]:
    """What a rank would do with shards like these, or with stand-ins of them, and why that strategy."""
    axes = Axes.of(len(inputs[0].shape), call.options.layout, packing(call.masks) is not None)
    rows, keys = (inputs[i].shape[axes.rows] for i in (QUERIES[0], KEYS[0]))
    owners = _owners(asked.ownership, [rows] * size, [keys] * size)
    strategy, groups, why = _chosen(size, inputs, axes, call, asked, owners)
    whole = Whole(size * rows, size * keys, call.options, call.masks, call.given).read()
    ranks: Any = Anyone(rank, size)
    library = library_named("numpy")
    posts = not any(LIBRARIES[x].programs for x in map(known, map(type, inputs)) if x)
    early = posts and _early(inputs, whole, strategy, owners)
    return Job(ranks, Launching(), library, whole, *owners, axes, strategy, groups, early), why


def _early(inputs: Sequence[Any], whole: Whole, strategy: str, owners: tuple[tuple[Runs, ...], ...]) -> bool:
    """Whether keys are gathered shard by shard. From float32 keys one call takes what all of them share, and no call on
    some of them may; some masks are cut for all keys at once, and scattered positions make many calls of shards."""
    return (
        len(owners[0]) > 1
        and max(len(runs) for side in owners for runs in side) <= MOST_RUNS
        and strategy == "all_gather"
        and whole.options.divergence in MERGED
        and not any(part.cut_once for part in whole.parts)
        and not any("float32" in str(x.dtype) for x in inputs)
    )


def _job(ranks: Ranks, engine: Engine, inputs: Sequence[Any], call: Plain, axes: Axes, agreed: _Agreed) -> Job:
    rows, keys = (sum(map(length, x)) for x in (agreed.rows, agreed.keys))
    whole = Whole(rows, keys, call.options, call.masks, call.given).read()
    library = library_named(library_of("student_q", inputs[2]))
    early = ranks.posts and _early(inputs, whole, agreed.strategy, (agreed.rows, agreed.keys))
    return Job(ranks, engine, library, whole, agreed.rows, agreed.keys, axes, agreed.strategy, agreed.groups, early)


def _digest(x: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=6).digest(), "little")


def _axes(inputs: Sequence[Any], call: Plain) -> Axes:
    """Where rows and heads are, of inputs that have as many axes and come from one library."""
    found = {name: library_of(name, x) for name, x in zip(NAMES, inputs)}
    for name, library in found.items():
        if library != found["student_q"]:
            raise TypeError(
                f"{name} is of {library}, but student_q of {found['student_q']}; all arrays of a call are of one"
            )
    rank = len(inputs[0].shape)
    if not 2 <= rank <= 4 or any(len(x.shape) != rank for x in inputs):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(NAMES, inputs))
        raise ValueError(f"{shapes}; allowed are 2 to 4 axes, the same number for all")
    axes = Axes.of(rank, call.options.layout, packing(call.masks) is not None)
    for q, k in ((0, 2), (1, 3)):
        if inputs[q].shape[axes.rows] != inputs[k].shape[axes.rows]:
            raise ValueError(
                f"{NAMES[k]}: {inputs[k].shape[axes.rows]} positions, but {NAMES[q]} has {inputs[q].shape[axes.rows]}; "
                f"a rank holds the same positions of both"
            )
    return axes


def _compared(inputs: Sequence[Any], axes: Axes, call: Plain, asked: Asked) -> tuple[Any, ...]:
    """What must be the same on all ranks, in the order of `_COMPARED`."""
    pattern = call.options.block_mask
    options = call.options._replace(block_mask=None)
    shapes = tuple((*x.shape[: axes.rows], *x.shape[axes.rows + 1 :], str(x.dtype)) for x in inputs)
    masks = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in call.masks.items())
    return (
        shapes,
        tuple(options),
        (masks, None if pattern is None else pattern.digest),
        (asked.strategy, asked.head_groups, asked.keep),
        named_ownership(asked.ownership),
        tuple(asked.wrt),
        asked.reduction,
    )


def _check_asked(inputs: Sequence[Any], asked: Asked) -> None:
    """Check what a rank asks for beside its call: gradients, how rows are reduced, and what they are multiplied by."""
    if asked.wrt:
        wanted(ATTENTION_KL, asked.wrt)
    choice("reduction", asked.reduction, REDUCTIONS)
    flag("keep_gathered", asked.keep)
    if asked.weight is None:
        return
    kind, shape, dtype = asked.weight
    like = inputs[QUERIES[1]]
    if dtype is None or library_of_type("row_weight", kind) != library_of(NAMES[QUERIES[1]], like):
        raise TypeError(
            f"row_weight is {with_article(kind.__name__)}; allowed is an array of the inputs' library, for the rows of "
            f"this rank"
        )
    weights(SimpleNamespace(shape=shape, dtype=dtype), like.shape[:-1])


def named_ownership(ownership: Any) -> Any:
    """A rule, or who owns which positions, hashable."""
    if isinstance(ownership, (str, Ownership)):
        return ownership
    return Ownership(ownership)


def _owners(ownership: Any, rows: list[int], keys: list[int]) -> tuple[tuple[Runs, ...], tuple[Runs, ...]]:
    """The runs of rows and keys of each rank, which must be as long as its shards."""
    ownership = named_ownership(ownership)
    found = []
    for name, sizes in (("rows", rows), ("keys", keys)):
        total, size = sum(sizes), len(sizes)
        if isinstance(ownership, Ownership):
            runs = getattr(ownership, name)
            check_owned(f"ownership's {name}", runs, total, size)
        else:
            runs = owned(total, size, ownership)
        for rank, (have, want) in enumerate(zip(sizes, map(length, runs), strict=True)):
            if have != want:
                rule = repr(ownership) if isinstance(ownership, str) else "the one given"
                raise ValueError(
                    f"rank {rank} holds {have} {name} of {total}; ownership={rule} over {size} ranks "
                    f"gives it {want}. Cut shards by streamkl_cupy.parallel.shard, or say which positions "
                    f"each rank holds: ownership is one of {listed(OWNERSHIPS)} or an Ownership"
                )
        found.append(runs)
    return found[0], found[1]


def _check_whole(
    inputs: Sequence[Any], axes: Axes, call: Plain, owners: tuple[tuple[Runs, ...], tuple[Runs, ...]], rank: int
) -> None:
    """Check the call on the whole sequence as the plain operation would."""
    rows, keys = (sum(map(length, x)) for x in owners)
    local = [length(x[rank]) for x in owners]
    for array in ARRAYS.values():
        if not array.of or not array.axes:
            continue
        at, total = (1, keys) if array.of == "keys" else (0, rows)
        x = call.masks.get(array.name)
        if x is not None and x.shape[-1] == local[at] != total:
            raise ValueError(
                f"{array.name}: {x.shape[-1]} entries, as many as this rank's shard has; masks are in positions of the "
                f"whole sequence, {total} here, and the same on every rank"
            )
    whole = []
    for i, x in enumerate(inputs):
        shape = (*x.shape[: axes.rows], rows if i in QUERIES else keys, *x.shape[axes.rows + 1 :])
        whole.append(SimpleNamespace(shape=tuple(map(int, shape)), dtype=x.dtype))
    given = {**call.given, **{name: getattr(call.options, name) for name in _POSITIONAL}, **call.masks}
    stand_ins = {name: SimpleNamespace(shape=tuple(x.shape), dtype=x.dtype) for name, x in call.masks.items()}
    in_programs = LIBRARIES[library_of("student_q", inputs[2])].programs
    device = None if in_programs else describe("student_q", inputs[2]).device
    calls.Call.of(ATTENTION_KL, tuple(whole), {**given, **stand_ins}).problem(device)


def _chosen(
    size: int, inputs: Sequence[Any], axes: Axes, call: Plain, asked: Asked, owners: tuple[tuple[Runs, ...], ...]
) -> tuple[str, int, str]:
    """The strategy, in how many steps the key heads go, and why it is that strategy."""
    choice("strategy", asked.strategy, ("auto", *STRATEGIES))
    heads = [1 if axes.heads is None else inputs[k].shape[axes.heads] for k in KEYS]
    strategy, why = asked.strategy, "asked for"
    divergence = DIVERGENCES[call.options.divergence]
    merges = divergence.merging is not None
    if size == 1:
        strategy, why = "all_gather", "one rank"
    elif strategy == "auto":
        strategy, why = _cheapest(size, inputs, axes, owners, divergence)
    if strategy == "a2a" and any(n % size for n in heads):
        raise ValueError(
            f'strategy="a2a" gives each of {size} ranks as many whole key heads, but there are {heads[0]} of the '
            f"teacher and {heads[1]} of the student; allowed are numbers that {size} divides. Say "
            f'strategy="all_gather"'
        )
    if strategy in MERGING and not merges:
        raise NotImplementedError(
            f"strategy={strategy!r} merges states of rows, which is built for divergence {listed(MERGED)}; "
            f'{call.options.divergence!r} goes with strategy="all_gather" and "a2a"'
        )
    if asked.head_groups is None:
        return strategy, 1, why
    groups = integer("head_groups", asked.head_groups)
    if strategy != "all_gather" or axes.heads is None:
        if groups != 1:
            raise ValueError(
                f'head_groups={groups} is of strategy="all_gather" and inputs with heads; leave it out here'
            )
        return strategy, 1, why
    if groups < 1 or any(n % groups for n in heads):
        raise ValueError(
            f"head_groups={groups} does not divide the {heads[0]} key heads of the teacher and {heads[1]} of "
            f"the student"
        )
    return strategy, groups, why


def _cheapest(
    size: int, inputs: Sequence[Any], axes: Axes, owners: tuple[tuple[Runs, ...], ...], divergence: Divergence
) -> tuple[str, str]:
    """Gather keys, unless queries with their states are fewer bytes."""
    longest = (max(map(length, owners[0])), max(map(length, owners[1])))
    of_keys, of_queries = (
        traffic(x, inputs, longest, size, axes.rows, NAMES, floats=divergence.state_floats).forward
        for x in ("all_gather", "all_gather_queries")
    )
    bytes_of = f"keys are {of_keys:,} bytes to receive, queries and states of rows {of_queries:,}"
    if of_queries < of_keys and divergence.merging:
        return "all_gather_queries", bytes_of
    return "all_gather", bytes_of
