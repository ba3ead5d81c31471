"""Python blocks of README and pages run, the notebook prints what it shows, pictures are of the code beside them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from test_examples import python

import streamkl_cupy
from streamkl_cupy import parallel, patterns
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import ARRAYS
from streamkl_cupy.rules.masks.interface import Chosen
from streamkl_cupy.rules.scores import SCORES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOOLS = DOCS / "_tools"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
WITH_CODE = [path for path in PAGES if "```python" in path.read_text(encoding="utf-8")]


def tool(name: str, *arguments: str | Path, cwd: Path) -> str:
    done = python(str(TOOLS / name), *map(str, arguments), cwd=cwd)
    assert done.returncode == 0, f"{name} {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_walk_of_an_operand_ends_in_a_launch(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    rows = re.findall(
        r"^\| CuPy, (.*), (first|again) \| .* \| (.*) \|$", tool("walk.py", "cupy", cwd=tmp_path), re.MULTILINE
    )
    calls = ("attention_kl", "attention_kl_forward", "attention_kl_backward")
    assert {(name, time) for name, time, _ in rows} == {(f"`{x}`", time) for x in calls for time in ("first", "again")}
    for _, _, way in rows:
        assert way.startswith("advice, api, call, ")
        assert way.endswith(", launch")


def test_pages_have_code() -> None:
    assert {"README.md", "index.md", "masks.md", "recipes.md"} <= {path.name for path in WITH_CODE}


def test_every_block_runs(tmp_path: Path) -> None:
    """In one process, because importing the frameworks takes longer than all the rest."""
    lines = [x for x in tool("blocks.py", *WITH_CODE, cwd=tmp_path).splitlines() if re.match(r"\w+\.md \d+: ", x)]
    skipped = [line for line in lines if not line.endswith(": ran")]
    assert len(lines) == sum(path.read_text(encoding="utf-8").count("```python") for path in WITH_CODE)
    if skipped:
        pytest.skip(f"{len(lines) - len(skipped)} blocks ran, and not: {'; '.join(skipped)}")


def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    said = tool("notebook.py", DOCS / "tour.ipynb", "--check", cwd=tmp_path)
    if skipped := re.findall(r"cell \d+: .*", said):
        pytest.skip(f"the other cells ran, and not: {'; '.join(skipped)}")


def test_the_notebook_check_sees_another_number(tmp_path: Path) -> None:
    book = json.loads((DOCS / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [
        {"cell_type": "code", "outputs": [{"text": [f"{number} nats\n"]}], "source": ["print('1.50 nats')"]}
        for number in ("1.51", "1.60")
    ]
    changed = tmp_path / "changed.ipynb"
    changed.write_text(json.dumps({**book, "cells": cells}), encoding="utf-8")
    done = python(str(TOOLS / "notebook.py"), str(changed), "--check", cwd=tmp_path)
    assert done.returncode == 1
    assert "cell 2 prints" in done.stderr
    assert "cell 1" not in done.stderr


def test_pictures_are_of_the_code_beside_them(tmp_path: Path) -> None:
    assert "0 of them stale" in tool("pictures.py", "--check", cwd=tmp_path)


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    codes = ("import no_such_package", "no_such_package.x", "\n1 / 0")
    page.write_text("text\n\n" + "\n".join(f"```python\n{code}\n```\n" for code in codes))
    done = python(str(TOOLS / "blocks.py"), str(page), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "page.md 4: not installed: no_such_package",
        "page.md 8: uses no_such_package of a block that was skipped",
    ]
    assert re.search(r'page\.md", line 13, in <module>', done.stderr)
    assert "ZeroDivisionError" in done.stderr


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    if path.suffix != ".md":
        return set()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"], ids=lambda path: path.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_every_option_of_a_mask_is_on_the_page_of_masks() -> None:
    text = (DOCS / "masks.md").read_text(encoding="utf-8")
    options = [name for name, value in vars(Chosen).items() if isinstance(value, property)]
    assert options
    missing = [name for name in (*ARRAYS, *options) if not re.search(rf"attention_kl\([^`]*\b{name}=", text)]
    assert not missing, f"docs/masks.md shows no call with {missing}"


def test_everything_public_is_on_the_page_of_the_api() -> None:
    listed = re.findall(r"^.. auto\w+:: (\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {*streamkl_cupy.__all__, *patterns.__all__} - {"patterns", "parallel"}
    page = (DOCS / "context_parallel.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^.. auto\w+:: (\w+)$", page, re.MULTILINE)) == set(parallel.__all__)


@pytest.mark.parametrize("page", ["support.md", "recipes.md"])
def test_every_divergence_and_score_has_a_row_and_a_recipe(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    missing = [name for name in (*DIVERGENCES, *SCORES) if f'"{name}"' not in text and name not in ("kl", "dot")]
    assert not missing, f"docs/{page} does not name {missing}"


@pytest.mark.parametrize(
    "page, said", [("README.md", r"\n\* \*\*Sinks\.(.*?)\n\* "), ("docs/support.md", r"\| `teacher_sink(.*?)\n")]
)
def test_pages_say_beside_which_divergences_sinks_are_built(page: str, said: str) -> None:
    (found,) = re.findall(said, (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r'"(\w+)"', found)) == {name for name, entry in DIVERGENCES.items() if entry.weighing}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """CI builds it in any case; here only where everything is installed."""
    if absent := [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    out = tmp_path / "site"
    done = python(
        "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees"), str(DOCS), str(out), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    tour = (out / "tour.html").read_text(encoding="utf-8")
    assert "nats" in tour
    api = (out / "api.html").read_text(encoding="utf-8")
    assert api.count('id="streamkl_cupy.attention_kl"') == 1
    assert not re.search(r"&lt;[A-Z_]{4,}&gt;", api), "a docstring has a gap that was not filled"
