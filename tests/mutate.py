"""Plants small faults in the host code, one at a time, and counts those that the tests without a GPU notice.

    python tests/mutate.py --count 50 [--seed 7] [--modules planning,patterns/*] [--jobs 2] [--all]

Works in a copy of the tree. A fault changes one expression or statement: an operator, a comparison, a constant, two
arguments that change places, a statement that is gone, the teacher for the student. Texts, annotations, decorators,
tables of tiles and what Triton compiles are left alone. A fault meets the tests that run its lines, the quickest first,
of the quick files and those that import the module; with --all of the others that take seconds too. Which these are is
found by running them once, and kept from run to run in --reached. A test that notices a fault must pass without it.
What survives is held against tests/equivalents.txt, which lists changes that make no difference, with reasons. Not part
of CI: it takes minutes.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import difflib
import fnmatch
import functools
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reached import PACKAGE, Notes, Record, Test, block_of, digest, name_of

ROOT = Path(__file__).resolve().parents[1]
# They compile kernels, make environments or copies of the tree, draw pictures, ask a type checker or take minutes.
SLOW = (
    "plans_compile",
    "install",
    "packaging",
    "examples",
    "soak",
    "readme_table",
    "masks_benchmark",
    "users_benchmark",
    "patches",
    "typing",
    "fork",
)

PYTEST = ("-q", "--tb=no", "-rfE", "-n0", "-p", "no:cacheprovider", "-m", "not gpu")

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED = {"teacher": "student", "student": "teacher"}
CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}
# Where the order of arguments means nothing.
SYMMETRIC = re.compile(r"^(\w+\.)*(max|min|maximum|minimum|gcd|lcm|logical_and|logical_or|isinstance|swapaxes)\(")
# What is no computation: texts of errors, types, and what a decorator keeps.
SKIPPED = {"annotation", "returns", "decorator_list", "type_comment", "format_spec", "bases"}


class Fault(NamedTuple):
    """A change of one file: the bytes from `start` to `stop` become `text`."""

    path: Path
    start: int
    stop: int
    text: str


def other_side(word: str) -> str:
    return re.sub("teacher|student", lambda found: SWAPPED[found.group()], word)


def is_field(node: ast.AST) -> bool:
    """Whether it is a field of a struct or a region, whose text and whose places are made of one list, in any order."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("Field", "Region")


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
            isinstance(parent, ast.Compare | ast.ExceptHandler)
            or (isinstance(node, ast.Call) and SYMMETRIC.search(ast.unparse(node)))
            or (isinstance(parent, ast.Call) and re.match(r"(isinstance|issubclass)\(", ast.unparse(parent)))
        ):
            field = "args" if isinstance(node, ast.Call) else "elts"
            for i in range(len(elements) - 1):
                if ast.dump(elements[i]) != ast.dump(elements[i + 1]) and not all(map(is_field, elements[i : i + 2])):
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
        if isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.dump(node.annotation):
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.Subscript) and ast.unparse(child.value) == "Literal":
                continue
            # A row of a table of tiles: whether registers hold it is a matter of compiling, and all else of time.
            if isinstance(child, ast.Call) and re.search(r"(Tile|_)Row$", ast.unparse(child.func)):
                continue
            # What Triton compiles runs on a GPU only.
            if isinstance(child, ast.FunctionDef) and any("triton." in ast.unparse(x) for x in child.decorator_list):
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


def stages_for(root: Path, module: str, options: argparse.Namespace) -> list[list[str]]:
    """Test files that a fault of a module meets: its own, those that import it and the quick ones, and with --all the
    others that take seconds."""
    if options.tests:
        return [options.tests, []]
    quick = re.search(r"^QUICK = (.*)$", (root / "Makefile").read_text(), re.M)
    assert quick is not None
    words = module.removesuffix("/__init__").split("/")
    uses = re.compile(rf"{PACKAGE}[.\w]*\.{words[-1]}\b|from {PACKAGE}[.\w]* import [^\n]*\b{words[-1]}\b")
    about = {part for word in words for part in word.split("_")}
    own, near, far = [], [], []  # of (is about something else, is not quick, file)
    for path in sorted((root / "tests").glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if name not in SLOW:
            slower = name not in quick[1].split()
            other = not about & {*name.split("_")}
            used = not (slower and other) or uses.search(path.read_text()) is not None
            # What plans say of kernels is read by a compiler in one file.
            mine = name in words or (name == "texts" and words[0] == "kernels")
            (own if mine else near if used else far).append((other, slower, f"tests/{path.name}"))
    return [[name for *_, name in sorted(stage)] for stage in ((own, near, far) if options.all else (own, near))]


class Tree:
    """A copy of the tree, in which one fault at a time is planted."""

    def __init__(self, source: Path) -> None:
        self.source, self.root = source, source.with_name(secrets.token_hex(4))
        shutil.copytree(source, self.root)
        self.clock = int(time.time())
        self.sound: set[str] = set()  # tests that have failed with a fault, and passed without

    def write(self, path: Path, text: bytes) -> None:
        """Python recognises a changed file by its size and second, so each version gets a second of its own."""
        self.clock += 2
        target = self.root / path.relative_to(self.source)
        target.write_bytes(text)
        os.utime(target, (self.clock, self.clock))

    def run(self, plugin: object, tests: Iterable[str], seed: int, limit: float, *options: str) -> int | None:
        """The status of pytest, whose words are in `output`; None if it takes too long. It is a fork, with the
        libraries imported."""
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(self.root / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.chdir(self.root)
            sys.path[:0] = [str(self.root), str(self.root / "tests")]
            os.environ["PYTHONPATH"] = str(self.root)
            code = 99
            try:
                code = int(pytest.main([*PYTEST, f"--seed={seed}", *options, *tests], plugins=[plugin]))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + limit
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(done[1])

    def failing(self, tests: list[str], seed: int, limit: float) -> str:
        """The first of these tests that fails, or "timeout"; empty where none does."""
        status = self.run(Chosen(tests), dict.fromkeys(x.partition("::")[0] for x in tests), seed, limit, "-x")
        if status is None:
            return "timeout"
        text = (self.root / "output").read_text(errors="replace")
        found = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", text, re.M)
        return found[0] if found else "" if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else f"status {status}"

    def noticed(self, fault: Fault, parts: list[list[str]], limit: float) -> str:
        """What notices a fault, and has nothing to say without one."""
        seed = random.randrange(10**6)
        while True:
            self.write(fault.path, planted(fault))
            # Of few files first: to collect a file may take longer than its tests.
            found = next((by for part in parts if part and (by := self.failing(part, seed, limit))), "")
            self.write(fault.path, fault.path.read_bytes())
            if "::" not in found or found in self.sound or not self.failing([found], seed, limit):
                self.sound.add(found)
                return found
            print(f"{found} fails without a fault", file=sys.stderr)
            parts = [[x for x in part if x != found] for part in parts]

    def record(self, file: str, limit: float) -> Record:
        """What the tests of a file reach, where there is no fault."""
        made = self.root / "tests.json"
        made.unlink(missing_ok=True)
        self.run(Notes(made), [file], random.randrange(10**6), limit)
        if not made.exists():
            raise SystemExit(f"{file} did not come to its end:\n{(self.root / 'output').read_text()[-2000:]}")
        tests = json.loads(made.read_text())
        modules = {name_of(x): digest(x) for x in (self.root / PACKAGE).rglob("*.py")}
        return Record(digest(self.root / file), modules, {name: Test(*x) for name, x in tests.items()})


class Chosen:
    """A plugin that runs these tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self._order = {name: i for i, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self._order
        items[:] = sorted((x for x in items if x.nodeid in order), key=lambda x: order[x.nodeid])


_trees: list[Tree] = []


def tree_of(source: Path) -> Tree:
    """The copy of the tree that this process works in."""
    if not _trees:
        _trees.append(Tree(source))
    return _trees[0]


def recorded(file: str, source: Path, options: argparse.Namespace) -> None:
    """Have a record of a file of tests for the modules as they are."""
    kept = options.reached / f"{Path(file).stem}.json"
    modules = {name_of(x): digest(x) for x in (source / PACKAGE).rglob("*.py")}
    if (
        kept.exists()
        and (known := record_of(kept)).file == digest(source / file)
        and all(known.modules.get(name) == modules[name] for name in options.changed)
    ):
        return
    began = time.monotonic()
    kept.write_text(json.dumps(tree_of(source).record(file, 4 * options.limit)))
    print(f"{file}: what its tests run is known, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


@functools.cache
def record_of(kept: Path) -> Record:
    file, modules, tests = json.loads(kept.read_text())
    return Record(file, modules, {name: Test(*x) for name, x in tests.items()})


def chosen_tests(fault: Fault, module: str, source: Path, options: argparse.Namespace) -> list[list[str]]:
    """Tests that run the lines of a fault, own ones and others, the quickest first, for as long as a fault may take."""
    text = fault.path.read_bytes()
    block = block_of(text, text[: fault.start].count(b"\n") + 1)
    here = f"{module}:{block}"
    found: list[tuple[bool, bool, float, str, bool]] = []
    known = [
        (i, name, test)
        for i, stage in enumerate(stages_for(source, module, options))
        for file in stage
        for name, test in record_of(options.reached / f"{Path(file).stem}.json").tests.items()
        if test.passed
    ]
    # What runs on import may be a table that others read, and what is kept from the first call on nobody runs again:
    # then it meets those that run other lines of the module first.
    kept = not block or not any(here in test.blocks for _, _, test in known)
    for i, name, test in known:
        if here in test.blocks or kept or (test.starts_python and not i):
            elsewhere = kept and not any(block.startswith(f"{module}:") for block in test.blocks)
            found.append((i > 0, elsewhere, test.seconds, name, test.starts_python))
    left = {False: options.seconds, True: options.seconds}
    parts: dict[bool, list[str]] = {False: [], True: []}
    for away, _, seconds, name, always in sorted(found):
        left[away] -= seconds
        if left[away] > 0 or (always and seconds < options.seconds):
            parts[away].append(name)
    return [parts[False], parts[True]]


def equivalents(source: Path) -> set[tuple[str, ...]]:
    """Changes that make no difference: module, lines as they are and as they would be."""
    text = (source / "tests" / "equivalents.txt").read_text(encoding="utf-8")
    entries = (part.splitlines() for part in re.split(r"\n\s*\n", text))
    listed = {found for lines in entries if (found := tuple(line for line in lines if line[0] != "#"))}
    for module, *lines in listed:
        there = {line.strip() for line in (source / PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()}
        if dead := [line for line in lines if line[0] == "-" and line[2:] not in there]:
            raise SystemExit(f"tests/equivalents.txt: {module}.py has no line {dead[0][2:]!r} any more; drop the entry")
    return listed


def judged(fault: Fault, source: Path, options: argparse.Namespace) -> tuple[str, str, str]:
    """The module of a fault, what became of it, and the report."""
    module = name_of(fault.path)
    tests = chosen_tests(fault, module, source, options)
    began = time.monotonic()
    by = tree_of(source).noticed(fault, tests, options.limit)
    outcome = by if by == "timeout" else "noticed" if by else "survived"
    old, new = (x.decode().splitlines() for x in (fault.path.read_bytes(), planted(fault)))
    lines = [x for x in difflib.unified_diff(old, new, n=0, lineterm="") if not x.startswith(("---", "+++", "@@"))]
    changed = [f"{x[0]} {x[1:].strip()}" for x in lines]
    if outcome == "survived" and (module, *changed) in options.equivalents:
        outcome = "no difference"
    report = f"{outcome} ({time.monotonic() - began:.0f} s, {sum(map(len, tests))} tests): {PACKAGE}/{module}.py {by}"
    if outcome in ("survived", "timeout"):
        line = fault.path.read_bytes()[: fault.start].count(b"\n") + 1
        report += f" line {line}" + "".join(f"\n    {x}" for x in changed)
    return module, outcome, report


OUTCOMES = ("noticed", "survived", "no difference", "timeout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="faults to plant (50)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="repeat a choice of faults")
    parser.add_argument("--modules", default="*", help="globs of modules, as in planning,patterns/* (all)")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at work side by side (1)")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="these tests, in place of those chosen by module")
    parser.add_argument("--seconds", type=float, default=60, help="of tests per fault, its own and others (60)")
    parser.add_argument("--limit", type=float, default=300, help="seconds until a run of tests is ended (300)")
    parser.add_argument("--all", action="store_true", help="tests that have nothing to do with the module too")
    parser.add_argument("--reached", type=Path, default=ROOT / "build" / "reached", help="where records are kept")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    # What takes long to import is there in every fork.
    for name in ("torch._dynamo", "jax.numpy", "matplotlib.pyplot", "cupy"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    table: dict[str, Counter[str]] = {}
    options.reached.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as where:
        # What is edited here meanwhile does not matter.
        source = Path(where) / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "shared", "build"))
        paths = {name_of(x): x for x in (source / PACKAGE).rglob("*.py")}
        globs = options.modules.split(",")
        chosen = [x for name, x in sorted(paths.items()) if any(fnmatch.fnmatch(name, glob) for glob in globs)]
        places = [place for path in chosen for place in faults(path)]
        picked = [rng.choice(place) for place in rng.sample(places, min(options.count, len(places)))]
        print(f"{len(picked)} faults in {len(places)} places, --seed {options.seed}", flush=True)
        options.equivalents = equivalents(source)
        options.changed = sorted({name_of(fault.path) for fault in picked})
        stages = [stages_for(source, name, options) for name in options.changed]
        files = sorted({file for some in stages for stage in some for file in stage})
        # Not of a Pool, whose processes may not have children of their own, as compiling for a test has.
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
            list(pool.map(functools.partial(recorded, source=source, options=options), files))
        with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
            judge = functools.partial(judged, source=source, options=options)
            for future in concurrent.futures.as_completed([pool.submit(judge, fault) for fault in picked]):
                module, outcome, report = future.result()
                table.setdefault(module, Counter())[outcome] += 1
                print(report, flush=True)
    print(f"\n{'module':28} " + "  ".join(OUTCOMES))
    for module, counts in [*sorted(table.items()), ("all", sum(table.values(), Counter()))]:
        print(f"{module:28} " + "  ".join(f"{counts[x]:{len(x)}}" for x in OUTCOMES))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
