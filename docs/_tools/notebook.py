"""Run a notebook and keep what its cells print, in the notebook itself.

    python docs/_tools/notebook.py docs/tour.ipynb
    python docs/_tools/notebook.py docs/tour.ipynb --check

With --check nothing is written, and it fails if the words that cells print are others or their numbers far off. Cells
that cannot run here, as a package is missing, keep what they have.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import sys
from pathlib import Path

from blocks import run

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def same(old: str, new: str) -> bool:
    """Equal words, and numbers within 2 percent: BLAS libraries differ in last bits, and training amplifies them."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=1e-5) for a, b in pairs)


def printed(path: Path) -> dict[int, str]:
    """What each cell prints, by its number from 1; those that were skipped are said on stderr."""
    found: dict[int, str] = {}
    steps = run(path)
    while True:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            step = next(steps, None)
        if step is None:
            return found
        block, why = step
        if why:
            print(f"{path.name} cell {block.line}: {why}", file=sys.stderr)
        else:
            found[block.line] = out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    path = options.notebook.resolve()
    book = json.loads(path.read_text(encoding="utf-8"))
    os.chdir(path.parent)  # as Jupyter does
    different = []
    for number, text in printed(path).items():
        cell = book["cells"][number - 1]
        old = "".join(line for output in cell["outputs"] for line in output["text"])
        if same(old, text):
            continue
        different.append(f"cell {number} prints\n{text}and not\n{old}")
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    if options.check and different:
        sys.exit("\n".join([*different, f"run python docs/_tools/notebook.py {options.notebook}"]))
    if different:
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(different)} cells print something else than before")


if __name__ == "__main__":
    main()
