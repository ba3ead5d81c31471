"""The public functions of attention itself: what each does with a call, and below its signature and documentation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import frameworks, validate
from .arguments import with_article
from .frameworks import describe
from .frameworks.base import FRAMEWORKS
from .results import A, AttentionForward, AttentionGradients
from .rules import states

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "merge_attention_states",
]


def _is_torchs(x: Any) -> bool:
    """By ancestors' names, which torch.compile can trace."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(x).__mro__)


def merge_attention_states(outs: Sequence[A], lses: Sequence[A]) -> AttentionForward[A]:
    """Attention over several sets of keys as one, from the attention over each: outputs and log-sum-exps.

        lse = log sum_p exp(lse_p)    out = sum_p exp(lse_p - lse) out_p

    The sets have no key in common: parts of a cache, of a context that is spread over devices, or a prefix that many
    sequences share. It does not matter in which order, or which of them first, parts are merged. A row that sees no key
    of a part has log-sum-exp -inf there, and its output there is not looked at; one that sees none at all has output 0.
    A learned sink, a logit beside the keys that brings no value, is a part too: outputs of 0 beside its logit.

    Differentiable where the arrays are torch's or JAX's; sums are made in the type of the log-sum-exps.

    Args:
        outs: For each part (B, H, M, D_v), in any layout, all of one type and framework.
        lses: For each part (B, H, M), or whatever the outputs have without their last axis, float32 or float64.

    Returns:
        `AttentionForward`: outputs in the type of `outs`, and log-sum-exps.

    Raises:
        TypeError: what are no arrays, arrays of several frameworks, log-sum-exps of another type.
        ValueError: shapes that do not fit together.

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> outs, lses = [np.array([[1.0]]), np.array([[4.0]])], [np.log([2.0]), np.log([1.0])]
        >>> both = streamkl_cupy.merge_attention_states(outs, lses)
        >>> both.out.round(6).tolist(), np.exp(both.lse).round(6).tolist()  # weights 2/3 and 1/3
        ([[2.0]], [3.0])
    """
    outs, lses = validate.states(outs, lses)
    if all(map(_is_torchs, (*outs, *lses))):
        from .torch import merged

        return AttentionForward(*merged(outs, lses))
    found = {f"{name}[{i}]": x for name, parts in (("outs", outs), ("lses", lses)) for i, x in enumerate(parts)}
    framework = validate.one_framework({name: frameworks.framework_of(name, x) for name, x in found.items()})
    if framework not in frameworks.OWN:
        raise TypeError(
            f"outs[0] is {with_article(framework)} array; allowed are NumPy, CuPy, torch and JAX arrays. Convert it: "
            f"{frameworks.conversion('outs[0]', framework, 'numpy')}"
        )
    if framework == "jax":  # tracers too, which cannot be read
        return AttentionForward(*states.merged(sys.modules["jax.numpy"], outs, lses))
    views = [describe(name, x) for name, x in found.items()]
    for view in views[1:]:
        validate.same_place(views[0], view)
    with frameworks.on_device(views[0]):
        return AttentionForward(*states.merged(FRAMEWORKS[framework].namespace(views[0].device), outs, lses))
