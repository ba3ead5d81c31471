"""`deterministic`: what the caller says, and where the caller leaves it open, what the framework is set to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import arrays, call, frameworks
from streamkl_cupy.call import Call
from streamkl_cupy.frameworks.jax import xla_deterministic
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.testing.problems import make


@pytest.fixture(params=[False, True], ids=["error", "warn_only"])
def torch_switched(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    torch.use_deterministic_algorithms(True, warn_only=request.param)
    yield torch
    torch.use_deterministic_algorithms(False)


def prepared(framework: Any, said: bool | None) -> bool:
    """What a problem on these arrays is told."""
    case = make(M=20, N=30, D_t=16)
    given = Call.of(ATTENTION_KL, tuple(framework(a) for a in case.arrays), {"deterministic": said})
    return given.ready().checked.problem.deterministic


@pytest.mark.parametrize("said", [None, False, True])
def test_torch_switch(torch_switched: Any, said: bool | None) -> None:
    assert prepared(torch_switched.from_numpy, said) is (said is not False)
    torch_switched.use_deterministic_algorithms(False)
    assert prepared(torch_switched.from_numpy, said) is bool(said)


@pytest.mark.parametrize("said", [None, False, True])
def test_no_other_framework_has_the_switch_of_torch(torch_switched: Any, said: bool | None) -> None:
    assert prepared(np.asarray, said) is bool(said)


def test_torch_asks_when_the_backward_runs(torch_switched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own operators do: the switch counts where the work is done, not where it was recorded."""
    torch, seen = torch_switched, []
    prepare = call.prepare
    monkeypatch.setattr(call, "prepare", lambda *a: seen.append(prepare(*a)) or seen[-1])
    # A shape that no other call has: one that is known already is not prepared again.
    M = 22 + torch.is_deterministic_algorithms_warn_only_enabled()
    x = [torch.from_numpy(a) for a in make(M=M, N=30, D_t=16).arrays]
    x[2].requires_grad_()
    loss = streamkl_cupy.attention_kl(*x, reduction="sum")
    torch.use_deterministic_algorithms(False)
    loss.backward()
    assert [checked.problem.deterministic for checked in seen] == [True, False]


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true --xla_dump_to=/tmp", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
        ("--xla_gpu_autotune_level=0", False),
    ],
)
def test_flags_of_xla(monkeypatch: pytest.MonkeyPatch, flags: str, wanted: bool) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert xla_deterministic() is wanted


@pytest.mark.parametrize("said", [None, False, True])
def test_jax_programs_know_the_flag(monkeypatch: pytest.MonkeyPatch, said: bool | None) -> None:
    pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    front = pytest.importorskip("streamkl_cupy.autodiff.jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    x = tuple(jnp.asarray(a) for a in make(M=20, N=30, D_t=16).arrays)
    given = Call.of(ATTENTION_KL, x, {"deterministic": said})
    assert front.config_of(given).options.deterministic is (said is not False)
    monkeypatch.delenv("XLA_FLAGS")
    assert front.config_of(given).options.deterministic is bool(said)


def test_plan_and_warmup_say_the_same(torch_switched: Any) -> None:
    x = [torch_switched.from_numpy(a.astype(np.float16)) for a in make(M=128, N=640, D_t=64).arrays]
    assert "deterministic=True, and one pass" in str(streamkl_cupy.plan(*x, arch="sm_90"))
    assert "deterministic=True, and one pass" not in str(streamkl_cupy.plan(*x, arch="sm_90", deterministic=False))
    shapes = [type("Shape", (), {"shape": tuple(t.shape), "dtype": t.dtype})() for t in x]
    assert "deterministic=True, and one pass" not in str(streamkl_cupy.plan(*shapes, arch="sm_90"))


@pytest.mark.gpu
def test_gradients_are_equal_from_run_to_run_where_torch_asks(torch_switched: Any) -> None:
    torch = torch_switched
    x = [torch.randn(1, 4, 2048, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    seen = set()
    for _ in range(10):
        q = x[2].clone().requires_grad_()
        streamkl_cupy.attention_kl(*x[:2], q, x[3].clone().requires_grad_(), reduction="sum").backward()
        seen.add(q.grad.view(torch.int16).cpu().numpy().tobytes())
    assert len(seen) == 1


def test_cuda_views_of_torch_are_asked_too(torch_switched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_switched.zeros(1)
    frameworks.describe("x", torch_switched.zeros(1, 1))  # makes the adapter
    view = frameworks.standin("student_q", torch_switched.zeros(4, 8), arrays.cuda(0))._replace(framework="torch")
    assert call.as_framework_says(view)
    assert not call.as_framework_says(view._replace(framework="cupy"))
