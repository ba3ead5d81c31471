"""GPUs that plans are made for without one, against their makers' tables."""

from __future__ import annotations

import pytest

from streamkl_cupy.kernels.gpus import GPUS, facts_for_arch

# Of a GPU of each: multiprocessors, and by the programming guide the KiB that a block may ask for.
KNOWN = {
    "sm_80": ("A100", 108, 163),
    "sm_86": ("RTX A6000", 84, 99),
    "sm_89": ("RTX 4090", 128, 99),
    "sm_90": ("H100 SXM", 132, 227),
    "sm_100": ("B200", 148, 227),
    "sm_120": ("RTX 5090", 170, 99),
}


@pytest.mark.parametrize("arch", GPUS)
def test_facts(arch: str) -> None:
    facts = facts_for_arch(arch)
    _, multiprocessors, kibibytes = KNOWN[arch]
    assert (facts.multiprocessors, facts.smem_per_block) == (multiprocessors, 1024 * kibibytes)
    assert facts.flag == facts.name == arch == f"sm_{facts.compute_capability[0]}{facts.compute_capability[1]}"
