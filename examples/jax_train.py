"""The distillation step in JAX: attention_kl under jax.jit and jax.value_and_grad.

Two matrices learn queries and keys of head dimension 16 that attend as layer 15 of SmolLM2-135M does
(without rotary positions, to stay short). The whole step of loss, gradient and Adam is one compiled function; on a GPU
the CUDA kernels run inside it, on XLA's stream and buffers.

    python examples/jax_train.py --steps 60
"""

import argparse

from _shared import install, need, rate, sample, training_options

DIM = 16


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="example: python examples/jax_train.py --steps 60"
    )
    training_options(parser, steps=60)
    parser.add_argument("--rate", type=rate, default=1e-2, help="learning rate of Adam (%(default)s)")
    options = parser.parse_args()
    jax = need("jax", install("jax"))
    streamkl = need("streamkl_cupy", install())
    jnp = jax.numpy

    data = sample()
    hidden, teacher_q, teacher_k = (jnp.asarray(data[f"layer15_{x}"], "float32") for x in ("hidden", "q", "k"))
    keys = jax.random.split(jax.random.key(options.seed))
    width = hidden.shape[-1]
    weights = [
        jax.random.normal(key, (width, len(x) * DIM)) / width**0.5
        for key, x in zip(keys, (teacher_q, teacher_k), strict=True)
    ]

    def loss_of(weights):
        student_q, student_k = ((hidden @ w).reshape(len(hidden), -1, DIM).swapaxes(0, 1) for w in weights)
        return streamkl.attention_kl(teacher_q, teacher_k, student_q, student_k, causal=True, reduction="mean")

    @jax.jit
    def train_step(weights, moments, t):
        loss, grads = jax.value_and_grad(loss_of)(weights)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)
        weights = jax.tree.map(
            lambda w, m, v: w - options.rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8),
            weights,
            first,
            second,
        )
        return weights, (first, second), loss

    print(f"jax {jax.__version__} on {jax.default_backend()}: head dimension {teacher_q.shape[-1]} -> {DIM}")
    zeros = jax.tree.map(jnp.zeros_like, weights)
    moments, losses = (zeros, zeros), []
    for step in range(options.steps):
        weights, moments, loss = train_step(weights, moments, step + 1.0)
        losses.append(float(loss))
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}   KL {losses[-1]:.4f} nats")

    assert losses[-1] < 0.5 * losses[0], "the loss did not halve"
    print("The student's attention follows its teacher's.")


if __name__ == "__main__":
    main()
