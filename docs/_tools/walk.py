"""Rooms that `teacher_q` passes in a call, for docs/notebook.md: `python docs/_tools/walk.py torch`, or jax, or cupy.

Each function of the package that is handed it, alone or within what has all operands, is noted as it is entered. A
move leads from the room of one to that of the next, a climb to a floor above (ARCHITECTURE.md); a return is neither.
Needs no GPU: torch and JAX are on the CPU, and CuPy's arrays are addresses that nothing reads, beside a driver that
does nothing.
"""

from __future__ import annotations

import itertools
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

import streamkl_cupy
from streamkl_cupy import attention_kl, attention_kl_backward, attention_kl_forward
from streamkl_cupy.arrays import ArrayView
from streamkl_cupy.call import Call, Look, Ready, Views

ROOT = Path(streamkl_cupy.__file__).parent
# From the top, as in ARCHITECTURE.md.
FLOORS = (
    "__init__ cli",
    "parallel",
    "api targets attention torch jax",
    "autodiff",
    "indexer",
    "call",
    "validate advice",
    "frameworks",
    "arrays results options arguments",
    "launch",
    "planning",
    "compiler kernels",
    "numpy_backend",
    "concurrency rules ops patterns problem errors",
)
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor.split()}
# What functions call all operands together, of tracers too, which are others in each.
TOGETHER = ("operands", "inputs", "primals")


class Walk:
    """Notes rooms while it runs a function."""

    def __init__(self, teacher_q: Any) -> None:
        self.teacher_q, self.rooms = teacher_q, list[str]()

    def holds(self, x: Any) -> bool:
        if x is self.teacher_q or isinstance(x, (Call, Look, Ready, Views)):
            return True
        if isinstance(x, ArrayView):
            return x.name == "teacher_q"
        if isinstance(x, dict):
            x = tuple(x.values())
        return isinstance(x, (tuple, list)) and any(map(self.holds, x))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)):
            return
        sys.setprofile(None)
        flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
        given = {name: x for name in names if (x := frame.f_locals.get(name)) is not None}
        if any(self.holds(x) or (name in TOGETHER and x) for name, x in given.items()):
            self.rooms.append(Path(code.co_filename).relative_to(ROOT).parts[0].removesuffix(".py"))
        sys.setprofile(self)

    def show(self, label: str, run: Callable[[], Any]) -> Any:
        """Run it, and say where it led."""
        self.rooms.clear()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            found = run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        way = [room for room, _ in itertools.groupby(self.rooms)]
        climbs = sum(FLOOR[b] < FLOOR[a] for a, b in itertools.pairwise(way))
        print(f"| {label} | {len({*way})} | {len(way) - 1} | {climbs} | {', '.join(way)} |")
        return found


def normal() -> list[Any]:
    return [np.random.default_rng().standard_normal((1, 2, 64, 64), np.float32) for _ in range(4)]


def of_torch() -> None:
    import torch

    x = [torch.from_numpy(a).requires_grad_() for a in normal()]
    walk = Walk(x[0])
    for time in ("first", "again"):
        loss = walk.show(f"torch, forward, {time}", lambda: attention_kl(*x, causal=True).sum())
        walk.show(f"torch, backward, {time}", loss.backward)


def of_jax() -> None:
    import jax

    x = [jax.numpy.asarray(a) for a in normal()]
    walk = Walk(x[0])
    for time in ("first", "again"):
        rows, back = walk.show(f"JAX, forward, {time}", lambda: jax.vjp(lambda *x: attention_kl(*x, causal=True), *x))
        jax.block_until_ready(rows)
        walk.show(f"JAX, backward, {time}", lambda: jax.block_until_ready(back(rows)))  # noqa: B023


def of_cupy() -> None:
    import cupy

    from streamkl_cupy import launch
    from streamkl_cupy.frameworks.cupy import TYPES, CuPy
    from streamkl_cupy.kernels.gpus import facts_for_arch

    addresses = itertools.count(1 << 20, 1 << 20)

    def made(shape: tuple[int, ...], dtype: Any) -> Any:
        memory = cupy.cuda.UnownedMemory(next(addresses), prod(shape) * np.dtype(dtype).itemsize, None, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def planes(_: Any, like: Any, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        found = tuple(made(shape, TYPES[dtype]) for _ in range(count))
        return found[0].data.ptr, found

    def nothing(*_: Any) -> None:
        pass

    driver = SimpleNamespace(
        ctxGetCurrent=lambda: 1, streamIsCapturing=lambda _: False, memsetAsync=nothing, launchKernel=nothing
    )
    instead = {
        "import_cupy": lambda: SimpleNamespace(cuda=SimpleNamespace(driver=driver, runtime=driver)),
        "device_facts": lambda _: facts_for_arch("sm_90"),
        "_primary_context": lambda _: 1,
        "load": lambda *_, **__: SimpleNamespace(handle=1),
        "encode": lambda pointer, *_: struct.pack("=Q120x", pointer),
    }
    for name, function in instead.items():
        setattr(launch, name, function)
    of_class: dict[str, Any] = {
        "stream": lambda *_: 7,
        "on_device": lambda *_: nullcontext(),
        "allocate": lambda _, like, shape, dtype: made(shape, TYPES[dtype]),
        "allocate_planes": planes,
    }
    for name, function in of_class.items():
        setattr(CuPy, name, function)

    def inputs(rows: int) -> list[Any]:
        return [made((1, 2, rows, 64), np.float16) for _ in range(4)]

    x = inputs(64)
    walk = Walk(x[0])
    for time in ("first", "again"):
        walk.show(f"CuPy, `attention_kl`, {time}", lambda: attention_kl(*x, causal=True))
    y = inputs(65)
    walk = Walk(y[0])
    for time in ("first", "again"):
        saved = walk.show(f"CuPy, `attention_kl_forward`, {time}", lambda: attention_kl_forward(*y, causal=True))
        grad = made((1, 2, 65), np.float32)
        walk.show(
            f"CuPy, `attention_kl_backward`, {time}",
            lambda: attention_kl_backward(grad, *y, saved=saved, causal=True),  # noqa: B023
        )


if __name__ == "__main__":
    {"torch": of_torch, "jax": of_jax, "cupy": of_cupy}[sys.argv[1]]()
