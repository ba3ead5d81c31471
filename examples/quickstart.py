"""Measure what a cheaper attention costs, in nats, on real queries and keys of SmolLM2-135M.

Runs on CuPy arrays where a CUDA GPU is usable and on NumPy arrays otherwise:

    python examples/quickstart.py
"""

import argparse

from _shared import array_library, install, need, sample


def quantised(xp, keys, bits):
    """Round every key vector to `bits`-bit integers with one scale, as a quantised KV cache does."""
    top = 2 ** (bits - 1) - 1
    step = abs(keys).max(axis=-1, keepdims=True) / top
    return xp.rint(keys / step) * step


def exact_kl(xp, teacher_q, teacher_k, student_q, student_k):
    """The same number the plain way, in float64 with the whole (N, N) matrix: what the kernels avoid."""
    future = xp.triu(xp.ones((len(teacher_q), len(teacher_k)), dtype=bool), 1)

    def log_softmax(q, k):
        logits = xp.where(future, -1e9, q.astype("float64") @ k.astype("float64").T / q.shape[-1] ** 0.5)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))

    log_p, log_q = log_softmax(teacher_q, teacher_k), log_softmax(student_q, student_k)
    return xp.where(future, 0, xp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog="example: quickstart.py --cpu")
    parser.add_argument("--cpu", action="store_true", help="use NumPy even where a GPU is usable")
    xp = array_library(parser.parse_args().cpu)
    streamkl = need("streamkl_cupy", install())

    data = {name: xp.asarray(a) for name, a in sample().items() if name.startswith("layer")}
    q, k = data["layer15_q"], data["layer15_k"]  # (9 heads, 320 tokens, 64) and (3, 320, 64): grouped queries
    print(f"{xp.__name__} arrays, {q.dtype}: {len(q)} query heads, {len(k)} key heads, {q.shape[1]} tokens\n")

    students = {
        "int8 keys": (q, quantised(xp, k, 8)),
        "int4 keys": (q, quantised(xp, k, 4)),
        "layer 14": (data["layer14_q"], data["layer14_k"]),
        "layer 0": (data["layer0_q"], data["layer0_k"]),
    }
    print("KL(layer 15 || student), nats, mean over the tokens of each head")
    print("student   " + "".join(f"{f'head {h}':>9}" for h in range(len(q))))
    rows = {name: streamkl.attention_kl(q, k, *student, causal=True) for name, student in students.items()}
    for name, kl in rows.items():
        print(f"{name:<10}" + "".join(f"{float(x):9.5f}" for x in kl.mean(axis=-1)))

    # The gradient says which way to nudge the quantised keys to win the loss back. A sum keeps it well inside float16.
    cheap_k = students["int4 keys"][1]
    before, grads = streamkl.attention_kl_value_and_grad(q, k, q, cheap_k, causal=True, reduction="sum")
    nudged_k = cheap_k - 0.1 * xp.sign(grads.student_k)
    after = streamkl.attention_kl(q, k, q, nudged_k, causal=True, reduction="sum")
    print(f"\nint4 keys: KL summed over heads and tokens {float(before):.1f}, after one signed step {float(after):.1f}")

    reference = exact_kl(xp, q[0], k[0], *(x[0] for x in students["int4 keys"]))
    error = float(abs(rows["int4 keys"][0] - reference).max())
    print(f"head 0 against float64: largest error {error:.1e} nats")
    assert error < 1e-5
    assert after < before
    print("The streamed KL matches the dense one, and its gradient points downhill.")


if __name__ == "__main__":
    main()
