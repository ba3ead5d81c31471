"""Judge an installed wheel: `python smoke.py PROJECT`, run where only the wheel and what it requires are installed.

Every CUDA source of the project must have arrived unchanged, the package must be typed, and it must compute without
any of the optional packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import numpy as np

import streamkl_cupy


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(project: Path) -> None:
    package = Path(streamkl_cupy.__file__).parent
    if package.is_relative_to(project):
        sys.exit(f"{package} is the checkout, not the installed wheel")
    expected, installed = digests(project / "cuda_src"), digests(package / "cuda_src")
    if not expected or installed != expected:
        sys.exit(f"CUDA sources differ: {sorted(set(expected.items()) ^ set(installed.items()))}")
    if not (package / "py.typed").is_file():
        sys.exit("py.typed is missing")

    optional = ("cupy", "jax", "torch", "matplotlib", "tqdm")
    if present := [name for name in optional if importlib.util.find_spec(name)]:
        sys.exit(f"this environment proves nothing: it has {present}")

    rng = np.random.default_rng()
    teacher_q, teacher_k, student_q, student_k = (rng.standard_normal((2, 3, rows, 16)) for rows in (40, 50, 40, 50))
    kl = streamkl_cupy.attention_kl(teacher_q, teacher_k, student_q, student_k)
    teacher = teacher_q @ teacher_k.swapaxes(-1, -2) / 4.0
    student = student_q @ student_k.swapaxes(-1, -2) / 4.0
    teacher -= np.log(np.exp(teacher).sum(-1, keepdims=True))
    student -= np.log(np.exp(student).sum(-1, keepdims=True))
    error = np.abs(kl - (np.exp(teacher) * (teacher - student)).sum(-1)).max()
    if not error < 1e-12:
        sys.exit(f"the KL of the installed wheel is off by {error}")
    print(f"wheel: {len(installed)} CUDA sources intact, KL right to {error:.1e} with NumPy alone")


main(Path(sys.argv[1]).resolve())
