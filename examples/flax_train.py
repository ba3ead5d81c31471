"""The distillation step in Flax and optax: attention_kl in place of optax's divergence of two N x N maps.

A Flax module learns queries and keys of head dimension 16 that attend as layer 15 of SmolLM2-135M does (without rotary
positions, to stay short). What a module for `attention_kl` gives back are its queries and keys, not its map; with
--maps the same training takes the usual loss, and the losses agree.

    python examples/flax_train.py --steps 60
"""

import argparse

from _shared import install, need, rate, sample, training_options

DIM = 16


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="example: python examples/flax_train.py --steps 60 --maps"
    )
    training_options(parser, steps=60)
    parser.add_argument("--rate", type=rate, default=1e-2, help="learning rate of Adam (%(default)s)")
    parser.add_argument("--maps", action="store_true", help="optax's divergence of whole attention maps")
    options = parser.parse_args()
    jax = need("jax", install("jax"))
    nn = need("flax.linen", install("flax"))
    optax = need("optax", install("flax"))
    streamkl = need("streamkl_cupy", install())
    jnp = jax.numpy

    class QueriesAndKeys(nn.Module):
        """Queries (heads, N, DIM) and keys (key heads, N, DIM) of a layer."""

        heads: int
        key_heads: int

        @nn.compact
        def __call__(self, hidden):
            names = {"query": self.heads, "key": self.key_heads}
            made = (nn.DenseGeneral((heads, DIM), use_bias=False, name=name)(hidden) for name, heads in names.items())
            return tuple(x.swapaxes(0, 1) for x in made)

    data = sample()
    hidden, teacher_q, teacher_k = (jnp.asarray(data[f"layer15_{x}"], "float32") for x in ("hidden", "q", "k"))
    student = QueriesAndKeys(len(teacher_q), len(teacher_k))
    params = student.init(jax.random.key(options.seed), hidden)
    optimiser = optax.adam(options.rate)
    future = jnp.triu(jnp.ones((len(hidden), len(hidden)), bool), 1)

    def log_map(q, k):
        logits = q @ jnp.repeat(k, len(q) // len(k), axis=0).swapaxes(-1, -2) / q.shape[-1] ** 0.5
        return jax.nn.log_softmax(jnp.where(future, -1e30, logits))

    def loss_of(params):
        q, k = student.apply(params, hidden)
        if options.maps:
            kl = optax.losses.kl_divergence_with_log_targets(log_map(q, k), log_map(teacher_q, teacher_k))
            return kl.mean()
        return streamkl.attention_kl(teacher_q, teacher_k, q, k, causal=True, reduction="mean")

    @jax.jit
    def train_step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    print(f"jax {jax.__version__} on {jax.default_backend()}: head dimension {teacher_q.shape[-1]} -> {DIM}")
    state, losses = optimiser.init(params), []
    for step in range(options.steps):
        params, state, loss = train_step(params, state)
        losses.append(float(loss))
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}   KL {losses[-1]:.4f} nats")

    assert losses[-1] < 0.5 * losses[0], "the loss did not halve"
    print("The student's attention follows its teacher's.")


if __name__ == "__main__":
    main()
