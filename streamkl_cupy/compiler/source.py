"""From an entry file, constants and slots to one flat CUDA text.

The compiler is handed a single string and no include path, because a cache keyed by the text is only right when the
text is everything: a header found through `-I` could change without changing the key. `#line` directives keep the
names and numbers of the real files, so that compiler messages and profilers point at what one can edit.

Three rules make the text easy to predict:

* `#include "path"` is relative to the root of `cuda_src`, and a file is inlined the first time only;
* `#include "@name"` takes its path, or several one after the other, from `slots["name"]`: that is how a divergence and
  the parts of a mask enter a kernel that does not know their names;
* an include may not stand inside `#if`, where "the first time only" could drop it from the branch that needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import CompilerError

Slots = Mapping[str, str | tuple[str, ...]]

_INCLUDE = re.compile(r'\s*#\s*include\s*(?P<open>["<])(?P<path>[^">]+)[">]')
_CONDITIONAL = re.compile(r"\s*#\s*(?P<word>if|ifdef|ifndef|endif)\b")
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_NAME = re.compile(r"[A-Za-z_]\w*")


def cuda_root() -> Path:
    """The folder of CUDA sources: inside an installed package, beside the package in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise CompilerError(
        f"the CUDA sources are missing: neither {package / 'cuda_src'} nor {package.parent / 'cuda_src'} is a folder; "
        "the installation is incomplete, install streamkl-cupy again"
    )


def flatten(
    entry: str,
    constants: Mapping[str, int | float | str],
    slots: Slots,
    root: Path | None = None,
    prologue: str = "",
) -> str:
    """One self-contained CUDA text: constants as macros, the prologue, then `entry` with every include inlined once.

    Args:
        entry: file to start from, relative to `root`, such as "kernels/forward.cu".
        constants: macro name -> value. An int or bool becomes an integer literal, a float a single-precision literal,
            a str is taken verbatim (the name of a type or of a function).
        slots: slot name -> file, or files in order, relative to `root`, that `#include "@name"` stands for.
        root: folder of the sources; by default the one this package ships.
        prologue: declarations that are written rather than read, as `kernels/structs.py` does.

    Returns:
        The text. Equal arguments and equal files give equal text, whatever the order of the mappings.

    Raises:
        CompilerError: a file or a slot is unknown, or an include stands inside `#if`; the message names file and line.
        ValueError, TypeError: a constant has no C spelling.
    """
    out = ['#line 1 "constants"']
    out += [f"#define {_macro(name)} {_literal(name, constants[name])}" for name in sorted(constants)]
    if prologue:
        out += ['#line 1 "structs.py"', prologue]
    _inline(entry, "the caller", root or cuda_root(), slots, out, set())
    return "\n".join(out) + "\n"


def _inline(path: str, origin: str, root: Path, slots: Slots, out: list[str], seen: set[str]) -> None:
    seen.add(path)
    out.append(f'#line 1 "{path}"')
    depth = 0
    for number, line in enumerate(_read(path, origin, root).splitlines(), start=1):
        if "#" not in line:  # most lines, and every kernel's text is made of thousands
            out.append(line)
            continue
        here = f"{path}:{number}"
        if conditional := _CONDITIONAL.match(line):
            depth += -1 if conditional["word"] == "endif" else 1
        include = _INCLUDE.match(line)
        if include is None:
            # The compiler would warn of `#pragma once` in a main file; an empty line keeps the numbering.
            out.append("" if _PRAGMA_ONCE.match(line) else line)
            continue
        targets = [target for target in _targets(include, here, depth, slots) if target not in seen]
        for target in targets:
            # One of them may have brought a later one along.
            if target not in seen:
                _inline(target, here, root, slots, out, seen)
        out.append(f'#line {number + 1} "{path}"' if targets else "")


def _targets(include: re.Match[str], here: str, depth: int, slots: Slots) -> tuple[str, ...]:
    path = include["path"]
    if include["open"] == "<":
        raise CompilerError(
            f"{here} includes <{path}>: kernels use no toolkit header, only files of cuda_src in quotes"
        )
    if depth:
        raise CompilerError(f'{here} includes "{path}" inside #if: move the include out, or choose the file by a slot')
    if not path.startswith("@"):
        return (path,)
    if path[1:] not in slots:
        raise CompilerError(f'{here} includes the slot "{path}", which is not filled; filled are {sorted(slots)}')
    files = slots[path[1:]]
    return (files,) if isinstance(files, str) else files


def _read(path: str, origin: str, root: Path) -> str:
    file = root / path
    # Without this a path such as "../x" would make the text depend on what lies around an installation.
    if not file.resolve().is_relative_to(root.resolve()):
        raise CompilerError(f'"{path}", wanted by {origin}, is outside the CUDA sources in {root}')
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CompilerError(f'"{path}", wanted by {origin}, is not among the CUDA sources in {root}') from error


def _macro(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"constant {name!r}: a name must be a C identifier")
    return name


def _literal(name: str, value: int | float | str) -> str:
    if isinstance(value, str):
        if "\n" in value:
            raise ValueError(f"constant {name}: {value!r} spans lines, a macro is one line")
        return value
    if isinstance(value, int):
        text = str(int(value))
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"constant {name}: {value} has no literal, only finite numbers have")
        # A literal without the suffix is a double, and would pull double-precision arithmetic into the kernel.
        text = f"{value!r}f"
    else:
        raise TypeError(f"constant {name}: got {type(value).__name__}, expected int, float or str")
    return f"({text})" if text.startswith("-") else text
