"""The command line without a GPU: options, rows, files, tables, errors, exit codes; the peers against the package."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import frameworks
from streamkl_cupy.__main__ import COMMANDS, main
from streamkl_cupy.cli import bench, cases, catalogue, context_parallel, doctor, environment, indexer, peers, report
from streamkl_cupy.cli import compile as compile_command
from streamkl_cupy.cli.cases import PASSES, Case, attention_flops, kl_flops
from streamkl_cupy.compiler import nvrtc as compiler
from streamkl_cupy.compiler import settings
from streamkl_cupy.compiler.source import cuda_root
from streamkl_cupy.errors import CompilerError, install
from streamkl_cupy.testing import indexer_reference, timing

ROOT = Path(__file__).resolve().parents[1]
SMALL = Case("cpu", 1, 2, 40, 56, 32, 16, "float32", False)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


# --- the command line itself ---


def test_runs_as_a_module(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "streamkl_cupy", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, streamkl_cupy.__version__)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_has_examples_and_exit_codes(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m streamkl_cupy {command[0] if command else 'doctor'}" in text.partition("examples:")[2]
    assert not command or "Exit code: 0" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("bench", "--sizes", "many"), "'many' is no whole number from 1; write 4096 or 4k"),
        (("bench", "--sizes", "0"), "'0' is no whole number"),
        (("bench", "--dims", "64/x"), "'64/x' is no head dim; write 128, or teacher/student as 192/128"),
        (("bench", "--dims", "64/512"), "the teacher's may be 1 to 576, the student's 1 to 256"),
        (("bench", "--seconds", "-1"), "'-1' is no time in seconds"),
        (("bench", "--device", "tpu"), "invalid choice: 'tpu'"),
        (("compile", "--dtype", "int8"), "invalid choice: 'int8'"),
        ((), "required: COMMAND"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("bench", "--device", "cpu", "--published", "--sizes", "64"),
            "--published has its own cases; leave out --sizes",
        ),
        (
            ("bench", "--device", "cpu", "--causal", "--queries", "65", "--sizes", "64"),
            "the first rows would see no key",
        ),
        (("compile", "--jobs", "0"), "--jobs 0: give at least 1"),
        (("compile", "--arch", "sm_75"), "arch: 'sm_75' is not known"),
    ],
)
def test_bad_combinations(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_sizes_have_units() -> None:
    assert parsed("--sizes", "512", "4k", "1M").sizes == [512, 4096, 1 << 20]


# --- bench ---


def test_cases() -> None:
    found = bench.cases_of(parsed("--sizes", "64", "128", "--dims", "32", "64/16", "--heads", "3", "--causal"), "cuda")
    assert [(c.keys, c.teacher_dim, c.student_dim) for c in found] == [
        (64, 32, 32),
        (128, 32, 32),
        (64, 64, 16),
        (128, 64, 16),
    ]
    assert all(c.causal and c.heads == 3 and c.dtype == "bfloat16" and c.passes == PASSES for c in found)
    assert len(bench.cases_of(parsed("--published"), "cuda")) == len(bench.PUBLISHED)
    # The large ones on the CPU are there for the memory.
    assert [c.passes for c in bench.cases_of(parsed(), "cpu")][-1] == ("forward",)
    assert bench.cases_of(parsed("--passes", "backward"), "cpu")[-1].passes == ("backward",)


def test_counted_work() -> None:
    case = Case("cuda", 2, 3, 100, 200, 64, 32, "bfloat16", False)
    unit = 2.0 * 2 * 3 * 100 * 200
    assert kl_flops(case, "forward") == unit * (64 + 32)
    assert kl_flops(case, "backward") == unit * (64 + 3 * 32)
    assert kl_flops(case, "value_and_grad") == kl_flops(case, "forward") + kl_flops(case, "backward")
    # Both logits, and two products for each side.
    assert kl_flops(case, "all_gradients") == unit * 3 * (64 + 32)
    assert attention_flops(case, "backward") == 2.5 * attention_flops(case, "forward") == 2.5 * 2 * unit * 32
    assert kl_flops(case._replace(causal=True), "forward") == kl_flops(case, "forward") / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("peer", ["numpy", "eager", "yardstick"])
def test_peers_compute_the_same(peer: str, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is worth nothing if it is another number."""
    case = SMALL._replace(causal=causal)
    given: Any = cases.inputs(case, "numpy")
    monkeypatch.setattr(peers, "torch_missing", lambda: "")
    contestant: Any = peers.Materialising("numpy")
    if peer != "numpy":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in given]
        contestant = peers.TorchEager()
    if peer == "yardstick":
        contestant = peers.Yardstick(yardstick(tmp_path))
    ours = peers.Ours()
    for name in contestant.passes:
        got, want = (flat(p.prepare(case, name, given)()) for p in (contestant, ours))
        # The package's forward also gives log-sum-exps; the torch peers give gradients without the loss.
        want = want[:1] if name == "forward" else want[-len(got) :]
        got = got[: len(want)]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
def test_the_torch_peer_is_one_graph(causal: bool) -> None:
    torch = pytest.importorskip("torch")
    case = SMALL._replace(causal=causal)
    given = [torch.from_numpy(x) for x in cases.inputs(case, "numpy")]
    future = torch.ones(case.queries, case.keys, dtype=torch.bool).triu(17) if causal else None
    whole = torch.compile(peers.torch_divergence(), backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(whole(*given, future), peers.torch_divergence()(*given, future))


def flat(result: Any) -> list[np.ndarray]:
    if isinstance(result, tuple):
        return [array for part in result if part is not None for array in flat(part)]
    return [np.asarray(result.detach() if hasattr(result, "detach") else result)]


def yardstick(folder: Path) -> Path:
    """A module as `--yardstick` takes it, over the package itself."""
    path = folder / "other_kernels.py"
    path.write_text(
        "import streamkl_cupy as s\n"
        "def forward(a, b, c, d, st, ss, causal):\n"
        "    return tuple(s.attention_kl_forward(a, b, c, d, teacher_scale=st, student_scale=ss, causal=causal))\n"
        "def backward(a, b, c, d, g, lt, ls, st, ss, causal):\n"
        "    options = dict(teacher_scale=st, student_scale=ss, causal=causal)\n"
        "    grads = s.attention_kl_backward(g, a, b, c, d, teacher_lse=lt, student_lse=ls, **options)\n"
        "    return grads.student_q, grads.student_k\n"
    )
    return path


def test_attention_peer_runs_under_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "torch_missing", lambda: "")
    case = Case("cuda", 1, 2, 32, 32, 16, 16, "bfloat16", True)
    peer = peers.TorchAttention("math", "attention", "MATH")
    given = [torch.randn(shape).bfloat16() for shape in case.shapes]
    assert peer.missing(case) == ""
    assert peer.prepare(case, "forward", given)().shape == given[0].shape
    for name in ("backward", "value_and_grad"):
        assert [x.shape for x in peer.prepare(case, name, given)()] == [given[i].shape for i in (2, 3, 1)]
    assert peer.missing(case._replace(teacher_dim=32)) == "attention has one head dim"
    assert "16-bit" in peer.missing(case._replace(dtype="float32"))
    assert "causal" in peer.missing(case._replace(keys=64))


@pytest.mark.parametrize(
    "text, message", [(None, "give a Python file"), ("x = 1", "has no functions forward and backward")]
)
def test_a_yardstick_that_is_none(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "torch_missing", lambda: "")
    path = tmp_path / "none_such.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        peers.Yardstick(path)


def test_bench_on_the_cpu_writes_csv_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["bench", "--device", "cpu", "--sizes", "64", "128", "--seconds", "0.01", "--rounds", "2", "--plot"]
    assert main([*arguments, "--out", str(tmp_path / "new"), "--name", "here"]) == 0
    text = capsys.readouterr().out
    assert "NumPy materialising" in text
    assert "N=128" in text
    with (tmp_path / "new" / "here.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert tuple(reader.fieldnames or ()) == bench.FIELDS
    assert len(rows) == 2 * len(PASSES) * 2
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["ms_p20"]) <= float(row["ms_median"]) <= float(row["ms_p80"])
        assert int(row["samples"]) >= 1
        assert int(row["peak_bytes"]) > 0
        assert row["card"]
        assert row["package"] == streamkl_cupy.__version__
        assert row["date"].startswith("20")
        n = int(row["keys"])
        work = kl_flops(Case("cpu", 1, 1, n, n, 64, 64, "float32", False), row["pass"])
        assert float(row["tflops"]) == pytest.approx(work / float(row["ms_median"]) / 1e9, rel=1e-3)
    found = json.loads((tmp_path / "new" / "here.json").read_text())
    assert found["environment"]["numpy"] == np.__version__
    assert len(found["rows"]) == len(rows)
    assert all(len(x) >= 1 for x in found["samples_ms"].values())
    assert (tmp_path / "new" / "here.png").read_bytes()[:4] == b"\x89PNG"


def run_with(contestants: list[peers.Peer], case: Case = SMALL) -> list[bench.Row]:
    options = parsed("--seconds", "0.01", "--rounds", "1")
    return bench.run_case(case._replace(passes=("forward",)), "numpy", contestants, timing.HostTimer(), options, {})


class Broken(peers.Peer):
    key, title = "cupy", "broken"

    def __init__(self, error: Exception | None = None, missing: str = "", needs: int = 0) -> None:
        self.error, self.reason, self.needs = error, missing, needs

    def missing(self, case: Case) -> str:
        return self.reason

    def needs_bytes(self, case: Case, name: str) -> int:
        return self.needs

    def prepare(self, case: Case, name: str, arrays: Any) -> Any:
        def call() -> None:
            if self.error:
                raise self.error

        return call


def test_what_does_not_run_is_a_row_that_says_so() -> None:
    rows = run_with(
        [
            peers.Ours(),
            Broken(MemoryError("no room")),
            Broken(RuntimeError("CUDA error: out of memory\nmore words")),
            Broken(KeyError("nonsense")),
            Broken(missing="not here"),
            Broken(needs=1 << 60),
        ]
    )
    full = "out of memory"
    assert [row.status for row in rows] == ["ok", full, full, "failed", "missing", full]
    assert rows[2].note == "RuntimeError: CUDA error: out of memory"
    assert rows[4].note == "not here"
    if environment.available_bytes() is not None:
        assert rows[5].note.startswith("not run: it needs about 1073741824.0 GiB")
    assert all(row.ms_median is None for row in rows[1:])
    cells = bench.table_rows(rows)
    assert [row[-1] for row in cells] == ["", full, full, "failed", "missing", full]
    assert bench.notes(rows)[0] == "broken, out of memory: MemoryError: no room"
    assert bench.notes(rows)[3] == "broken, missing: not here"


def test_the_plot_says_which_points_are_missing_and_draws_on_equal_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [
        {"status": "ok", "keys": n, "peer": p, "title": p, "pass": q, "ms_median": n * f, "peak_bytes": n * f}
        for q, f in (("forward", 1), ("value_and_grad", 50))
        for p in ("streamkl", "numpy")
        for n in (64, 128, 256)
    ]
    rows[1] |= {"status": "out of memory", "ms_median": None, "peak_bytes": None}
    rows[3]["peak_bytes"] = 0
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    report.plot(tmp_path / "plot.png", rows, "a card")
    (figure,) = drawn
    words = " ".join(figure.get_suptitle().split())
    assert words.startswith("a card streamkl, out of memory: forward N = 128 numpy, no extra memory")
    assert words.endswith("forward N = 64")
    for line in (figure.axes[:2], figure.axes[2:4]):
        assert line[0].get_ylim() == line[1].get_ylim()
    (time,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "streamkl")
    assert [y == y for y in time.get_ydata()] == [True, False, True]
    monkeypatch.undo()
    pyplot.close(figure)


def test_the_ratio_says_which_way_is_better() -> None:
    def row(peer: str, ms: float | None, name: str = "forward") -> bench.Row:
        return bench.Row(name, peer, peer, "cpu", ms_median=ms)

    at = bench.COLUMNS.index("than ours")
    others = [row("a", 8.0), row("b", 1.0), row("c", 2.001), row("d", None), row("e", 1.0, "backward")]
    cells = bench.table_rows([row("streamkl", 2.0), *others])
    assert [line[at] for line in cells] == ["", "4.00x slower", "2.00x faster", "equal", "", ""]


def test_a_wrong_result_is_not_timed_as_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.attention_kl_forward
    assert run_with([peers.Ours()])[0].status == "ok"
    monkeypatch.setattr(
        bench, "attention_kl_forward", lambda *a, **o: right(*a, **o)._replace(kl=right(*a, **o).kl * 1.1)
    )
    row = run_with([peers.Ours()])[0]
    assert row.status == "wrong"
    assert "against float64" in row.note


@pytest.mark.parametrize("causal", [False, True])
def test_verification_is_right_about_right_results(causal: bool) -> None:
    case = SMALL._replace(causal=causal)
    for _ in range(5):
        assert bench.verify(case, cases.inputs(case, "numpy")) == ""


def test_bench_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--device", "cpu", "--plot"]) == 2
    assert install.command("bench") in capsys.readouterr().err


def test_bench_of_sparse_attention(tmp_path: Path) -> None:
    """The reduction is that of pairs, which the diagonal halves for patterns too."""
    pytest.importorskip("torch")
    small = ("--device", "cpu", "--seconds", "0.001", "--rounds", "1", "--heads", "2", "--dims", "8", "--block", "16")
    given = ["bench", "--op", "sparse_attention", *small, "--sizes", "128", "--out", str(tmp_path), "--name", "small"]
    assert main([*given, "--patterns", "2:2"]) == 0
    with (tmp_path / "small.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    passes = {(row["case"], row["peer"], row["pass"]) for row in rows}
    dense = {("dense", peer, name) for peer in ("streamkl", "torch") for name in ("forward", "backward")}
    assert passes == dense | {("2:2", "streamkl", name) for name in ("forward", "backward")}
    seen = np.tril(np.ones((2, 128, 128), bool))
    blocks = np.arange(128) // 16
    for head in range(2):
        seen[head] &= (blocks[:, None] - blocks < 2) | ((blocks - head) % 2 == 0)
    found = [float(row["reduction"]) for row in rows if row["case"] == "2:2"]
    assert found == [pytest.approx(128 * 129 / seen.sum(), abs=1e-3)] * 2
    assert all(float(row["ms"]) > 0 and row["status"] == "ok" for row in rows)
    assert main([*given, "--patterns", "2:2", "--decode", "--batch", "2"]) == 0
    with (tmp_path / "small.csv").open(newline="", encoding="utf-8") as file:
        assert {row["pass"] for row in csv.DictReader(file)} == {"forward"}


@pytest.mark.parametrize(
    "option", ["--patterns=8", "--patterns=0:4", "--block=20", "--key-heads=0", "--dense-heads=-1"]
)
def test_bench_of_patterns_that_are_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--op", "sparse_attention", option])
    assert left.value.code == 2
    name, _, value = option.partition("=")
    assert f"argument {name}: {value!r} is no" in capsys.readouterr().err


def test_bench_on_fewer_gpus_than_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["bench", "--op", "context_parallel", "--ranks", "64"]) == 2
    assert "--ranks 64, but there are" in capsys.readouterr().err


def test_bench_of_sharded_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank, in this process: every strategy, with and without masks, is compared with the plain call, and one
    that is further off than allowed is told by the exit code."""
    pytest.importorskip("torch")
    module = context_parallel
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda work, given, nprocs: work(0, *given))
    monkeypatch.setattr(module, "REPEATS", 1)
    monkeypatch.setattr(module, "LONG", 0.0)
    monkeypatch.setattr(module, "OFF", -1.0)
    monkeypatch.setattr(module._Rank, "_host", lambda self, call: 0.0)
    monkeypatch.setattr(module._Rank, "_attention", lambda self, shape: [])  # torch's, which no CPU runs
    given = ["bench", "--op", "context_parallel", "--device", "cpu", "--ranks", "1", "--sizes", "32", "--heads", "2"]
    assert main([*given, "--out", str(tmp_path)]) == 1
    with (tmp_path / "bench.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {(row["mask"], row["strategy"]) for row in rows if row["right"]}
    masks = ("", "offset", "window", "key mask", "packed", "pattern")
    assert found == {(mask, case.strategy) for mask in masks for case in module.CASES}
    assert {row["right"] for row in rows} == {"", "False"}
    assert {float(row["kl_off"]) for row in rows if row["right"]} == {0.0}
    assert all(float(row["forward_ms"]) > 0 and float(row["backward_times_one"]) > 0 for row in rows)


def test_bench_on_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if frameworks.current_gpu() is not None:
        pytest.skip("there is one")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "error:" in capsys.readouterr().err


# --- reporting ---

BODY = [("first", "1.0", "a [bold] note"), ("second, longer", "22.5", "")]


def test_table_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = io.StringIO()
    report.table("Title", ("<name", "ms", "<note"), BODY, out)
    assert out.getvalue().splitlines() == [
        "Title",
        "name              ms  note",
        "--------------  ----  -------------",
        "first            1.0  a [bold] note",
        "second, longer  22.5",
        "",
    ]


def test_table_rich() -> None:
    pytest.importorskip("rich")
    out = io.StringIO()
    report.table("Title", ("<name", "ms", "<note"), BODY, out)
    lines = out.getvalue().splitlines()
    assert lines[0].strip() == "Title"
    assert "│ second, longer │ 22.5 │" in out.getvalue()
    assert "a [bold] note" in out.getvalue()
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
def test_progress_without_a_bar_is_a_line_now_and_then(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    now = 100.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    with report.Progress(1000, "kernel") as bar:
        for i in range(1000):
            now += 0.1
            bar.step(f"number {i}" if i != 99 else "")
    lines = capsys.readouterr().err.splitlines()
    assert 15 <= len(lines) <= 20
    assert lines[0] in ("50 of 1000 kernels, 5 s: number 49", "51 of 1000 kernels, 5 s: number 50")
    seconds = [int(line.split()[4]) for line in lines]
    assert seconds == sorted(set(seconds))


def test_progress_of_a_short_run_is_silent_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Progress(2, "step") as bar:
        bar.step("one")
        bar.step()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("module", ["tqdm", "rich.console"])
def test_broken_ornaments_are_done_without(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / module.partition(".")[0]
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with report.Progress(1, "step") as bar:
        bar.step("one")
    report.table("Title", ("<name", "ms", "<note"), BODY)
    assert "second, longer" in capsys.readouterr().out


def test_what_the_output_cannot_spell_is_escaped(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    env[settings.CACHE_DIR] = str(tmp_path / "n\u00fc\u6838")
    command = [sys.executable, "-c", "import sys; sys.modules.update(torch=None, jax=None, cupy=None); "
               "from streamkl_cupy.__main__ import main; sys.exit(main(['doctor', '--cpu']))"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "n\\xfc\\u6838" in done.stdout


# --- timing ---


def test_timing_is_of_the_middle() -> None:
    assert timing.Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == pytest.approx((1.8, 3.0, 4.2, 5))


def test_variants_take_turns_and_sets_rotate() -> None:
    seen: list[tuple[str, int]] = []

    def variant(name: str) -> timing.Variant:
        return timing.Variant(name, lambda index: lambda: seen.append((name, index)))

    outcomes = timing.measure([variant("a"), variant("b")], timing.HostTimer(), sets=3, rounds=4, seconds=0.5, warmup=0)
    assert all(o.timing is not None and o.timing.samples >= 4 for o in outcomes)
    turns = [name for i, (name, _) in enumerate(seen) if i == 0 or seen[i - 1][0] != name]
    # Memory and warm-up of each, then turns in alternating order, where neighbours merge: a b, a b, b a, a b, b a.
    assert "".join(turns) == "abababa"
    assert {index for _, index in seen} == {0, 1, 2}


def test_an_error_keeps_no_array_alive() -> None:
    import weakref

    class Array:
        pass

    alive: list[weakref.ref[Array]] = []

    def prepare(index: int) -> timing.Call:
        held = Array()
        alive.append(weakref.ref(held))

        def call() -> None:
            raise MemoryError(f"{held} is too much")

        return call

    (outcome,) = timing.measure([timing.Variant("x", prepare)], timing.HostTimer(), warmup=0)
    assert outcome.status == "out of memory"
    assert [ref() for ref in alive] == [None]


def test_memory_counts_the_peak() -> None:
    def call() -> Any:
        large = np.ones(1 << 20)
        return large[:10].copy()

    found = timing.HostTimer().memory(call)
    assert 8 << 20 <= found.allocated < 9 << 20


def test_host_cost() -> None:
    found = timing.host_cost(lambda: None, timing.HostTimer(), batch=10, batches=3)
    assert found.samples == 3
    assert 0 <= found.median < 1


# --- doctor ---


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor frameworks with processes of their own, which other tests start."""
    monkeypatch.setattr(doctor, "devices", lambda checks: [])
    monkeypatch.setattr(doctor, "in_a_process", lambda name, devices: [doctor.Check(f"{name} on cpu", "ok", "")])


def test_doctor_without_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "numpy on cpu" in text
    assert "Not ready: no GPU" in text
    assert main(["doctor", "--cpu"]) == 0
    assert "Ready, on the CPU." in capsys.readouterr().out


def test_doctor_with_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"index": 0, "name": "a GPU", "capability": "9.0", "family": "some"}
    monkeypatch.setattr(doctor, "devices", lambda checks: [device])
    answers = [doctor.Check("numpy on cpu", "ok", ""), doctor.Check("cupy on cuda", "ok", "right")]
    monkeypatch.setattr(doctor, "computations", lambda gpu, versions: answers)
    assert main(["doctor"]) == 0
    assert "a GPU" in (text := capsys.readouterr().out)
    assert "Ready." in text
    answers[1] = doctor.Check("cupy on cuda", "broken", "ArithmeticError: off by 1", "do this")
    assert main(["doctor"]) == 1
    assert "cupy on cuda: do this" in capsys.readouterr().out


def test_doctor_json(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    assert main(["doctor", "--cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["versions"]["numpy"] == np.__version__
    assert found["cache"] == {"folder": str(cache), "usable": True, "problem": "", "kernels": 0, "mib": 0.0}
    assert {"name", "status", "detail", "fix"} == set(found["checks"][0])
    assert all(check["fix"] for check in found["checks"] if check["status"] != "ok")


def test_doctor_finds_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    right = doctor.attention_kl_value_and_grad

    def wrong(*given: Any, **options: Any) -> Any:
        value, grads = right(*given, **options)
        return value, grads._replace(student_k=grads.student_k * np.float16(1.01))

    monkeypatch.setattr(doctor, "attention_kl_value_and_grad", wrong)
    (check, *_) = doctor.computations(False, {})
    assert check.status == "broken"
    assert check.detail.startswith("ArithmeticError: student_k is off by")


def test_doctor_finds_two_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cupy_wheels", lambda: ["cupy-cuda12x 14.0", "cupy-cuda13x 14.0"])
    check = doctor.wheels_and_driver({"driver": "580", "driver_cuda": "12.8"})[0]
    assert check.status == "broken"
    assert check.fix == f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {install.command('cuda12')}"


def test_doctor_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cupy_wheels", list)
    check = doctor.wheels_and_driver({"driver": "580", "driver_cuda": "13.0"})[0]
    assert (check.status, check.fix) == ("missing", install.command("cuda13"))


def test_doctor_and_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "file"))
    (check,) = doctor.cache_checks(doctor.cache())
    assert check.status == "broken"
    assert settings.CACHE_DIR in check.fix


def test_doctor_says_whom_the_cache_is_taken_from(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CACHE_TRUST, raising=False)
    (check,) = doctor.cache_checks(doctor.cache())
    assert (check.status, check.fix) == ("ok", "")
    assert check.detail.endswith("from this user and root alone")
    if hasattr(os, "geteuid"):
        cache.chmod(0o777)
        (check,) = doctor.cache_checks(doctor.cache())
        assert check.status == "broken"
        assert "chmod go-w" in check.fix
        assert f"{settings.CACHE_TRUST}=1" in check.fix
    monkeypatch.setenv(settings.CACHE_TRUST, "1")
    (check,) = doctor.cache_checks(doctor.cache())
    assert check.status == "ok"
    assert check.detail.endswith(f"from everybody who can write there, by {settings.CACHE_TRUST}")


def test_doctor_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cache_dir", lambda: None)
    (check,) = doctor.cache_checks(doctor.cache())
    assert (check.status, settings.CACHE_DIR in check.fix) == ("broken", True)


# What a broken installation does, and what is said of it.
FAULTS = {
    "import error": ("raise ImportError('libcudart.so.99: cannot open')", "ImportError: libcudart.so.99: cannot open"),
    "library": ("raise OSError('cannot load libsomething')", "OSError: cannot load libsomething"),
    "runtime": ("raise RuntimeError('cuInit failed\\nin line 2\\nin line 3')", "RuntimeError: cuInit failed in line 2"),
    "exit": ("raise SystemExit('not licensed')", "SystemExit: not licensed"),
    "exit without a word": ("raise SystemExit", "SystemExit"),
    "no exception of ours": ("class Odd(BaseException): pass\nraise Odd('strange')", "Odd: strange"),
    "no words": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E"),
    "attributes": ("def __getattr__(name): raise RuntimeError('half imported')", "RuntimeError: half imported"),
    "output": ("print('hello'); raise OSError('with noise')", "OSError: with noise"),
}
CRASHES = {
    "exits": ("import os\nos._exit(7)", "the process ended with exit code 7"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "the process was ended by SIGSEGV"),
    "hangs": ("import time\ntime.sleep(1000)", "no answer in 3 s"),
}


def broken(folder: Path, module: str, text: str) -> None:
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "__init__.py").write_text(text)


SOME = ("runtime", "exit", "attributes", "exits")


@pytest.mark.parametrize(
    "framework, fault",
    [*(("torch", fault) for fault in (*FAULTS, *CRASHES)), *((x, fault) for x in ("jax", "cupy") for fault in SOME)],
)
def test_a_broken_framework_is_a_row(
    framework: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, words = {**FAULTS, **CRASHES}[fault]
    broken(tmp_path, framework, text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "PATIENCE", 3.0 if fault == "hangs" else 60.0)
    checks = doctor.in_a_process(framework, ["cpu", "cuda"])
    assert [check.name for check in checks] == [f"{framework} on cpu", f"{framework} on cuda"]
    assert {check.status for check in checks} == {"broken"}
    assert all(words in check.detail and check.fix for check in checks), checks


def test_a_crash_on_the_gpu_leaves_the_row_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import numpy, os, sys\n"
        "def from_numpy(x): return Array(x)\n"
        "class Array:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def to(self, place):\n"
        "        if place == 'cuda':\n"
        "            print('driver says no', file=sys.stderr, flush=True)\n"
        "            os.abort()\n"
        "        return self.x\n"
    )
    broken(tmp_path, "torch", text)
    monkeypatch.syspath_prepend(tmp_path)
    on_cpu, on_cuda = doctor.in_a_process("torch", ["cpu", "cuda"])
    assert on_cpu.status == "ok", on_cpu
    assert on_cuda.status == "broken"
    assert "the process was ended by SIGABRT (printed last: driver says no" in on_cuda.detail


def test_a_module_without_a_spec_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, argparse.Namespace(__spec__=None))  # type: ignore[arg-type]
    asked = []
    monkeypatch.setattr(doctor, "in_a_process", lambda name, devices: asked.append((name, devices)) or [])  # type: ignore[func-returns-value]
    doctor.computations(False, {})
    assert asked == [("torch", ["cpu"]), ("jax", ["cpu"])]


LOGGED = """
import logging
def devices(*_):
    try:
        raise RuntimeError("operation cuInit(0) failed: CUDA_ERROR_NO_DEVICE")
    except RuntimeError:
        logging.getLogger("jax").exception("plugin configuration error")
        raise
"""


@pytest.mark.parametrize("fault", ["exit", "attributes", "output", "logged"])
def test_doctor_ends_in_a_table_whatever_is_broken(fault: str, tmp_path: Path) -> None:
    """All three frameworks at once, in a new process without a GPU."""
    for module in ("torch", "jax", "cupy"):
        broken(tmp_path, module, LOGGED if fault == "logged" else FAULTS[fault][0])
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "CUDA_VISIBLE_DEVICES": ""}
    env[settings.CACHE_DIR] = str(tmp_path / "kernels")
    command = [sys.executable, "-m", "streamkl_cupy", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for row in ("numpy on cpu", "torch on cpu", "jax on cpu", "Not ready: no GPU computes the right numbers here"):
        assert row in done.stdout
    if fault not in ("exit", "logged"):  # what ends a process, and what is written beside an answer
        return
    done = subprocess.run([*command, "--json", "--cpu"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    rows = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert rows["jax on cpu"]["status"] == rows["torch on cpu"]["status"] == "broken"


def test_doctor_where_no_device_is_visible(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", settings.CACHE_DIR: str(tmp_path / "k")}
    done = subprocess.run(
        [sys.executable, "-m", "streamkl_cupy", "doctor"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "numpy on cpu" in done.stdout


@pytest.mark.gpu
def test_doctor_on_a_gpu(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["family"]
    assert [check for check in found["checks"] if check["status"] == "broken"] == []


@pytest.mark.gpu
@pytest.mark.long
def test_bench_on_a_gpu(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--sizes", "512", "--heads", "2", "--dtype", "float16", "--rounds", "3", "--seconds", "0.02"]
    assert main(["bench", "--device", "cuda", *arguments, "--out", str(tmp_path)]) == 0
    with (tmp_path / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["peer"] == "streamkl"]
    assert [row["status"] for row in ours] == ["ok"] * len(PASSES)
    assert any(row["peer"] == "matmul" and float(row["tflops"]) > 1 for row in rows)
    assert any(row["pass"] == "host" for row in rows)


# --- compile ---


def test_compile_lists_the_kernels_of_an_operation(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compile", "--op", "sparse_attention", "--arch", "sm_90", "--dims", "64/128", "--list"])
    lines = capsys.readouterr().out.splitlines()
    listed = catalogue.attention_entries("sm_90", [(64, 128)])
    assert (code, lines) == (0, [f"{x.kernel.arch} {x.label}: {x.kernel}" for x in listed])
    assert {x.kernel.name for x in listed} == {"attention", "combine", "query", "key", "value"}


def test_compile_lists_the_kernels_of_targets(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--arch", "sm_90", "--dims", "192/128", "--dtype", "float32", "--masks", "none")
    assert main(["compile", "--op", "attention_kl_to", *few, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines} == {"forward", "combine", "student_q", "student_k"}
    assert {word for line in lines for word in line.split() if "/dot" in word} == {
        "probability/dot:",
        "log_probability/dot:",
    }
    assert all("128/128 float32" in line for line in lines)


def test_compile_lists_the_kernels_of_the_indexer(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--arch", "sm_90", "--dims", "192/128", "--dtype", "bfloat16", "float32")
    assert main(["compile", "--op", "indexer_kl", *few, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {path.stem for path in (cuda_root() / "kernels").glob("indexer_*.cu")}
    listed = {line.split()[1] for line in lines}
    assert listed <= names
    scores = {"indexer_score_sm80", "indexer_score_sm90"}
    assert listed >= scores | {"indexer_rows", "indexer_pack", "indexer_bits", "indexer_join", "indexer_key_sm80"}
    assert sum("indexer_bits" in line for line in lines) == 1
    # Of 16-bit elements Hopper's own, of others the portable ones.
    assert all(("sm_90a" in line) == ("_sm90 192/128 bfloat16" in line) for line in lines)


def test_bench_of_an_indexer(tmp_path: Path) -> None:
    """What torch's own functions give is what is timed."""
    torch = pytest.importorskip("torch")
    case = indexer.Case(24, 2, 4, 2, 3, 8, 5, "made")
    bench = indexer.Bench(torch, case, "cpu", None)
    found = bench.peer("value_and_grad", bench.rows)(0)()
    torch.testing.assert_close(tuple(bench.ours("value_and_grad")(0)()[1]), found, rtol=1e-4, atol=1e-6)
    rows = bench.ours("forward")(0)()
    torch.testing.assert_close(rows.kl, bench.peer("forward", bench.rows)(0)(), rtol=1e-4, atol=1e-6)
    yardstick = tmp_path / "one.py"
    yardstick.write_text("def forward(*x): pass\ndef backward(*x): pass\n")
    small = ("--device", "cpu", "--seconds", "0.001", "--rounds", "1", "--heads", "2", "--dims", "8", "--sizes", "16")
    given = (
        "--index-heads",
        "2",
        "--passes",
        "backward",
        "--yardstick",
        str(yardstick),
        "--out",
        str(tmp_path),
        "--name",
        "small",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **how: f)
        assert main(["bench", "--op", "indexer_kl", *small, *given]) == 0
    with (tmp_path / "small.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert {(row["peer"], row["pass"]) for row in written} == {
        (peer, "backward") for peer in ("streamkl", "eager", "compile", "yardstick")
    }
    assert all(row["status"] == "ok" and float(row["ms"]) > 0 for row in written)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("lse", ["given", "made"])
def test_the_indexer_in_triton_is_right(lse: str) -> None:
    """What is timed beside this package computes the same."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    bench = indexer.Bench(torch, indexer.Case(300, 2, 4, 2, 3, 192, 64, lse), "cuda", None)
    module = bench.others["triton"]
    options = {name: x for name, x in bench.options.items() if name != "teacher_lse"}
    x = [a.double().cpu().numpy() for a in (*bench.teacher, *bench.student)]
    grads = indexer_reference.backward(
        bench.grad.double().cpu().numpy()[:, None], *x[:3], x[3][:, None], x[4], **options
    )
    rows = indexer_reference.forward(*x[:3], x[3][:, None], x[4], **options)
    kl, *_ = bench.module(module, "forward")(0)()
    assert np.abs(kl.double().cpu().numpy() - rows.kl[:, 0]).max() < 1e-4
    for found, right in zip(bench.module(module, "backward")(0)(), grads, strict=True):
        found = found.double().cpu().numpy().reshape(right.shape)
        assert np.linalg.norm(found - right) < 1e-2 * np.linalg.norm(right)


FEW = ("compile", "--arch", "sm_80", "--dims", "16", "--dtype", "float16", "--masks", "none")


def test_compile_builds_what_is_missing_and_reports_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    listed, _ = catalogue.entries("sm_80", [(16, 16)], [catalogue.ElementTypes("float16", "float16")], ["none"])
    built: list[str] = []
    work = catalogue._workers
    monkeypatch.setattr(catalogue, "_workers", lambda jobs: built.append("some") or work(jobs))  # type: ignore[func-returns-value]

    def run(*more: str) -> tuple[int, str, list[str], set[tuple[str, int]]]:
        built.clear()
        code = main([*FEW, *more])
        title, *table = capsys.readouterr().out.splitlines()
        return code, title.strip(), table, {(x.name, x.stat().st_mtime_ns) for x in cache.glob("*.cubin")}

    first = run()
    assert built
    assert first[1] == f"{len(listed)} kernels in {cache}, 0 of them from before"
    assert len(first[3]) == len(listed)
    assert any("teacher_k" in line for line in first[2])
    assert first[0] == int(any("spills" in line or "remark of" in line for line in first[2]))
    second = run()
    assert not built
    assert second[1] == f"{len(listed)} kernels in {cache}, {len(listed)} of them from before"
    # The same registers, spills and remarks, the same exit code, the same files.
    assert (second[0], second[2:]) == (first[0], first[2:])
    for path in sorted(cache.glob("*.cubin"))[:2]:
        path.unlink()
    third = run("--jobs", "1")
    assert built
    assert third[1] == f"{len(listed)} kernels in {cache}, {len(listed) - 2} of them from before"
    assert len(third[3]) == len(listed)
    assert len(third[3] & first[3]) == len(listed) - 2
    assert (third[0], third[2]) == (first[0], first[2])
    forced = run("--force")
    assert forced[1] == f"{len(listed)} kernels in {cache}, 0 of them from before"
    assert not forced[3] & third[3]


def test_compile_remembers_complaints(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was wrong when a kernel was built is wrong when it is found."""
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    assert nvrtc
    entry = catalogue.entries("sm_80", [(16, 16)], [catalogue.ELEMENT_TYPES[0]], ["none"])[0][0]
    log = (
        "ptxas info : (C7508) odd\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed 77 registers"
    )
    compiler.keep(entry.kernel.text, entry.kernel.arch, (), compiler._report(b"image", log))
    (built,) = catalogue.build([entry], store=True)
    assert built.found
    assert (built.registers, built.spill_bytes, len(built.notes)) == (77, 16, 1)
    assert len(compile_command._complaints(built)) == 2


def test_compile_says_what_was_not_kept() -> None:
    entry = catalogue.entries("sm_90", [(64, 64)], [catalogue.ELEMENT_TYPES[0]])[0][0]
    assert compile_command._complaints(catalogue.Built(entry, 255, stored=True)) == []
    (line,) = compile_command._complaints(catalogue.Built(entry, 255))
    assert line.endswith("compiled, but not kept")


def alive(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has asked about do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_compile_can_be_interrupted(cache: Path, kind: signal.Signals) -> None:
    pytest.importorskip("cupy")
    command = [sys.executable, "-m", "streamkl_cupy", "compile", "--arch", "sm_90", "--dims", "256", "--jobs", "2"]
    # A session of its own, so that all its processes get the signal, as from a terminal.
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell without job control starts beside it ignores Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not list(cache.glob("*.cubin")):
            assert running.poll() is None, running.communicate()
            time.sleep(0.05)
        workers = children_of(running.pid)
        assert len(workers) >= 2
        if kind == signal.SIGINT:
            os.killpg(running.pid, kind)
        else:
            running.kill()
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "Traceback" not in err
    if kind == signal.SIGINT:
        assert running.returncode == 130
        words = err.splitlines()[-1]
        assert words.startswith("interrupted: ")
        assert words.endswith(f"kernels are in {cache}; the same command goes on from there")
        # The last may have been written and not yet counted.
        assert len(list(cache.glob("*.cubin"))) - int(words.split()[1]) in (0, 1)
        assert not list(cache.glob(".*"))
    started = time.monotonic()
    while any(alive(pid) for pid in workers):
        assert time.monotonic() - started < 30
        time.sleep(0.05)
    listed, _ = catalogue.entries("sm_90", [(256, 256)])
    again = catalogue.build(listed, jobs=1, store=True)
    assert next(again).found
    again.close()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is heard here, also where this process was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["futures.wait", "ProcessPoolExecutor.submit"])
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_does_not_fall_into_the_executor(place: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # There it can leave a lock taken, and the process then never ends.
    pytest.importorskip("cupy")
    name, _, function = place.partition(".")
    owner = getattr(catalogue, name)
    real = getattr(owner, function)

    def interrupted(*args: Any, **how: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
            result = real(*args, **how)
        except KeyboardInterrupt:
            pytest.fail(f"interrupted inside {place}")
        return result

    monkeypatch.setattr(owner, function, interrupted)
    before, children = signal.getsignal(signal.SIGINT), set(multiprocessing.active_children())
    listed, _ = catalogue.entries("sm_80", [(16, 16)], [catalogue.ELEMENT_TYPES[0]])
    with pytest.raises(KeyboardInterrupt):
        list(catalogue.build(listed, jobs=1))
    assert signal.getsignal(signal.SIGINT) is before
    assert set(multiprocessing.active_children()) <= children


@pytest.mark.parametrize("more, again", [((), "command goes on"), (("--force",), "without --force goes on")])
def test_an_interrupted_compile_says_what_goes_on(
    more: tuple[str, ...],
    again: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("cupy")
    closed = []

    def building(listed: Any, *_: Any, **how: Any) -> Any:
        try:
            yield catalogue.Built(listed[0], stored=True)
            yield catalogue.Built(listed[1], stored=False)
            raise KeyboardInterrupt
        finally:
            closed.append(how["anew"])

    monkeypatch.setattr(catalogue, "build", building)
    assert main([*FEW, *more]) == 130
    assert closed == [bool(more)]
    captured = capsys.readouterr()
    assert captured.err.startswith("interrupted: 1 of ")
    assert again in captured.err
    assert captured.out == ""


def test_a_compiling_process_that_is_ended_is_an_error_with_advice() -> None:
    pytest.importorskip("cupy")
    listed, _ = catalogue.entries("sm_80", [(16, 16)], [catalogue.ELEMENT_TYPES[0]])
    before = set(multiprocessing.active_children())
    building = catalogue.build(listed, jobs=1)
    next(building)
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
    with pytest.raises(CompilerError, match=r"ended from outside.* fewer --jobs"):
        list(building)


def test_compiled_kernels_are_those_a_call_looks_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    entry = catalogue.entries("sm_80", [(64, 64)], [catalogue.ELEMENT_TYPES[0]])[0][0]
    (built,) = catalogue.build([entry], jobs=1, store=True)
    assert (built.stored, built.found) == (True, False)
    monkeypatch.setattr(compiler, "build", lambda *a, **o: pytest.fail("it was compiled again"))
    kernel = entry.kernel
    compiler.cached_image(kernel.text, kernel.arch)


def test_compile_lists_without_compiling(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90", "sm_120", "--dims", "64", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0][:5] for line in lines} == {"sm_90", "sm_12"}
    assert not cache.exists()


def test_compile_lists_the_masks_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["compile", "--arch", "sm_90", "--dims", "64", "--dtype", "bfloat16", "--list"]
    assert main([*choice, "--masks", "keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("kernels/mask_bits.cu" in line for line in lines)
    assert all(" keys: " in line for line in lines)
    assert main(choice) == 0
    assert " keys: " not in capsys.readouterr().out


def test_compile_says_what_is_wrong_with_a_kernel() -> None:
    entry = catalogue.entries("sm_90", [(64, 64)], [catalogue.ELEMENT_TYPES[0]])[0][0]
    built = [catalogue.Built(entry, 255, 8, ("a note",), 2048, True), catalogue.Built(entry, error="no")]
    (row,) = compile_command.summary(built)
    assert row[:3] == (entry.kernel.arch, "forward", "bfloat16")
    assert row[3:5] == ("2", "255")
    assert row[6:] == ("8", "1", "1", "2")


def test_compile_into_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "file" / "kernels"))
    assert main(["compile", "--arch", "sm_90"]) == 2
    assert f"set {settings.CACHE_DIR}" in capsys.readouterr().err


def test_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> Any:
        raise CompilerError("NVRTC is missing")

    monkeypatch.setattr(compile_command, "supported_archs", missing)
    assert main(["compile", "--arch", "sm_90"]) == 2
    assert "NVRTC is missing" in capsys.readouterr().err


def test_compile_for_an_architecture_that_nvrtc_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_command, "supported_archs", lambda: (80, 90))
    assert main(["compile", "--arch", "sm_120"]) == 2
    said = capsys.readouterr().err
    assert "compiles for sm_80, sm_90" in said
    assert install.cuda(upgrade=True) in said


def test_compile_into_a_folder_that_others_can_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    if not hasattr(os, "geteuid"):
        pytest.skip("this system has no owners and modes of files")
    monkeypatch.delenv(settings.CACHE_TRUST, raising=False)
    cache.mkdir()
    cache.chmod(0o777)
    assert main([*FEW]) == 2
    assert f"{cache} can be written by everybody" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


# --- the example of long contexts ---


def test_long_context_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    script = ROOT / "examples" / "long_context.py"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    arguments = ["--cpu", "--forward", "1100", "--backward", "600", "--chunk", "500"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert "forward, N = 1,100" in done.stdout
    assert "forward and backward, N = 600" in done.stdout
    assert done.stdout.rstrip().endswith("Exact, and without a matrix.")
