"""What the host and the kernels both know the layout of: arguments and workspaces, described once.

A kernel takes one struct by value. Its description here writes the struct's CUDA text, which stands at the head of the
kernel's own, and packs values by the names of fields, so nothing else knows where a field lies. Regions of a workspace
are described alike: sizes for the plan, constants and pointers for the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Final, NamedTuple, cast

from ..ops import ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION
from ..rules.masks import most_words

# C spelling and code of `struct`. `u64` is what a call fills in: addresses, and the words of tensor maps.
_TYPES = {
    "byte": ("unsigned char", "B"),
    "int": ("int", "i"),
    "u32": ("unsigned int", "I"),
    "float": ("float", "f"),
    "i64": ("long long", "q"),
    "u64": ("unsigned long long", "Q"),
}
_SIZES = {name: struct.calcsize(code) for name, (_, code) in _TYPES.items()}

Value = float | Sequence[float]


class Field(NamedTuple):
    """A member: a number, an array of `length` of them, or another struct."""

    name: str
    type: str | Struct
    about: str = ""
    length: int = 0


class Leaf(NamedTuple):
    """Numbers of one type that lie in a struct."""

    offset: int
    type: str
    length: int


@dataclass(frozen=True)
class Struct:
    """A struct of C. Members of members are named by as much of the end of their path as only one has."""

    name: str
    fields: tuple[Field, ...]
    about: str = ""
    align: int = 0
    """More than the members ask for."""

    @cached_property
    def alignment(self) -> int:
        return max(self.align, *(_alignment(field) for field in self.fields))

    @cached_property
    def size(self) -> int:
        end = 0
        for field in self.fields:
            end = _round_up(end, _alignment(field)) + _size(field)
        return _round_up(end, self.alignment)

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Every number by its whole path."""
        found: dict[str, Leaf] = {}
        at = 0
        for name, kind, _, length in self.fields:
            at = _round_up(at, kind.alignment if isinstance(kind, Struct) else _SIZES[kind])
            if isinstance(kind, Struct):
                found |= {f"{name}.{path}": x._replace(offset=at + x.offset) for path, x in kind.leaves.items()}
                at += kind.size
            else:
                found[name] = Leaf(at, kind, length)
                at += _SIZES[kind] * max(length, 1)
        return found

    @cached_property
    def _paths(self) -> dict[str, str]:
        """From the ends of paths that belong to one only."""
        found: dict[str, list[str]] = {}
        for path in self.leaves:
            parts = path.split(".")
            for start in range(len(parts)):
                found.setdefault(".".join(parts[start:]), []).append(path)
        return {end: paths[0] for end, paths in found.items() if len(paths) == 1}

    @cached_property
    def words(self) -> dict[str, int]:
        """Which 8-byte word of the struct a field is, of those that begin with one."""
        offsets = {name: self.leaves[path].offset for name, path in self._paths.items()}
        return {name: offset // 8 for name, offset in offsets.items() if offset % 8 == 0}

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs all numbers in their order."""
        code, at = "=", 0
        for offset, kind, length in self.leaves.values():
            code += f"{offset - at}x{max(length, 1)}{_TYPES[kind][1]}"
            at = offset + _SIZES[kind] * max(length, 1)
        return struct.Struct(f"{code}{self.size - at}x")

    def __getstate__(self) -> dict[str, Any]:
        # Plans go to processes that compile, after calls too; what packs is made there again.
        return {name: x for name, x in self.__dict__.items() if name != "packer"}

    def pack(self, values: Mapping[str, Value]) -> bytes:
        """The struct with these values, and zero for what a call fills in.

        Raises:
            KeyError: a name is not of a field, or a field has no value.
        """
        given = {self._paths[name]: value for name, value in values.items()}
        numbers: list[Any] = []
        for path, (_, kind, length) in self.leaves.items():
            if path not in given and kind != "u64":
                raise KeyError(f"{self.name}: {path!r} has no value")
            value = given.get(path, [0] * length if length else 0)
            if length:
                numbers += cast(Sequence[float], value)
            else:
                numbers.append(value)
        return self.packer.pack(*numbers)

    @cached_property
    def text(self) -> str:
        """The CUDA text of this struct and of those that it is made of."""
        return "\n".join(_declaration(x) for x in _parts(self))


def _size(field: Field) -> int:
    return field.type.size if isinstance(field.type, Struct) else _SIZES[field.type] * max(field.length, 1)


def _alignment(field: Field) -> int:
    return field.type.alignment if isinstance(field.type, Struct) else _SIZES[field.type]


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _parts(whole: Struct) -> list[Struct]:
    """A struct after all that it is made of, each once."""
    found: dict[str, Struct] = {}
    for field in whole.fields:
        if isinstance(field.type, Struct):
            found |= {part.name: part for part in _parts(field.type)}
    return [*found.values(), whole]


def _declaration(x: Struct) -> str:
    align = f"alignas({x.align}) " if x.align else ""
    lines = [f"struct {align}{x.name} {{" + _remark(x.about)]
    for name, kind, about, length in x.fields:
        type_name = kind.name if isinstance(kind, Struct) else _TYPES[kind][0]
        lines.append(f"    {type_name} {name}{f'[{length}]' if length else ''};" + _remark(about))
    lines.append("};")
    # The members' offsets follow from C's rules; that these are the compiler's as well is cheap to ask.
    lines.append(f'static_assert(sizeof({x.name}) == {x.size}, "what the host packs as {x.name} has {x.size} bytes");')
    return "\n".join(lines)


def _remark(about: str) -> str:
    return about and f"  // {about}"


class Region(NamedTuple):
    """A part of a workspace: `numbers` of one type for each entry, or, with `once`, for all of them together."""

    name: str
    type: str
    numbers: int
    about: str = ""
    once: bool = False
    axes: tuple[str, ...] = ()
    """Of what there are entries, where a workspace has several kinds of them."""

    def entries(self, counts: int | Mapping[str, int]) -> int:
        """How many there are: so many, or what the counts of its axes come to."""
        if self.once:
            return 1
        return counts if isinstance(counts, int) else prod(counts[x] for x in self.axes)

    @property
    def field(self) -> Field:
        """The member of arguments that is its address."""
        return Field(self.name, "u64", f"[{']['.join(self.axes)}] {self.about}" if self.axes else self.about)


@dataclass(frozen=True)
class Regions:
    """What lies in a workspace, one after the other."""

    name: str
    regions: tuple[Region, ...]
    pitch: int = 0
    """Regions take multiples of so many bytes, and a call passes the address of each; 0: they follow close upon one
    another, and the kernel finds them from the first."""
    line: int = 1
    """All of them take a multiple of so many bytes, so that what follows has lines of its own."""

    def sizes(self, entries: int | Mapping[str, int]) -> dict[str, int]:
        """Bytes of each region, where so many entries are there, or of what there are entries so many."""
        return {
            x.name: _round_up(_SIZES[x.type] * x.numbers * x.entries(entries), self.pitch or 1) for x in self.regions
        }

    def bytes(self, entries: int | Mapping[str, int]) -> int:
        """Bytes of all."""
        return _round_up(sum(self.sizes(entries).values()), self.line)

    def only(self, names: Collection[str]) -> Regions:
        """Those of these names."""
        return replace(self, regions=tuple(x for x in self.regions if x.name in names))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """By name, the members of arguments that are the addresses of regions."""
        return {x.name: x.field for x in self.regions}

    @cached_property
    def text(self) -> str:
        """The CUDA text: numbers of an entry as constants; where the kernel finds the regions, a pointer to each."""
        # Of an enum, since constants that are members of structs take memory in the image.
        constants = (f"        {_constant(x)} = {x.numbers},{_remark(x.about)}" for x in self.regions)
        lines = [f"struct {self.name} {{", "    enum : int {", *constants, "    };"]
        if not self.pitch:
            lines += [f"    {_TYPES[x.type][0]}* {x.name};" for x in self.regions]
            lines.append("    __device__ void locate(unsigned long long address, long long entries) {")
            start = "address"
            for x in self.regions:
                lines.append(f"        {x.name} = reinterpret_cast<{_TYPES[x.type][0]}*>({start});")
                start = f"{x.name} + {'' if x.once else 'entries * '}{_constant(x)}"
            lines.append("    }")
        return "\n".join([*lines, "};"])


def _constant(x: Region) -> str:
    return "k" + x.name.title().replace("_", "")


# Arguments. Strides are counted in elements.

# Some to spare: one more part need not change the arguments of every kernel.
MASK_WORDS = _round_up(most_words(), 4)

TENSOR_MAP = Struct("TensorMap", (Field("words", "u64", length=16),), "as the driver encodes it", align=64)
TENSOR4 = Struct(
    "Tensor4",
    (Field("pointer", "u64"), *(Field(name, "i64") for name in ("batch", "head", "row", "column"))),
    "(B, H, rows, D) through strides, whatever the caller's layout",
)
TENSOR3 = Struct(
    "Tensor3",
    (Field("pointer", "u64"), *(Field(name, "i64") for name in ("batch", "head", "row"))),
    "(B, H, M), a float for each query row, through strides",
)


def _extents(*groups: Field) -> Struct:
    return Struct(
        "Extents",
        (
            Field("batch", "int"),
            Field("heads", "int"),
            Field("queries", "int"),
            Field("keys", "int"),
            *groups,
            Field("tiles", "int", "row tiles of this launch per head"),
            Field("head_group", "int", "heads that run side by side"),
            Field("splits", "int", "blocks over which the keys of one row tile are split"),
            Field("sequences", "int", "that lie one after the other in rows and keys; 0: all is one"),
            Field("mask", "i64", "of each part its integers, then its addresses, in the registry's order", MASK_WORDS),
        ),
    )


_GROUP = "query heads that read one key head"
EXTENTS = _extents(Field("teacher_group", "int", _GROUP), Field("student_group", "int"))
INPUTS = Struct("Inputs", tuple(Field(name, TENSOR4) for name in ATTENTION_KL.names))

OUT_ROWS = ("value", "teacher_lse", "student_lse")
"""What a forward writes, nats."""
SAVED_ROWS = ("grad", "teacher_lse", "student_lse", "value")
"""What a backward reads of each row: the upstream gradient and what the forward saved, nats. One after the other."""
SAVED_ROWS_ARGS = Struct(
    "SavedRowsArgs",
    (
        *(Field(name, TENSOR3) for name in SAVED_ROWS),
        Field("moments", TENSOR3),
        Field("entries", "int", "of the batch"),
        Field("heads", "int"),
        Field("queries", "int"),
        Field("workspace", "u64", "four floats of each row, in the order of the first four of these"),
    ),
)
MASK_BITS = Struct(
    "MaskBitsArgs",
    (
        Field("bytes", "u64", "one for each key or query row"),
        Field("words", "u64", "32 of these to a word, whole words per batch entry"),
        Field("batch", "i64", "strides of the bytes"),
        Field("column", "i64"),
        Field("count", "i64", "of an entry"),
        Field("entries", "int", "of the batch"),
    ),
)

JOIN_STATES = Struct(
    "JoinStatesArgs",
    (
        Field("entries", "i64", "of batch and heads, or of batch alone where rows of all heads lie together"),
        Field("count", "i64", "rows of each that are joined"),
        Field("pitch", "i64", "rows of each that there are"),
        Field("first", "i64"),
        Field("value", "u64"),
        Field("teacher_lse", "u64"),
        Field("student_lse", "u64"),
        Field("states", "u64"),
        Field("others", "u64", "states of the rows that are joined"),
    ),
)

Names = tuple[str, ...]


def _numbers(teacher: Names, student: Names) -> tuple[Field, ...]:
    """What the scores of both sides read."""
    return tuple(
        Field(f"{side}_numbers", Struct(f"{side.title()}Numbers", tuple(Field(name, "float") for name in names)))
        for side, names in (("teacher", teacher), ("student", student))
    )


# Of the indexer: what kernels find in workspaces, by the letters of its record; and the arguments.

INDEXER_LINE = 256
"""Bytes that its regions are multiples of."""
STRIP_TILE = 64
"""Rows and keys of a tile of the strip."""

INDEXER_ROW_REGIONS = Regions(
    "IndexerRowRegions",
    (
        Region("lse2", "float", 1, "the teacher's in base 2, +inf where a head counts nothing", axes=("B", "H", "M")),
        Region("weights", "float", 1, "of the student's heads", axes=("B", "I", "M")),
        Region("row_keys", "int", 2, "start, end", axes=("B", "M")),
        Region("tile_keys", "int", 2, "least start, largest end", axes=("B", "row_tiles")),
        Region("bases", "int", 1, "what ids of a row count from", axes=("B", "M")),
        Region("bits", "u32", 1, "a bit for each key that is there", axes=("B", "bit_rows", "words")),
        Region("states", "float", 4, "of rows: reference, sum, mass, terms", axes=("B", "row_states", "M")),
        Region("made_lse", "float", 1, "the teacher's, where no result has them", axes=("B", "H", "M")),
        Region(
            "row_stats",
            "float",
            4,
            "the student's log-sum-exp in base 2, 1 / mass, gradient times scale, 0",
            axes=("B", "G", "M"),
        ),
    ),
    pitch=INDEXER_LINE,
)
"""What requests have of rows."""


@lru_cache
def indexer_strip(dim: int, element_bytes: int) -> Regions:
    """What kernels leave of a strip for those that multiply by it."""
    return Regions(
        "IndexerStrip",
        (
            Region(
                "strip",
                "byte",
                STRIP_TILE * STRIP_TILE * element_bytes,
                "gradients of logits, by tiles or by rows: tile/strip.cuh",
                axes=("B", "G", "strip_tiles"),
            ),
            Region("gates", "u32", 2 * STRIP_TILE, "words of tile/strip.cuh", axes=("B", "I", "strip_tiles")),
            Region(
                "weighted_queries",
                "byte",
                _operand_tile(dim),
                "tiles of operands, times their weights",
                axes=("B", "I", "strip_row_tiles"),
            ),
        ),
        pitch=INDEXER_LINE,
    )


@lru_cache
def indexer_gradients(dim: int) -> Regions:
    """What gradients work in beside these, whose rows have so many columns."""
    depth = _round_up(dim, 16)
    return Regions(
        "IndexerGradients",
        (
            Region(
                "strip_widths", "int", 1, "tiles of keys before each row tile of the strip", axes=("row_tile_ends",)
            ),
            Region(
                "partials",
                "float",
                depth,
                "sums of blocks that go on with a key block that another began",
                axes=("shares", "share_rows"),
            ),
            Region("key_tiles", "byte", _operand_tile(dim), "of all keys the same", axes=("B", "J", "key_tiles")),
            Region("items", "int", 1, "work before each row tile of the strip", axes=("row_tile_ends",)),
            Region("kept_flags", "int", 8, "of each warp that multiplies, of which strip they are", axes=("shares",)),
            Region("key_sums", "float", depth, "of the gradient", axes=("key_shares", "B", "J", "N")),
            Region("units", "int", 1, "a strip's work before each key block", axes=("key_block_ends",)),
            Region(
                "listed",
                "float",
                1,
                "gradients of logits, of each row those of its keys in their order",
                axes=("B", "G", "listed_rows", "listed_keys"),
            ),
            Region("broken", "int", 1, "whether the student's queries and keys hold NaN or infinities", once=True),
        ),
        pitch=INDEXER_LINE,
    )


def _operand_tile(dim: int) -> int:
    """Bytes of a tile of queries or keys as gradients read them: in bfloat16, chunks of 64 columns."""
    return STRIP_TILE * 128 * -(-dim // 64)


_ROW = INDEXER_ROW_REGIONS.fields
_OF_GRADIENTS = indexer_strip(0, 2).fields | indexer_gradients(0).fields

INDEXER = Struct(
    "IndexerArgs",
    (
        *(Field(name, TENSOR4) for name in ("teacher_q", "teacher_k", "rope_q", "rope_k", "index_q", "index_k")),
        Field("target", TENSOR4, "(B, G, M, N) float32, read or written"),
        Field("out_q", TENSOR4),
        Field("out_k", TENSOR4),
        *(Field(name, TENSOR3) for name in ("out_value", "out_lse", "out_mass", "out_weights")),
        *(_ROW[name] for name in ("lse2", "weights", "row_stats", "row_keys", "tile_keys", "bits", "states")),
        *(_OF_GRADIENTS[name] for name in ("strip", "key_sums", "broken")),
        Field("bits_batch", "i64", "strides of the bits, in words"),
        Field("bits_group", "i64"),
        Field("bits_row", "i64"),
        Field("entries", "int", "of the batch"),
        Field("groups", "int"),
        Field("queries", "int"),
        Field("keys", "int"),
        Field("teacher_heads", "int", "of a group"),
        Field("teacher_group", "int", "heads that read one key head"),
        Field("rope_group", "int", "the same of the rotary parts"),
        Field("index_heads", "int", "of a group"),
        Field("index_key_heads", "int", "1 or one for each group"),
        Field("first_tile", "int", "of rows, of this launch, on the strip's grid"),
        Field("tiles", "int", "of this launch"),
        Field("grid_tiles", "int", "of all rows"),
        Field("splits", "int", "blocks over which the keys of one row tile are split"),
        Field("shares", "int", "blocks over which the rows of one key tile are split"),
        Field("strip_rows", "int"),
        Field("strip_pitch", "int", "elements"),
        Field("first_row", "int", "of a target"),
        Field("end_row", "int"),
        *_numbers(("scale",), ("scale",)),
        *(_OF_GRADIENTS[name] for name in ("gates", "weighted_queries", "key_tiles", "units", "items")),
        Field("kept_sums", "u64", "where `partials` are, in the query's kernel: of items that go on in the next share"),
        *(_OF_GRADIENTS[name] for name in ("kept_flags", "strip_widths", "partials")),
        Field("strip_number", "int"),
        Field("key_blocks", "int"),
        Field("head_blocks", "int"),
        _OF_GRADIENTS["listed"],
    ),
    "all that the indexer's kernels read and write",
)

INDEXER_ROWS = Struct(
    "IndexerRowsArgs",
    (
        Field("key_start", TENSOR3),
        Field("key_end", TENSOR3),
        Field("mask", TENSOR3, "bytes, its rows are keys"),
        Field("counts", TENSOR3, "ids of rows that count"),
        Field("ids", TENSOR4),
        *(Field(name, "u64") for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *(_ROW[name] for name in ("row_keys", "tile_keys", "bases", "bits")),
        Field("q_offset", "i64"),
        Field("chosen", "i64", "ids of a row"),
        Field("queries", "int"),
        Field("keys", "int"),
        Field("sequences", "int", "0: all is one"),
        Field("diagonal", "int", "whether there is one"),
        Field("offset_given", "int"),
        Field("ratio", "int", "tokens of a key"),
        Field("relative", "int", "whether ids count from the start of a sequence"),
        Field("bit_groups", "int"),
        Field("first_row", "int", "that has bits in this launch"),
        Field("bit_rows", "int"),
        *(Field(f"wide_{name}", "int") for name in ("q", "k", "start", "end", "counts", "ids")),
    ),
    "which keys rows see; wide integers have 64 bits",
)
INDEXER_PACK = Struct(
    "IndexerPackArgs",
    (
        *(Field(name, TENSOR3) for name in ("teacher_lse", "in_weights", "grad", "index_lse", "mass")),
        *(_ROW[name] for name in ("lse2", "weights", "row_stats")),
        *(Field(name, "int") for name in ("entries", "groups", "queries", "teacher_heads", "index_heads")),
        Field("index_scale", "float"),
    ),
    "what is packed of rows; heads are those of all groups",
)


class Args(NamedTuple):
    """The arguments of every kernel that computes scores, whose numbers of a side have these names."""

    forward: Struct
    gradient: Struct
    fused: Struct
    hopper_forward: Struct
    hopper_gradient: Struct
    hopper_fused: Struct


@lru_cache
def args_of(teacher: Names = ("scale",), student: Names = ("scale",)) -> Args:
    """The arguments by what the scores of both sides read."""
    numbers = _numbers(teacher, student)
    forward = Struct(
        "ForwardArgs",
        (
            Field("in", INPUTS),
            *(Field(name, TENSOR3) for name in OUT_ROWS),
            Field("n", EXTENTS),
            *numbers,
            Field("workspace", "u64", "row states where keys are split: [field][split][B H][M]"),
            Field("entropy", TENSOR3, "nats, where it is wanted"),
            Field("moments", TENSOR3, "several floats to a row, where the divergence has some"),
        ),
    )
    gradient = Struct(
        "GradientArgs",
        (
            Field("in", INPUTS),
            *(Field(name, TENSOR3) for name in SAVED_ROWS),
            Field("out", TENSOR4, "gradient of one input"),
            Field("n", EXTENTS),
            *numbers,
            Field("out_scale", "float", "the plain scale of the side that is differentiated"),
            Field("partial_slots", "int", "for sums of blocks that share a row tile, per batch entry and head"),
            Field("partial_arrivals", "u64", "what lies there pipeline/partials.cuh says; 0: no memory for it"),
            Field("partial_sums", "u64"),
        ),
    )
    fused = Struct(
        "FusedArgs",
        (
            Field("base", gradient, "its `out` is the keys'"),
            Field("out_q", TENSOR4),
            Field("workspace", "u64"),
            Field("heads_together", "int", "query heads whose rows may lie in one tile, one after the other"),
            Field("share_steps", "int", "of blocks that share a row tile in turns; 0: each tile has as many shares"),
        ),
        "both gradients of one side",
    )
    return Args(
        forward,
        gradient,
        fused,
        _with_maps("HopperForwardArgs", "base", forward),
        _with_maps("HopperGradientArgs", "base", gradient),
        _with_maps("HopperFusedArgs", "fused", fused),
    )


def _with_maps(name: str, base: str, args: Struct, inputs: Names = ATTENTION_KL.names) -> Struct:
    return Struct(name, (*(Field(x, TENSOR_MAP) for x in inputs), Field(base, args)))


INDEXER_MAPS = ("teacher_q", "teacher_k", "index_q", "index_k")
HOPPER_INDEXER = _with_maps("HopperIndexerArgs", "base", INDEXER, INDEXER_MAPS)


class AttentionArgs(NamedTuple):
    """The arguments of the kernels of attention whose numbers have these names."""

    forward: Struct
    gradient: Struct
    rows: Struct
    hopper_forward: Struct
    hopper_gradient: Struct
    hopper_fused: Struct


@lru_cache
def attention_args_of(numbers: Names = ("scale",)) -> AttentionArgs:
    """The arguments by what the score reads."""
    inputs = tuple(Field(name, TENSOR4) for name in SPARSE_ATTENTION.names)
    extents = _extents(Field("group", "int", _GROUP))
    of_score = Field("numbers", Struct("Numbers", tuple(Field(name, "float") for name in numbers)))
    forward = Struct(
        "AttentionArgs",
        (
            *inputs,
            Field("out", TENSOR4),
            Field("lse", TENSOR3, "nats"),
            Field("n", extents),
            of_score,
            Field("workspace", "u64", "row states where keys are split, an entry for each split of each row"),
        ),
    )
    gradient = Struct(
        "AttentionGradientArgs",
        (
            *inputs,
            Field("grad", TENSOR4),
            Field("out", TENSOR4, "gradient of queries or keys"),
            Field("out_value", TENSOR4, "gradient of values"),
            Field("n", extents),
            of_score,
            Field("out_scale", "float", "the plain scale"),
            Field("rows", "u64", "what attention_rows.cu has made of each row"),
        ),
    )
    rows = Struct(
        "AttentionRowsArgs",
        (
            Field("grad", TENSOR4),
            Field("saved_out", TENSOR4, "what the forward made"),
            Field("lse", TENSOR3),
            Field("grad_lse", TENSOR3, "address 0: none"),
            Field("entries", "int", "of the batch"),
            Field("heads", "int"),
            Field("queries", "int"),
            Field("workspace", "u64"),
            Field("copy", "u64", "of the upstream gradient, compact; 0: none is wanted"),
        ),
    )
    names = SPARSE_ATTENTION.names
    hopper_gradient = _with_maps("HopperAttentionGradientArgs", "base", gradient, (*names, "grad"))
    hopper_fused = Struct(
        "HopperAttentionFusedArgs",
        (
            *hopper_gradient.fields,
            Field("out_q", TENSOR4, "gradient of queries, where `out` is that of keys"),
            Field("workspace", "u64"),
            Field("units", "u64", "two to a tile of keys, of 64 keys each, by key head; 0: neighbours"),
            Field("units_alike", "int", "whether all heads have the same"),
        ),
    )
    return AttentionArgs(
        forward,
        gradient,
        rows,
        _with_maps("HopperAttentionArgs", "base", forward, names),
        hopper_gradient,
        hopper_fused,
    )


ARGS: Final[dict[str, Callable[..., Any]]] = {
    ATTENTION_KL.name: args_of,
    ATTENTION_KL_TO.name: args_of,
    SPARSE_ATTENTION.name: attention_args_of,
}
"""By operation, the arguments of its kernels by the names of the numbers of each side."""

# Workspaces.

LINE = 128
"""Bytes of a line of the caches."""


def split_states(floats: int) -> Regions:
    """States of rows whose keys are split over blocks; an entry is a row in one of these."""
    return Regions("SplitStates", (Region("states", "float", floats),))


def attention_states(value_dim: int) -> Regions:
    """States of rows whose keys are split over blocks; an entry is a row in one of these."""
    return Regions(
        "AttentionStates",
        (
            Region("reference", "float", 1, "of the weights"),
            Region("sum", "float", 1, "of these"),
            Region("out", "float", value_dim, "values by their weights"),
        ),
        line=LINE,
    )


ATTENTION_ROWS = Regions(
    "AttentionRows",
    (
        Region("lse", "float", 1, "in base 2; plus infinity: the row has no keys"),
        Region("delta", "float", 1),
    ),
    line=LINE,
)
"""What gradients of attention read of each row."""


def attention_copy(row_bytes: int) -> Regions:
    """A compact copy of the upstream gradient; an entry is a row."""
    return Regions("AttentionCopy", (Region("grad", "u32", -(-row_bytes // 4)),), line=LINE)


def attention_sums(columns: int, dim: int) -> Regions:
    """What the one-pass backward of attention adds the gradient of the queries to; an entry is a tile of `columns` of
    one head."""
    return Regions(
        "AttentionSums",
        (
            Region("sums", "float", columns * _round_up(dim, 16), "as the accumulators hold them"),
            Region("taken", "u32", 1, "work tiles that blocks have taken beyond their first", once=True),
        ),
        line=LINE,
    )


def partials(warps: int, rows: int, out_dim: int) -> Regions:
    """What blocks that share a row tile leave for one another; an entry is a slot."""
    return Regions(
        "Partials",
        (
            Region("arrivals", "int", warps, "zero before a launch"),
            Region("sums", "float", rows * _round_up(out_dim, 16)),
        ),
        pitch=LINE,
    )


def fused_workspace(columns: int, dim: int, row_vectors: int, direct: bool) -> Regions:
    """What the one-pass backward works in; an entry is a tile of `columns` queries of one head.

    `direct`: the pass writes the queries' gradient itself and needs no sums of it.
    """
    sums = 0 if direct else columns * dim
    return Regions(
        "FusedWorkspace",
        (
            Region("sums", "float", sums, "of the queries' gradient, as the accumulators hold them"),
            Region("row_stats", "float", columns * row_vectors, "of the queries, as tile/row_stats.cuh lays them out"),
            Region("exponents", "int", 1, "the largest of g * bound; of narrow types only"),
            Region("taken", "u32", 1, "work tiles that blocks have taken beyond their first", once=True),
        ),
        line=LINE,
    )


def bit_words(bits: int) -> int:
    """Words of so many bits."""
    return -(-bits // 32)


def packed_mask(bits: int) -> Regions:
    """A mask with so many bits to an entry of the batch."""
    return Regions("PackedMask", (Region("words", "u32", bit_words(bits)),), line=LINE)


def row_tiles(rows: int, tile: int, sequences: int) -> int:
    """Tiles of `tile` rows; of packed sequences as many as any lengths need: each has at most one that is not full, and
    what follows the last one is like one more."""
    return rows // tile + sequences + 1 if sequences else -(-rows // tile)
