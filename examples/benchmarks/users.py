"""What people compute around the KL of attention maps, beside it: divergences, scores, padded rows, given targets.

Each case is timed in turns with what it is a variant of. Padded rows should take as much of its time as they leave of
its tiles; everything else stands beside it as a factor. torch.compile of the same loss, written out in torch, is the
peer of divergences and targets.

    python examples/benchmarks/users.py --out examples/benchmarks --name users_h200
    python examples/benchmarks/users.py --groups rows scores --no-compile
    python examples/benchmarks/users.py --device cpu
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import streamkl_cupy as streamkl
from streamkl_cupy import frameworks
from streamkl_cupy.cli import bench, catalogue, exit_code, report, timings
from streamkl_cupy.cli.cases import torch_missing
from streamkl_cupy.cli.values import positive, results, seconds, whole
from streamkl_cupy.errors import StreamKLError, install
from streamkl_cupy.testing.timing import Call, DeviceTimer, HostTimer, Timer, Variant, measure

EPILOG = """\
examples:
  python examples/benchmarks/users.py --out examples/benchmarks --name users_h200
  python examples/benchmarks/users.py --groups rows scores --no-compile
  python examples/benchmarks/users.py --device cpu        the same, small, to try the script

Passes: forward, and backward: the student's two gradients from a saved forward; of targets and of torch.compile, which
save what they like, through autograd.

Columns: "times" is the time over that of the case that it is compared with, of rows over its share of the tiles that
kernels visit ("tiles") too; "compile" is the time of torch.compile over ours; "kernels" are rows x columns of tiles and
registers of a thread. Before it is timed, every result is compared with float64, a head of it as a whole.

Exit code: 0 all of this package ran and was right, 1 not all, 2 wrong arguments or nothing to run on.
"""

GROUPS = ("divergences", "scores", "rows", "peers", "targets")
LN2 = math.log(2)
PASSES = ("forward", "backward")
OURS, COMPILED = "streamkl_cupy", "torch.compile"
SIDES = ("teacher", "student")
BATCH = 4
"""Entries of padded batches, each with all heads."""
DEFAULTS: dict[str, tuple[tuple[int, ...], str, float]] = {
    "cuda": ((4096, 8192), "bfloat16", 0.06),
    "cpu": ((256,), "float32", 0.01),
}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One loss, of as many keys as rows."""

    title: str
    base: str
    """Title of the case that it is compared with."""
    batch: int
    heads: int
    rows: int
    dim: int
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of the call, but masks' arrays."""
    masks: dict[str, Array] = field(default_factory=dict)
    target: str = ""
    """Element type of the target that is given in the teacher's place, if one is."""
    peer: bool = False
    """Whether torch.compile is timed beside it."""

    def there(self, what: str) -> Array:
        """(batch, rows) bool: which of "query" or "key" masks leave."""
        there = np.ones((self.batch, self.rows), np.bool_)
        if f"{what}_lengths" in self.masks:
            there &= np.arange(self.rows) < self.masks[f"{what}_lengths"][:, None]
        return there & self.masks.get(f"{what}_mask", there)

    def tiles(self, rows: int, columns: int) -> float:
        """The share of tiles of so many queries and keys that padding leaves something of."""

        def left(there: Array, size: int) -> Array:
            return np.pad(there, ((0, 0), (0, -self.rows % size))).reshape(self.batch, -1, size).any(-1).mean(-1)

        return float((left(self.there("query"), rows) * left(self.there("key"), columns)).mean())

    @property
    def passes(self) -> tuple[str, ...]:
        """The entropy is one of a forward."""
        return PASSES[:1] if self.options.get("return_entropy") else PASSES

    def __str__(self) -> str:
        return f"N={self.rows} D={self.dim} {self.title}"


@dataclass
class Row(timings.CaseRow):
    """One line of the CSV."""

    times: float | None = None
    tiles: float | None = None
    time_over_tiles: float | None = None
    compile_times: float | None = None
    peak_bytes: int | None = None
    kernels: str = ""


FIELDS = timings.columns(Row)


def cases_of(group: str, heads: int, sizes: Sequence[int], dtype: str) -> Iterator[list[Case]]:
    """The cases that are timed in turns, what they are compared with first."""
    size = sizes[-1]
    if group == "rows":
        dense = Case("dense", "dense", BATCH, heads, size, 128, dtype)
        yield [dense, *(replace(dense, title=title, masks=masks) for title, masks in padded(size).items())]
        return
    if group == "scores":
        dot = Case("dot", "dot", 1, heads, size, 128, dtype)
        options: dict[str, dict[str, Any]] = {
            "log_dot, student": {"student_score": "log_dot"},
            "softcap, student": {"student_softcap": 50.0},
            "softcap, both": {"student_softcap": 50.0, "teacher_softcap": 50.0},
            "relu, student": {"student_score": "relu"},
        }
        yield [dot, *(replace(dot, title=title, options=x) for title, x in options.items())]
        return
    for causal in (False, True):
        also = {"causal": True} if causal else {}
        mark = ", causal" if causal else ""
        if group == "targets":
            for rows in sizes:
                plain = Case(f"kl{mark}", f"kl{mark}", 1, heads, rows, 128, dtype, also)
                yield [
                    plain,
                    *(
                        replace(plain, title=f"{x} target{mark}", target=x, peer=True)
                        for x in dict.fromkeys(("float32", dtype))
                    ),
                ]
            continue
        if group == "peers":
            for rows in sizes:
                kl = Case(f"kl{mark}", f"kl{mark}", 1, heads, rows, 128, dtype, also, peer=True)
                names = "cross_entropy", "jsd"
                yield [kl, *(replace(kl, title=f"{x}{mark}", options={**also, "divergence": x}) for x in names)]
            continue
        for dim in (64, 128):
            kl = Case(f"kl{mark}", f"kl{mark}", 1, heads, size, dim, dtype, also)
            others: dict[str, dict[str, Any]] = {
                "kl and entropy": {"return_entropy": True},
                **{name: {"divergence": name} for name in ("reverse_kl", "cross_entropy")},
                "cross_entropy and entropy": {"divergence": "cross_entropy", "return_entropy": True},
                **{name: {"divergence": name} for name in ("squared_error", "cosine", "jsd")},
            }
            yield [kl, *(replace(kl, title=f"{name}{mark}", options={**also, **x}) for name, x in others.items())]


def padded(size: int) -> dict[str, dict[str, Array]]:
    """Padding of a batch by what says so: ends, or masks, solid ones and one with holes."""
    rng = np.random.default_rng()
    lengths = np.array([size // 4, size // 2, size * 3 // 4, size], np.int32)
    behind = np.arange(size) < lengths[:, None]
    blocks = np.repeat(rng.random((BATCH, -(-size // 128))) < 0.5, 128, axis=1)[:, :size]
    return {
        "query_lengths": {"query_lengths": lengths},
        "both lengths": {"query_lengths": lengths, "key_lengths": lengths},
        "query_mask, half": {"query_mask": np.broadcast_to(np.arange(size) < size // 2, (BATCH, size)).copy()},
        "query_mask, blocks of 128": {"query_mask": blocks},
        "left-padded, both masks": {"query_mask": behind[:, ::-1].copy(), "key_mask": behind[:, ::-1].copy()},
        "right-padded, both masks": {"query_mask": behind, "key_mask": behind},
    }


def log_softmax(torch: Any, q: Any, k: Any, score: str, softcap: float | None, seen: Any) -> Any:
    """Logarithms of a side's map, in the type of a result of at least float32."""
    dots = q @ k.mT
    wide = dots.to(torch.promote_types(dots.dtype, torch.float32))
    scale = 1.0 if score == "log_dot" else q.shape[-1] ** -0.5
    logits = wide * scale
    if score == "log_dot":
        logits = logits.clamp_min(2.0**-126).log()
    if score == "relu":
        logits = logits.relu()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if seen is not None:
        # The least finite number: an infinite one would make 0 x inf of the keys that are not there.
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    return torch.nn.functional.log_softmax(logits, -1)


def between(torch: Any, log_p: Any, log_q: Any, divergence: str) -> Any:
    """A divergence of maps that are given by their logarithms, for each row."""
    p, q = log_p.exp(), log_q.exp()
    if divergence == "kl":
        return (p * (log_p - log_q)).sum(-1)
    if divergence == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if divergence == "cross_entropy":
        return -(p * log_q).sum(-1)
    if divergence == "squared_error":
        return (p - q).square().sum(-1)
    if divergence == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(p, q, dim=-1, eps=0)
    log_m = torch.logaddexp(log_p, log_q) - LN2
    return (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2


def written_out(torch: Any, case: Case) -> Callable[..., Any]:
    """The loss in torch, of (teacher's queries, keys or a target, None; student's queries, keys; what is seen)."""
    # Said before the function is traced, which may not ask.
    divergence = case.options.get("divergence", "kl")
    teacher, student = ((case.options.get(f"{x}_score", "dot"), case.options.get(f"{x}_softcap")) for x in SIDES)
    kl_div = torch.nn.functional.kl_div

    def to_target(target: Any, _: Any, student_q: Any, student_k: Any, seen: Any) -> Any:
        log_q = log_softmax(torch, student_q, student_k, *student, seen)
        return kl_div(log_q, target.to(log_q.dtype), reduction="none").sum(-1)

    def to_teacher(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any, seen: Any) -> Any:
        log_p = log_softmax(torch, teacher_q, teacher_k, *teacher, seen)
        return between(torch, log_p, log_softmax(torch, student_q, student_k, *student, seen), divergence)

    return to_target if case.target else to_teacher


class Problem:
    """Inputs of a case, and calls on them."""

    def __init__(self, case: Case, device: str) -> None:
        torch = self.torch = importlib.import_module("torch")
        self.case, self.device = case, device
        shape, kind = (case.batch, case.heads, case.rows, case.dim), getattr(torch, case.dtype)
        self.inputs = [torch.randn(shape, device=device).to(kind) for _ in range(4)]
        if case.options.get("student_score") == "log_dot":
            self.inputs[2:] = [x.abs() for x in self.inputs[2:]]
        self.masks = {name: torch.from_numpy(x).to(device) for name, x in case.masks.items()}
        self.seen = None
        if case.options.get("causal"):
            self.seen = torch.ones(case.rows, case.rows, dtype=torch.bool, device=device).tril()
        if case.target:
            logs = log_softmax(torch, self.inputs[0], self.inputs[1], "dot", None, self.seen)
            self.inputs[:2] = [logs.exp().to(getattr(torch, case.target)), None]
        self.options = {name: x for name, x in case.options.items() if name != "return_entropy"}
        self.compiled = torch.compile(written_out(torch, case), dynamic=False, fullgraph=True)
        self.entropy = {"return_entropy": True} if case.options.get("return_entropy") else {}

    def prepare(self, peer: str, name: str) -> Call:
        """A call of a pass, with what it needs computed before."""
        if peer == OURS and not self.case.target:
            return self._ours(name)
        torch = self.torch
        a, b, *student = self.inputs
        student = [x.detach().requires_grad_(name != "forward") for x in student]
        if peer == OURS:

            def value() -> Any:
                return streamkl.attention_kl_to(a, *student, **self.options)
        else:

            def value() -> Any:
                return self.compiled(a, b, *student, self.seen)

        if name == "forward":
            return value
        rows = value()
        # Any values will do as upstream gradients; the row values are at hand, random and of the right type.
        grad = rows.detach().clone()
        return lambda: torch.autograd.grad(rows, student, grad, retain_graph=True)

    def _ours(self, name: str) -> Call:
        options = {**self.options, **self.masks}
        if name == "forward":
            return lambda: streamkl.attention_kl_forward(*self.inputs, **options, **self.entropy)
        saved = streamkl.attention_kl_forward(*self.inputs, **options)
        return lambda: streamkl.attention_kl_backward(saved.kl, *self.inputs, saved=saved, **options)

    def verify(self, peer: str, name: str) -> str:
        """What is wrong with a head of a result, against float64; empty where nothing is."""
        case, torch = self.case, self.torch
        entry, head = (int(torch.randint(n, ())) for n in (case.batch, case.heads))
        a, b, q, k = (None if x is None else x[entry, head].double() for x in self.inputs)
        there, keys = (torch.from_numpy(case.there(x)[entry]).to(self.device) for x in ("query", "key"))
        seen = there[:, None] & keys
        if self.seen is not None:
            seen &= self.seen
        q, k = q.requires_grad_(), k.requires_grad_()
        if case.target and peer == OURS:  # which looks at probabilities beside one another
            a = a / a.sum(-1, keepdim=True)
        want = torch.where(there, written_out(torch, case)(a, b, q, k, seen | ~there[:, None]), 0)
        found = self.prepare(peer, name)()
        if name == "forward":
            value = (found if torch.is_tensor(found) else found.kl)[entry, head].double()
            error = float(((value - want).abs() / (1 + want.abs())).max().detach())
            return "" if error < (2e-5 if peer == OURS else 1e-1) else f"value of head {head} is off by {error:.1e}"
        upstream = self.prepare(peer, "forward")()
        upstream = (upstream if torch.is_tensor(upstream) else upstream.kl)[entry, head].double().detach()
        wants = torch.autograd.grad(want, (q, k), upstream)
        pair = found[2:4] if len(found) == 4 else found
        errors = [float((x[entry, head].double() - y).norm() / y.norm().clamp_min(1e-300)) for x, y in zip(pair, wants)]
        return "" if max(errors) < 3e-2 else f"gradients of head {head} are off by {errors[0]:.1e}, {errors[1]:.1e}"


def plan_of(case: Case, dtype: str) -> Any:
    """What a case would run, without an array of it."""

    class Standin(NamedTuple):
        shape: tuple[int, ...]
        dtype: str

    x = Standin((case.batch, case.heads, case.rows, case.dim), dtype)
    options = {name: value for name, value in case.options.items() if name != "return_entropy"}
    if case.target:
        return streamkl.attention_kl_to_plan(
            Standin((case.batch, case.heads, case.rows, case.rows), case.target), x, x, **options
        )
    return streamkl.plan(x, x, x, x, **case.options, **case.masks)


def kernels_of(plan: Any, name: str) -> list[Any]:
    """The kernels that walk over tiles in a pass; none on the CPU."""
    if not hasattr(plan, "gradients"):
        return []
    if name == "forward":
        return [kernel for kernel, _ in plan.passes]
    fused = [fused.main for fused in plan.fused if fused.side == "student"]
    return fused or [plan.gradient("student_q"), plan.gradient("student_k")]


def share_of(case: Case, kernels: Sequence[Any]) -> float:
    """The share of tiles that are visited. Kernels of one pass do about as much work per tile each."""
    tiles = [
        (x.tile.rows, x.tile.columns) if dict(x.constants)["SKL_ROWS_ARE_QUERIES"] else (x.tile.columns, x.tile.rows)
        for x in kernels
    ]
    tiles = tiles or [(64, 64)]
    return sum(case.tiles(*tile) for tile in tiles) / len(tiles)


class Bench:
    """A run: its options, what it has found so far, and where that goes."""

    def __init__(self, options: argparse.Namespace, timer: Timer) -> None:
        self.options, self.timer = options, timer
        self.rows: list[Row] = []
        self.about = bench.environment_of(options.device, "torch")
        self.about["command"] = self.about["command"].replace("-m streamkl_cupy", "examples/benchmarks/users.py", 1)
        self.samples: dict[str, list[float]] = {}
        self.built: dict[Any, str] = {}

    def compile(self, cases: Sequence[Case]) -> None:
        """All kernels into the cache, a process per core."""
        rows: dict[Any, catalogue.Entry] = {}
        for case in cases:
            for name in case.passes:
                for kernel in kernels_of(plan_of(case, case.dtype), name):
                    rows.setdefault(kernel.text, catalogue.Entry(f"{case} {kernel.name}", kernel))
        with report.Progress(len(rows), "kernel") as bar:
            for done in catalogue.build(list(rows.values()), store=True):
                kernel, tile = done.entry.kernel, done.entry.kernel.tile
                size = f"{tile.rows}x{tile.columns}" if tile else ""
                spills = f", {done.spill_bytes} B spilled" if done.spill_bytes else ""
                self.built[kernel.text] = f"{kernel.entry[8:-3]} {size}, {done.registers} registers{spills}"
                bar.step()

    def run(self, group: str, cases: Sequence[Case]) -> None:
        """Check and time the cases that go together, then write all that is known."""
        rows: list[Row] = []
        ready: list[tuple[Row, Variant]] = []
        for case in cases:
            problem = Problem(case, self.options.device)
            for peer in (OURS, COMPILED) if case.peer and not self.options.no_compile else (OURS,):
                for name in case.passes:
                    rows.append(self._row(group, case, peer, name))
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            wrong = problem.verify(peer, name)
                    except Exception as error:
                        rows[-1].failed(error)
                        continue
                    if wrong:
                        rows[-1].status, rows[-1].note = "wrong", f"{wrong} against float64"
                        continue
                    title = f"{group} {case}: {peer} {name}"
                    ready.append((rows[-1], Variant(title, self._calls(problem, peer, name))))
        options = self.options
        outcomes = measure(
            [x for _, x in ready],
            self.timer,
            rounds=options.rounds,
            seconds=options.seconds,
            warmup=options.seconds / 2,
        )
        for (row, variant), outcome in zip(ready, outcomes):
            self.samples[variant.title] = [round(x, 6) for x in outcome.samples]
            row.timed(outcome)
            if outcome.memory is not None:
                row.peak_bytes = outcome.memory.allocated
        compare(rows)
        self.rows += rows
        self.write()
        show(f"{group}, {cases[0].batch} x {cases[0].heads} heads, N={cases[0].rows}, D={cases[0].dim}", rows)

    @staticmethod
    def _calls(problem: Problem, peer: str, name: str) -> Callable[[int], Call]:
        call = problem.prepare(peer, name)
        return lambda _: call

    def _row(self, group: str, case: Case, peer: str, name: str) -> Row:
        row = Row(group, case.title, peer, name, case.base, *(getattr(case, x) for x in SHAPE))
        if peer == OURS:
            kernels = kernels_of(plan_of(case, case.dtype), name)
            row.tiles = share_of(case, kernels) if group == "rows" else None
            row.kernels = "; ".join(self.built.get(x.text, "") for x in kernels)
        return row

    def write(self) -> None:
        """CSV and JSON of all rows so far."""
        timings.write(self.options.base, FIELDS, self.rows, self.about, self.samples)


SHAPE = ("batch", "heads", "rows", "dim", "dtype")


def compare(rows: Sequence[Row]) -> None:
    """Times beside those of what a case is compared with, and of torch.compile."""
    times = {(row.case, row.peer, row.pass_): row.ms_median for row in rows if row.ms_median is not None}
    for row in rows:
        base, peer = (times.get(key) for key in ((row.base, OURS, row.pass_), (row.case, COMPILED, row.pass_)))
        if row.ms_median is None or row.peer != OURS:
            continue
        row.times = row.ms_median / base if base else None
        row.time_over_tiles = row.times / row.tiles if row.times and row.tiles else None
        row.compile_times = peer / row.ms_median if peer else None


COLUMNS = ("<case", "<peer", "<pass", "ms", "times", "tiles", "times/tiles", "compile", "extra MiB", "<kernels", "<")


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table of cases that go together."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale, form)

    report.table(
        title,
        COLUMNS,
        [
            (
                row.case,
                row.peer,
                row.pass_,
                number(row.ms_median, ".3f"),
                number(row.times, ".2f"),
                number(row.tiles, ".3f"),
                number(row.time_over_tiles, ".2f"),
                number(row.compile_times, ".2f"),
                number(row.peak_bytes, ".1f", 2.0**-20),
                row.kernels,
                row.note if row.status == "ok" else f"{row.status}: {row.note}",
            )
            for row in rows
        ],
    )
    sys.stdout.flush()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="users.py",
        description="Time what is computed around attention KL beside it: divergences, scores, padded rows, targets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(%(default)s)")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="cases (all)")
    parser.add_argument("--sizes", nargs="+", type=positive, metavar="N", help="rows and keys (4096 8192; CPU 256)")
    parser.add_argument("--heads", type=whole(1, 1024), default=8, metavar="H", help="of an entry (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seconds", type=seconds, help="of timing per variant (0.06; CPU 0.01)")
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each variant (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("streamkl-bench"), help="results (%(default)s)")
    parser.add_argument("--name", default="users", help="base name of the result files (%(default)s)")
    return parser


def run(options: argparse.Namespace) -> int:
    """Do it; the exit code.

    Raises:
        ValueError: results that cannot be written.
        StreamKLError: nothing to run on.
        ImportError: torch is missing.
    """
    sizes, dtype, time_of_each = DEFAULTS[options.device]
    options.sizes, options.seconds = options.sizes or sizes, options.seconds or time_of_each
    if options.device == "cuda" and frameworks.current_gpu() is None:
        raise StreamKLError("no usable GPU: python -m streamkl_cupy doctor says why; --device cpu tries the script")
    if options.device == "cuda" and (reason := torch_missing()):
        raise ImportError(f"{reason}; inputs and the peer are torch's: {install.command('torch')}")
    options.base = results(options.out, options.name)
    it = Bench(options, DeviceTimer() if options.device == "cuda" else HostTimer())
    importlib.import_module("torch._dynamo.config").recompile_limit = 256
    groups = [
        (group, cases) for group in options.groups for cases in cases_of(group, options.heads, sizes_of(options), dtype)
    ]
    if options.device == "cuda":
        it.compile([case for _, cases in groups for case in cases])
    for group, cases in groups:
        it.run(group, cases)
        it.timer.release()
    print(f"wrote {options.base}.csv, {options.base}.json")
    return 1 if any(row.status != "ok" for row in it.rows if row.peer == OURS) else 0


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Ascending."""
    return tuple(sorted(options.sizes))


def main() -> int:
    """Read the command line and run; errors are one line."""
    options = arguments().parse_args()
    return exit_code("users.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
