"""What a divergence must offer on the host, beside its header and under the same name.

A divergence is a function of two distributions over the same keys, P the teacher's and Q the student's, one value per
query row. Its entry says it twice: for tiles, as the NumPy backend streams them, and for whole rows of probabilities,
as the definition that everything is judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Logits = NDArray[np.float64]
Visible = NDArray[np.bool_]
Scratch = Callable[[str, tuple[int, ...]], Array]
"""(name, shape) -> a buffer, what it held before included."""


class RowResults(NamedTuple):
    """What a forward has of the rows of a block; all of a row are NaN where it saw NaN or Inf on either side: the value
    could be infinite and a log-sum-exp finite, and a backward from that would be silent."""

    value: Array
    """Nats; 0 for a row without keys."""
    teacher_lse: Array
    """Natural logarithms; -inf for a row without keys."""
    student_lse: Array
    teacher_entropy: Array | None = None
    """Nats, where it is wanted; 0 for a row without keys."""
    moments: Array | None = None
    """(..., k), where the divergence has some."""


class RowState(Protocol):
    """Partial sums of the rows of one block over the keys seen so far."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], entropy: bool = False) -> None:
        """`entropy`: whether the teacher's is wanted."""

    def absorb(self, teacher: Array, student: Array, visible: Array | None, scratch: Scratch, /) -> None:
        """Add a tile of keys: base-2 logits (b, h, m, n), -inf where not visible, which may be overwritten."""

    def finish(self, teacher_offset: Array | float, student_offset: Array | float, /) -> RowResults:
        """Results of rows whose logits lack so much in base 2."""


class TileGradients(Protocol):
    """The derivatives of each row's value by the logits of a tile, but for the factors of the entry."""

    def __call__(
        self,
        teacher: Array,
        student: Array,
        value: Any,
        wanted: tuple[bool, bool],
        visible: Array | None,
        scratch: Scratch,
        /,
    ) -> tuple[Array | None, Array | None]:
        """(log2 P, log2 Q, the row's value in base 2, which sides) -> both, None for what is not wanted.

        Logarithms are -inf where not visible and may be overwritten; derivatives are 0 there. The value is 0 where no
        wanted side needs it; a divergence with moments has these, (..., 1, k), in its place.
        """


class Parameter(NamedTuple):
    """A number that a divergence takes by an option of the same name."""

    default: float
    misfit: Callable[[float], str]
    """What is wrong with a value, the rest of a sentence; empty where nothing is."""


class Weighing(NamedTuple):
    """Of a value that is a mean, over the distribution of one side, of how far the logarithms of both differ: what one
    more outcome of a row adds to it, which a sink is, follows from that."""

    side: int
    """Whose distribution it is: 0 the teacher's, 1 the student's."""
    crossed: bool = False
    """Whether the mean is of the other's logarithm alone, as of a cross-entropy."""


Numbers = tuple[Any, ...]
"""Of a row's state, arrays of any library, all of the shape of the rows: references of the teacher's and the student's
logits (base 2, -inf where the row has seen no key), sums of exponentials, and terms."""


class Merging(NamedTuple):
    """How states of rows that have seen different keys become one, with the functions `xp` of any array library."""

    unseen: tuple[float, ...]
    """What kernels leave of a row that has seen no key."""
    merge: Callable[[Any, Sequence[Numbers]], Numbers]
    """(xp, states) -> that of all their keys; the states are added in the order given."""
    finish: Callable[[Any, Numbers], tuple[Any, Any, Any]]
    """(xp, state) -> value and both log-sum-exps, as a call with all these keys has them."""


class Terms(NamedTuple):
    """Rows of both distributions, natural logarithms beside them; all four are 0 where a key is not visible."""

    p: Array
    q: Array
    log_p: Array
    log_q: Array


@dataclass(frozen=True)
class Divergence:
    """One divergence. Pairs are (teacher's, student's)."""

    name: str
    header: str
    formula: str
    """The value of a row in Python, of arrays P and Q of its keys, with numpy's log: for people, and for tests. After a
    comma it says what M is."""
    needs_value: tuple[str, ...]
    """Sides whose gradients read the row's value, as `LogitGradient<side>::kNeedsValue` says on the device."""
    state_floats: int
    """Size of a row's partial state in memory, where several blocks share a row's keys."""
    row_state: type[RowState]
    tile_gradients: TileGradients
    factors: tuple[float, float]
    """What `tile_gradients` lack: `LogitGradient<side>::kFactor`."""
    tile_buffers: tuple[str, ...]
    """Names of the buffers, each of a tile's size, that the two of them ask for."""
    row_values: Callable[[Terms], Array]
    """-> (..., M), nats."""
    row_gradients: Callable[[Terms, Array], tuple[Array, Array]]
    """(rows, value (..., M, 1)) -> derivatives of each row's value by the logits of P and of Q."""
    row_magnitudes: Callable[[Terms, Array], tuple[Array, Array]]
    """The same with every term by its magnitude: what rounding errors of the derivatives are proportional to."""
    moments: int = 0
    """Numbers of a row that its gradients read in place of its value."""
    later_floats: tuple[int, ...] = ()
    """`state_floats` of passes after the first."""
    later_states: tuple[Callable[[Any], RowState], ...] = ()
    """Their row states, each of the one before."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    bind: Callable[[Mapping[str, float]], Divergence] | None = None
    """The divergence with other parameters."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Macros of its header, what comes of parameters."""
    zeros: bool = True
    """Whether it is finite where a probability of the teacher is 0 and the student's is not."""
    narrow: bool = True
    """Whether `LogitGradient<side>::bound` bounds its gradients, which float16 needs on a GPU."""
    weighing: Weighing | None = None
    """What sinks need; None: its rows have none."""
    merging: Merging | None = None
    """How states merge outside of kernels, as they do where ranks hold a sequence; None: they do not."""

    def value(self, teacher: Logits, student: Logits, visible: Visible) -> NDArray[np.float64]:
        """Natural logits (..., M, N) -> (..., M) in nats; 0 for a row that sees no key."""
        with np.errstate(invalid="ignore", over="ignore"):
            return _poison(self.row_values(_terms(teacher, student, visible)), teacher, student, visible)

    def logit_gradients(self, teacher: Logits, student: Logits, visible: Visible) -> tuple[Logits, Logits]:
        """The derivatives of each row's value; exactly 0 where not visible."""
        with np.errstate(invalid="ignore", over="ignore"):
            terms = _terms(teacher, student, visible)
            both = self.row_gradients(terms, self.row_values(terms)[..., None])
        d_teacher, d_student = (np.where(visible, _poison(d, teacher, student, visible), 0.0) for d in both)
        return d_teacher, d_student

    def logit_magnitudes(self, teacher: Logits, student: Logits, visible: Visible) -> tuple[Logits, Logits]:
        """Like `logit_gradients`, every term by its magnitude."""
        with np.errstate(invalid="ignore", over="ignore"):
            terms = _terms(teacher, student, visible)
            return self.row_magnitudes(terms, self.row_values(terms)[..., None])


def _split_log_sum_exp(logits: NDArray[Any], visible: Visible) -> tuple[Logits, Logits]:
    """The largest visible logit of each row, and how far its log-sum-exp is above that."""
    x = np.where(visible, logits, -np.inf).astype(np.float64)
    top = x.max(axis=-1, keepdims=True, initial=-np.inf)
    # A row of -inf would make inf - inf: shift it by 0 instead, its sum of exponentials is 0 either way.
    shift = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        return shift, np.log(np.exp(x - shift).sum(axis=-1, keepdims=True))


def log_sum_exp(logits: NDArray[Any], visible: Visible) -> NDArray[np.float64]:
    """Natural log-sum-exp over the visible keys of each row, (..., M, N) -> (..., M); -inf for a row that sees none."""
    shift, above = _split_log_sum_exp(logits, visible)
    return np.asarray((shift + above)[..., 0])


def log_softmax(logits: NDArray[Any], visible: Visible) -> Logits:
    """Natural log-probabilities over the visible keys, 0 where not visible so that sums may run over whole rows."""
    # Subtracted one after the other: with logits of 1e4 their sum is rounded too coarsely for sum P to be 1.
    shift, above = _split_log_sum_exp(logits, visible)
    with np.errstate(invalid="ignore"):
        return np.where(visible, logits - shift - above, 0.0)


def terms_of(log_p: Array, log_q: Array, visible: Visible) -> Terms:
    """Probabilities beside their logarithms, in the logarithms' precision."""
    p, q = (np.where(visible, np.exp(x), x.dtype.type(0)) for x in (log_p, log_q))
    return Terms(p, q, log_p, log_q)


def _terms(teacher: Logits, student: Logits, visible: Visible) -> Terms:
    return terms_of(log_softmax(teacher, visible), log_softmax(student, visible), visible)


def _poison(rows: NDArray[Any], teacher: Logits, student: Logits, visible: Visible) -> NDArray[Any]:
    """NaN in exactly the rows that see a logit which is not finite: a NaN or Inf input must not be silent."""
    bad = (visible & ~(np.isfinite(teacher) & np.isfinite(student))).any(axis=-1)
    return np.where(bad.reshape(bad.shape + (1,) * (rows.ndim - bad.ndim)), np.nan, rows)
