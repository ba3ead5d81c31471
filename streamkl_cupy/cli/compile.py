"""`python -m streamkl_cupy compile`: kernels into the cache ahead of time, with a report of what they use."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from .. import frameworks
from ..compiler import cache, settings
from ..compiler.nvrtc import supported_archs
from ..errors import CompilerError, install
from ..kernels.base import ELEMENT_CODES
from ..ops import ATTENTION_KL, ATTENTION_KL_TO, INDEXER_KL, SPARSE_ATTENTION
from ..problem import Problem, Side
from ..rules.divergences import DIVERGENCES
from ..rules.scores.given import GIVEN
from . import catalogue, report
from .catalogue import (
    ATTENTION_DIMS,
    DIMS,
    ELEMENT_TYPES,
    INDEXER_DIMS,
    MASK_CASES,
    PLAIN,
    SCORE_CASES,
    Built,
    ElementTypes,
)
from .values import dims

HELP = "compile kernels ahead of time into the cache; needs no GPU"
EPILOG = """\
examples:
  python -m streamkl_cupy compile                                  for the GPU of this machine
  python -m streamkl_cupy compile --arch sm_80 sm_90 sm_120        for other machines; no GPU needed
  python -m streamkl_cupy compile --dims 64 128 192/128 --dtype bfloat16
  python -m streamkl_cupy compile --dims 128 --masks none causal packed blocks
  python -m streamkl_cupy compile --op sparse_attention --dims 128 192/128
  python -m streamkl_cupy compile --op attention_kl_to --dims 128  of the student
  python -m streamkl_cupy compile --op indexer_kl --dims 192/128   teacher/indexer
  mkdir -m 755 /opt/kernels && STREAMKL_CACHE_DIR=/opt/kernels python -m streamkl_cupy compile --arch sm_90
                                                                   as root: into an image, for all its users

Kernels that the cache has are not compiled again, so a run that was interrupted goes on where it ended; the table shows
what the compiler said of them then. A call whose kernel is not in the list compiles it at its first use and keeps it.
Exit code: 0 all compiled without spills or remarks, 1 some did not, 2 wrong arguments or no compiler, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--arch", nargs="+", metavar="ARCH", help="such as sm_90; default: the GPU here, else sm_90")
    parser.add_argument(
        "--dims",
        nargs="+",
        type=dims,
        metavar="D",
        help="head dims, as 128 or teacher/student 192/128, of sparse_attention keys/values; default: all",
    )
    ops = [op.name for op in (ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION, INDEXER_KL)]
    parser.add_argument("--op", choices=ops, default=ATTENTION_KL.name, help="whose kernels (%(default)s)")
    names = sorted({name for types in ELEMENT_TYPES for name in types[:2]})
    parser.add_argument(
        "--dtype", nargs="+", choices=names, metavar="TYPE", help=f"only these of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--masks",
        nargs="+",
        choices=MASK_CASES,
        default=PLAIN,
        metavar="MASK",
        help=f"of {', '.join(MASK_CASES)}; default: {' '.join(PLAIN)}",
    )
    parser.add_argument(
        "--divergences",
        nargs="+",
        choices=DIVERGENCES,
        default=[Problem.divergence],
        metavar="NAME",
        help=f"of {', '.join(DIVERGENCES)}; default: {Problem.divergence}",
    )
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=SCORE_CASES,
        default=[Side.score],
        metavar="NAME",
        help=f"of {', '.join(SCORE_CASES)}, on either side; default: {Side.score}",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: one per core")
    parser.add_argument("--force", action="store_true", help="compile anew what the cache has, too")
    parser.add_argument("--list", action="store_true", help="list what would be compiled, and stop")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: give at least 1")
    archs = options.arch or [_arch_here()]
    types = [t for t in ELEMENT_TYPES if not options.dtype or {t.teacher, t.student} <= set(options.dtype)]
    scores = [*itertools.product(options.scores, repeat=2)]
    if options.op == ATTENTION_KL_TO.name:
        # Targets that nothing is lost of, and those that came of the same model.
        of_student = options.dtype or ELEMENT_CODES
        types = [ElementTypes(x, student) for student in of_student for x in dict.fromkeys(("float32", student))]
        scores = [*itertools.product(GIVEN, options.scores)]
    listed = []
    refused = []
    for arch in archs:
        if options.op == SPARSE_ATTENTION.name:
            pairs = options.dims or ATTENTION_DIMS
            listed += catalogue.attention_entries(arch, pairs, types, options.masks, options.scores)
            continue
        if options.op == INDEXER_KL.name:
            # Rows see intervals, or what bits say, whatever --masks are.
            found, without = catalogue.indexer_entries(arch, options.dims or INDEXER_DIMS, types)
            listed += found
            refused += [f"{arch} {line}" for line in without]
            continue
        pairs = options.dims or DIMS
        if options.op == ATTENTION_KL_TO.name:
            # Of the student alone.
            pairs = list(dict.fromkeys((student, student) for _, student in pairs))
        found, without = catalogue.entries(arch, pairs, types, options.masks, options.divergences, scores)
        listed += found
        refused += [f"{arch} {line}" for line in without]
    for line in refused:
        print(f"no kernel: {line}")
    if options.list:
        for entry in listed:
            print(f"{entry.kernel.arch} {entry.label}: {entry.kernel}")
        return 0
    _check_compiler({entry.kernel.arch for entry in listed})
    _check_cache()

    built: list[Built] = []
    try:
        with (
            report.Progress(len(listed), "kernel") as bar,
            closing(catalogue.build(listed, options.jobs, store=True, anew=options.force)) as building,
        ):
            for done in building:
                built.append(done)
                bar.step(done.entry.label)
    except KeyboardInterrupt:
        kept = sum(done.stored for done in built)
        again = "the same command without --force" if options.force else "the same command"
        print(
            f"interrupted: {kept} of {len(listed)} kernels are in {settings.cache_dir()}; {again} goes on from there",
            file=sys.stderr,
        )
        return 130
    before = sum(done.found for done in built)
    report.table(
        f"{len(built)} kernels in {settings.cache_dir()}, {before} of them from before", COLUMNS, summary(built)
    )
    complaints = [line for done in built for line in _complaints(done)]
    for line in complaints:
        print(line)
    return 1 if complaints else 0


COLUMNS = (
    "<arch",
    "<kernel",
    "<types",
    "kernels",
    "registers",
    "shared KiB",
    "spilled B",
    "remarks",
    "failed",
    "image KiB",
)


def summary(built: list[Built]) -> list[tuple[str, ...]]:
    """One row per architecture, role and element types: the largest use of each resource."""
    groups: dict[tuple[str, str, str], list[Built]] = defaultdict(list)
    for done in built:
        name, _, types, *rest = done.entry.label.split(" ")
        precision = f" {rest[0]}" if rest[0] in ("highest", "high") else ""
        groups[done.entry.kernel.arch, name, types + precision].append(done)
    return [
        (
            *group,
            str(len(members)),
            str(max(m.registers for m in members)),
            f"{max(m.entry.kernel.smem_bytes for m in members) / 1024:.0f}",
            str(max(m.spill_bytes for m in members)),
            str(sum(len(m.notes) for m in members)),
            str(sum(bool(m.error) for m in members)),
            f"{sum(m.image_bytes for m in members) / 1024:.0f}",
        )
        for group, members in sorted(groups.items())
    ]


def _complaints(done: Built) -> list[str]:
    name = f"{done.entry.kernel.arch} {done.entry.label}"
    lines = [f"{name}: remark of the assembler: {note}" for note in done.notes]
    if done.spill_bytes:
        lines.append(f"{name}: spills {done.spill_bytes} B; correct, but slower than it should be")
    if done.error:
        lines.append(f"{name}: {done.error}")
    elif not done.stored:
        lines.append(f"{name}: compiled, but not kept")
    return lines


def _arch_here() -> str:
    index = frameworks.current_gpu()
    if index is None:
        return "sm_90"
    from ..kernels.gpus import device_facts

    major, minor = device_facts(index).compute_capability
    return f"sm_{major}{minor}"


def _check_compiler(archs: set[str]) -> None:
    known = supported_archs()
    for arch in sorted(archs):
        number = int(arch.removeprefix("sm_").rstrip("af"))
        if number not in known:
            raise CompilerError(
                f"--arch {arch}: the installed NVRTC compiles for {', '.join(f'sm_{n}' for n in known)}; "
                f"a newer one comes with {install.cuda(upgrade=True)}"
            )


def _check_cache() -> None:
    """A cache that cannot be used makes this command pointless, so it is an error here."""
    folder = settings.cache_dir()
    if folder is None:
        raise OSError(f"no home folder is known; set {settings.CACHE_DIR} to a folder for the kernels")
    if reason := unusable(folder):
        raise OSError(reason)


def unusable(folder: Path) -> str:
    """Why kernels cannot be kept in a folder, which is made if it is missing, and what to do; empty where they can."""
    try:
        if reason := cache.prepare(folder):
            return reason
        with tempfile.TemporaryFile(dir=folder):
            if os.access(folder, os.R_OK):
                return ""
        return f"{folder} cannot be read; set {settings.CACHE_DIR} to a folder that can"
    except OSError as error:
        return f"{folder} cannot be written ({error}); set {settings.CACHE_DIR} to a folder that can"
