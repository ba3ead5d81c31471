"""NVRTC driven directly: what a build reports, and how it fails. Only the marked tests need a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkl_cupy.compiler import cache
from streamkl_cupy.compiler import nvrtc as compiler
from streamkl_cupy.compiler.source import flatten
from streamkl_cupy.errors import CompilerError, DriverError, install

pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")

PLAIN = 'extern "C" __global__ void fill(float* x, float value) { x[threadIdx.x] = value; }\n'
# 128 values live across a barrier in a kernel allowed 32 registers: some must spill.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
    float v[128];
    for (int i = 0; i < 128; ++i) v[i] = x[threadIdx.x + 1024 * i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; ++i) x[threadIdx.x + 1024 * (127 - i)] = v[i] * v[(i * 7) % 128];
}
"""
# Register re-allocation needs the number of blocks in the launch bounds; without it ptxas ignores it and says so.
REMARKED = """
extern "C" __global__ void __launch_bounds__(384) remark(float* x) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    x[threadIdx.x] = 0.0f;
}
"""
SHARED = """
extern "C" __global__ void shared(float* x) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x];
}
"""
DYNAMIC = """
extern "C" __global__ void big(float* x, float value) {
    extern __shared__ float tile[];
    tile[22000 + threadIdx.x] = value;
    x[threadIdx.x] = tile[22000 + threadIdx.x];
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_clean_kernel_has_nothing_to_report(arch: str) -> None:
    build = compiler.build(PLAIN, arch)
    assert build.image[:4] == b"\x7fELF"
    assert 0 < build.registers <= 32
    assert (build.spill_bytes, build.stack_bytes, build.smem_bytes, build.notes) == (0, 0, 0, ())


def test_a_text_that_was_compiled_before_is_reported_again() -> None:
    first, second = (compiler.build(SPILLING, "sm_90a")._replace(log="") for _ in range(2))  # it says how long it took
    assert second == first
    assert second.spill_bytes > 0


@pytest.mark.parametrize("version, asked", [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_is_asked_not_to_answer_from_its_own_cache(
    version: tuple[int, int], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache gives no log, and so no spills; a version without one does not know the option."""
    import cupy

    given: list[str] = []
    real = cupy.cuda.nvrtc
    names = ("NVRTCError", "createProgram", "destroyProgram", "getProgramLog", "getCUBIN")
    fake = SimpleNamespace(
        **{name: getattr(real, name) for name in names},
        getVersion=lambda: version,
        compileProgram=lambda program, options: given.extend(options) or real.compileProgram(program, options),
    )
    monkeypatch.setattr(compiler, "_nvrtc", lambda: fake)
    assert compiler.build(PLAIN, "sm_80").registers > 0
    assert ("--no-cache" in given) is asked


def test_image_is_a_whole_file() -> None:
    # The section table is the last thing in an ELF file of the compiler; its end must be the end of the image.
    image = compiler.build(PLAIN, "sm_80").image
    table = int.from_bytes(image[40:48], "little")
    entry_size, entries = int.from_bytes(image[58:60], "little"), int.from_bytes(image[60:62], "little")
    header_end = table + entry_size * entries
    program = int.from_bytes(image[32:40], "little")
    program_end = program + int.from_bytes(image[54:56], "little") * int.from_bytes(image[56:58], "little")
    assert max(header_end, program_end) == len(image)


def test_spills_are_found() -> None:
    build = compiler.build(SPILLING, "sm_90a")
    assert build.spill_bytes > 0
    assert build.stack_bytes > 0


def test_spills_are_counted_in_bytes_of_stores_and_loads() -> None:
    """As the assembler says it in words, which nobody else reads."""
    build = compiler.build(SPILLING, "sm_90a")
    said = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", build.log)]
    assert len(said) == 2
    assert build.spill_bytes == sum(said)
    assert build.stack_bytes == int(re.findall(r"(\d+) bytes stack frame", build.log)[0])
    assert build.registers == int(re.findall(r"Used (\d+) registers", build.log)[0])


def test_numbered_remarks_of_the_assembler_are_found() -> None:
    notes = compiler.build(REMARKED, "sm_90a").notes
    assert any("C7508" in note for note in notes), notes


def test_warnings_of_the_front_end_are_found() -> None:
    notes = compiler.build(PLAIN.replace("{", "{ int unused;", 1), "sm_80").notes
    assert any("unused" in note for note in notes), notes


def test_shared_memory_is_reported() -> None:
    assert compiler.build(SHARED, "sm_80").smem_bytes == 1024


def test_ptx_is_built_for_virtual_architectures() -> None:
    assert b".target sm_90" in compiler.build(PLAIN, "compute_90").image


def test_lambdas_need_no_annotation() -> None:
    compiler.build(PLAIN.replace("= value", "= [](float v) { return v; }(value)"), "sm_80")


def test_error_names_the_header_its_line_and_shows_it(tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_text('#include "deep/bad.cuh"\n' + PLAIN)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/bad.cuh").write_text(
        "#pragma once\n\n// the next line is wrong\ninline int bad() { return wrong; }\n"
    )
    with pytest.raises(CompilerError) as caught:
        compiler.build(flatten("f.cu", {"A": 1}, {}, tmp_path), "sm_80")
    message = str(caught.value)
    assert "deep/bad.cuh(4): error" in message
    assert ">     4 | inline int bad() { return wrong; }" in message
    assert "      3 | // the next line is wrong" in message


def test_error_in_the_entry_after_an_include_has_the_right_line(tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_text('#include "h.cuh"\n\nint broken = ;\n')
    (tmp_path / "h.cuh").write_text("struct Unused {};\n" * 1)
    with pytest.raises(CompilerError, match=r"f\.cu\(3\): error"):
        compiler.build(flatten("f.cu", {}, {}, tmp_path), "sm_80")


def test_refused_option_and_architecture_are_errors_with_the_log() -> None:
    with pytest.raises(CompilerError, match="no-such-option"):
        compiler.build(PLAIN, "sm_80", ("--no-such-option",))
    with pytest.raises(CompilerError, match="sm_1"):
        compiler.build(PLAIN, "sm_1")


@pytest.mark.parametrize("option", ["-arch=sm_80", "--gpu-architecture=sm_80", "--gpu-architecture", "-arch"])
def test_architecture_among_the_options_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="give the architecture as arch"):
        compiler.build(PLAIN, "sm_80", (option,))


def test_supported_architectures_are_ascending() -> None:
    archs = compiler.supported_archs()
    assert {80, 90} <= set(archs)
    assert list(archs) == sorted(archs)


def test_missing_cupy_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CompilerError, match=rf"CuPy is missing.*{re.escape(install.cuda())}"):
        compiler.build(PLAIN, "sm_80")


def test_missing_nvrtc_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    def absent() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(nvrtc, "getVersion", absent)
    with pytest.raises(CompilerError, match=rf"NVRTC.*is missing.*{re.escape(install.cuda())}"):
        compiler.supported_archs()


def test_load_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    def no_driver() -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", no_driver)
    with pytest.raises(DriverError, match="no usable NVIDIA driver or GPU: cudaErrorInsufficientDriver"):
        compiler.load(PLAIN, "fill", "sm_80")


class FakeDriver:
    """What `load` asks of CuPy, without a GPU: keeps what it was given, and refuses on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy import cuda

        self.images: list[bytes] = []
        self.granted: list[tuple[int, int, int]] = []
        self.before_load: Any = lambda: None
        self.refuses = ""
        fake = self

        class Module:
            def load(self, image: bytes) -> None:
                fake.before_load()
                fake.refuse("load")
                fake.images.append(image)

            def get_function(self, symbol: str) -> Any:
                fake.refuse("get_function")
                return SimpleNamespace(ptr=1000 + len(fake.images), module=self, symbol=symbol)

        def set_attribute(handle: int, attribute: int, value: int) -> None:
            fake.refuse("set_attribute")
            fake.granted.append((handle, attribute, value))

        monkeypatch.setattr(cuda, "Module", Module)
        monkeypatch.setattr(cuda.driver, "funcSetAttribute", set_attribute)
        monkeypatch.setattr(cuda.runtime, "getDevice", lambda: 0)
        monkeypatch.setattr(cuda, "Device", lambda: SimpleNamespace(compute_capability="90"))

    def refuse(self, step: str) -> None:
        from cupy.cuda import driver

        class Refused(driver.CUDADriverError):  # type: ignore[misc]
            def __init__(self) -> None:
                # Its own would ask a driver for the words.
                RuntimeError.__init__(self, "CUDA_ERROR_INVALID_IMAGE")

        if self.refuses == step:
            raise Refused


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "_kernels", {})
    return FakeDriver(monkeypatch)


def test_the_driver_gets_the_bytes_of_the_entry_and_is_set_up_at_once(fake_driver: FakeDriver, tmp_path: Path) -> None:
    from cupy.cuda import driver

    first = compiler.load(PLAIN, "fill", "sm_80", smem_bytes=0)
    (entry,) = (tmp_path / "kernels").glob("*.cubin")
    assert fake_driver.images == [entry.read_bytes()]
    compiler._kernels.clear()
    second = compiler.load(PLAIN, "fill", "sm_80", smem_bytes=70_000)
    assert fake_driver.images == [entry.read_bytes()] * 2
    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    # Also where nothing is asked for: a lazy driver loads the module then.
    assert fake_driver.granted == [(first.handle, attribute, 0), (second.handle, attribute, 70_000)]
    assert compiler.load(PLAIN, "fill", "sm_80", smem_bytes=70_000) is second
    assert second.function.module is not None


def test_a_file_that_is_changed_after_it_was_checked_is_not_what_is_loaded(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    image = compiler.cached_image(PLAIN, "sm_80")
    assert image.path is not None
    fake_driver.before_load = lambda: image.path.write_bytes(b"planted") if image.path else None
    compiler.load(PLAIN, "fill", "sm_80")
    assert fake_driver.images == [image.data]


@pytest.mark.parametrize("step", ["load", "get_function", "set_attribute"])
def test_what_the_driver_refuses_is_named(fake_driver: FakeDriver, step: str) -> None:
    fake_driver.refuses = step
    with pytest.raises(
        DriverError, match=r"refused kernel 'fill', built for sm_80, with 7 bytes.*capability 90: CUDA_ERROR"
    ):
        compiler.load(PLAIN, "fill", "sm_80", smem_bytes=7)
    assert compiler._kernels == {}


FAKED = """
from types import SimpleNamespace
from cupy import cuda
class Module:
    def load(self, image): self.image = image
    def get_function(self, symbol): return SimpleNamespace(ptr=1, module=self)
cuda.Module = Module
cuda.driver.funcSetAttribute = lambda *_: None
cuda.runtime.getDevice = lambda: 0
"""
LOADED = f"""
import os, sys
from streamkl_cupy.compiler import nvrtc as compile
found = compile.load({PLAIN!r}, "fill", sys.argv[1])
print(sys.getfilesystemencoding(), found.handle != 0, os.listdir(os.environ["STREAMKL_CACHE_DIR"]) != [])
"""
RUN = """
import cupy, numpy
x = cupy.zeros(32, cupy.float32)
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    found.function((1,), (32,), (x, numpy.float32(3)))
    graph = stream.end_capture()
    graph.launch()
stream.synchronize()
assert x.get().tolist() == [3.0] * 32
"""


def load_in_an_ascii_locale(tmp_path: Path, code: str, arch: str, **more: str) -> str:
    """Load a kernel of a folder whose name this process's file system encoding cannot spell; what was printed."""
    folder = os.fsencode(tmp_path) + "/n\u00fc\u6838".encode()
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    path = {"PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    environment = {**os.environb, **{os.fsencode(k): os.fsencode(v) for k, v in {**locale, **path, **more}.items()}}
    environment[b"STREAMKL_CACHE_DIR"] = folder
    outputs = []
    for _ in range(2):  # what is built, and what is found
        done = subprocess.run([sys.executable, "-c", code, arch], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        outputs.append(done.stdout.decode("ascii"))
    assert outputs[0] == outputs[1]
    return outputs[0]


@pytest.mark.skipif(sys.platform != "linux", reason="locales with an ASCII file system are Linux's")
def test_folder_whose_name_the_locale_cannot_spell(tmp_path: Path) -> None:
    assert load_in_an_ascii_locale(tmp_path, FAKED + LOADED, "sm_80") == "ascii True True\n"


@pytest.mark.gpu
def test_folder_whose_name_the_locale_cannot_spell_on_a_gpu(own_arch: str, tmp_path: Path) -> None:
    assert load_in_an_ascii_locale(tmp_path, LOADED + RUN, own_arch) == "ascii True True\n"


@pytest.mark.gpu
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_a_loaded_kernel_can_be_captured_at_its_first_launch(own_arch: str, tmp_path: Path, loading: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2]), "CUDA_MODULE_LOADING": loading}
    command = [sys.executable, "-c", LOADED + RUN, own_arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    # Nor does unloading at the end of the process complain.
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def own_arch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Architecture of the GPU at hand, with an empty disk cache and an empty memory cache."""
    import cupy

    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    return f"sm_{cupy.cuda.Device().compute_capability}"


def launch(kernel: Any, value: float, smem_bytes: int = 0) -> Any:
    import cupy
    import numpy as np

    x = cupy.zeros(32, cupy.float32)
    kernel.function((1,), (32,), (x, np.float32(value)), shared_mem=smem_bytes)
    return x.get().tolist()


@pytest.mark.gpu
def test_loaded_kernel_runs_and_is_kept(own_arch: str, tmp_path: Path) -> None:
    kernel = compiler.load(PLAIN, "fill", own_arch)
    assert launch(kernel, 3.0) == [3.0] * 32
    assert compiler.load(PLAIN, "fill", own_arch) is kernel
    assert len(list(tmp_path.glob("*.cubin"))) == 1


@pytest.mark.gpu
def test_large_shared_memory_is_granted_and_an_impossible_one_refused(own_arch: str) -> None:
    from cupy.cuda import driver

    kernel = compiler.load(DYNAMIC, "big", own_arch, smem_bytes=90_000)
    granted = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.handle)
    assert granted == 90_000
    assert launch(kernel, 2.0, smem_bytes=90_000) == [2.0] * 32
    with pytest.raises(DriverError, match="10000000 bytes of dynamic shared memory"):
        compiler.load(DYNAMIC, "big", own_arch, smem_bytes=10_000_000)


@pytest.mark.gpu
def test_unknown_symbol_and_foreign_image_are_driver_errors(own_arch: str) -> None:
    with pytest.raises(DriverError, match="'absent'"):
        compiler.load(PLAIN, "absent", own_arch)
    other = "sm_80" if own_arch != "sm_80" else "sm_90"
    with pytest.raises(DriverError, match=f"built for {other}.*compute capability"):
        compiler.load(PLAIN, "fill", other)


@pytest.mark.gpu
def test_kernel_loads_where_nothing_can_be_kept(own_arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        kernel = compiler.load(PLAIN, "fill", own_arch)
    assert launch(kernel, 5.0) == [5.0] * 32


@pytest.mark.gpu
def test_damaged_entry_still_gives_a_running_kernel(own_arch: str, tmp_path: Path) -> None:
    compiler.load(PLAIN, "fill", own_arch)
    (entry,) = tmp_path.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:100])
    compiler._kernels.clear()
    assert launch(compiler.load(PLAIN, "fill", own_arch), 7.0) == [7.0] * 32
