"""Plants small faults in the host code, one at a time, and counts those that the tests without a GPU notice.

    python tests/mutate.py --count 50 [--seed 7] [--modules planning,patterns/*] [--jobs 2] [--all]

Works in a copy of the tree. A fault changes one expression or statement: an operator, a comparison, a constant, two
arguments that change places, a statement that is gone, the teacher for the student. Texts, annotations and decorators
are left alone. The quick tests and those that import the module run first; with --all what survives them meets the
other tests that take seconds too. A test that notices a fault must pass without it. Not part of CI: it takes minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import fnmatch
import itertools
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "streamkl_cupy"
# They compile kernels, make environments, draw pictures, ask a type checker or take minutes.
SLOW = (
    "plans_compile",
    "install",
    "packaging",
    "examples",
    "soak",
    "readme_table",
    "masks_benchmark",
    "typing",
    "fork",
)

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED = {"teacher": "student", "student": "teacher"}
CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}
SYMMETRIC = re.compile(r"(max|min|maximum|minimum|gcd|lcm|logical_and|logical_or|isinstance|swapaxes)\(")
# What is no computation: texts of errors, types, and what a decorator keeps.
SKIPPED = {"annotation", "returns", "decorator_list", "type_comment", "format_spec"}


class Fault(NamedTuple):
    """A change of one file: the bytes from `start` to `stop` become `text`."""

    path: Path
    start: int
    stop: int
    text: str


def other_side(word: str) -> str:
    return re.sub("teacher|student", lambda found: SWAPPED[found.group()], word)


def changes(node: ast.AST, parent: ast.AST) -> Iterator[Any]:
    """Faulty versions of a node; a statement's is "pass", to be left out."""

    def changed(**fields: Any) -> Any:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield changed(op=OPERATORS[type(op)]())
        case ast.Compare(ops=[op, *rest]):
            yield changed(ops=[OPERATORS[type(op)](), *rest])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(x) for x in {value + 1, value - 1, 2 * value} - {value})
        case ast.Constant(value=float(value)) if value:
            yield ast.Constant(2 * value)
        case ast.Constant(value=str(value)) | ast.Attribute(attr=value) | ast.Name(id=value, ctx=ast.Load()):
            field = {ast.Constant: "value", ast.Attribute: "attr", ast.Name: "id"}[type(node)]
            if re.search("teacher|student", value) and not re.search(r"\s", value):
                yield changed(**{field: other_side(value)})
            if isinstance(node, ast.Name) and isinstance(parent, ast.Call) and parent.func is node and value in CALLS:
                yield changed(id=CALLS[value])
        case ast.Call(args=elements) | ast.Tuple(elts=elements, ctx=ast.Load()) if not (
            isinstance(node, ast.Call) and SYMMETRIC.search(ast.unparse(node.func) + "(")
        ):
            field = "args" if isinstance(node, ast.Call) else "elts"
            for i in range(len(elements) - 1):
                if ast.dump(elements[i]) != ast.dump(elements[i + 1]):
                    yield changed(**{field: [*elements[:i], elements[i + 1], elements[i], *elements[i + 2 :]]})
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def sites(node: ast.AST) -> Iterator[tuple[ast.AST, list[Any]]]:
    """Every node under `node` with its faulty versions."""
    for field, value in ast.iter_fields(node):
        if field in SKIPPED or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check of what is so
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if found := list(changes(child, node)):
                yield child, found
            if not isinstance(child, ast.Raise):  # its words
                yield from sites(child)


def faults(path: Path) -> Iterator[list[Fault]]:
    """For each place of a file where a fault can be, those that can be there."""
    source = path.read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    for node, found in sites(ast.parse(source)):
        if hasattr(node, "lineno"):
            start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield [Fault(path, start, stop, new if isinstance(new, str) else f"({ast.unparse(new)})") for new in found]


def planted(fault: Fault) -> bytes:
    source = fault.path.read_bytes()
    return source[: fault.start] + fault.text.encode() + source[fault.stop :]


def tests_for(root: Path, module: str) -> tuple[list[str], list[str]]:
    """Test files that run first, the module's own at the head, and the others that take seconds."""
    quick = re.search(r"^QUICK = (.*)$", (root / "Makefile").read_text(), re.M)
    assert quick is not None
    stem = module.removesuffix("/__init__").rpartition("/")[2]
    uses = re.compile(rf"{PACKAGE}[.\w]*\.{stem}\b|from {PACKAGE}[.\w]* import [^\n]*\b{stem}\b")
    first, others = [], []
    for path in sorted((root / "tests").glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        own = name == stem or name in module.split("/")
        used = own or uses.search(path.read_text()) is not None
        if name not in SLOW:
            (first if used or name in quick[1].split() else others).append((not own, not used, f"tests/{path.name}"))
    return [name for *_, name in sorted(first)], [name for *_, name in sorted(others)]


class Tree:
    """A copy of the tree, in which one fault at a time is planted."""

    checked: dict[str, bool] = {}  # noqa: RUF012  tests that noticed a fault: whether they pass without one
    lock = threading.Lock()

    def __init__(self, source: Path, root: Path) -> None:
        self.source, self.root = source, root
        shutil.copytree(source, root)
        self.clock = int(time.time())

    def write(self, path: Path, text: bytes) -> None:
        """Python recognises a changed file by its size and second, so each version gets a second of its own."""
        self.clock += 2
        target = self.root / path.relative_to(self.source)
        target.write_bytes(text)
        os.utime(target, (self.clock, self.clock))

    def failing(self, tests: list[str], limit: float) -> str:
        """The first test that fails, "timeout", or nothing."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-n0", "-m", "not gpu", *tests]
        env = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.root, env=env, capture_output=True, text=True, timeout=limit, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return "timeout"
        found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", done.stdout, re.M)
        return found[1] if found else "" if done.returncode == 0 else f"exit code {done.returncode}"

    def try_out(self, fault: Fault, stages: list[list[str]], limit: float) -> str:
        """What notices a fault."""
        for tests in stages:
            self.write(fault.path, planted(fault))
            found = self.failing(tests, limit)
            self.write(fault.path, fault.path.read_bytes())
            if "::" in found and not self.passes(found, limit):
                tests = [test for test in tests if not found.startswith(test)]
                print(f"{found} fails without a fault", file=sys.stderr)
                self.write(fault.path, planted(fault))
                found = self.failing(tests, limit)
                self.write(fault.path, fault.path.read_bytes())
            if found:
                return found
        return ""

    def passes(self, test: str, limit: float) -> bool:
        with self.lock:
            known = self.checked.get(test)
        if known is None:
            known = not self.failing([test], limit)
            with self.lock:
                self.checked[test] = known
        return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="faults to plant (50)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="repeat a choice of faults")
    parser.add_argument("--modules", default="*", help="globs of modules, as in planning,patterns/* (all)")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at work side by side (1)")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="these tests, in place of those chosen by module")
    parser.add_argument("--limit", type=float, default=300, help="seconds of tests per fault and stage (300)")
    parser.add_argument("--all", action="store_true", help="what survives the first tests meets the others too")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    table: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as where, ThreadPoolExecutor(options.jobs) as pool:
        # What is edited here meanwhile does not matter.
        source = Path(where) / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "shared"))
        paths = {str(x.relative_to(source / PACKAGE).with_suffix("")): x for x in (source / PACKAGE).rglob("*.py")}
        globs = options.modules.split(",")
        chosen = [x for name, x in sorted(paths.items()) if any(fnmatch.fnmatch(name, glob) for glob in globs)]
        places = [place for path in chosen for place in faults(path)]
        picked = [rng.choice(place) for place in rng.sample(places, min(options.count, len(places)))]
        print(f"{len(picked)} faults in {len(places)} places, --seed {options.seed}", flush=True)
        local = threading.local()

        def judge(fault: Fault) -> None:
            if not hasattr(local, "tree"):
                local.tree = Tree(source, Path(where) / secrets.token_hex(4))
            module = str(fault.path.relative_to(source / PACKAGE).with_suffix(""))
            first, others = (options.tests, []) if options.tests else tests_for(source, module)
            began = time.monotonic()
            by = local.tree.try_out(fault, [first, others] if options.all else [first], options.limit)
            outcome = by if by == "timeout" else "noticed" if by else "survived"
            old, new = (x.decode().splitlines() for x in (fault.path.read_bytes(), planted(fault)))
            lines = [] if outcome == "noticed" else list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
            with Tree.lock:
                table.setdefault(module, Counter())[outcome] += 1
                print(f"{outcome} ({time.monotonic() - began:.0f} s): {PACKAGE}/{module}.py {by}")
                print("".join(f"    {line}\n" for line in lines), end="", flush=True)

        list(pool.map(judge, picked))
    print(f"\n{'module':28} noticed  survived  timeout")
    for module, counts in [*sorted(table.items()), ("all", sum(table.values(), Counter()))]:
        print(f"{module:28} {counts['noticed']:7}  {counts['survived']:8}  {counts['timeout']:7}")


if __name__ == "__main__":
    main()
