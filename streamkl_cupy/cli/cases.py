"""What the benchmark measures: problems, passes, the work counted for each, and the inputs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..arrays import ITEMSIZE

if TYPE_CHECKING:
    from ..problem import InputName

PASSES = ("forward", "backward", "value_and_grad", "all_gradients")
"""backward: student gradients from saved rows; value_and_grad: forward and that; all_gradients: of all four inputs."""

STUDENT: Final = ("student_q", "student_k")
ALL: Final = ("teacher_q", "teacher_k", *STUDENT)


def wrt(name: str) -> tuple[InputName, ...]:
    """The inputs a pass differentiates by."""
    return ALL if name == "all_gradients" else STUDENT


class Case(NamedTuple):
    """One problem to time, and where."""

    device: str
    batch: int
    heads: int
    queries: int
    keys: int
    teacher_dim: int
    student_dim: int
    dtype: str
    causal: bool
    passes: tuple[str, ...] = PASSES

    def __str__(self) -> str:
        d_t, d_s = self.teacher_dim, self.student_dim
        return (
            f"B={self.batch} H={self.heads} M={self.queries} N={self.keys} D={d_t if d_t == d_s else f'{d_t}/{d_s}'} "
            f"{self.dtype}{' causal' if self.causal else ''}"
        )

    @property
    def scores(self) -> int:
        """Elements of one attention matrix over all heads."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of the four inputs, in the order of `ALL`."""
        b, h, m, n = self.batch, self.heads, self.queries, self.keys
        return tuple((b, h, rows, dim) for dim in (self.teacher_dim, self.student_dim) for rows in (m, n))

    @property
    def input_bytes(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes) * ITEMSIZE[self.dtype]


def kl_flops(case: Case, name: str) -> float:
    """Operations of the products that the mathematics needs, whatever an implementation recomputes; causal is half.

    forward 2 BHMN (D_t + D_s); backward 2 BHMN (D_t + 3 D_s): both logits again, and two products per gradient pair.
    """
    d_t, d_s = case.teacher_dim, case.student_dim
    per_score = {
        "forward": d_t + d_s,
        "backward": d_t + 3 * d_s,
        "value_and_grad": 2 * d_t + 4 * d_s,
        "all_gradients": 3 * (d_t + d_s),
    }[name]
    return 2.0 * case.scores * per_score / (2 if case.causal else 1)


def attention_flops(case: Case, name: str) -> float:
    """Of softmax attention at the student's D: forward 4 BHMND, backward 2.5 times that; causal is half."""
    forward = 4.0 * case.scores * case.student_dim / (2 if case.causal else 1)
    return forward * {"forward": 1.0, "backward": 2.5, "value_and_grad": 3.5}[name]


def home_of(device: str) -> str:
    """The framework that makes the inputs: torch on a GPU where it can, CuPy there without it, NumPy on the CPU."""
    if device == "cpu":
        return "numpy"
    return "torch" if not torch_missing() else "cupy"


def torch_missing() -> str:
    """Why torch cannot be used on this GPU; empty where it can."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return (
            f"torch is not installed ({error})"
            if not isinstance(error, ModuleNotFoundError)
            else "torch is not installed"
        )
    if not torch.cuda.is_available():
        return "this torch has no CUDA, or a driver too old for it"
    return ""


def inputs(case: Case, home: str) -> tuple[Any, Any, Any, Any]:
    """Fresh normal inputs of a framework, on the case's device."""
    if home == "torch":
        torch = importlib.import_module("torch")
        kind = getattr(torch, case.dtype)
        made = [torch.randn(shape, device="cuda", dtype=torch.float32).to(kind) for shape in case.shapes]
    elif home == "cupy":
        cupy = importlib.import_module("cupy")
        made = [
            cupy.random.standard_normal(shape, dtype=np.float32).astype(numpy_type(case.dtype)) for shape in case.shapes
        ]
    else:
        rng = np.random.default_rng()
        made = [rng.standard_normal(shape, np.float32).astype(numpy_type(case.dtype)) for shape in case.shapes]
    a, b, c, d = made
    return a, b, c, d


def numpy_type(name: str) -> Any:
    """The NumPy type of a name; bfloat16 is ml_dtypes'.

    Raises:
        ImportError: bfloat16 without ml_dtypes.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise ImportError(
            "bfloat16 outside torch needs ml_dtypes: pip install ml_dtypes, or choose --dtype float16"
        ) from error


def to_float64(x: Any) -> np.ndarray[Any, Any]:
    """A small array of any framework as float64 on the host."""
    if hasattr(x, "detach"):
        return np.asarray(x.detach().double().cpu().numpy())
    if hasattr(x, "get"):
        return np.asarray(x.astype(np.float32).get().astype(np.float64))
    return np.asarray(x).astype(np.float64)
