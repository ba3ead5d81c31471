"""Calls of the indexer: made of arrays and options as they come, and how they are read and run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from ..call import KINDS, Call, Kind, check_gpu_usable
from ..ops import INDEXER_KL, INDEXER_TARGET, Op
from ..problem import Device
from . import cpu, problem
from .plan import gradients_built

NO_SCALE: Final = (
    "index_scale is missing; two conventions are in use, and the wrong one would be silent: pass index_scale=1.0 where "
    "index_weights have index heads ** -0.5 * index dim ** -0.5 in them (DeepSeek, Megatron-LM), or "
    "index_scale=index_q.shape[-1] ** -0.5 where they have not (TileLang's examples)"
)


def split(op: Op, placed: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All operands in the order of the record, of arrays by position and by name; and the options that were given."""
    if op is INDEXER_KL and "index_scale" not in given:
        raise TypeError(NO_SCALE)
    if given.get("causal", False) is False:
        for name, default in (("q_offset", None), ("compress_ratio", 1)):
            if (value := given.get(name, default)) != default:
                raise ValueError(
                    f"{name}={value} says where the diagonal of causal lies, but there is none; pass causal=True, or "
                    f"leave it out"
                )
    operands = (*placed, *[given.get(name) for name in op.names[len(placed) :]])
    return operands, {name: x for name, x in given.items() if name not in op.operand}


def call_of(op: Op, placed: tuple[Any, ...], given: Mapping[str, Any]) -> Call:
    """The call of these."""
    return Call.of(op, *split(op, placed, given))


def backend(device: Device) -> Any:
    """The module whose Runner serves a device."""
    if device.kind == "cpu":
        return cpu
    check_gpu_usable()
    return importlib.import_module(".cuda", __package__)


KINDS[INDEXER_KL.name] = KINDS[INDEXER_TARGET.name] = Kind(
    problem.read,
    problem.outline,
    problem.standin,
    problem.to_problem,
    lambda asked: asked.results,
    gradients_built,
    backend,
)
