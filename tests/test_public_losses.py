"""Losses that others have published, from their formulas, beside the one call that each is: values and gradients in
float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from streamkl_cupy import attention_kl  # noqa: E402

B, A, N, D_T, D_S = 3, 4, 37, 16, 8
LENGTHS = (37, 20, 1)


@pytest.fixture
def states(rng: np.random.Generator) -> list[Any]:
    """Queries and keys of a teacher, and of a student that learns."""
    shapes = [(B, A, N, D_T)] * 2 + [(B, A, N, D_S)] * 2
    return [torch.from_numpy(rng.standard_normal(x)).requires_grad_(i > 1) for i, x in enumerate(shapes)]


def maps(q: Any, k: Any) -> Any:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)


def check(ours: Any, theirs: Any, *by: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for found, wanted in zip(
        torch.autograd.grad(ours, by, retain_graph=True),
        torch.autograd.grad(theirs, by, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-13)


def test_minilm_of_padded_slices(states: list[Any]) -> None:
    """MiniLMv2 as bloomberg/minilmv2.bb has it: of each sequence its own slice, a sum over A_r L_b, the mean of these;
    padding may hold anything."""
    tq, tk, sq, sk = states
    slices = []
    for b, n in enumerate(LENGTHS):
        p, q = maps(tq[b, :, :n], tk[b, :, :n]), maps(sq[b, :, :n], sk[b, :, :n])
        slices.append((p * (p.log() - q.log())).sum() / (A * n))
    theirs = torch.stack(slices).mean()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    padding = torch.arange(N)[None, None, :, None] >= lengths[:, None, None, None]
    weight = 1 / (B * A * lengths.double())[:, None, None].expand(B, A, N)
    ours = attention_kl(
        *(x.masked_fill(padding, torch.nan) for x in states),
        query_lengths=lengths,
        key_lengths=lengths,
        row_weight=weight,
        reduction="sum",
    )
    check(ours, theirs, sq, sk)


def test_cross_entropy_of_a_linear_student(states: list[Any]) -> None:
    """LoLCATs and Hedgehog: cross-entropy of softmax attention and of phi(q) . phi(k) over its sum, which is causal."""
    tq, tk, sq, sk = states
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    p = torch.softmax((tq @ tk.mT * D_T**-0.5).masked_fill(future, -torch.inf), -1)
    phi_q, phi_k = (torch.cat([torch.softmax(x, -1), torch.softmax(-x, -1)], -1) for x in (sq, sk))
    linear = (phi_q @ phi_k.mT).masked_fill(future, 0)
    linear = linear / linear.sum(-1, keepdim=True)
    theirs = -(p * linear.masked_fill(future, 1).log()).sum(-1).mean()
    ours = attention_kl(
        tq, tk, phi_q, phi_k, causal=True, divergence="cross_entropy", student_score="log_dot", reduction="mean"
    )
    check(ours, theirs, sq, sk)


def test_jensen_shannon_of_heads(states: list[Any]) -> None:
    """Of every pair of heads of two layers, as analyses of attention have it (clarkkev/attention-analysis)."""
    tq, tk, sq, sk = states
    p, q = maps(tq, tk)[:, :, None], maps(sq, sk)[:, None]
    m = (p + q) / 2
    theirs = ((p * (p / m).log() + q * (q / m).log()) / 2).sum(-1).mean((0, 3))  # (A, A)
    pairs = [
        attention_kl(
            *(x[:, i : i + 1].expand_as(x) for x in (tq, tk)), sq, sk, divergence="jsd", reduction="none"
        ).mean((0, 2))
        for i in range(A)
    ]
    check(torch.stack(pairs).sum(), theirs.sum(), sq, sk)
    torch.testing.assert_close(torch.stack(pairs), theirs, rtol=1e-12, atol=1e-13)


def test_cross_entropy_with_a_mask(states: list[Any]) -> None:
    """TextBrewer's `att_ce_loss` with its mask, of rows and keys alike: the mean over rows that are there."""
    tq, tk, sq, sk = states
    there = torch.arange(N) < torch.tensor(LENGTHS)[:, None]
    hidden = ~there[:, None, None, :]
    p, q = (
        torch.softmax((x @ y.mT * x.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf), -1)
        for x, y in ((tq, tk), (sq, sk))
    )
    rows = -(p * q.masked_fill(hidden, 1).log()).sum(-1)
    theirs = (rows * there[:, None]).sum() / (A * there.sum())
    options = {"query_mask": there, "key_mask": there, "divergence": "cross_entropy"}
    check(attention_kl(tq, tk, sq, sk, reduction="mean", **options), theirs, sq, sk)


@pytest.mark.parametrize("divergence", ["squared_error", "cosine"])
def test_maps_that_are_compared_as_vectors(divergence: str, states: list[Any]) -> None:
    """google/tunix compares maps by cosine; MOHAWK takes the root of squared errors of a head's whole map."""
    tq, tk, sq, sk = states
    p, q = maps(tq, tk), maps(sq, sk)
    rows = attention_kl(tq, tk, sq, sk, divergence=divergence)
    if divergence == "cosine":
        check(rows.mean(), (1 - torch.nn.functional.cosine_similarity(p, q, dim=-1)).mean(), sq, sk)
    else:
        check(rows.sum(-1).sqrt().mean(), torch.linalg.matrix_norm(p - q).mean(), sq, sk)
