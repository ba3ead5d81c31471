"""The seams that keep an addition in one place. They rot by one word in a kernel, so the words are searched for."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
import sanitize

from streamkl_cupy.compiler.source import cuda_root
from streamkl_cupy.kernels import KERNELS
from streamkl_cupy.ops import OPS, Op
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.rules.scores import SCORES

# Some names are English words besides. Kernels may use those, but no part's struct.
NAMES = sorted({*MASKS, *DIVERGENCES, *SCORES} - {"packed", "keys", "blocks", "dot"})
STRUCTS = sorted(part.struct for part in MASKS.values())
ROOT = cuda_root()
PACKAGE = Path(__file__).parents[1] / "streamkl_cupy"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.cu*"))


def code_of(path: Path) -> str:
    """The text without comments, which may name what they like."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words_of(text: str) -> set[str]:
    """Whole words and the parts of snake_case and CamelCase ones, in lower case."""
    words = re.findall(r"\w+", text)
    return {part.lower() for word in words for part in (word, *re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", word))}


def test_the_search_finds_a_planted_name(tmp_path: Path) -> None:
    planted = tmp_path / "planted.cu"
    planted.write_text("// window, in a comment\nfor (;;) if (isCausalRow(x)) y = q_sliding[reverse_kl];\n")
    assert {"causal", "sliding", "reverse_kl"} <= words_of(code_of(planted))
    assert "window" not in words_of(code_of(planted))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_tiles_do_not_know_the_name_of(name: str) -> None:
    guilty = [name_of(path) for path in sources("kernels", "tile") if name in words_of(code_of(path))]
    assert not guilty, f"{name!r} belongs to its registry and its header; found in {guilty}"


@pytest.mark.parametrize("name", STRUCTS)
def test_kernels_and_tiles_do_not_know_the_part(name: str) -> None:
    guilty = [name_of(path) for path in sources("kernels", "tile") if re.search(rf"\b{name}\b", code_of(path))]
    assert not guilty, f"{name!r} belongs to its header; found in {guilty}"


def test_kernels_and_tiles_reach_rules_only_through_slots_and_interfaces() -> None:
    rules = ("masks/", "divergences/", "scores/")
    allowed = {f"{folder}interface.cuh" for folder in rules}
    for path in sources("kernels", "tile", "common", "ptx"):
        included = set(re.findall(r'#\s*include\s*"([^"]+)"', code_of(path)))
        direct = {file for file in included if file.startswith(rules)} - allowed
        assert not direct, f"{name_of(path)} includes {sorted(direct)}; use a slot"


def test_assembly_is_only_in_the_ptx_folder() -> None:
    found = [name_of(path) for path in sources(".") if re.search(r"\basm\b", code_of(path))]
    assert [name for name in found if not name.startswith("ptx/")] == []
    assert found, "no assembly at all: the search is broken"


def test_no_lambda_captures_everything() -> None:
    assert not [path.name for path in cuda_root().rglob("*.cu*") if re.search(r"\[[&=]\]\s*[({]", path.read_text())]


def test_no_source_needs_a_toolkit_header() -> None:
    assert [name_of(path) for path in sources(".") if re.search(r"#\s*include\s*<", code_of(path))] == []


@pytest.mark.parametrize("name", sorted(MASKS))
def test_a_part_of_a_mask_is_a_pair_of_files(name: str) -> None:
    assert MASKS[name].name == name
    assert MASKS[name].header == f"masks/{name}.cuh"
    assert (ROOT / MASKS[name].header).is_file()
    assert (PACKAGE / f"rules/masks/{name}.py").is_file()


def test_only_the_last_part_may_have_lists() -> None:
    """Kernels read pointers of lists behind the words of all parts."""
    assert not any(part.listed for part in list(MASKS.values())[:-1])


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_divergence_is_a_pair_of_files(name: str) -> None:
    entry = DIVERGENCES[name]
    assert entry.name == name
    assert entry.header == f"divergences/{name}.cuh"
    assert (ROOT / entry.header).is_file()


@pytest.mark.parametrize("name", sorted(SCORES))
def test_score_is_a_pair_of_files(name: str) -> None:
    assert SCORES[name].name == name
    assert SCORES[name].header == f"scores/{name}.cuh"
    assert (ROOT / SCORES[name].header).is_file()


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_the_readme_has_the_divergence(name: str) -> None:
    readme = " ".join((PACKAGE.parent / "README.md").read_text(encoding="utf-8").split())
    assert f'`"{name}"`: `{DIVERGENCES[name].formula}`' in readme


OWN = {
    "SPARSE_ATTENTION": {"attention.py", "numpy_backend/attention.py"},
    "ATTENTION_KL_TO": {"targets.py", "numpy_backend/given.py"},
}


@pytest.mark.parametrize("name", OWN)
def test_who_knows_an_operation_by_name_stands_in_the_guide(name: str) -> None:
    """As a name or as a text of that name, whatever messages and documentation say."""
    guide = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = guide.partition("an operation touches these")[2].partition("\n\n`tests/")[0]
    allowed = set(re.findall(r"`([\w/]+\.py)`", table.partition("|---|")[2]))
    assert len(allowed) == 12
    texts = {name.lower()}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, (ast.Name, ast.alias)) and name in (
                getattr(node, "id", ""),
                getattr(node, "name", ""),
            )
            if named or (isinstance(node, ast.Constant) and node.value in texts):
                found.add(where)
    own = OWN[name] | {f"ops/{name.lower()}.py", f"cli/{name.lower()}.py"}
    assert found >= {"ops/__init__.py", "options.py", "kernels/structs.py"}, "the search is broken"
    assert found - own <= allowed


def test_every_header_of_a_registry_folder_is_registered() -> None:
    registered = {entry.header for registry in (MASKS, DIVERGENCES, SCORES) for entry in registry.values()}
    shared = {f"{folder}/interface.cuh" for folder in ("masks", "divergences", "scores")}
    shared |= {"masks/all.cuh", "masks/bits.cuh", "divergences/relative_entropy.cuh", "divergences/softmax_sums.cuh"}
    shared |= {"divergences/overlap.cuh", "scores/all.cuh", "scores/softcap.cuh", "scores/given.cuh"}
    assert {name_of(path) for path in sources("masks", "divergences", "scores")} - shared == registered


def test_frameworks_are_imported_only_by_their_own_module() -> None:
    pattern = re.compile(r"^\s*(?:import|from)\s+(torch|jax)\b", re.MULTILINE)
    for path in sorted(PACKAGE.rglob("*.py")):
        imported = set(pattern.findall(path.read_text(encoding="utf-8")))
        # The differentiable doors and what differentiates; what reads a framework's arrays finds it imported.
        rooms = (PACKAGE, *(PACKAGE / name for name in ("autodiff", "indexer", "parallel")))
        allowed = {path.stem} if path.parent in rooms else set()
        assert imported <= allowed, f"{path.name} imports {sorted(imported)}"


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_operation_is_what_its_record_says(name: str) -> None:
    op = OPS[name]
    assert op.name == name
    assert op.like in op.names
    assert set(op.wrt) <= {task.name for task in op.gradients} <= set(op.names)
    for task in (op.forward, *op.gradients, *op.fused):
        assert all(kernel.kind == task.kind for kernel in KERNELS[task.kind])
        if task.side:
            assert {op.operand[result].side for result in task.results} == {task.side}
    for task in op.gradients:
        assert op.operand[task.name].rows == task.stationary


def test_values_of_a_call_are_as_the_record_has_them() -> None:
    for op in OPS.values():
        assert op.Inputs._fields == op.Gradients._fields == op.names
        always = (*op.rows, *(name for name, _ in op.vectors))
        assert op.Results(*always)._fields[: len(always)] == always
        assert {x.like for x in op.saved} <= set(op.results)
        assert set(op.log_sum_exps) <= set(op.results)
        assert [x.optional for x in op.saved] == sorted(x.optional for x in op.saved)
        assert {result for _, result in op.forward.outputs} == set(always)
        # Where nothing comes from above for one of several results, its derivative is zeros like that result.
        kept = {x.name for x in op.saved if x.name == x.like and not x.optional}
        assert len(op.differentiable) == 1 or {x.like for x in op.saved if not x.optional} <= kept


def test_what_follows_from_a_record_is_known_before_anything_is_traced() -> None:
    """A compiler that finds a property which nobody has asked for yet gives up."""
    lazy = {name for name, x in vars(Op).items() if isinstance(x, cached_property)}
    assert lazy
    assert all(lazy <= vars(op).keys() for op in OPS.values())


def test_a_kernel_is_a_pair_of_files() -> None:
    texts = {path.stem for path in (ROOT / "kernels").glob("*.cu")}
    modules = {name: importlib.import_module(f"streamkl_cupy.kernels.{name}") for name in sorted(texts)}
    listed = {kernel.stem: kernel for kernels in KERNELS.values() for kernel in kernels}
    assert {name: module.KERNEL for name, module in modules.items() if hasattr(module, "KERNEL")} == listed
    assert all(kernel.kind == kind for kind, kernels in KERNELS.items() for kernel in kernels)


def test_sanitizers_see_every_kernel(rng: np.random.Generator) -> None:
    """Each file is launched by a case of the matrix, on a GPU that has kernels of its own."""
    pytest.importorskip("ml_dtypes", reason="operands of the matrix are bfloat16, which needs ml_dtypes")
    unseen = {path.stem for path in (ROOT / "kernels").glob("*.cu")}
    cases = list(sanitize.Matrix(int(rng.integers(10**6))))
    drawn = [cases[i] for i in rng.permutation(len(cases))]
    one_of_each = {f"{case.op} {case.about}": case for case in drawn}
    for case in (*one_of_each.values(), *drawn):
        unseen -= {sanitize.name_of(kernel) for kernel in sanitize.kernels_of(case, "sm_90")}
        if not unseen:
            return
    assert unseen == set()


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a module imports, inside functions, for types and by their names too."""
    package = list(path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if name.startswith((".", "streamkl_cupy.")):
                found.add(".".join((*(package if name[0] == "." else ()), *name.split(".")[1:])))
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found |= {".".join((*base, name.name)) for name in node.names} | {".".join(base)}
    return found


def imports() -> dict[str, set[str]]:
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {name: (imports_of(path) & modules.keys()) - {name} for name, path in modules.items()}
    assert graph["api"] >= {"call", "planning"}, "the search is broken"
    assert graph["call"] >= {"launch"}, "the search for names is broken"
    return graph


def demand_one_way(graph: dict[str, set[str]], what: str) -> None:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{what} import each other: {' -> '.join(error.args[1])}")


def test_imports_run_one_way() -> None:
    demand_one_way(imports(), "modules")


def test_rooms_are_on_floors() -> None:
    """A room is a folder of the package, or a module beside them: none imports what imports it in a roundabout way."""
    rooms: dict[str, set[str]] = {}
    for name, imported in imports().items():
        room = name.partition(".")[0]
        rooms.setdefault(room, set()).update({other.partition(".")[0] for other in imported} - {room})
    assert rooms["launch"] >= {"kernels", "compiler"}, "the search is broken"
    demand_one_way(rooms, "rooms")


def device_functions(text: str) -> Iterator[tuple[str, int]]:
    """Where each function of a CUDA text begins, in words, and how many lines it has."""
    for found in re.finditer(r"__device__|__global__", text):
        depth, i = 0, found.end()
        while i < len(text) and (depth or text[i] not in ";{"):
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            i += 1
        if text[i : i + 1] != "{":
            continue
        head, level, end = text[found.start() : i], 0, i
        while end < len(text):
            level += {"{": 1, "}": -1}.get(text[end], 0)
            if not level:
                break
            end += 1
        yield " ".join(head.split()), text.count("\n", found.start(), end) + 1


def test_device_functions_fit_on_some_screens() -> None:
    planted = "__device__ int f(int a) {\n" + "  a++;\n" * 200 + "}\n__device__ void g();\n"
    assert [lines for _, lines in device_functions(planted)] == [202]
    found = [(name_of(path), *x) for path in sources(".") for x in device_functions(code_of(path))]
    assert len(found) > 400, "the search is broken"
    assert [(name, head) for name, head, lines in found if lines > 150] == []


def test_lines_of_cuda_sources_fit() -> None:
    """The formatter leaves comments alone."""
    lines = [(path, i, x) for path in sources(".") for i, x in enumerate(path.read_text("utf-8").split("\n"), start=1)]
    assert [f"{name_of(path)}:{i}" for path, i, x in lines if len(x) > 120] == []


# Doors, whose parameters are for people; a peer in Triton says why.
MANY_PARAMETERS = ("api", "attention", "targets", "torch", "jax", "indexer/api", "parallel/api", "patterns/families")


def test_internal_functions_have_few_parameters() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and name != "cli/triton_indexer":
                given = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(given) - (given[:1] in (["self"], ["cls"]))
                public = name in MANY_PARAMETERS and not node.name.startswith("_")
                found += [f"{name}.{node.name}: {count}"] if count > 8 and not public else []
    assert found == []


def test_the_top_level_fits_on_a_screen() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 16
