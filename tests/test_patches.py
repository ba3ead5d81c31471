"""The additions of CONTRIBUTING.md, carried out in a copy of the tree: each patch still applies, and its tests pass."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHES = sorted((ROOT / "docs/patches").glob("*.patch"))


def test_there_are_patches() -> None:
    named = set(re.findall(r"docs/patches/(\w+\.patch)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert named == {path.name for path in PATCHES}


@pytest.mark.long
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_all_that_it_takes(patch: Path, tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("needs git, which applies patches")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("streamkl_cupy", "cuda_src", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "docs").mkdir()
    for path in (*map(ROOT.joinpath, ("README.md", "CHANGELOG.md", "pyproject.toml")), *(ROOT / "docs").glob("*.md")):
        shutil.copy(path, tree / path.relative_to(ROOT))
    # A folder above that is a repository would take the patch for one of its own paths.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run([git, "apply", "-C1", "--verbose", patch], cwd=tree, env=environment, check=True)

    (asked,) = re.findall(r"^Tests: (.*)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    tests = shlex.split(asked)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for variable in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(variable, None)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not gpu", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-1000:]
