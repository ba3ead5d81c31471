"""Every planned kernel compiles, spills nothing and draws no remark from the assembler, for each architecture.

By default, of the usual rules, half of the hardest kernels of every tile and role, in each draw others and another of
the 16-bit types, and some of the others'; with --slow the whole catalogue. What a draw leaves out is said at it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from streamkl_cupy.cli import catalogue
from streamkl_cupy.compiler import nvrtc
from streamkl_cupy.kernels.base import KernelPlan
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.planning import make_plan
from streamkl_cupy.problem import Problem, Side
from streamkl_cupy.rules.divergences import DIVERGENCES

pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")

# Each rule with the usual ones beside it.
USUAL = (Problem.divergence, catalogue.USUAL_SCORES)
RULES = [
    USUAL,
    *((name, catalogue.USUAL_SCORES) for name in DIVERGENCES if name != Problem.divergence),
    (Problem.divergence, ("dot+softcap", "log_dot")),
]
COMMON_DIMS = ((64, 64), (128, 128))
HALF = [types for types in catalogue.ELEMENT_TYPES if types[:2] == ("float16", "float16")]
FEW_DIMS = [(128, 128), (256, 256), (576, 128)]
of_all_rules = pytest.mark.parametrize("divergence, scores", RULES)


FEW = 8
"""Kernels that are compiled here: processes take longer to start."""


def built(listed: list[catalogue.Entry]) -> Iterator[catalogue.Built]:
    if len(listed) > FEW:
        yield from catalogue.build(listed, int(os.environ.get("STREAMKL_TEST_JOBS", "0")) or None)
        return
    for entry in listed:
        build = nvrtc.build(entry.kernel.text, entry.kernel.arch)
        yield catalogue.Built(entry, build.registers, build.spill_bytes, build.notes)


def check(listed: list[catalogue.Entry]) -> None:
    limit = facts_for_arch(listed[0].kernel.arch.rstrip("a")).smem_per_block
    wrong = []
    for found in built(listed):
        problems = [found.error] if found.error else list(found.notes)
        if found.spill_bytes:
            problems.append(f"spills {found.spill_bytes} B with {found.registers} registers")
        if found.entry.kernel.smem_bytes > limit:
            problems.append(f"{found.entry.kernel.smem_bytes} B of shared memory, the limit is {limit}")
        wrong += [f"{found.entry.label} [{found.entry.kernel}]: {problem}" for problem in problems]
    assert not wrong, f"{len(wrong)} of {len(listed)}:\n" + "\n".join(sorted(wrong))


def check_planned(listed: list[catalogue.Entry], refused: list[str], arch: str, divergence: str) -> None:
    """Every problem has a plan, and plans name every kernel."""
    assert refused == []
    constants = [dict(e.kernel.constants) for e in listed if e.kernel.tile]
    assert {(c["SKL_T_DIM"], c["SKL_S_DIM"]) for c in constants} == set(catalogue.DIMS)
    assert len({c["SKL_MASK_PARTS"] for c in constants}) == len(catalogue.MASK_CASES)
    # Passes of both gradients have a side for a name, and so has what makes rows of moments for them.
    passes = {"teacher", "student"} if arch == "sm_90" or DIVERGENCES[divergence].moments else set()
    gradients = {"teacher_q", "teacher_k", "student_q", "student_k"}
    assert {e.kernel.name for e in listed} == {"forward", "combine", "mask_bits"} | gradients | passes


def three_extents(rng: np.random.Generator) -> list[catalogue.Extents]:
    """By lot, where what is compiled of all that is planned is by lot too."""
    return [catalogue.EXTENTS[i] for i in rng.choice(len(catalogue.EXTENTS), 3, replace=False)]


def one_of_alike(hard: list[catalogue.Entry], rng: np.random.Generator) -> list[catalogue.Entry]:
    """Of kernels of one tile that differ in the side they are a gradient of, or in how many sides are float32 where
    any is, one by lot: their loops are the same, and their registers but for a row vector."""
    found: dict[object, catalogue.Entry] = {}
    for i in rng.permutation(len(hard)):
        kernel = hard[i].kernel
        constants = dict(kernel.constants)
        role = kernel.name.removeprefix("teacher").removeprefix("student")
        float32 = "kF32" in (constants.get("SKL_T_ELEMENT"), constants.get("SKL_S_ELEMENT"))
        found.setdefault((role, kernel.tile, float32, constants.get("SKL_PACKED_ROWS")), hard[i])
    return list(found.values())


@pytest.mark.long
@pytest.mark.parametrize("arch", sorted(catalogue.ARCHS, key="sm_90".__ne__))  # by how many kernels there are
def test_the_usual_rules(arch: str, rng: np.random.Generator) -> None:
    """What masks, element types and head dims take of registers is seen with these. Half of them by lot: all take a
    third of what both commands of the README take on two cores."""
    listed, refused = catalogue.entries(arch, masks=catalogue.MASK_CASES)
    check_planned(listed, refused, arch, Problem.divergence)
    hard = catalogue.hardest([listed[i] for i in rng.permutation(len(listed))])
    assert {(e.kernel.name, e.kernel.tile) for e in hard} == {(e.kernel.name, e.kernel.tile) for e in listed}
    assert len(hard) < len(listed) / 10
    alike = one_of_alike(hard, rng)
    check([alike[i] for i in rng.choice(len(alike), -(-len(alike) // 2), replace=False)])


@pytest.mark.parametrize("divergence, scores", RULES[1:])
def test_every_problem_of_other_rules_has_a_plan(
    divergence: str, scores: tuple[str, str], rng: np.random.Generator
) -> None:
    """Of the architectures one by lot, and of the seven extents, which choose among the tiles that fit and are all
    planned with the usual rules, one for each pair of head dims and mask: whether any tile fits hangs on what
    `Kernel.fitting` keeps them by."""
    arch = str(rng.choice(catalogue.ARCHS))
    listed: dict[KernelPlan, catalogue.Entry] = {}
    refused: list[str] = []
    for dims, mask in itertools.product(catalogue.DIMS, catalogue.MASK_CASES):
        lot = [catalogue.EXTENTS[rng.integers(len(catalogue.EXTENTS))]]
        some, none = catalogue.entries(
            arch, [dims], masks=[mask], divergences=[divergence], scores=[scores], extents=lot
        )
        listed |= {entry.kernel: entry for entry in some}
        refused += none
    check_planned(list(listed.values()), refused, arch, divergence)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != Problem.divergence])
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_some_of_the_hardest_of_other_divergences(arch: str, divergence: str, rng: np.random.Generator) -> None:
    """There are many, and a compile is most of what a test costs: some of those whose exponents ask the rules too, at
    both ends of masks, of three extents by lot."""
    listed, _ = catalogue.entries(
        arch, FEW_DIMS, HALF, masks=("none", "everything"), divergences=(divergence,), extents=three_extents(rng)
    )
    hard = catalogue.hardest(listed)
    check([hard[i] for i in rng.choice(len(hard), 3, replace=False)])


@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_some_of_the_hardest_of_attention(arch: str, rng: np.random.Generator) -> None:
    """Of each tile and role the one that takes most, some of them; all are a matter of --slow."""
    dims = [catalogue.ATTENTION_DIMS[i] for i in rng.choice(len(catalogue.ATTENTION_DIMS), 2, replace=False)]
    listed = catalogue.attention_entries(arch, dims, masks=("causal", "everything"), scores=("dot", "dot+softcap"))
    hard = catalogue.hardest([listed[i] for i in rng.permutation(len(listed))])
    check([hard[i] for i in rng.choice(len(hard), 3, replace=False)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_every_kernel_of_attention(arch: str) -> None:
    check(catalogue.attention_entries(arch, masks=catalogue.MASK_CASES, scores=("dot", "dot+softcap")))


@pytest.mark.parametrize("score", sorted({*catalogue.SCORE_CASES} - {Side.score}))
def test_some_of_the_hardest_of_each_score(score: str, rng: np.random.Generator) -> None:
    """Of what most calls have; all masks and head dims are a matter of --slow."""
    arch, lot = str(rng.choice(catalogue.ARCHS)), three_extents(rng)
    listed, _ = catalogue.entries(arch, COMMON_DIMS, HALF, scores=((score, score),), extents=lot)
    hard = catalogue.hardest(listed)
    check([hard[i] for i in rng.choice(len(hard), 2, replace=False)])


@pytest.mark.slow
@pytest.mark.parametrize("scores", [(name, name) for name in catalogue.SCORE_CASES if name != Side.score])
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_the_hardest_of_each_score(arch: str, scores: tuple[str, str]) -> None:
    check(catalogue.hardest(catalogue.entries(arch, masks=catalogue.MASK_CASES, scores=(scores,))[0]))


@pytest.mark.slow
@of_all_rules
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_every_kernel_of_the_catalogue(arch: str, divergence: str, scores: tuple[str, str]) -> None:
    check(catalogue.entries(arch, masks=catalogue.MASK_CASES, divergences=(divergence,), scores=(scores,))[0])


def test_kernels_of_sharded_calls(rng: np.random.Generator) -> None:
    """Forwards that leave states of rows, and gradients of 16-bit operands that leave as float32: some of each."""
    arch, mask = str(rng.choice(["sm_80", "sm_90"])), str(rng.choice(["causal", "everything"]))
    cases = ((COMMON_DIMS[1], HALF[0]), (FEW_DIMS[2], catalogue.ElementTypes("bfloat16", "bfloat16")))
    dims, types = cases[int(rng.integers(2))]
    problem = replace(catalogue.problem(dims, types, mask), some_keys=True, wide_gradients="qk")
    plan = make_plan(problem, facts_for_arch(arch))
    gradients = [kernel for fused in plan.fused for kernel in fused.kernels[1:] if fused.side == "student"]
    gradients += [kernel for name, kernel in plan.gradients if name.startswith("student")]
    states = [plan.forward, *([plan.combine] if plan.combine else [])]
    listed = [some[int(rng.integers(len(some)))] for some in (states, gradients)]
    check([catalogue.Entry(f"sharded, {mask}", kernel) for kernel in listed])


def test_an_architecture_that_shares_its_kernels_with_others(rng: np.random.Generator) -> None:
    """Beside those of the catalogue, some of the hardest; all, and all others, are a matter of --slow."""
    lot = [catalogue.EXTENTS[rng.integers(len(catalogue.EXTENTS))]]
    listed, refused = catalogue.entries("sm_100", masks=catalogue.MASK_CASES, extents=lot)
    assert refused == []
    hard = catalogue.hardest([listed[i] for i in rng.permutation(len(listed))])
    check([hard[i] for i in rng.choice(len(hard), 3, replace=False)])


@pytest.mark.slow
def test_every_kernel_of_that_architecture() -> None:
    check(catalogue.entries("sm_100", masks=catalogue.MASK_CASES)[0])


def test_the_hardest_of_several_rules_are_those_of_each(rng: np.random.Generator) -> None:
    lot = [catalogue.EXTENTS[rng.integers(len(catalogue.EXTENTS))]]
    every = [catalogue.entries("sm_80", COMMON_DIMS, divergences=[x], extents=lot)[0] for x in DIVERGENCES]
    together = catalogue.hardest(catalogue.entries("sm_80", COMMON_DIMS, divergences=DIVERGENCES, extents=lot)[0])
    alone = [entry.kernel for listed in every for entry in catalogue.hardest(listed)]
    assert {(e.kernel.text, e.kernel.arch) for e in together} == {(kernel.text, kernel.arch) for kernel in alone}
