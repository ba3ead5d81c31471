"""The flat text: deterministic, complete, and honest about where each line came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamkl_cupy.compiler.source import cuda_root, flatten
from streamkl_cupy.errors import CompilerError

KERNEL = """\
// a kernel
#include "common/scale.cuh"
#include "@mask"
#include "common/scale.cuh"
extern "C" __global__ void f(float* x) { x[threadIdx.x] = scale(FACTOR) + visible(); }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "kernels/f.cu": KERNEL,
        "common/scale.cuh": '#pragma once\n#include "common/two.cuh"\ninline float scale(float x) { return 2 * x; }\n',
        "common/two.cuh": "#pragma once\ninline float two() { return 2.0f; }\n",
        "masks/all.cuh": '#include "common/two.cuh"\ninline float visible() { return 1.0f; }\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def flat(root: Path, **constants: int | float | str) -> str:
    return flatten("kernels/f.cu", constants, {"mask": "masks/all.cuh"}, root)


def test_text_is_complete_and_each_file_stands_in_it_once(root: Path) -> None:
    text = flat(root, FACTOR=0.5)
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("float two()") == text.count("float scale(") == text.count("float visible()") == 1


def test_text_does_not_depend_on_the_order_of_the_mappings(root: Path) -> None:
    assert flat(root, A=1, B=2.0) == flat(root, B=2.0, A=1)


def test_every_line_is_where_its_line_directive_says(root: Path) -> None:
    file, number, seen = "", 0, 0
    for line in flat(root, FACTOR=0.5).splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = directive[2], int(directive[1])
            continue
        if file != "constants":
            original = (root / file).read_text().splitlines()[number - 1]
            assert line == original or (line == "" and original.startswith("#")), f"{file}:{number}"
            seen += 1
        number += 1
    assert seen >= 9


@pytest.mark.parametrize(
    "value, literal",
    [
        (7, "7"),
        (-7, "(-7)"),
        (True, "1"),
        (0.5, "0.5f"),
        (-1e-30, "(-1e-30f)"),
        (3.0, "3.0f"),
        ("unsigned short", "unsigned short"),
    ],
)
def test_constants_become_macros(root: Path, value: int | float | str, literal: str) -> None:
    assert f"#define FACTOR {literal}\n" in flat(root, FACTOR=value)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "two\nlines"])
def test_constants_without_a_literal_are_refused(root: Path, value: float | str) -> None:
    with pytest.raises(ValueError, match="FACTOR"):
        flat(root, FACTOR=value)


def test_constants_of_other_kinds_and_bad_names_are_refused(root: Path) -> None:
    with pytest.raises(TypeError, match="FACTOR: got tuple"):
        flat(root, FACTOR=(1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="C identifier"):
        flatten("kernels/f.cu", {"1x": 1}, {"mask": "masks/all.cuh"}, root)


@pytest.mark.parametrize(
    "line, message",
    [
        ('#include "common/none.cuh"', r'"common/none.cuh", wanted by common/two.cuh:2, is not among'),
        ('#include "@divergence"', r"common/two.cuh:2 includes the slot \"@divergence\".*filled are \['mask'\]"),
        ("#include <cuda_fp16.h>", "common/two.cuh:2 includes <cuda_fp16.h>: kernels use no toolkit header"),
        ('#include "../secret.cuh"', "outside the CUDA sources"),
        ('#if A\n#include "masks/all.cuh"\n#endif', 'common/two.cuh:3 includes "masks/all.cuh" inside #if'),
    ],
)
def test_includes_that_cannot_be_followed_are_named_with_their_line(root: Path, line: str, message: str) -> None:
    (root / "common/two.cuh").write_text(f"// two\n{line}\n")
    with pytest.raises(CompilerError, match=message):
        flat(root)


def test_unknown_entry_is_refused() -> None:
    with pytest.raises(CompilerError, match=r'"kernels/none.cu", wanted by the caller'):
        flatten("kernels/none.cu", {}, {})


def test_files_that_include_each_other_end(root: Path) -> None:
    (root / "common/two.cuh").write_text('#include "common/scale.cuh"\ninline float two() { return 2.0f; }\n')
    assert flat(root).count("float two()") == 1


def test_sources_of_the_package_are_found() -> None:
    assert (cuda_root() / "masks").is_dir()
