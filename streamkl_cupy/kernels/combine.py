"""Keys of few rows are split over blocks, and `kernels/combine.cu` joins the states that these leave of each row."""

from __future__ import annotations

from dataclasses import replace

from ..ops import Task
from ..problem import Problem
from ..rules import divergences
from ..rules.masks import Scene, key_range, parts_of
from .base import KernelPlan, Work
from .gpus import DeviceFacts
from .structs import args_of
from .work_tiles import TILES_TO_START

COMBINE = Task("combine")
# Splitting costs a workspace and a second launch: below this many key tiles an unsplit block is done sooner.
MIN_TILES_TO_SPLIT = 64
MIN_TILES_PER_SPLIT = 8
THREADS = 128


def splits(blocks: int, key_tiles: int, facts: DeviceFacts, per_multiprocessor: int = 1) -> int:
    """Over how many blocks the keys go: so many that the GPU is done soonest.

    Args:
        blocks: Those of keys that are not split.
        key_tiles: That each of them visits.
        facts: Of the GPU.
        per_multiprocessor: Blocks that run on one at a time.
    """
    if blocks == 0 or blocks * 5 >= facts.multiprocessors * 4:
        return 1
    at_once = facts.multiprocessors * per_multiprocessor

    def tiles_in_turn(number: int) -> int:
        return -(-blocks * number // at_once) * (-(-key_tiles // number) + TILES_TO_START)

    return min(range(1, min(most_splits(key_tiles), -(-2 * at_once // blocks)) + 1), key=tiles_in_turn)


def most_splits(key_tiles: int) -> int:
    """Over how many blocks so many tiles of keys go at most."""
    return key_tiles // MIN_TILES_PER_SPLIT if key_tiles >= MIN_TILES_TO_SPLIT else 1


def key_tiles(problem: Problem, rows: int, columns: int) -> int:
    """Tiles of `columns` keys that the longest tile of `rows` query rows visits, as far as is known here: sequences
    count as equally long, and lists of patterns do not count."""
    mask, sequences = problem.mask, max(problem.sequences, 1)
    queries, keys = -(-problem.queries // sequences), -(-problem.keys // sequences)
    params = dict(mask.params)
    if not params.get("q_offset_given", 1):
        params["q_offset"] = keys - queries
    scene = Scene(queries, keys, params)
    ranges = (
        key_range(parts_of(mask), scene, q0, min(q0 + rows, queries))
        for q0 in {0, queries // 2, max(queries - rows, 0)}
    )
    return max(-(-stop // columns) - start // columns for start, stop in ranges)


def splits_of_last_rows(problem: Problem, rows: int, columns: int) -> int:
    """Over how many blocks the keys of a tile of `rows` query rows go at most, if these are the last rows of the keys:
    the choice of a tile may not hang on numbers that change from call to call. Nor are a pattern's lists made for it.
    """
    mask = problem.mask
    if mask.blocks is not None:
        return 1
    last = tuple((name, problem.keys - problem.queries if name == "q_offset" else x) for name, x in mask.params)
    return most_splits(key_tiles(replace(problem, mask=replace(mask, params=last)), rows, columns))


def plan(work: Work, forward: KernelPlan, facts: DeviceFacts) -> KernelPlan:
    """The kernel that joins the splits of `forward`, a thread to a row."""
    problem = work.problem
    # Only float32 keys have parts in common taken from them, and log-sum-exps to give those back to.
    divergence = divergences.of(problem)
    constants = {**divergence.constants, "SKL_HAS_OFFSETS": int(work.float32), "SKL_THREADS": THREADS}
    if problem.entropy:
        constants["SKL_ENTROPY"] = 1
    if problem.some_keys:
        constants["SKL_SOME_KEYS"] = 1
    return KernelPlan(
        task=COMBINE,
        entry="kernels/combine.cu",
        symbol="streamkl_combine",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(("divergence", divergence.header),),
        args=args_of().forward,
        regions=forward.regions,
        blocks=-(-problem.batch * problem.heads * problem.queries // THREADS),
        threads=THREADS,
        schedule=forward.schedule,
    )
