"""Row states over some of the keys: five numbers that merge, whatever brought them together.

With references r (logits in base 2), u = T - r_t and v = S - r_s over the keys that a state has seen,

    l_t = sum 2^u        l_s = sum 2^v        A = sum 2^u (u - v)

When references move by (d_t, d_s), l <- 2^-d l and A <- 2^-d_t (A - (d_t - d_s) l_t), so states over disjoint keys add
up once they have the same references. At last KL = ln 2 (A / l_t + log2(l_s / l_t)) and lse = ln 2 (r + log2 l). A row
without keys has the references -inf and sums of 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..results import KLForward
from ..rules.divergences import DIVERGENCES
from ..rules.divergences.interface import Merging
from .libraries import library_named, library_of

OF = "kl"
"""The divergence that these states are of, which is what their names say."""


def merging_of(divergence: str) -> Merging:
    """How states of a divergence merge that has such."""
    found = DIVERGENCES[divergence].merging
    assert found is not None
    return found


_MERGING = merging_of(OF)


class KLState(NamedTuple):
    """What some keys contribute to the KL of each row; all arrays have the shape of the rows.

    Attributes:
        teacher_reference: A number that the teacher's logits are told from, base 2; -inf where the row has seen no key.
        student_reference: The same for the student.
        teacher_sum: l_t, the sum over these keys of 2^(logit - reference).
        student_sum: l_s, the same for the student.
        difference: A, the sum over these keys of 2^(logit - reference) of the teacher times how far the teacher's logit
            is above its reference beyond how far the student's is.
    """

    teacher_reference: Any
    student_reference: Any
    teacher_sum: Any
    student_sum: Any
    difference: Any


def numbers_of(rows: Any) -> tuple[Any, ...]:
    """The numbers of the states that a call with some of their keys has left of rows as their moments."""
    xp = library_named(library_of("kl", rows.kl)).xp
    empty = rows.teacher_lse == -math.inf
    numbers = (rows.moments[..., i] for i in range(rows.moments.shape[-1]))
    return tuple(xp.where(empty, -math.inf if i < 2 else 0.0, x) for i, x in enumerate(numbers))


def merge_kl_states(*states: KLState) -> KLState:
    """One state of all the keys that these have seen, which must be disjoint.

    Args:
        states: Of the same rows, arrays of one library: NumPy, CuPy, PyTorch or JAX. They are added in the order given.

    Returns:
        `KLState`, which merges further.

    Accuracy:
        That of one call over all keys, |error| <= 2e-6 (1 + KL) in float32, since logits are told from references that
        occurred among them, however large they are. But one call takes from float32 keys what all of them share, and
        states do not: the logits of such keys are rounded whole.

    Raises:
        TypeError: no state, or arrays of several libraries.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy import attention_kl_forward
        >>> from streamkl_cupy.parallel import attention_kl_state, finish_kl_state, merge_kl_states
        >>> q, k_t, k_s = np.ones((1, 1)), np.log([[4.0], [3.0], [2.0], [1.0]]), np.zeros((4, 1))
        >>> halves = [attention_kl_state(q, k_t[i : i + 2], q, k_s[i : i + 2]) for i in (0, 2)]
        >>> round(float(finish_kl_state(merge_kl_states(*halves)).kl[0]), 6)
        0.10644
    """
    for number, state in enumerate(states):
        if not isinstance(state, KLState):
            raise TypeError(
                f"state {number} is {type(state).__name__}; allowed are results of attention_kl_state, each given by "
                f"itself: merge_kl_states(*states)"
            )
    if not states:
        raise TypeError("merge_kl_states() needs a state, but none came; pass merge_kl_states(*states)")
    libraries = {library_of("state", x) for state in states for x in state}
    if len(libraries) > 1:
        raise TypeError(
            f"states have arrays of {' and '.join(sorted(libraries))}; allowed is one library: convert them"
        )
    xp = library_named(libraries.pop()).xp
    return KLState(*_MERGING.merge(xp, states))


def finish_kl_state(state: KLState) -> KLForward[Any]:
    """Row values and log-sum-exps, of a state that has seen all the keys of its rows.

    Args:
        state: Of `attention_kl_state` or `merge_kl_states`.

    Returns:
        `KLForward`, as `attention_kl_forward` gives it: 0 and -inf for a row without keys, NaN where an input was not
        finite.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy.parallel import attention_kl_state, finish_kl_state
        >>> q, k_t, k_s = np.ones((1, 1)), np.log([[1.0], [3.0]]), np.zeros((2, 1))
        >>> round(float(finish_kl_state(attention_kl_state(q, k_t, q, k_s)).kl[0]), 4)
        0.1308
    """
    if not isinstance(state, KLState):
        raise TypeError(
            f"state is {type(state).__name__}; allowed is a result of attention_kl_state or merge_kl_states"
        )
    xp = library_named(library_of("state", state.teacher_reference)).xp
    return KLForward(*_MERGING.finish(xp, state))
