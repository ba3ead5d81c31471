"""What is kept from call to call is found again, and never more than there is room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkl_cupy import launch
from streamkl_cupy.compiler import cache, nvrtc
from streamkl_cupy.errors import CompilerError
from streamkl_cupy.kernels.base import Box
from streamkl_cupy.parallel import setup
from streamkl_cupy.problem import Operand


def test_jobs_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "LIMIT", 5)
    made: list[object] = []
    monkeypatch.setattr(setup, "look", lambda inputs, given, asked: inputs[0])
    monkeypatch.setattr(setup, "job_of", lambda *given, **more: made.append(object()) or made[-1])
    ranks: Any = SimpleNamespace(jobs={})

    def job(key: Any) -> Any:
        return setup.kept_job("attention_kl", ranks, None, [key], {}, None)

    found = [job(i) for i in range(8)]
    assert (found, list(ranks.jobs)) == (made, [3, 4, 5, 6, 7])  # the oldest have gone
    assert [job(i) for i in (7, 3)] == [made[7], made[3]]
    assert len(made) == 8
    assert job(0) is made[8]
    assert list(ranks.jobs) == [4, 5, 6, 7, 0]
    # What cannot be looked up is made each time, and not kept.
    assert job(None) is not job(None)
    assert len(ranks.jobs) == 5


def test_commands_and_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = launch.Packed()
    commands = [launch.Command(print, (i,)) for i in range(3)]
    for i in range(2 * launch.Packed.LIMIT + 7):
        assert kept.keep((i,), iter(commands)) == tuple(commands)
        assert len(kept) <= launch.Packed.LIMIT
        assert kept[i,] == tuple(commands)
    assert len(kept) == 7
    first = kept.keep((1, 2), iter(commands))
    assert kept.keep((1, 2), iter([])) is first
    asked: list[Any] = []
    monkeypatch.setattr(launch, "encode", lambda pointer, *how: asked.append((pointer, *how)) or bytes([pointer % 256]))
    x, box = Operand(1, 2, 3, "float16", (6, 6, 3, 1), True), Box("query", 16)
    maps = launch._Maps(x, 4, box)
    for pointer in range(launch._Maps.LIMIT + 3):
        assert maps[pointer] == bytes([pointer % 256])
        assert maps[pointer] == bytes([pointer % 256])
        assert len(maps) <= launch._Maps.LIMIT
    assert (asked[0], asked[-1]) == ((0, x, 4, box), (launch._Maps.LIMIT + 2, x, 4, box))
    assert len(asked) == launch._Maps.LIMIT + 3


@pytest.mark.parametrize("version, afresh", [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_keeps_nothing_of_its_own(
    version: tuple[int, int], afresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of images is the only cache, since NVRTC has one."""
    given: list[Any] = []
    fake = SimpleNamespace(
        getVersion=lambda: version, createProgram=lambda *x: "program", NVRTCError=ValueError,
        compileProgram=lambda program, options: given.extend(options), getProgramLog=lambda program: "",
        getCUBIN=lambda program: b"image", getPTX=lambda program: b"text", destroyProgram=lambda program: None,
    )  # fmt: skip
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: fake)
    monkeypatch.setattr(nvrtc, "_report", lambda image, log: image)
    assert nvrtc.build("text", "sm_80", ("-DX=1",)) == b"image\0"
    assert ("--no-cache" in given) == afresh
    assert given[0] == "-arch=sm_80"
    assert given[-1] == "-DX=1"
    assert nvrtc.build("text", "compute_80") == b"text"
    with pytest.raises(ValueError, match="give the architecture as arch"):
        nvrtc.build("text", "sm_80", ("--gpu-architecture=sm_90",))


@pytest.mark.parametrize("name, words", [("cupy", "CuPy is missing"), ("cupy_backends", "CuPy cannot be imported")])
def test_a_cupy_that_is_absent_is_told_from_a_broken_one(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(nvrtc.importlib, "import_module", absent)
    with pytest.raises(CompilerError, match=f"^{words}, CUDA kernels cannot be compiled"):
        nvrtc.import_cupy()


def test_a_folder_behind_links_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_all_are_trusted", lambda: False)
    monkeypatch.setattr(cache, "_fault", lambda *given, **more: "")
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="too many symbolic links"):
        cache.refusal(tmp_path / "one" / "kernels")
    (tmp_path / "there").mkdir()
    (tmp_path / "three").symlink_to("there")
    (tmp_path / "four").symlink_to(tmp_path / "three")
    assert cache.refusal(tmp_path / "four" / "kernels") == ""
