"""Run the Python blocks of pages, those of each in their order and in one namespace, as its reader would.

    python docs/_tools/blocks.py README.md docs/recipes.md

A block is skipped where a package that it imports is missing, where it is CuPy's and there is no GPU, and where it uses
what such a block defines; each is named with its line. Exit code 0 unless a block fails.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    line: int
    code: str


def blocks(path: Path) -> list[Block]:
    """The code of a Markdown page or a notebook, with the line that it starts on (in a notebook, the cell's number)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return [Block(i + 1, "".join(x["source"])) for i, x in enumerate(cells) if x["cell_type"] == "code"]
    return [Block(text.count("\n", 0, found.start()) + 2, found[1]) for found in FENCE.finditer(text)]


def missing(tree: ast.AST) -> str:
    """Why a block cannot run here, or nothing."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    if absent := sorted(name for name in names if importlib.util.find_spec(name) is None):
        return f"not installed: {', '.join(absent)}"
    if "cupy" in names:
        import cupy

        if not cupy.cuda.is_available():
            return "no usable GPU"
    return ""


def defined(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def run(path: Path) -> Iterator[tuple[Block, str]]:
    """Each block with why it was skipped, or with nothing once it has run; what it raises is raised."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    lost: set[str] = set()
    for block in blocks(path):
        tree = ast.parse(block.code, str(path))
        why = missing(tree)
        if not why:
            # Lines of a traceback are those of the page.
            code = compile(ast.increment_lineno(tree, block.line - 1), str(path), "exec")
            try:
                exec(code, namespace)
            except NameError as error:
                if error.name not in lost:
                    raise
                why = f"uses {error.name} of a block that was skipped"
        if why:
            lost |= defined(tree) - namespace.keys()
        yield block, why


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        for block, why in run(path):
            print(f"{path.name} {block.line}: {why or 'ran'}", flush=True)


if __name__ == "__main__":
    main()
