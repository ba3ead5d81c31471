"""What the kernel that joins states of rows is launched with, read back as it would: through its own struct."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from test_packing import compiled, needs_compiler, prologue

from streamkl_cupy.compiler.nvrtc import Loaded
from streamkl_cupy.errors import CaptureError
from streamkl_cupy.kernels import join_states, structs
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.parallel import joining
from streamkl_cupy.problem import Device
from streamkl_cupy.results import KLForwardRows
from streamkl_cupy.rules.divergences import DIVERGENCES


class Driver(list[Any]):
    """Notes launches, and reads their arguments."""

    at: ClassVar[list[int]] = []
    """Offsets of fields, of all tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.texts, self.capturing = folder, list[str](), False
        self.driver = self.runtime = self.cuda = self
        monkeypatch.setattr(joining, "import_cupy", lambda: self)
        monkeypatch.setattr(joining, "load", self.load)
        monkeypatch.setattr(joining, "device_facts", lambda index: facts_for_arch("sm_90"))
        monkeypatch.setattr(joining, "in_context", lambda index: nullcontext())
        monkeypatch.setattr(joining, "stream_of", lambda view: 7)
        monkeypatch.setattr(joining, "_handles", {})
        view = SimpleNamespace(device=Device("cuda", 3), framework="fake")
        monkeypatch.setattr(joining, "describe", lambda name, x: view)
        monkeypatch.setattr(joining, "FRAMEWORKS", {"fake": SimpleNamespace(addresses=lambda xs: list(map(id, xs)))})

    def load(self, text: str, symbol: str, arch: str) -> Loaded:
        self.texts.append(text)
        return Loaded(100 + len(self.texts), None)

    def streamIsCapturing(self, stream: int) -> bool:
        return self.capturing

    def launchKernel(self, handle: int, *given: Any) -> None:
        grid, *ones, threads, one, other, smem, stream, parameters, extra = given
        assert (ones, one, other, smem, stream, extra) == ([1, 1], 1, 1, 0, 7, 0)
        fields = [field.name for field in structs.JOIN_STATES.fields]
        assert {prologue(text) for text in self.texts} == {prologue(self.texts[0])}
        if not self.at:
            offsets = ", ".join(f"offsetof(JoinStatesArgs, {name})" for name in fields)
            text = f'{prologue(self.texts[0])}\nextern "C" const long long found[] = {{{offsets}}};'
            self.at.extend((ctypes.c_longlong * len(fields)).in_dll(compiled(self.folder, text), "found"))
        (address,) = struct.unpack("=Q", ctypes.string_at(parameters, 8))
        got = {name: struct.unpack("=q", ctypes.string_at(address + x, 8))[0] for name, x in zip(fields, self.at)}
        self.append((handle, grid, threads, got))


@needs_compiler
@pytest.mark.parametrize("shape, axis", [((2, 3, 500), 2), ((2, 500, 3), 1), ((500, 3), 0)])
def test_joins_are_packed_by_name(
    shape: tuple[int, ...], axis: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = Driver(monkeypatch, tmp_path)
    rows = KLForwardRows(*(np.empty(shape) for _ in range(3)), moments=np.empty((*shape, 5)))
    some = KLForwardRows(None, None, None, moments=np.empty((*shape, 5)))
    job: Any = SimpleNamespace(axes=SimpleNamespace(rows=axis), divergence=DIVERGENCES["kl"])
    joining._launch(job, rows, some, slice(120, 410))
    ((handle, grid, threads, got),) = driver
    entries, each = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    assert got == {
        "entries": entries, "count": 290 * each, "pitch": 500 * each, "first": 120 * each, "value": id(rows.kl),
        "teacher_lse": id(rows.teacher_lse), "student_lse": id(rows.student_lse), "states": id(rows.moments),
        "others": id(some.moments),
    }  # fmt: skip
    assert (handle, threads) == (101, join_states.THREADS)
    assert (grid - 1) * threads < entries * 290 * each <= grid * threads
    # Loaded once for each divergence; nothing is launched for no rows.
    joining._launch(job, rows, some, slice(5, 5))
    assert (len(driver), len(driver.texts)) == (1, 1)
    joining._launch(job, rows, some, slice(0, 1))
    job.divergence = DIVERGENCES["reverse_kl"]
    joining._launch(job, rows, some, slice(0, 1))
    assert [handle for handle, *_ in driver] == [101, 101, 102]
    assert driver.texts[0] != driver.texts[1]
    driver.capturing = True
    joining._launch(job, rows, some, slice(0, 1))  # what is loaded may be captured
    job.divergence = DIVERGENCES["cross_entropy"]
    with pytest.raises(CaptureError, match=r"call streamkl_cupy\.parallel\.warmup\("):
        joining._launch(job, rows, some, slice(0, 1))
    joining.warmup(3, job.divergence)
    joining._launch(job, rows, some, slice(0, 1))
    assert len(driver.texts) == 3
