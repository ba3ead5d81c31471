"""Which tests run which lines of the package, noted while they run, so that a fault meets those that can notice it.

Bodies of functions, branches and loops are blocks, known by the line that they begin in; what runs on import is block
0. Of a test that starts Python anew nothing more is known than that.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import json
import multiprocessing.util
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

PACKAGE = "streamkl_cupy"
NOTE = "_note_that_a_block_runs"
# Rooms whose functions may forget what they have computed.
FORGETFUL = ("arrays", "indexer", "kernels", "parallel.shards", "planning", "problem", "rules", "validate")


class Test(NamedTuple):
    """What is known of a test: the seconds that it took, whether it passed, and blocks, as module:line."""

    __test__ = False
    seconds: float
    passed: bool
    blocks: tuple[str, ...]
    starts_python: bool


class Record(NamedTuple):
    """What is known of a file of tests, as long as it and a module are what they were: digests of both."""

    file: str
    modules: dict[str, str]
    tests: dict[str, Test]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def name_of(path: Path) -> str:
    """A module by its path in the package, without the suffix."""
    parts = path.parts
    return "/".join(parts[len(parts) - parts[::-1].index(PACKAGE) :]).removesuffix(".py")


def bodies(node: ast.AST, inside: bool = False) -> Iterator[list[ast.stmt]]:
    """Lists of statements that run when a function is called."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if inside and field in ("body", "orelse", "finalbody") and isinstance(value, list) and value:
            yield value
        for child in children:
            if isinstance(child, ast.AST):
                yield from bodies(child, inside and not isinstance(node, ast.ClassDef))


def block_of(source: bytes, line: int) -> int:
    """The block that a line is in, or 0."""
    found = [x[0].lineno for x in bodies(ast.parse(source)) if x[0].lineno <= line <= (x[-1].end_lineno or 0)]
    return max(found, default=0)


def _code_with_notes(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    """In place of a loader's `get_code`: a module of the package notes its blocks."""
    path = Path(loader.get_filename(fullname))
    if PACKAGE not in path.parts:
        return _get_code(loader, fullname)
    tree, name = ast.parse(path.read_bytes()), name_of(path)
    for body in [*bodies(tree)]:
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        note = ast.parse(f"{NOTE}({f'{name}:{body[0].lineno}'!r})").body[0]
        for node in ast.walk(note):
            ast.copy_location(node, body[0])
        body.insert(int(documented), note)
    code: CodeType = compile(tree, str(path), "exec", dont_inherit=True)
    return code


_get_code = SourceFileLoader.get_code


def _forget() -> None:
    """Empty what is kept from call to call, so that a test that finds it full is known to reach what fills it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(tuple(f"{PACKAGE}.{room}" for room in FORGETFUL)):
            for x in list(vars(module).values()):
                if isinstance(x, functools._lru_cache_wrapper):
                    x.cache_clear()
    if call := sys.modules.get(f"{PACKAGE}.call"):
        for kept in (call._checked, call._runners, call._looks):
            kept.clear()


class Notes:
    """A plugin that notes what each test runs, and writes it to a file when all are done."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, Test] = {}
        self._seen: set[str] = set()
        self._shared: set[str] = set()  # by what several tests have
        self._starts_python = False
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Before anything imports the package."""
        SourceFileLoader.get_code = _code_with_notes  # type: ignore[method-assign]
        setattr(builtins, NOTE, self._seen.add)
        sys.addaudithook(self._audit)
        start = multiprocessing.util.spawnv_passfds

        def noted(*arguments: Any) -> int:
            self._starts_python = True
            return start(*arguments)

        multiprocessing.util.spawnv_passfds = noted

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.fork" or (event == "subprocess.Popen" and "python" in str(arguments[0])):
            self._starts_python = True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = set(self._seen)
        yield
        if fixturedef.scope != "function":
            self._shared |= self._seen - before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _forget()
        self._seen.clear()
        self._starts_python, self._reports = False, []
        yield
        passed = bool(self._reports) and all(x.passed for x in self._reports)
        seconds = sum(x.duration for x in self._reports)
        self._tests[item.nodeid] = Test(seconds, passed, tuple(sorted(self._seen)), self._starts_python)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        found = {name: x._replace(blocks=(*x.blocks, *self._shared)) for name, x in self._tests.items()}
        self._file.write_text(json.dumps(found))
