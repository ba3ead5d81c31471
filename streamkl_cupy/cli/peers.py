"""What is timed: this package, and the ways to get the same number, or its next of kin, from what is installed.

A peer says why it cannot run a case, and makes a call ready. Torch is reached by name, so that a machine without it
still runs the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from .. import api
from ..testing.timing import Call
from .cases import ALL, PASSES, Case, attention_flops, kl_flops, numpy_type, torch_missing, wrt


class Peer:
    """One contestant."""

    key: str
    title: str
    passes: tuple[str, ...] = PASSES
    devices: tuple[str, ...] = ("cuda",)

    def missing(self, case: Case) -> str:
        """Why this one cannot run a case; empty where it can."""
        return ""

    def needs_bytes(self, case: Case, name: str) -> int:
        """About how much memory a call takes, where it is known and may be too much; 0 otherwise."""
        return 0

    def flops(self, case: Case, name: str) -> float:
        """Work counted for a pass."""
        return kl_flops(case, name)

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        """A call of the pass `name`, ready to be timed once, with whatever it needs computed before."""
        raise NotImplementedError


class Ours(Peer):
    """This package."""

    key = "streamkl"
    title = "streamkl_cupy"
    devices = ("cuda", "cpu")

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        a, b, c, d = arrays
        if name == "forward":
            return lambda: api.attention_kl_forward(a, b, c, d, causal=case.causal)
        if name == "value_and_grad":
            return lambda: api.attention_kl_value_and_grad(a, b, c, d, causal=case.causal)
        rows = api.attention_kl_forward(a, b, c, d, causal=case.causal)
        # Any values will do as upstream gradients; the row values are at hand, random and of the right type.
        return lambda: api.attention_kl_backward(rows.kl, a, b, c, d, saved=rows, wrt=wrt(name), causal=case.causal)


def torch_divergence() -> Any:
    """KL of each row in plain torch, as a function of the four inputs and of a mask of what lies ahead, or None."""
    torch = importlib.import_module("torch")
    functional = torch.nn.functional

    def log_softmax(q: Any, k: Any, future: Any) -> Any:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if future is not None:
            # The least finite number: an infinite one would make 0 x inf of the keys that are not there.
            logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)
        return functional.log_softmax(logits, -1, dtype=torch.float32)

    def divergence(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any, future: Any) -> Any:
        log_p, log_q = log_softmax(teacher_q, teacher_k, future), log_softmax(student_q, student_k, future)
        return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    return divergence


class TorchEager(Peer):
    """log_softmax and kl_div on logits written out, as one would write it without a kernel, under autograd."""

    key = "eager"
    title = "torch eager"

    def __init__(self) -> None:
        self._missing = torch_missing()

    def missing(self, case: Case) -> str:
        return self._missing

    def function(self, case: Case) -> Any:
        """What is called for a case."""
        return torch_divergence()

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        torch = importlib.import_module("torch")
        function = self.function(case)
        future = None
        if case.causal:
            ones = torch.ones(case.queries, case.keys, dtype=torch.bool, device=arrays[0].device)
            future = ones.triu(case.keys - case.queries + 1)
        if name == "forward":
            plain = [x.detach() for x in arrays]

            def forward() -> Any:
                with torch.no_grad():
                    return function(*plain, future)

            return forward
        wanted = wrt(name)
        leaves = [x.detach().requires_grad_(each in wanted) for each, x in zip(ALL, arrays)]
        by = [x for x in leaves if x.requires_grad]
        if name == "value_and_grad":
            return lambda: torch.autograd.grad(function(*leaves, future).mean(), by)
        kl = function(*leaves, future)
        return lambda: torch.autograd.grad(kl, by, kl.detach())


class TorchCompile(TorchEager):
    """The same through torch.compile, compiled anew for each shape, as its best."""

    key = "compile"
    title = "torch.compile"

    def __init__(self) -> None:
        super().__init__()
        self._case: Case | None = None
        self._function: Any = None

    def function(self, case: Case) -> Any:
        if case != self._case:
            torch = importlib.import_module("torch")
            # Without this the second shape would be compiled for any shape.
            torch.compiler.reset()
            self._function = torch.compile(torch_divergence(), dynamic=False, fullgraph=True)
            self._case = case
        return self._function


class TorchAttention(Peer):
    """Softmax attention with one backend: not the same operation, but the yardstick of its kind at the same D."""

    passes = ("forward", "backward", "value_and_grad")

    def __init__(self, key: str, title: str, backend: str) -> None:
        self.key, self.title, self._backend = key, title, backend
        self._missing = torch_missing()

    def missing(self, case: Case) -> str:
        if self._missing:
            return self._missing
        if case.teacher_dim != case.student_dim:
            return "attention has one head dim"
        if case.dtype == "float32":
            return "this backend takes 16-bit inputs"
        if case.causal and case.queries != case.keys:
            return "torch aligns causal masks to the first key"
        return ""

    def flops(self, case: Case, name: str) -> float:
        return attention_flops(case, name)

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("torch.nn.attention")
        backend = getattr(attention.SDPBackend, self._backend)
        # Queries and keys of the student; the teacher's keys stand in for values.
        inputs = [x.detach().requires_grad_(name != "forward") for x in (arrays[2], arrays[3], arrays[1])]

        def forward() -> Any:
            with attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)

        if name == "forward":
            return forward
        if name == "value_and_grad":
            grad = torch.randn_like(inputs[0])
            return lambda: torch.autograd.grad(forward(), inputs, grad)
        result = forward()
        grad = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, inputs, grad)


class Materialising(Peer):
    """Both matrices written out in float32 with NumPy or CuPy, gradients by hand."""

    def __init__(self, library: str) -> None:
        self.key = library
        self.title = f"{'NumPy' if library == 'numpy' else 'CuPy'} materialising"
        self.devices = ("cpu",) if library == "numpy" else ("cuda",)

    def missing(self, case: Case) -> str:
        if case.dtype == "bfloat16":
            try:
                numpy_type("bfloat16")
            except ImportError as error:
                return str(error)
        return ""

    def needs_bytes(self, case: Case, name: str) -> int:
        return 4 * case.scores * (5 if name == "forward" else 6) if self.key == "numpy" else 0

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        xp = importlib.import_module(self.key)
        tq, tk, sq, sk = (self._native(xp, x) for x in arrays)
        scales = case.teacher_dim**-0.5, case.student_dim**-0.5
        future = (
            xp.triu(xp.ones((case.queries, case.keys), bool), case.keys - case.queries + 1) if case.causal else None
        )

        def log_softmax(q: Any, k: Any, scale: float) -> Any:
            logits = q @ k.swapaxes(-1, -2)
            logits *= np.float32(scale)
            if future is not None:
                logits = xp.where(future, np.float32(-1e30), logits)
            logits -= logits.max(-1, keepdims=True)
            logits -= xp.log(xp.exp(logits).sum(-1, keepdims=True))
            return logits

        def forward() -> tuple[Any, Any, Any]:
            log_p, log_q = log_softmax(tq, tk, scales[0]), log_softmax(sq, sk, scales[1])
            return (xp.exp(log_p) * (log_p - log_q)).sum(-1), log_p, log_q

        def backward(grad: Any, kl: Any, log_p: Any, log_q: Any) -> tuple[Any, ...]:
            p = xp.exp(log_p)
            found: tuple[Any, ...] = ()
            if name == "all_gradients":
                d = p * (log_p - log_q - kl[..., None]) * grad[..., None]
                found = gradients(d, tq, tk, scales[0])
            d = xp.exp(log_q)
            d -= p
            d *= grad[..., None]
            return (*found, *gradients(d, sq, sk, scales[1]))

        def gradients(d: Any, q: Any, k: Any, scale: float) -> tuple[Any, Any]:
            return d @ k * np.float32(scale), d.swapaxes(-1, -2) @ q * np.float32(scale)

        if name == "forward":
            return lambda: forward()[0]
        if name == "value_and_grad":

            def both() -> Any:
                kl, log_p, log_q = forward()
                return kl.mean(), backward(xp.full_like(kl, 1 / kl.size), kl, log_p, log_q)

            return both
        kl, log_p, log_q = forward()
        return lambda: backward(kl, kl, log_p, log_q)

    def _native(self, xp: Any, x: Any) -> Any:
        if self.key == "cupy" and not isinstance(x, xp.ndarray):
            x = xp.from_dlpack(x.detach())
        return x.astype(np.float32)


class Yardstick(Peer):
    """A module from a file, with functions over compact (BH, rows, D) torch tensors.

    forward(teacher_q, teacher_k, student_q, student_k, teacher_scale, student_scale, causal) -> (kl, lse_t, lse_s)
    backward(the four, grad, lse_t, lse_s, teacher_scale, student_scale, causal) -> gradients of the student's two
    """

    key = "yardstick"
    passes = ("forward", "backward", "value_and_grad")

    def __init__(self, path: Path) -> None:
        self.title = path.stem
        self._missing = torch_missing()
        if not self._missing:
            self._module = module_of(path)

    def missing(self, case: Case) -> str:
        return self._missing

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        flat = [x.detach().reshape(-1, *x.shape[2:]) for x in arrays]
        scales = case.teacher_dim**-0.5, case.student_dim**-0.5

        def forward() -> Any:
            return self._module.forward(*flat, *scales, case.causal)

        if name == "forward":
            return forward
        if name == "value_and_grad":

            def both() -> Any:
                kl, *lse = forward()
                grad = kl.new_full(kl.shape, 1 / kl.numel())
                return kl.mean(), self._module.backward(*flat, grad, *lse, *scales, case.causal)

            return both
        kl, *lse = forward()
        return lambda: self._module.backward(*flat, kl, *lse, *scales, case.causal)


def module_of(path: Path) -> Any:
    """The module of a file that joins in."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"--yardstick {path}: give a Python file with functions forward and backward")
    module = importlib.util.module_from_spec(spec)
    # Some compilers look a function's module up by name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "forward") or not hasattr(module, "backward"):
        raise ValueError(f"--yardstick {path}: it has no functions forward and backward")
    return module


KEYS = ("streamkl", "eager", "compile", "cudnn", "flash", "cupy", "numpy")


def peers(keys: Sequence[str] = KEYS, yardstick: Path | None = None) -> list[Peer]:
    """The peers named, this package always first among them."""
    made: dict[str, Any] = {
        "streamkl": Ours,
        "eager": TorchEager,
        "compile": TorchCompile,
        "cudnn": lambda: TorchAttention("cudnn", "cuDNN attention", "CUDNN_ATTENTION"),
        "flash": lambda: TorchAttention("flash", "flash attention", "FLASH_ATTENTION"),
        "cupy": lambda: Materialising("cupy"),
        "numpy": lambda: Materialising("numpy"),
    }
    chosen = [cast(Peer, made[key]()) for key in KEYS if key in keys]
    return chosen if yardstick is None else [*chosen, Yardstick(yardstick)]
