"""KL on the CPU in turns with what else computes it there: torch, JAX and NumPy with the matrices written out.

Everybody gets the same numbers and as many threads; torch.compile needs a C++ compiler. Where neighbours
are busy, times drift by more than they differ, so only those of one run are to be compared, by their medians.

    OMP_NUM_THREADS=2 python examples/benchmarks/cpu.py --out examples/benchmarks --name cpu
    OMP_NUM_THREADS=2 python examples/benchmarks/cpu.py --sizes 2048 --dims 64 128 --causal --peers jax compile
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamkl_cupy.cli import bench, exit_code, report
from streamkl_cupy.cli.cases import Case, inputs
from streamkl_cupy.cli.peers import Materialising, Ours, Peer, TorchCompile, TorchEager
from streamkl_cupy.cli.values import positive, results, seconds
from streamkl_cupy.testing.timing import Call, HostTimer, Variant, measure

PASSES = ("forward", "backward", "value_and_grad")
FIELDS = (
    "pass", "peer", "title", "heads", "queries", "dim", "causal", "status", "note",
    "ms_p20", "ms_median", "ms_p80", "samples", "card", "threads", "package", "numpy", "torch", "jax", "date",
)  # fmt: skip
HIDDEN = -1e30
"""A logit of what is hidden: a finite one, as it is written without thinking of rows that see nothing."""


class Jax(Peer):
    """The dense formula under jax.jit. Arrays have one axis of heads: with two XLA takes five times as long."""

    key = "jax"
    title = "JAX jit"
    devices = ("cpu",)

    def missing(self, case: Case) -> str:
        return _missing("jax")

    def prepare(self, case: Case, name: str, arrays: Sequence[Any]) -> Call:
        jax = importlib.import_module("jax")
        given = [jax.numpy.asarray(x.reshape(-1, *x.shape[2:])) for x in arrays]
        forward, both, residuals, apply = _jitted(case.queries, case.causal)
        if name == "forward":
            return lambda: forward(*given).block_until_ready()
        if name == "value_and_grad":
            return lambda: jax.block_until_ready(both(*given))
        kl, back = jax.block_until_ready(residuals(*given))
        return lambda: jax.block_until_ready(apply(back, kl))


@functools.cache
def _jitted(rows: int, causal: bool) -> tuple[Any, Any, Any, Any]:
    jax = importlib.import_module("jax")
    xp = jax.numpy

    def log_softmax(q: Any, k: Any) -> Any:
        logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            logits = xp.where(xp.tril(xp.ones((rows, rows), bool)), logits, HIDDEN)
        return jax.nn.log_softmax(logits, -1)

    def kl(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any) -> Any:
        log_p, log_q = log_softmax(teacher_q, teacher_k), log_softmax(student_q, student_k)
        return (xp.exp(log_p) * (log_p - log_q)).sum(-1)

    def residuals(teacher_q: Any, teacher_k: Any, *student: Any) -> Any:
        return jax.vjp(lambda *x: kl(teacher_q, teacher_k, *x), *student)

    loss = jax.value_and_grad(lambda *x: kl(*x).mean(), argnums=(2, 3))
    return jax.jit(kl), jax.jit(loss), jax.jit(residuals), jax.jit(lambda back, grad: back(grad))


class Eager(TorchEager):
    """Plain torch on the CPU."""

    def missing(self, case: Case) -> str:
        return _missing("torch")


class Compiled(TorchCompile):
    """The same compiled for the CPU."""

    def missing(self, case: Case) -> str:
        return _missing("torch")


def _missing(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


PEERS = {
    "streamkl": Ours,
    "jax": Jax,
    "compile": Compiled,
    "eager": Eager,
    "numpy": lambda: Materialising("numpy"),
}


def arguments() -> argparse.ArgumentParser:
    """The options of this script."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="example: OMP_NUM_THREADS=2 python examples/benchmarks/cpu.py --sizes 2048 --peers jax compile",
    )
    parser.add_argument("--sizes", nargs="+", type=positive, default=[1024, 2048, 4096], metavar="N")
    parser.add_argument("--dims", nargs="+", type=positive, default=[64], metavar="D")
    parser.add_argument("--heads", type=positive, default=8, metavar="H")
    parser.add_argument("--causal", action="store_true", help="row i sees keys up to its own position")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--peers", nargs="+", choices=[x for x in PEERS if x != "streamkl"], help="default: all")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="of timing per peer and pass (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each peer (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("streamkl-bench"), metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--name", default="cpu", help="base name of the result file (%(default)s)")
    return parser


def timed(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one problem, all peers in turns."""
    arrays = inputs(case, "numpy")
    if wrong := bench.verify(case, arrays):
        raise ValueError(f"{case}: {wrong}")
    chosen = ["streamkl", *(options.peers or [x for x in PEERS if x != "streamkl"])]
    rows, variants, of_variants = [], [], []
    for peer in [PEERS[key]() for key in chosen]:
        given = arrays
        missing = peer.missing(case)
        if isinstance(peer, TorchEager) and not missing:
            given = [importlib.import_module("torch").from_numpy(x) for x in arrays]
        for name in options.passes:
            row = {"pass": name, "peer": peer.key, "title": peer.title, "heads": case.heads, "queries": case.queries}
            row |= {"dim": case.student_dim, "causal": case.causal, "status": "missing" if missing else "ok"}
            rows.append({**row, "note": missing})
            if not missing:
                of_variants.append(rows[-1])
                variants.append(Variant(f"{peer.title}: {name}", functools.partial(_prepared, peer, case, name, given)))
    for variant in variants:
        # What is compiled is compiled here: where memory is traced that takes minutes. What fails is noted there.
        with contextlib.suppress(Exception):
            variant.prepare(0)()
    with report.Progress(len(variants) * (options.rounds + 1), "turn") as bar:
        outcomes = measure(
            variants,
            HostTimer(),
            rounds=options.rounds,
            seconds=options.seconds,
            before=lambda variant: bar.step(f"N={case.keys} {variant.title}"),
        )
    for row, outcome in zip(of_variants, outcomes, strict=True):
        row["status"], row["note"] = outcome.status, outcome.error
        if outcome.timing is not None:
            times = (float(f"{x:.6g}") for x in outcome.timing[:3])
            row["ms_p20"], row["ms_median"], row["ms_p80"] = times
            row["samples"] = outcome.timing.samples
    return rows


def _prepared(peer: Peer, case: Case, name: str, given: Sequence[Any], index: int) -> Call:
    return peer.prepare(case, name, given)


def run(options: argparse.Namespace) -> int:
    """Carry the script out; the exit code."""
    base = results(options.out, options.name)
    about = bench.environment_of("cpu", "numpy")
    stamp = {name: about.get(name, "") for name in ("card", "threads", "numpy", "torch", "jax", "date")}
    stamp["package"] = about.get("streamkl_cupy", "")
    rows: list[dict[str, Any]] = []
    for dim in options.dims:
        for n in options.sizes:
            case = Case("cpu", 1, options.heads, n, n, dim, dim, "float32", options.causal)
            found = timed(case, options)
            rows += [{**dict.fromkeys(FIELDS, ""), **row, **stamp} for row in found]
            ours = {row["pass"]: row.get("ms_median", math.nan) for row in found if row["peer"] == "streamkl"}
            body = [
                (row["pass"], row["title"], f"{row['ms_median']:.1f}", f"{row['ms_median'] / ours[row['pass']]:.2f}x")
                if row.get("ms_median")
                else (row["pass"], row["title"], row["status"], row["note"])
                for row in found
            ]
            report.table(str(case), ("<pass", "<", "ms", "of ours"), body)
            report.write_csv(base.with_name(base.name + ".csv"), FIELDS, rows)
    return 0 if all(row["status"] == "ok" for row in rows if row["peer"] == "streamkl") else 1


def main() -> int:
    """Read the command line and run; errors are one line."""
    options = arguments().parse_args()
    return exit_code("cpu.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
