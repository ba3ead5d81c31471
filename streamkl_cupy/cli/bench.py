"""`python -m streamkl_cupy bench`: time and memory of this package and of its peers, in one run on this machine."""

from __future__ import annotations

import argparse
import importlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import frameworks
from ..api import attention_kl_forward, attention_kl_value_and_grad
from ..testing.timing import DeviceTimer, HostTimer, Outcome, Timer, Variant, host_cost, measure
from . import context_parallel, environment, indexer, report, shapes, sparse_attention, timings
from .cases import PASSES, Case, home_of, inputs, to_float64, torch_missing
from .peers import KEYS, Ours, Peer, peers
from .values import dims, positive, results, seconds

HELP = "time this package against what is installed, with the memory each needs"
EPILOG = """\
examples:
  python -m streamkl_cupy bench                                  the default sizes, about two minutes on an H100
  python -m streamkl_cupy bench --sizes 4k 16k 64k --dims 64 --causal --peers streamkl cudnn
  python -m streamkl_cupy bench --published --out examples/benchmarks --name h100
  python -m streamkl_cupy bench --shapes --out examples/benchmarks --name h200_shapes
  python -m streamkl_cupy bench --device cpu --plot
  python -m streamkl_cupy bench --op sparse_attention --sizes 64k --patterns 8:16 8:32
  python -m streamkl_cupy bench --op sparse_attention --decode --sizes 128k --batch 16 --heads 32 --key-heads 8
  python -m streamkl_cupy bench --op indexer_kl --sizes 4k 8k --dims 128 192/128 --index-heads 8 64
  python -m streamkl_cupy bench --op context_parallel            sharded calls on two GPUs beside one, in one table
  python -m streamkl_cupy bench --yardstick my_kernels.py        a module with forward and backward joins in

passes
  forward          KL and log-sum-exps of every row
  backward         student gradients from a saved forward; its memory includes what was saved
  value_and_grad   a loss and its student gradients
  all_gradients    like backward, gradients of all four inputs

Work counted for KL: forward 2 BHMN (Dt + Ds), backward 2 BHMN (Dt + 3 Ds), all gradients 6 BHMN (Dt + Ds), value and
grad the sum of the first two; for attention 4 BHMND and 2.5 times that; half of it with --causal. An implementation
that recomputes gets no credit for that. Attention is another operation: a yardstick of what the GPU can do at this D.

"than ours" sets the median beside that of this package in the same pass: 2.00x slower takes twice its time.

Memory is the peak beyond the inputs: "extra" by the frameworks' allocators, "driver" as missing from the GPU's free
memory afterwards, which includes what allocators keep. Times are device time; what a forward call costs the host is
measured by itself, with goals of 40 us for torch tensors and 30 us for CuPy arrays.

Exit code: 0 this package ran everywhere, 1 it failed somewhere or gave a wrong number, 2 wrong arguments.
"""

HOST_GOALS_US = {"torch": 40.0, "cupy": 30.0}
MATMUL = 8192


@dataclass
class Row(timings.Timed):
    """One line of the CSV."""

    pass_: str
    peer: str
    title: str
    device: str
    batch: int | None = None
    heads: int | None = None
    queries: int | None = None
    keys: int | None = None
    teacher_dim: int | None = None
    student_dim: int | None = None
    dtype: str = ""
    causal: bool | None = None
    tflops: float | None = None
    share_of_matmul: float | None = None
    input_bytes: int | None = None
    peak_bytes: int | None = None
    driver_bytes: int | None = None


STAMP = ("card", "driver", "package", "torch", "cupy", "numpy", "date")
FIELDS = timings.columns(Row, stamp=STAMP)

# Batch x heads, N, (D_t, D_s), causal: the cases of the published table, losing ones included.
PUBLISHED = (
    (16, 4096, (64, 64), False),
    (16, 4096, (128, 128), False),
    (16, 4096, (128, 128), True),
    (8, 8192, (64, 64), False),
    (8, 8192, (128, 128), False),
    (8, 8192, (128, 128), True),
    (4, 16384, (128, 64), False),
    (16, 16384, (64, 64), False),
    (16, 16384, (128, 128), False),
    (16, 16384, (128, 128), True),
)
# Heads, head dims, sizes, type, seconds per variant.
DEFAULTS: dict[str, Any] = {
    "cuda": (8, (128, 128), (4096, 8192, 16384), "bfloat16", 0.2),
    "cpu": (1, (64, 64), (1024, 2048, 4096, 16384), "float32", 1.0),
}
# On the CPU, what is larger than this is there for the memory: one pass of it, or the run would never end.
CPU_ALL_PASSES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--op",
        choices=["attention_kl", "sparse_attention", "indexer_kl", "context_parallel"],
        default="attention_kl",
        help="what is timed (%(default)s)",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="GPUs, of context_parallel (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU where one is usable, else the CPU")
    parser.add_argument("--sizes", nargs="+", type=positive, metavar="N", help="keys and query rows; 4096 or 4k")
    parser.add_argument("--queries", type=positive, metavar="M", help="query rows, where not N")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="batch entries (%(default)s)")
    parser.add_argument("--heads", type=positive, metavar="H", help="heads (8 on a GPU, 1 on the CPU)")
    parser.add_argument("--dims", nargs="+", type=dims, metavar="D", help="head dims, 128 or teacher/student 128/64")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default bfloat16; float32 on the CPU"
    )
    parser.add_argument("--causal", action="store_true", help="row i sees keys up to its own position")
    parser.add_argument("--published", action="store_true", help="the cases of the published table instead")
    parser.add_argument(
        "--shapes", action="store_true", help="steps of shapes that trainers have, beside attention steps, instead"
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, help="default: all")
    parser.add_argument("--peers", nargs="+", choices=KEYS, help="default: all that are installed")
    parser.add_argument("--yardstick", type=Path, metavar="FILE.py", help="a module with forward and backward to join")
    parser.add_argument("--seconds", type=seconds, help="of timing per peer and pass (0.2 on a GPU, 1 on the CPU)")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each peer (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("streamkl-bench"), help="results (%(default)s)")
    parser.add_argument("--name", default="bench", help="base name of the result files (%(default)s)")
    parser.add_argument("--plot", action="store_true", help="also draw time and memory against N, as a PNG")
    sparse_attention.add_arguments(parser)
    indexer.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    if options.op == "context_parallel":
        return context_parallel.run(options)
    if options.op == "sparse_attention":
        return sparse_attention.run(options)
    if options.op == "indexer_kl":
        return indexer.run(options)
    if options.shapes:
        return shapes.run(options)
    if options.plot:
        report.require_matplotlib()
    device = options.device or ("cuda" if frameworks.current_gpu() is not None else "cpu")
    cases = cases_of(options, device)
    timer: Timer = DeviceTimer() if device == "cuda" else HostTimer()
    home = home_of(device)
    joining = peers(options.peers or KEYS, options.yardstick)
    contestants = [p for p in joining if device in p.devices]
    asked = {*(options.peers or ()), *(p.key for p in joining if p.key not in KEYS)}
    if elsewhere := sorted(asked & {p.key for p in joining if device not in p.devices}):
        raise ValueError(f"on device {device} these cannot run: {', '.join(elsewhere)}; leave them out")
    base = results(options.out, options.name)
    about = environment_of(device, home)
    print(f"{about['card']}, driver {about.get('driver', '-')}, inputs made by {home}\n")

    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    for case in cases:
        found = run_case(case, home, contestants, timer, options, samples)
        rows += found
        show(case, found)
        write(base, rows, about, samples)
    if device == "cuda":
        rows += host_rows(timer)
        show_host(rows)
        about["clocks under load"] = environment.clocks(_matmul(home)[1])
    write(base, rows, about, samples)
    written = [f"{base}{suffix}" for suffix in (".csv", ".json")]
    if options.plot:
        path = Path(f"{base}.png")
        drawn = [row.as_dict() for row in rows if _configuration(row) == _configuration(rows[0])]
        report.plot(path, drawn, f"{about['card']}: {_caption(cases[0])}")
        written.append(str(path))
    print(f"wrote {', '.join(written)}")
    return 1 if any(row.peer == "streamkl" and row.status not in ("ok", "missing") for row in rows) else 0


def cases_of(options: argparse.Namespace, device: str) -> list[Case]:
    """The problems that the options ask for."""
    heads, pair, sizes, dtype, _ = DEFAULTS[device]
    dtype = options.dtype or dtype
    if options.published:
        given = [f"--{name}" for name in ("sizes", "queries", "heads", "dims") if getattr(options, name)]
        if given or options.causal:
            raise ValueError(f"--published has its own cases; leave out {', '.join(given or ['--causal'])}")
        return [
            Case(device, options.batch, heads, n, n, *pair, dtype, causal, tuple(options.passes or PASSES))
            for heads, n, pair, causal in PUBLISHED
        ]
    cases = []
    for d_t, d_s in options.dims or [pair]:
        for n in options.sizes or sizes:
            m = options.queries or n
            if options.causal and m > n:
                raise ValueError(f"--queries {m} --sizes {n} --causal: the first rows would see no key; give M <= N")
            passes = options.passes or (("forward",) if device == "cpu" and n > CPU_ALL_PASSES else PASSES)
            cases.append(
                Case(
                    device, options.batch, options.heads or heads, m, n, d_t, d_s, dtype, options.causal, tuple(passes)
                )
            )
    return cases


def run_case(
    case: Case,
    home: str,
    contestants: Sequence[Peer],
    timer: Timer,
    options: argparse.Namespace,
    samples: dict[str, list[float]],
) -> list[Row]:
    """Measure all peers on one problem, in turns."""
    count = max(1, min(32, math.ceil(timer.cold_bytes / max(case.input_bytes, 1)) + 1)) if timer.cold_bytes else 1
    sets = [inputs(case, home) for _ in range(count)]
    wrong = verify(case, sets[0]) if any(isinstance(p, Ours) for p in contestants) else ""

    rows: list[Row] = []
    variants: list[Variant] = []
    variant_rows: list[tuple[Row, float]] = []
    for peer in contestants:
        reason = peer.missing(case)
        for name in case.passes:
            if name not in peer.passes:
                continue
            row = _row(case, name, peer)
            rows.append(row)
            if reason:
                row.status, row.note = "missing", reason
            elif too_large := _too_large(peer.needs_bytes(case, name)):
                row.status, row.note = "out of memory", too_large
            else:
                variants.append(_variant(peer, case, name, sets))
                variant_rows.append((row, peer.flops(case, name)))
    if case.device == "cuda":
        label, call = _matmul(home)
        row = Row("matmul", "matmul", f"{label} {MATMUL}^3 product", "cuda")
        rows.append(row)
        variants.append(Variant(row.title, lambda _: call))
        variant_rows.append((row, 2.0 * MATMUL**3))

    with report.Progress(len(variants) * (options.rounds + 1), "turn") as bar:
        outcomes = measure(
            variants,
            timer,
            sets=count,
            rounds=options.rounds,
            seconds=options.seconds or DEFAULTS[case.device][-1],
            before=lambda variant: bar.step(f"N={case.keys} {variant.title}"),
        )
    for (row, flops), outcome in zip(variant_rows, outcomes):
        _fill(row, outcome, flops)
        samples[f"{case} {row.pass_} {row.peer}"] = [round(x, 6) for x in outcome.samples]
        if wrong and row.peer == "streamkl" and row.status == "ok":
            row.status, row.note = "wrong", wrong
    roof = next((row.tflops for row in rows if row.peer == "matmul"), None)
    for row in rows:
        if roof and row.tflops:
            row.share_of_matmul = row.tflops / roof
    return rows


def _configuration(row: Row) -> tuple[Any, ...]:
    """What must agree for points to share a curve."""
    return row.batch, row.heads, row.teacher_dim, row.student_dim, row.causal


def _caption(case: Case) -> str:
    rows = "M = N" if case.queries == case.keys else f"M = {case.queries}"
    return re.sub(r" M=\d+ N=\d+", "", str(case)) + f", {rows}"


def _row(case: Case, name: str, peer: Peer) -> Row:
    return Row(
        name,
        peer.key,
        peer.title,
        case.device,
        case.batch,
        case.heads,
        case.queries,
        case.keys,
        case.teacher_dim,
        case.student_dim,
        case.dtype,
        case.causal,
        input_bytes=case.input_bytes,
    )


def _variant(peer: Peer, case: Case, name: str, sets: Sequence[Any]) -> Variant:
    return Variant(f"{peer.title}: {name}", lambda index: peer.prepare(case, name, sets[index % len(sets)]))


def _fill(row: Row, outcome: Outcome, flops: float) -> None:
    row.timed(outcome)
    if outcome.error:
        return
    if outcome.timing is not None:
        row.tflops = flops / outcome.timing.median / 1e9
    if outcome.memory is not None:
        row.peak_bytes, row.driver_bytes = outcome.memory


def _too_large(needed: int) -> str:
    available = environment.available_bytes()
    if available is None or needed <= 0.8 * available:
        return ""
    return f"not run: it needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"


def verify(case: Case, given: Sequence[Any], rows: int = 4) -> str:
    """What is wrong with this package's answer in a few random rows, against float64; empty where nothing is.

    A benchmark that times a wrong result measures nothing.
    """
    rng = np.random.default_rng()
    b, h = int(rng.integers(case.batch)), int(rng.integers(case.heads))
    at = sorted(int(i) for i in rng.integers(case.queries, size=rows))
    _, grads = attention_kl_value_and_grad(*given, causal=case.causal, reduction="sum")
    found = attention_kl_forward(*given, causal=case.causal)
    kl = to_float64(found.kl[b, h])[at]
    dq = to_float64(grads.student_q[b, h])[at]
    logs = []
    for q, k in (given[:2], given[2:]):
        logits = to_float64(q[b, h])[at] @ to_float64(k[b, h]).T * q.shape[-1] ** -0.5
        if case.causal:
            last = np.asarray(at)[:, None] + case.keys - case.queries
            logits = np.where(np.arange(case.keys) <= last, logits, -np.inf)
        logits -= logits.max(-1, keepdims=True)
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    log_p, log_q = logs
    p, q_ = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):
        want = np.where(p > 0, p * (log_p - log_q), 0).sum(-1)
    want_dq = (q_ - p) @ to_float64(given[3][b, h]) * case.student_dim**-0.5
    error = float(np.abs(kl - want).max() / (1 + want.max()))
    error_dq = float(np.linalg.norm(dq - want_dq)) / max(float(np.linalg.norm(want_dq)), 1e-300)
    if not error < 1e-5:
        return f"KL of head {h}, rows {at} is off by {error:.1e} of 1 + KL against float64"
    if not error_dq < 1e-2:
        return f"student_q gradient of head {h}, rows {at} is off by {error_dq:.1e} (relative L2) against float64"
    return ""


def _matmul(home: str) -> tuple[str, Any]:
    """A large matrix product of the framework at hand: what this GPU can do at best."""
    shape = (MATMUL, MATMUL)
    if home == "torch":
        torch = importlib.import_module("torch")
        a, b = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
        return "bfloat16", lambda: a @ b
    cupy = importlib.import_module("cupy")
    x, y = (cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(2))
    return "float16", lambda: x @ y


def host_rows(timer: Timer) -> list[Row]:
    """What a forward call costs the host, beside the smallest operation of each framework."""
    rows = []
    case = Case("cuda", 1, 1, 64, 64, 64, 64, "float16", False, ("host",))
    for home in ("torch", "cupy"):
        reason = torch_missing() if home == "torch" else ""
        if reason:
            rows.append(
                Row("host", f"streamkl-{home}", f"streamkl_cupy, {home} arrays", "cuda", status="missing", note=reason)
            )
            continue
        given = inputs(case, home)
        one = given[0][0, 0, 0, :1]
        for key, title, call in (
            (f"streamkl-{home}", f"streamkl_cupy forward, {home} arrays", lambda x=given: attention_kl_forward(*x)),
            (home, f"{home}: add 1 to one element", lambda x=one: x + 1),
        ):
            timing = host_cost(call, timer)
            rows.append(Row("host", key, title, "cuda", note="per call, the device keeping up"))
            rows[-1].took(timing)
    return rows


def environment_of(device: str, home: str) -> dict[str, Any]:
    """Card, versions and date, for whoever reads the results later."""
    return {
        "card": environment.card() if device == "cuda" else environment.processor(),
        **(environment.driver() if device == "cuda" else {}),
        **environment.versions(),
        **(environment.cuda_versions() if device == "cuda" else {}),
        "inputs made by": home,
        "threads": environment.threads(),
        "command": environment.command(),
        "date": environment.now(),
    }


def write(base: Path, rows: Iterable[Row], about: dict[str, Any], samples: dict[str, list[float]]) -> None:
    """CSV and JSON; called after every problem, so that an interrupted run keeps what it has."""
    stamp = {name: about.get("streamkl_cupy" if name == "package" else name) for name in STAMP}
    timings.write(base, FIELDS, rows, about, samples, stamp)


COLUMNS = ("<pass", "<", "ms", "p20", "p80", "TFLOP/s", "of matmul", "than ours", "extra MiB", "driver MiB", "<")


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Cells of the table, peers of a pass together, this package first."""
    ours = {row.pass_: row.ms_median for row in rows if row.peer == "streamkl" and row.status == "ok"}
    order = list(dict.fromkeys(row.pass_ for row in rows if row.pass_ != "matmul"))
    ordered = sorted(rows, key=lambda row: order.index(row.pass_) if row.pass_ in order else len(order))
    cells: list[tuple[str, ...]] = []
    for row in ordered:
        base = ours.get(row.pass_)
        versus = row.ms_median / base if row.ms_median and base else None
        cells.append(
            (
                row.pass_.replace("_", " "),
                row.title,
                _number(row.ms_median, ".3f"),
                _number(row.ms_p20, ".3f"),
                _number(row.ms_p80, ".3f"),
                _number(row.tflops, ".1f" if row.device == "cuda" else ".3f"),
                _number(row.share_of_matmul, ".0%"),
                _than(versus) if row.peer != "streamkl" else "",
                _number(row.peak_bytes, ".1f", 2.0**-20),
                _number(row.driver_bytes, ".0f", 2.0**-20) if row.device == "cuda" else "",
                "" if row.status == "ok" else row.status,
            )
        )
    return cells


def notes(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, each reason of a peer once."""
    return list(dict.fromkeys(f"{row.title}, {row.status}: {row.note}" for row in rows if row.status != "ok"))


def _than(ratio: float | None) -> str:
    """How much longer or shorter than this package's something takes, in a word that says which it is."""
    if ratio is None:
        return ""
    more = f"{max(ratio, 1 / ratio):.2f}"
    return "equal" if more == "1.00" else f"{more}x {'slower' if ratio > 1 else 'faster'}"


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def show(case: Case, rows: Sequence[Row]) -> None:
    """Print the table of one problem."""
    cells = table_rows(rows)
    # On the CPU some columns have nothing to say.
    used = [i for i in range(len(COLUMNS)) if i == len(COLUMNS) - 1 or any(row[i] for row in cells)]
    report.table(
        f"{case}, inputs {case.input_bytes / 2**20:.1f} MiB",
        [COLUMNS[i] for i in used],
        [[row[i] for i in used] for row in cells],
    )
    print("\n".join([*notes(rows), ""]))


def show_host(rows: Sequence[Row]) -> None:
    """Print what a call costs the host."""
    cells = []
    for row in (row for row in rows if row.pass_ == "host"):
        goal = HOST_GOALS_US.get(row.peer.removeprefix("streamkl-")) if row.peer.startswith("streamkl") else None
        micro = [_number(x, ".1f", 1e3) for x in (row.ms_median, row.ms_p20, row.ms_p80)]
        cells.append((row.title, *micro, _number(goal, ".0f"), row.note if row.status != "ok" else ""))
    report.table("Host cost of a call", ("<", "us", "p20", "p80", "goal us", "<"), cells)
