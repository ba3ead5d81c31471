"""Draw the pictures of the pages, as SVG files in docs/pictures.

    python docs/_tools/pictures.py
    python docs/_tools/pictures.py --check

The picture of a mask is that of the code beside it: a block of docs/masks.md after `![...](pictures/<name>.svg)` is
run, and what its call shows each row is found out by asking. So a new mask needs a heading, a line that names its
picture, and its code, and then this script.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from blocks import blocks

import streamkl_cupy

DOCS = Path(__file__).resolve().parents[1]
PICTURES = DOCS / "pictures"
PAGE = DOCS / "masks.md"
SAMPLE = DOCS.parent / "examples" / "data" / "smollm2_qk.npz"
NAMED = re.compile(r"!\[[^\]]*\]\(pictures/([\w-]+\.svg)\)\s+```python[^\n]*\n")

INK, PAPER, SEEN, HIDDEN, TEACHER, STUDENT, LOSS = (
    "#24292f",
    "#ffffff",
    "#2f6fb1",
    "#e8ecf1",
    "#2f6fb1",
    "#c4621b",
    "#7a3e9d",
)
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
SIDE = 150  # of a panel
DIGITS = 30  # that a float64 logarithm keeps with room to spare


def seen(inputs: tuple[Any, ...], options: dict[str, Any]) -> np.ndarray:
    """(B, H, M, N) of bool: which keys the rows of a call of `attention_kl` see.

    The student's logit of a key is its number times log 2, so that a row's log-sum-exp spells the keys in binary.
    """
    teacher_q, teacher_k, student_q, student_k = (np.array(x, np.float64) for x in inputs)
    own = {name: options[name] for name in options.keys() - {"reduction", "row_weight"}}
    heads_inside = "cu_seqlens_q" in own or own.get("layout") == "bnhd"
    count, found = student_k.shape[-3 if heads_inside else -2], []
    student_q[...], student_k[...] = 0.0, 0.0
    student_q[..., 0] = np.log(2.0)
    for first in range(0, count, DIGITS):
        digits = np.arange(first, min(first + DIGITS, count))
        logits = np.full(count, -1e4)
        logits[digits] = digits - first
        student_k[..., 0] = logits[:, None] if heads_inside else logits
        lse = streamkl_cupy.attention_kl_forward(
            teacher_q, teacher_k, student_q, student_k, **{**own, "student_scale": 1.0}
        ).student_lse
        number = np.exp(lse.swapaxes(-1, -2) if heads_inside else lse).round().astype(np.int64)
        found.append(number[..., None] >> np.arange(len(digits)) & 1 == 1)
    shown = np.concatenate(found, axis=-1)
    return shown if shown.ndim == 4 else shown[None]


def asked(path: Path = PAGE) -> Iterator[tuple[str, np.ndarray]]:
    """(name of the picture, what is seen) of every block of the page that has one."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    text = path.read_text(encoding="utf-8")
    named = {text.count("\n", 0, found.end()) + 1: found[1] for found in NAMED.finditer(text)}
    namespace: dict[str, Any] = {}

    def recorded(*inputs: Any, **options: Any) -> Any:
        calls.append((inputs, options))
        return streamkl_cupy.attention_kl(*inputs, **options)

    for block in blocks(path):
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
        namespace["attention_kl"] = recorded
        if block.line in named:
            yield named[block.line], seen(*calls[-1])


def svg(width: float, height: float, parts: list[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    background = rect(0, 0, width, height, PAPER, ' rx="6"')
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>', background, *parts, "</svg>\n"])


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def text(x: float, y: float, words: str, size: float, anchor: str = "middle", colour: str = INK, more: str = "") -> str:
    at = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{more}'
    return f"<text {at}>{escape(words)}</text>"


def panel(left: float, top: float, shown: np.ndarray, cell: float) -> list[str]:
    """One matrix: runs of keys that a row sees, and of rows that see the same."""
    rows, keys = shown.shape
    gap = 1 if cell >= 3 else 0
    parts = [rect(left, top, keys * cell, rows * cell, HIDDEN)]
    path, row = [], 0
    for same, lines in groupby(shown.tolist()):
        count, key = len(list(lines)), 0
        for visible, run in groupby(same):
            length = len(list(run))
            if visible:
                wide, high = length * cell, count * cell
                path.append(f"M{left + key * cell:g} {top + row * cell:g}h{wide:g}v{high:g}h{-wide:g}z")
            key += length
        row += count
    parts.append(f'<path d="{"".join(path)}" fill="{SEEN}" shape-rendering="crispEdges"/>')
    if gap:
        lines = [f"M{left + i * cell:g} {top:g}v{rows * cell:g}" for i in range(1, keys)]
        lines += [f"M{left:g} {top + i * cell:g}h{keys * cell:g}" for i in range(1, rows)]
        parts.append(f'<path d="{"".join(lines)}" stroke="{PAPER}" stroke-width="{gap}"/>')
    return parts


def mask(shown: np.ndarray) -> str:
    """The matrices of a mask: one where all heads and batch entries see the same, else one for each that differs."""
    names = [""]
    if (shown == shown[:1, :1]).all():
        shown = shown[0, :1]
    elif (shown == shown[:, :1]).all():
        shown, names = shown[:, 0], [f"text {i}" for i in range(len(shown))]
    else:
        shown, names = shown[0], [f"head {i}" for i in range(shown.shape[1])]
    rows, keys = shown.shape[1:]
    cell = SIDE / max(keys, rows)
    wide, high, parts = keys * cell, rows * cell, []
    for i, (name, one) in enumerate(zip(names, shown)):
        left = 30 + i * (wide + 16)
        parts += panel(left, 24, one, cell)
        parts.append(text(left + wide / 2, 16, name or "keys", 11))
    parts.append(text(18, 24 + high / 2, "queries", 11, more=f' transform="rotate(-90 18 {24 + high / 2:g})"'))
    return svg(30 + len(shown) * (wide + 16) - 4, 24 + high + 12, parts)


def shade(colour: str, share: float) -> str:
    """White to the colour, in 16 steps, so that the last bits of a sum do not show."""
    step = round(min(share, 1.0) * 15) / 15
    mixed = (round(255 + (int(colour[i : i + 2], 16) - 255) * step) for i in (1, 3, 5))
    return "#" + "".join(f"{x:02x}" for x in mixed)


def first() -> str:
    """What is computed: two maps of a language model's head on real text, and the KL of each row."""
    count, head, cell = 20, 4, 13.0
    with np.load(SAMPLE) as file:
        data = {name: file[name] for name in file if name.endswith(("_q", "_k"))}
        pieces = [str(x) for x in file["pieces"][:count]]

    def log_map(layer: int) -> np.ndarray:
        q = data[f"layer{layer}_q"][head, :count].astype(np.float64)
        k = data[f"layer{layer}_k"][head // 3, :count].astype(np.float64)
        logits = np.where(np.tri(count, dtype=bool), q @ k.T / 8.0, -np.inf)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    log_p, log_q = log_map(15), log_map(14)
    with np.errstate(invalid="ignore"):
        kl = np.nansum(np.exp(log_p) * (log_p - log_q), axis=-1)
    side, top, parts = count * cell, 62.0, []
    places = {"P": 96.0, "Q": 96.0 + side + 46}
    titles = {"P": ("teacher", "P = softmax(c Q Kᵀ)", TEACHER), "Q": ("student", "Q = softmax(c Q Kᵀ)", STUDENT)}
    for name, log_map_ in (("P", log_p), ("Q", log_q)):
        left, (title, formula, colour) = places[name], titles[name]
        parts += [
            text(left + side / 2, 26, title, 16, colour=colour, more=' font-weight="600"'),
            text(left + side / 2, 46, formula, 13),
        ]
        parts.append(rect(left, top, side, side, HIDDEN))
        for i, j in zip(*np.tril_indices(count)):
            fill = shade(colour, float(np.exp(log_map_[i, j])) ** 0.5)
            parts.append(rect(left + j * cell, top + i * cell, cell - 1, cell - 1, fill))
        # The tile of keys that is being read: all that exists of the map at any time.
        frame = f' stroke="{INK}" stroke-width="2"'
        parts.append(rect(left + 4 * cell - 1, top + 8 * cell - 1, 4 * cell + 1, 8 * cell + 1, "none", frame))
    for i, piece in enumerate(pieces):
        parts.append(text(places["P"] - 6, top + i * cell + 10, piece.strip()[:11] or "⏎", 10.5, "end"))
    parts.append(text(places["Q"] - 23, top + side / 2 + 6, "‖", 26))
    left, longest = places["Q"] + side + 40, 120.0
    parts += [
        text(left + longest / 2, 26, "KL of each row", 16, colour=LOSS, more=' font-weight="600"'),
        text(left + longest / 2, 46, "Σ P (log P − log Q)", 13),
    ]
    for i, value in enumerate(kl):
        length = round(float(value / kl.max()) * longest, 1)
        parts.append(rect(left, top + i * cell, max(length, 0.5), cell - 1, LOSS))
        parts.append(text(left + length + 5, top + i * cell + 10, f"{abs(value):.2f}", 9.5, "start"))
    below = top + side + 24
    parts.append(
        text(
            places["P"],
            below,
            "Only such a tile of either map exists at a time. A row keeps five numbers while the keys stream by,",
            12.5,
            "start",
        )
    )
    parts.append(
        text(
            places["P"],
            below + 18,
            "and the backward makes the tiles again. Memory grows with N, not with N².",
            12.5,
            "start",
        )
    )
    return svg(left + longest + 46, below + 34, parts)


def pictures() -> dict[str, str]:
    """Each picture's text by the name of its file."""
    return {"first.svg": first(), **{name: mask(shown) for name, shown in asked()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a picture is not what would be drawn"
    )
    check = parser.parse_args().check
    drawn = pictures()
    stale = [name for name, new in drawn.items() if not _is(PICTURES / name, new)]
    stale += [path.name for path in PICTURES.glob("*.svg") if path.name not in drawn]
    if check and stale:
        sys.exit(f"{', '.join(sorted(stale))}: not what docs/masks.md shows; run python docs/_tools/pictures.py")
    if not check:
        PICTURES.mkdir(exist_ok=True)
        for name, new in drawn.items():
            (PICTURES / name).write_text(new, encoding="utf-8")
        for name in set(stale) - drawn.keys():
            (PICTURES / name).unlink()
    print(f"{len(drawn)} pictures, {len(stale)} of them {'stale' if check else 'new'}")


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
