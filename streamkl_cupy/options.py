"""The options that every function has, each once: its type, how it is checked, how torch takes it, its default.

The public functions repeat them in their signatures, for people, editors and type checkers, as `Shared` does below for
these alone; nothing else does. What is
static is a field of `Options`; the arrays that masks read stand in the registry of masks.
"""

# Annotations are read here: they are the table.
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import numpy as np

from .arguments import FAR, a_kind_of, choice, flag, integer, listed
from .ops import ATTENTION_KL, ATTENTION_KL_TO, INDEXER_KL, INDEXER_TARGET, OPS, SPARSE_ATTENTION, Op
from .problem import Side
from .rules.divergences import DIVERGENCES, PARAMETERS
from .rules.masks import ARRAYS
from .rules.scores import SCORES
from .rules.sinks import Sinks

Layout = Literal["bhnd", "bnhd"]
Precision = Literal["highest", "high"]
Reduction = Literal["none", "sum", "mean"]
LAYOUTS = {"bhnd": "(batch, heads, rows, head dim)", "bnhd": "(batch, rows, heads, head dim)"}
PRECISIONS = ("highest", "high")
REDUCTIONS = ("none", "sum", "mean")
WIDE = ("", "q", "k", "qk")

if TYPE_CHECKING:
    from typing import TypedDict

    from .patterns import BlockPattern

    # What the type checker sees of them where a function has several signatures.

    class SharedByAll(TypedDict, total=False):
        """Those of every operation over queries and keys of sides."""

        causal: bool
        q_offset: int | None
        window: tuple[int | None, int | None] | None
        key_lengths: Any
        query_lengths: Any
        cu_seqlens_q: Any
        cu_seqlens_k: Any
        key_mask: Any
        query_mask: Any
        block_mask: BlockPattern | None
        layout: Layout
        precision: Precision
        deterministic: bool | None

    class SharedByStudents(SharedByAll, total=False):
        """With those of a student and its divergence."""

        student_scale: float | None
        student_score: str
        student_softcap: float | None
        divergence: str
        jsd_beta: float | None
        smoothing: float | None

    class Shared(SharedByStudents, total=False):
        """With those of a teacher."""

        teacher_scale: float | None
        teacher_score: str
        teacher_softcap: float | None

    class SharedByLosses(Shared, total=False):
        """With those of `attention_kl` alone."""

        row_weight: Any
        reduction: Reduction
        teacher_sink_logits: Any
        student_sink_logits: Any

    class SharedToTargets(SharedByStudents, total=False):
        """Those beside a target in place of a teacher, with those of `attention_kl_to` alone."""

        log_target: bool
        row_weight: Any
        reduction: Reduction
        student_sink_logits: Any

    class SharedByAttention(SharedByAll, total=False):
        """Those of `sparse_attention`."""

        scale: float | None
        softcap: float | None


class Row(NamedTuple):
    """What there is to know of an option besides its name, type and default."""

    check: Callable[[str, Any], Any]
    """(name, value) -> a plain value, so that equal requests are equal cache keys. None is not looked at where it is
    the default."""
    schema: str
    """The type that torch's operators take it as. `SymInt` may be a symbol of a tracer."""
    shared: bool = True
    """Whether every function has it; the others are those of functions with row results."""
    symbol: bool = False
    """Whether a tracer may hold it as a symbol that no check can look at: operators take it as a tensor then."""
    setting: bool = False
    """Whether only those read it who compute a problem: kernels, plans, the NumPy backend. They ask for
    `Problem.setting(name, default)`, and nothing between them and the signatures knows it."""


def _scale(name: str, value: Any) -> float:
    number = _number(
        name,
        value,
        "Factors that differ between heads or rows belong into the queries: multiply these by them",
        "scales are constants; pass float({name}), and scale the queries themselves to learn it",
    )
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} is not finite; allowed is every finite number, 0 and negative included")
    return number


def _softcap(name: str, value: Any) -> float:
    number = _number(
        name,
        value,
        "Heads with caps of their own are calls of their own",
        "caps are constants; pass float({name})",
    )
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={number}; allowed are positive finite numbers, and None for no cap")
    return number


def _number(name: str, value: Any, several: str, learned: str) -> float:
    """One that is known now; what to do about several of them, and about one that is differentiated by."""
    if type(value) is not float:
        if isinstance(value, (str, bytes)):
            raise TypeError(
                f"{name} is {a_kind_of(value)}; allowed are a number, and an array without axes: float({name})"
            )
        if isinstance(value, (bool, np.bool_, list, tuple)) or getattr(value, "shape", ()) != ():
            raise TypeError(f"{name} is {a_kind_of(value)}; allowed are a number, and an array without axes. {several}")
        if getattr(value, "requires_grad", False):
            raise TypeError(f"{name} requires a gradient, but {learned.format(name=name)}")
        try:
            value = float(value)
        except OverflowError as cause:
            raise ValueError(f"{name} is beyond what a float can hold; allowed is every finite number") from cause
        except Exception as cause:
            raise TypeError(f"{name} is {a_kind_of(value)}; allowed are a number known now (not traced)") from cause
    return float(value)


def _window(name: str, value: Any) -> tuple[int, int]:
    """Keys to the left and to the right, -1 for no limit."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}={value!r} is {a_kind_of(value)}; allowed is a pair (left, right), such as (1024, 0)")
    if len(value) != 2:
        raise ValueError(
            f"{name}={value!r} has {len(value)} entries; allowed is a pair (left, right), such as (1024, 0)"
        )
    sides = []
    for which, side in zip(("left", "right"), value, strict=True):
        keys = -1 if side is None else integer(f"{name}'s {which}", side)
        if keys < -1:
            raise ValueError(
                f"{name}={tuple(value)!r}: {which} is {keys}; allowed are 0 and more, and -1 or None for no limit"
            )
        sides.append(keys)
    left, right = sides
    return left, right


def _pattern(name: str, value: Any) -> Any:
    # Imported here, because most calls have none; whoever holds one has paid for it.
    from .patterns import BlockPattern

    if not isinstance(value, BlockPattern):
        raise TypeError(
            f"{name} is {a_kind_of(value)}; allowed is a streamkl_cupy.patterns.BlockPattern, which "
            f"patterns.from_dense makes of a boolean block matrix"
        )
    return value


def _parameter(name: str, value: Any) -> float:
    """A plain number of a divergence; whether it may be that says the divergence."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} is {a_kind_of(value)}; allowed is a number")
    try:
        return float(value)
    except Exception as cause:
        raise TypeError(f"{name} is {a_kind_of(value)}; allowed is a number known now (not traced)") from cause


def _from_one(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name}={value}; allowed are 1 and more")
    return number


def _some_rows(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {a_kind_of(value)}; allowed is a pair (first, end) of query rows")
    first, end = (integer(name, x) for x in value)
    return first, end


# Rows that several tables have.
Scale = Annotated[float | None, Row(_scale, "float?", symbol=True)]
Score = Annotated[str, Row(lambda name, value: choice(name, value, SCORES), "str")]
Softcap = Annotated[float | None, Row(_softcap, "float?", symbol=True)]
Flag = Annotated[bool, Row(flag, "bool")]
Own = Annotated[bool, Row(flag, "bool", shared=False)]
Number = Annotated[float | None, Row(_parameter, "float?")]
Offset = Annotated[int | None, Row(integer, "SymInt?")]
Window = Annotated[tuple[int, int] | None, Row(_window, "SymInt[]?")]
# Operators take the key of a pattern, and find the pattern among those alive.
Pattern = Annotated["BlockPattern | None", Row(_pattern, "Tensor?")]
Order = Annotated[str, Row(lambda name, value: choice(name, value, LAYOUTS), "str")]
Products = Annotated[str, Row(lambda name, value: choice(name, value, PRECISIONS), "str", setting=True)]
Equal = Annotated[bool | None, Row(lambda name, value: flag(name, value, "True, False and None"), "bool?")]


class Options(NamedTuple):
    """The static options, as they are checked."""

    teacher_scale: Scale = None
    student_scale: Scale = None
    teacher_score: Score = Side.score
    student_score: Score = Side.score
    teacher_softcap: Softcap = None
    student_softcap: Softcap = None
    causal: Flag = False
    q_offset: Offset = None
    window: Window = None
    block_mask: Pattern = None
    divergence: Annotated[str, Row(lambda name, value: choice(name, value, DIVERGENCES), "str")] = "kl"
    jsd_beta: Number = None
    smoothing: Number = None
    layout: Order = "bhnd"
    precision: Products = "highest"
    deterministic: Equal = None
    return_entropy: Own = False
    # Of calls whose keys are some of those that their rows see, which sharded calls make of themselves.
    some_keys: Own = False
    # Of calls whose gradients are added to others, which sharded calls do.
    wide_gradients: Annotated[str, Row(lambda name, value: choice(name, value, WIDE), "str", shared=False)] = ""
    # Whether rows have sinks, whose logits are the doors' own.
    sunk: Own = False


class AttentionOptions(NamedTuple):
    """Those of `sparse_attention`."""

    scale: Scale = None
    softcap: Softcap = None
    causal: Flag = False
    q_offset: Offset = None
    window: Window = None
    block_mask: Pattern = None
    layout: Order = "bhnd"
    precision: Products = "highest"
    deterministic: Equal = None


class TargetOptions(NamedTuple):
    """Those beside a teacher that is given."""

    log_target: Flag = False


class IndexOptions(NamedTuple):
    """Those of `indexer_kl`."""

    # Every call says it: the default is that of `indexer_target`, which has no student.
    index_scale: Annotated[float, Row(_scale, "float?", symbol=True)] = 1.0
    teacher_scale: Scale = None
    relu: Flag = True
    head_groups: Annotated[int | None, Row(_from_one, "SymInt?")] = None
    causal: Flag = False
    q_offset: Offset = None
    compress_ratio: Annotated[int, Row(_from_one, "SymInt")] = 1
    topk_relative: Flag = False
    layout: Order = "bhnd"
    deterministic: Equal = None
    # Of `indexer_target` alone: the first row that it is of, and the one after the last.
    rows: Annotated[tuple[int, int] | None, Row(_some_rows, "SymInt[]?", shared=False)] = None

    # What others ask all options for, and no call of these has.
    @property
    def block_mask(self) -> None:
        return None

    @property
    def window(self) -> None:
        return None


def _without(sides: str, more: Any) -> Any:
    """The options but for those of a side, and more."""
    rows = {name: kind for name, kind in Options.__annotations__.items() if not name.startswith(sides)}
    defaults = {name: Options._field_defaults[name] for name in rows} | more._field_defaults
    found: Any = namedtuple("Options", defaults, defaults=defaults.values())  # type: ignore[misc]  # as the names
    found.__annotations__ = rows | more.__annotations__
    return found


OPTIONS: Final[dict[str, Any]] = {
    ATTENTION_KL.name: Options,
    ATTENTION_KL_TO.name: _without("teacher_", TargetOptions),
    SPARSE_ATTENTION.name: AttentionOptions,
    INDEXER_KL.name: IndexOptions,
    INDEXER_TARGET.name: IndexOptions,
}
"""The static options of each operation, by its name."""


class LossOptions(NamedTuple):
    """What `attention_kl` has beside these: what becomes of its rows."""

    row_weight: Any = None
    reduction: str = "none"
    return_lse: bool = False
    dense_teacher_lse: Any = None
    teacher_sink_logits: Any = None
    student_sink_logits: Any = None

    @property
    def sinks(self) -> Sinks:
        """Both sides' sinks as they came."""
        return Sinks(self.teacher_sink_logits, self.student_sink_logits)


def with_sunk(given: dict[str, Any], asked: LossOptions) -> dict[str, Any]:
    """Options that were given, with the one that says that there are sinks."""
    return given if asked.teacher_sink_logits is None and asked.student_sink_logits is None else {**given, "sunk": True}


# By operation and name: the rows of its options; by name the dtypes of the arrays that masks read.
TABLES: Final[dict[str, dict[str, Row]]] = {
    op: {name: kind.__metadata__[0] for name, kind in options.__annotations__.items()}
    for op, options in OPTIONS.items()
}
MASK_ARRAYS: Final = {name: array.dtype for name, array in ARRAYS.items()}
SHARED: Final = {
    op: frozenset(
        {
            *(name for name, row in table.items() if row.shared or op == INDEXER_TARGET.name),
            *MASK_ARRAYS,
            *(x.name for x in OPS[op].operands if x.optional),
        }
    )
    for op, table in TABLES.items()
}
NO_MASKS: Final = (None,) * len(MASK_ARRAYS)
_DEFAULTS = {op: options() for op, options in OPTIONS.items()}
_SETTINGS = {op: tuple(name for name, row in table.items() if row.setting) for op, table in TABLES.items()}
_MAY_BE_NONE = {
    op: frozenset({name for name, default in options._field_defaults.items() if default is None})
    for op, options in OPTIONS.items()
}


def parse(op: Op, given: Mapping[str, Any], symbols: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Check options of an operation that were given by name: the static ones, and the arrays of masks in the order of
    `MASK_ARRAYS`.

    With `symbols` those that a tracer may hold as one pass as they are. Plain enough for torch.compile to trace.
    """
    if not given:
        return _DEFAULTS[op.name], NO_MASKS
    static: dict[str, Any] = {}
    masked = False
    table, may_be_none = TABLES[op.name], _MAY_BE_NONE[op.name]
    for name, value in given.items():
        if name not in table:
            masked = masked or value is not None
        elif (value is not None or name not in may_be_none) and not (symbols and table[name].symbol):
            static[name] = table[name].check(name, value)
        else:
            static[name] = value
    options = OPTIONS[op.name](**static)
    if [name for name in PARAMETERS if static.get(name) is not None]:
        _check_parameters(options, static)
    if options.q_offset is not None or options.window is not None:
        options = _near(options)
    return options, tuple([given.get(name) for name in MASK_ARRAYS]) if masked else NO_MASKS


def settings(op: Op, options: Any) -> tuple[tuple[str, Any], ...]:
    """`Problem.settings` of checked options."""
    found = [(name, getattr(options, name)) for name in _SETTINGS[op.name]]
    return tuple([(name, value) for name, value in found if value != getattr(_DEFAULTS[op.name], name)])


def further_results(op: Op, options: Any) -> dict[str, tuple[int, ...]]:
    """Results of a call beyond those that every call has, and the axes that each has after the row's."""
    asking = {field: option for option, field in op.problem_fields}
    found: dict[str, tuple[int, ...]] = {
        name: () for field, _, name in op.asked_rows if getattr(options, asking[field])
    }
    for name in op.ruled_rows:  # an entry says under that name how many it has
        if count := getattr(DIVERGENCES[options.divergence], name):
            found[name] = (count,)
    return found


def _check_parameters(options: Options, static: Mapping[str, Any]) -> None:
    """Refuse numbers that the divergence does not have, or cannot have."""
    known = DIVERGENCES[options.divergence].parameters
    for name in PARAMETERS:
        value = static.get(name)
        if value is None:
            continue
        if name not in known:
            having = [entry.name for entry in DIVERGENCES.values() if name in entry.parameters]
            raise ValueError(
                f"{name}={value:g} is no number of divergence={options.divergence!r}; it is one of "
                f"{listed(having)}: leave it out, or say divergence={having[0]!r}"
            )
        if misfit := known[name].misfit(value):
            raise ValueError(f"{name}={value:g} {misfit}")


def _near(options: Any) -> Any:
    """The same diagonal and window in numbers that 64 bits hold. Where a window begins and ends is what counts, not how
    far it reaches from where."""

    def near(distance: int) -> int:
        return max(-FAR, min(distance, FAR))

    q_offset, window = options.q_offset, options.window
    if window is None and options.causal:
        return options._replace(q_offset=near(q_offset))
    if q_offset is not None and not options.causal and window is None:
        raise ValueError(
            f"q_offset={q_offset} moves the diagonal of causal and window, but there is neither; pass causal=True "
            f"or a window, or leave it out"
        )
    first = q_offset or 0
    if window is not None:
        left, right = window
        window = (
            left if left < 0 else near(first) - near(first - left),
            right if right < 0 else near(first + right) - near(first),
        )
    return options._replace(q_offset=None if q_offset is None else near(q_offset), window=window)
