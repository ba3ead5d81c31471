"""From a Problem and facts about a GPU to a frozen Plan. Pure: no CuPy, no device, no environment.

A Plan names, for each kernel a call may launch, the source file, the constants and hooks compiled into it, and its
launch shape. It prints itself completely, so a bug report that holds `print(plan(...))` explains itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .arch import DeviceFacts, Family, TileRow, families
from .divergences import DIVERGENCES
from .masks import MASKS
from .problem import INPUT_NAMES, Problem

ELEMENT_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PLANES = {"highest": 3, "high": 2}
MAX_DIM = 256
MAX_TEACHER_DIM = 576
MAX_GRID = 2**31 - 1

# Bytes of the argument structs in cuda_src/common/args.cuh; launch.py packs them, the kernels assert them.
FORWARD_ARGS_BYTES = 4 * 40 + 3 * 32 + 64 + 8
GRADIENT_ARGS_BYTES = 4 * 40 + 4 * 32 + 40 + 64 + 16

# Streamed operands of heads that run side by side should stay in the L2 cache, which is 40 MB and more on the GPUs that
# have long rows to stream. On smaller caches the order costs nothing but the locality it would have had.
L2_BUDGET = 32 << 20


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: what to compile and how to launch it."""

    name: str
    entry: str
    symbol: str
    arch: str
    constants: tuple[tuple[str, int], ...]
    slots: tuple[tuple[str, str], ...]
    tile: TileRow
    smem_bytes: int
    tiles: int
    """Row tiles per head of the launch."""
    blocks: int
    head_group: int
    """Heads that run side by side."""

    @property
    def threads(self) -> int:
        return self.tile.threads

    def __str__(self) -> str:
        t = self.tile
        return (
            f"{self.name}: {self.entry} for {self.arch}, {self.blocks} blocks x {t.threads} threads, "
            f"{t.rows} rows x {t.columns} columns, {t.stages} stages, {self.smem_bytes} B shared"
        )


@dataclass(frozen=True)
class Plan:
    """Everything a call would run on a GPU."""

    problem: Problem
    family: str
    reason: str
    forward: KernelPlan
    gradients: tuple[tuple[str, KernelPlan], ...]
    workspace_bytes: int = 0

    def gradient(self, name: str) -> KernelPlan:
        for key, kernel in self.gradients:
            if key == name:
                return kernel
        raise NotImplementedError(
            f"wrt {name!r}: gradients to the teacher need a head dim of at most {MAX_DIM}, "
            f"this one has {self.problem.operand(name).dim}; built are {[key for key, _ in self.gradients]}"
        )

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"attention KL on {p.device}: B={p.batch} H={p.heads} M={p.queries} N={p.keys}, mask {p.mask.name}",
            *(
                f"  {name}: D={side.dim} {side.dtype}, {side.k.heads} key heads, scale {side.scale:.6g}"
                for name, side in (("teacher", p.teacher), ("student", p.student))
            ),
            f"  kernels {self.family}: {self.reason}",
            f"  workspace {self.workspace_bytes} B",
            f"  {self.forward}",
            *(f"  {kernel}" for _, kernel in self.gradients),
        ]
        return "\n".join(lines)


def facts_for_arch(arch: str) -> DeviceFacts:
    """Facts of a typical GPU of an architecture such as "sm_80", for planning where there is none."""
    typical = {
        "sm_80": DeviceFacts((8, 0), 166_912, 108, "sm_80"),
        "sm_86": DeviceFacts((8, 6), 101_376, 84, "sm_86"),
        "sm_89": DeviceFacts((8, 9), 101_376, 128, "sm_89"),
        "sm_90": DeviceFacts((9, 0), 232_448, 132, "sm_90"),
        "sm_100": DeviceFacts((10, 0), 232_448, 148, "sm_100"),
        "sm_120": DeviceFacts((12, 0), 101_376, 170, "sm_120"),
    }
    try:
        return typical[arch]
    except KeyError:
        raise ValueError(f"arch: {arch!r} is not known; known are {', '.join(typical)}") from None


@lru_cache(maxsize=1024)
def make_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """The Plan of a problem on a GPU.

    Raises:
        NotImplementedError: nothing here runs on that GPU, or the launch would be larger than a grid can be.
    """
    family = _family(facts)
    wanted = [name for name in INPUT_NAMES if problem.operand(name).dim <= MAX_DIM]
    return Plan(
        problem=problem,
        family=family.name,
        reason=f"compute capability {facts.compute_capability[0]}.{facts.compute_capability[1]}"
        f" runs the {family.name} family",
        forward=_kernel(problem, facts, family, "forward", "forward"),
        gradients=tuple((name, _kernel(problem, facts, family, "gradient", name)) for name in wanted),
    )


def _family(facts: DeviceFacts) -> Family:
    for family in families():
        if facts.compute_capability >= family.min_capability:
            return family
    raise NotImplementedError(
        f"GPU {facts.name or '?'} has compute capability {facts.compute_capability[0]}.{facts.compute_capability[1]}; "
        "kernels are built for 8.0 (Ampere) and newer; use NumPy arrays to compute on the CPU"
    )


def _kernel(problem: Problem, facts: DeviceFacts, family: Family, kind: str, name: str) -> KernelPlan:
    rows_are_keys = name.endswith("_k")
    side = problem.teacher if name.startswith("teacher") else problem.student
    out_heads = side.k.heads if rows_are_keys else problem.heads
    row_count = problem.keys if rows_are_keys else problem.queries
    float32 = "float32" in (problem.teacher.dtype, problem.student.dtype)
    vectors = 0 if not rows_are_keys else 4 if name.startswith("teacher") else 3
    tile = _tile(
        problem,
        facts,
        family.tiles(kind, float32),
        side.dim if kind == "gradient" else 0,
        vectors,
        row_count,
        out_heads,
    )
    tiles = -(-row_count // tile.rows)
    blocks = problem.batch * out_heads * tiles
    if blocks > MAX_GRID:
        raise NotImplementedError(
            f"{name}: {blocks} blocks (batch {problem.batch} x heads {out_heads} x row tiles {tiles}) exceed the grid "
            f"limit of {MAX_GRID}; split the batch over several calls"
        )
    entry, symbol = family.entries[kind]
    smem_bytes = _smem_bytes(problem, tile, vectors)
    constants = {
        "SKL_T_ELEMENT": ELEMENT_CODES[problem.teacher.dtype],
        "SKL_S_ELEMENT": ELEMENT_CODES[problem.student.dtype],
        "SKL_T_DIM": problem.teacher.dim,
        "SKL_S_DIM": problem.student.dim,
        "SKL_PLANES": PLANES[problem.precision] if float32 else PLANES["highest"],
        **{
            f"SKL_{name[0].upper()}{name[-1].upper()}_VECTOR": int(_vector_loads(problem, name)) for name in INPUT_NAMES
        },
        "SKL_ROWS": tile.rows,
        "SKL_COLUMNS": tile.columns,
        "SKL_WARPS": tile.warps,
        "SKL_WARP_TILES": tile.warp_tiles,
        "SKL_STAGES": tile.stages,
        "SKL_MIN_BLOCKS": tile.min_blocks,
        "SKL_UNROLL": tile.unroll,
        "SKL_SMEM_BYTES": smem_bytes,
        "SKL_ARGS_BYTES": FORWARD_ARGS_BYTES if kind == "forward" else GRADIENT_ARGS_BYTES,
    }
    if kind == "gradient":
        constants["SKL_GRAD_SIDE"] = int(name.startswith("student"))
        constants["SKL_ROWS_ARE_QUERIES"] = int(not rows_are_keys)
    return KernelPlan(
        name=name,
        entry=entry,
        symbol=symbol,
        arch=family.flag(facts.compute_capability),
        constants=tuple(sorted(constants.items())),
        slots=(("divergence", DIVERGENCES["kl"].header), ("mask", MASKS[problem.mask.name].header)),
        tile=tile,
        smem_bytes=smem_bytes,
        tiles=tiles,
        blocks=blocks,
        head_group=_head_group(problem, rows_are_keys),
    )


def _head_group(problem: Problem, queries_stream: bool) -> int:
    """How many heads' streamed operands fit the L2 budget together."""
    rows = problem.queries if queries_stream else problem.keys
    head_bytes = rows * sum(side.dim * ELEMENT_BYTES[side.dtype] for side in (problem.teacher, problem.student))
    return max(1, min(problem.batch * problem.heads, L2_BUDGET // max(head_bytes, 1)))


def _vector_loads(problem: Problem, name: str) -> bool:
    """Whether every row of an input starts on a 16-byte boundary and its elements are adjacent."""
    x = problem.operand(name)
    per_chunk = 16 // ELEMENT_BYTES[x.dtype]
    return x.aligned and x.strides[3] == 1 and all(stride % per_chunk == 0 for stride in x.strides[:3])


def _smem_bytes(problem: Problem, tile: TileRow, vectors: int) -> int:
    pitch = sum(-(-side.dim // 16) * 16 * ELEMENT_BYTES[side.dtype] + 16 for side in (problem.teacher, problem.student))
    return tile.rows * pitch + tile.stages * tile.columns * (pitch + 4 * vectors)


def _tile(
    problem: Problem,
    facts: DeviceFacts,
    table: tuple[TileRow, ...],
    out_dim: int,
    vectors: int,
    row_count: int,
    heads: int,
) -> TileRow:
    """The first row that fits and keeps the GPU busy; where none does, the fitting row with the most blocks."""
    dim = max(problem.teacher.dim, problem.student.dim)
    fitting = [
        row
        for row in table
        if dim <= row.max_dim
        and out_dim <= row.max_out
        and facts.compute_capability < row.before
        and _smem_bytes(problem, row, vectors) <= facts.smem_per_block
    ]
    if not fitting:
        raise NotImplementedError(
            f"head dims {problem.teacher.dim} ({problem.teacher.dtype}) and {problem.student.dim} "
            f"({problem.student.dtype}) need more shared memory than the {facts.smem_per_block} B of "
            f"{facts.name or 'this GPU'}"
        )
    pairs = problem.batch * heads
    for row in fitting:
        if pairs * -(-row_count // row.rows) * 5 >= facts.multiprocessors * 4:
            return row
    return max(fitting, key=lambda row: (pairs * -(-row_count // row.rows), -fitting.index(row)))
