"""Every planned kernel compiles, spills nothing and draws no remark from the assembler, for each architecture.

By default the hardest kernel of every tile, role and size of elements, of each draw another of the 16-bit types; with
--slow the whole catalogue.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from streamkl_cupy.cli import catalogue
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
of_divergences = pytest.mark.parametrize("divergence", DIVERGENCES)


def check(listed: list[catalogue.Entry]) -> None:
    limit = facts_for_arch(listed[0].kernel.arch.rstrip("a")).smem_per_block
    wrong = []
    for built in catalogue.build(listed, int(os.environ.get("STREAMKL_TEST_JOBS", "0")) or None):
        problems = [built.error] if built.error else list(built.notes)
        if built.spill_bytes:
            problems.append(f"spills {built.spill_bytes} B with {built.registers} registers")
        if built.entry.kernel.smem_bytes > limit:
            problems.append(f"{built.entry.kernel.smem_bytes} B of shared memory, the limit is {limit}")
        wrong += [f"{built.entry.label} [{built.entry.kernel}]: {problem}" for problem in problems]
    assert not wrong, f"{len(wrong)} of {len(listed)}:\n" + "\n".join(sorted(wrong))


@of_divergences
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_the_hardest_of_each_kind(arch: str, divergence: str, rng: np.random.Generator) -> None:
    """What masks, element types and head dims take of registers is seen with the usual rules. Of the others, which are
    many where a compile is most of what a test costs, some: of the type whose exponents ask the rules too, at both ends
    of masks."""
    if divergence == Problem.divergence:
        listed, _ = catalogue.entries(arch, masks=catalogue.MASK_CASES)
        check(catalogue.hardest([listed[i] for i in rng.permutation(len(listed))]))
        return
    listed, _ = catalogue.entries(arch, FEW_DIMS, HALF, masks=("none", "everything"), divergences=(divergence,))
    hard = catalogue.hardest(listed)
    check([hard[i] for i in rng.choice(len(hard), 6, replace=False)])


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
    listed, _ = catalogue.entries(rng.choice(catalogue.ARCHS), COMMON_DIMS, HALF, scores=((score, score),))
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


@of_all_rules
@pytest.mark.parametrize("arch", catalogue.ARCHS)
def test_every_problem_of_the_catalogue_has_a_plan(arch: str, divergence: str, scores: tuple[str, str]) -> None:
    listed, refused = catalogue.entries(arch, masks=catalogue.MASK_CASES, divergences=(divergence,), scores=(scores,))
    assert refused == []
    constants = [dict(e.kernel.constants) for e in listed if e.kernel.tile]
    assert {(c["SKL_T_DIM"], c["SKL_S_DIM"]) for c in constants} == set(catalogue.DIMS)
    assert len({c["SKL_MASK_PARTS"] for c in constants}) == len(catalogue.MASK_CASES)
    # Passes of both gradients have a side for a name, and so has what makes rows of moments for them.
    passes = {"teacher", "student"} if arch == "sm_90" or DIVERGENCES[divergence].moments else set()
    gradients = {"teacher_q", "teacher_k", "student_q", "student_k"}
    assert {e.kernel.name for e in listed} == {"forward", "combine", "mask_bits"} | gradients | passes


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
    """Beside those of the catalogue, a few kernels of any kind."""
    listed, refused = catalogue.entries("sm_100", masks=catalogue.MASK_CASES)
    assert refused == []
    check([listed[i] for i in rng.choice(len(listed), 3, replace=False)])


def test_the_hardest_cover_every_tile() -> None:
    listed, _ = catalogue.entries("sm_80", masks=catalogue.MASK_CASES)
    hard = catalogue.hardest(listed)
    assert {(e.kernel.name, e.kernel.tile) for e in hard} == {(e.kernel.name, e.kernel.tile) for e in listed}
    assert len(hard) < len(listed) / 10


def test_the_hardest_of_several_rules_are_those_of_each() -> None:
    every = [catalogue.entries("sm_80", divergences=[divergence])[0] for divergence in DIVERGENCES]
    together = catalogue.hardest(catalogue.entries("sm_80", divergences=DIVERGENCES)[0])
    alone = [entry.kernel for listed in every for entry in catalogue.hardest(listed)]
    assert {(e.kernel.text, e.kernel.arch) for e in together} == {(kernel.text, kernel.arch) for kernel in alone}
