"""`python -m streamkl_cupy bench --shapes`: steps of trainers, the loss and both student gradients through torch's
autograd, beside attention steps of the student's shape.

Grouped and single key heads, short sequences in batches, few queries on a long cache, few keys under long rows.
Attention has its keys as they are, or repeated for all heads; ratios are to the fastest way. Times are of the device;
what a step costs the host is measured by itself on tiny inputs.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import api
from ..errors import StreamKLError
from ..testing.timing import Call, DeviceTimer, Timer, Variant, host_cost, measure
from . import environment, report, timings
from .cases import STUDENT, torch_missing
from .values import results


class Shape(NamedTuple):
    """A shape of a call."""

    name: str
    batch: int
    heads: int
    teacher_key_heads: int
    student_key_heads: int
    queries: int
    keys: int
    teacher_dim: int
    student_dim: int
    causal: bool

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of the four inputs."""
        b, h, m, n = self.batch, self.heads, self.queries, self.keys
        return (
            (b, h, m, self.teacher_dim),
            (b, self.teacher_key_heads, n, self.teacher_dim),
            (b, h, m, self.student_dim),
            (b, self.student_key_heads, n, self.student_dim),
        )


SHAPES = (
    Shape("ViT-L, batch of 64", 64, 16, 16, 16, 197, 197, 64, 64, False),
    Shape("Llama-8B, 2k", 4, 32, 8, 8, 2048, 2048, 128, 128, True),
    Shape("Llama-8B to a smaller one, 4k", 1, 32, 8, 4, 4096, 4096, 128, 64, True),
    Shape("one key head, 4k", 1, 32, 1, 1, 4096, 4096, 64, 64, True),
    Shape("64 keys, 64k rows", 1, 8, 8, 8, 65536, 64, 128, 128, False),
    Shape("512 rows on a cache of 64k", 1, 32, 8, 8, 512, 65536, 128, 128, True),
    Shape("16 rows on a cache of 256k", 1, 32, 8, 8, 16, 262144, 128, 128, False),
    Shape("MLA, 192 / 128, one key head", 2, 128, 1, 1, 2048, 2048, 192, 128, True),
    Shape("MLA, latent 576 / 128", 1, 16, 1, 16, 2048, 2048, 576, 128, True),
)
TINY = Shape("tiny", 1, 2, 2, 2, 128, 128, 64, 64, False)
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
OURS = ("forward", "backward", "deterministic backward", "step")
FIELDS = (
    *Shape._fields,
    *("dtype", "pass", "peer"),
    *timings.TIMED,
    *("card", "driver", "package", "torch", "cupy", "date"),
)
PEERS = ("streamkl", "eager", "compile", *BACKENDS)
Row = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    if reason := torch_missing():
        raise StreamKLError(f"--shapes times steps of torch's autograd on a GPU, and {reason}")
    asked = options.peers or PEERS
    if wrong := [x for x in asked if x not in PEERS]:
        raise ValueError(f"--peers {wrong[0]} has no step of these; allowed are {', '.join(PEERS)}")
    base = results(options.out, options.name)
    timer = DeviceTimer()
    about: dict[str, Any] = {
        "card": environment.card(),
        **environment.driver(),
        **environment.versions(),
        "date": environment.now(),
    }
    about["package"] = about.get("streamkl_cupy")
    rows: list[Row] = []
    for shape in SHAPES:
        rows += of_shape(shape, asked, timer, options)
        show(shape, [row for row in rows if row["name"] == shape.name])
        write(base, rows, about)
    host = host_rows(timer)
    rows += host
    for row in host:
        print(f"host, {row['peer']}: {row['ms_median'] * 1e3:.0f} us a step of tiny inputs")
    write(base, rows, about)
    print(f"wrote {base}.csv")
    return 1 if any(row["peer"] == "streamkl" and row["status"] != "ok" for row in rows) else 0


def of_shape(shape: Shape, peers: Sequence[str], timer: DeviceTimer, options: argparse.Namespace) -> list[Row]:
    """Time whatever takes part, in turns."""
    named: list[tuple[str, str, Callable[[], Call]]] = []
    if "streamkl" in peers:
        named += [(name, "streamkl", lambda name=name: ours(shape, name)) for name in OURS]  # type: ignore[misc]
    named += [("step", key, lambda key=key: plain(shape, key)) for key in ("eager", "compile") if key in peers]  # type: ignore[misc]
    for backend in (key for key in BACKENDS if key in peers):
        for grouped in (True, False) if shape.student_key_heads != shape.heads else (False,):
            title = f"{backend}, grouped" if grouped else backend
            named.append(("step", title, lambda b=backend, g=grouped: attention(shape, b, g)))  # type: ignore[misc]
    made: dict[int, Call] = {}

    def prepare(i: int) -> Call:
        return made.get(i) or made.setdefault(i, named[i][2]())

    variants = [Variant(f"{peer}: {name}", lambda _, i=i: prepare(i)) for i, (name, peer, _) in enumerate(named)]  # type: ignore[misc]
    with report.Progress(len(variants) * (options.rounds + 1), "turn") as bar:
        outcomes = measure(
            variants,
            timer,
            rounds=options.rounds,
            seconds=options.seconds or 0.1,
            before=lambda variant: bar.step(f"{shape.name}: {variant.title}"),
        )
    rows = []
    for (name, peer, _), outcome in zip(named, outcomes):
        timed = timings.Timed()
        timed.timed(outcome)
        rows.append(_row(shape, name, peer, timed))
    return rows


def _inputs(shape: Shape) -> list[Any]:
    torch = importlib.import_module("torch")
    return [torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in shape.shapes]


def _stepped(function: Callable[[], Any], leaves: Sequence[Any]) -> Call:
    """A forward and backward of a number, whose gradients take no memory of the last one's."""

    def step() -> None:
        for x in leaves:
            x.grad = None
        function().backward()

    return step


def ours(shape: Shape, name: str) -> Call:
    """A pass of this package."""
    x = _inputs(shape)
    if name == "step":
        leaves = [t.requires_grad_() for t in x[2:]]
        return _stepped(lambda: api.attention_kl(*x, causal=shape.causal, reduction="sum"), leaves)
    if name == "forward":
        return lambda: api.attention_kl_forward(*x, causal=shape.causal)
    rows = api.attention_kl_forward(*x, causal=shape.causal)
    deterministic = name != "backward"
    return lambda: api.attention_kl_backward(
        rows.kl, *x, saved=rows, wrt=STUDENT, causal=shape.causal, deterministic=deterministic
    )


def plain(shape: Shape, key: str) -> Call:
    """A step in plain torch, on logits written out; with torch.compile, compiled for the shape."""
    torch = importlib.import_module("torch")
    x = _inputs(shape)
    leaves = [t.requires_grad_() for t in x[2:]]
    future = None
    if shape.causal:
        ones = torch.ones(shape.queries, shape.keys, dtype=torch.bool, device="cuda")
        future = ones.triu(shape.keys - shape.queries + 1)

    def loss(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any) -> Any:
        logs = []
        for q, k in ((teacher_q, teacher_k), (student_q, student_k)):
            k = k.repeat_interleave(shape.heads // k.shape[1], 1) if k.shape[1] != shape.heads else k
            logits = (q @ k.mT).float() * q.shape[-1] ** -0.5
            if future is not None:
                logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)
            logs.append(logits.log_softmax(-1))
        log_p, log_q = logs
        return torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)

    function = loss
    if key == "compile":
        torch.compiler.reset()
        function = torch.compile(loss, dynamic=False, fullgraph=True)
    return _stepped(lambda: function(*x), leaves)


def attention(shape: Shape, backend: str, grouped: bool) -> Call:
    """An attention step of the student's shape, for all three gradients; `grouped` keys are read once for a group."""
    torch = importlib.import_module("torch")
    choose = importlib.import_module("torch.nn.attention")
    heads = shape.student_key_heads if grouped else shape.heads
    (b, h, m, d), n = shape.shapes[2], shape.keys
    made = [(b, h, m, d), (b, heads, n, d), (b, heads, n, d)]
    leaves = [torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in made]

    def function() -> Any:
        with choose.sdpa_kernel(getattr(choose.SDPBackend, BACKENDS[backend])):
            # torch aligns causal masks to the first key, so rows on a cache see all of it.
            return torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=shape.causal and m == n, enable_gqa=grouped
            ).sum()

    return _stepped(function, leaves)


def host_rows(timer: Timer) -> list[Row]:
    """What steps of tiny inputs cost the host."""
    rows = []
    for peer, call in (("streamkl", ours(TINY, "step")), ("attention", attention(TINY, "flash", False))):
        timing = host_cost(call, timer)
        timed = timings.Timed()
        timed.took(timing)
        rows.append(_row(TINY, "host", peer, timed))
    return rows


def _row(shape: Shape, name: str, peer: str, timed: timings.Timed) -> Row:
    return {**shape._asdict(), "dtype": "bfloat16", "pass": name, "peer": peer, **timed.as_dict()}


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest attention step."""
    steps = [x for x in rows if x["pass"] == "step" and x["peer"].partition(",")[0] in BACKENDS and x.get("ms_median")]
    return min(steps, key=lambda row: float(row["ms_median"]), default=None)


def show(shape: Shape, rows: Sequence[Row]) -> None:
    """Print the table of one shape."""
    best = fastest(rows)
    base = math.nan if best is None else best["ms_median"]
    cells = [
        (
            row["pass"],
            row["peer"],
            f"{row['ms_median']:.3f}" if row.get("ms_median") else row["status"],
            f"{row['ms_median'] / base:.2f}" if row.get("ms_median") and row["pass"] == "step" else "",
        )
        for row in rows
    ]
    title = f"{shape.name}: B={shape.batch} H={shape.heads} on {shape.teacher_key_heads} / {shape.student_key_heads}"
    title += f", {shape.queries} x {shape.keys}, D={shape.teacher_dim}/{shape.student_dim}"
    report.table(title + (", causal" if shape.causal else ""), ("<pass", "<", "ms", "of attention's"), cells)
    print()


def write(base: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """The CSV of all rows so far."""
    stamp = {name: about.get(name) for name in FIELDS[-6:]}
    rounded = [timings.rounded(row) for row in rows]
    report.write_csv(base.with_name(base.name + ".csv"), FIELDS, [{**row, **stamp} for row in rounded])
