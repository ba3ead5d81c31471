"""One sequence over several devices in JAX: `attention_kl` inside of `shard_map`, differentiated there.

Each device holds a shard. The step of loss and gradients is one compiled function, and each strategy is checked against
one device that has the whole sequence, with what it moves and how long it takes. Without GPUs JAX makes devices of the
CPU.

    python examples/context_parallel_jax.py --ranks 4
"""

import argparse
import os
import time

from _shared import install, need, whole

STRATEGIES = ("all_gather", "a2a", "all_gather_queries", "p2p")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="example: python examples/context_parallel_jax.py --ranks 4"
    )
    parser.add_argument("--ranks", type=whole(1, 64), default=2, help="devices (%(default)s)")
    parser.add_argument("--tokens", type=whole(1), default=256, help="of the whole sequence (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the numbers (%(default)s)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    options = parser.parse_args()
    size, tokens = options.ranks, options.tokens
    if tokens % (2 * size):
        parser.error(f"--tokens {tokens} are not {2 * size} equal chunks, two for each of {size} devices")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={size}"
    jax = need("jax", install("jax"))
    streamkl = need("streamkl_cupy", install())
    from streamkl_cupy import parallel

    jnp, spec = jax.numpy, jax.sharding.PartitionSpec
    devices = jax.devices()
    if len(devices) < size:
        devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(devices[:size], ("cp",))
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
    heads, key_heads = 2 * size, size
    keys = jax.random.split(jax.random.key(options.seed), 4)
    with jax.default_device(devices[0]):
        inputs = [
            jax.random.normal(key, (n, tokens, 64), dtype)
            for key, n in zip(keys, (heads, key_heads, heads, key_heads), strict=True)
        ]
    teacher, student = inputs[:2], inputs[2:]
    print(f"{size} devices ({devices[0].platform}), {tokens} tokens, {heads} heads over {key_heads}, {dtype.__name__}")

    def loss_of(student, teacher, **options):
        of = parallel.attention_kl if options else streamkl.attention_kl
        return of(*teacher, *student, causal=True, reduction="mean", **options)

    expected, expected_grads = jax.value_and_grad(loss_of)(student, teacher)

    def in_shards(x):
        """Of 2 * size chunks device r holds chunk r and the one as far from the end: causal work is even."""
        x = jnp.concatenate([parallel.shard(x, 1, rank, size) for rank in range(size)], 1)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec(None, "cp")))

    mine = jax.tree.map(in_shards, (student, teacher))
    for strategy in options.strategies:

        def step(student, teacher, strategy=strategy):
            return jax.value_and_grad(loss_of)(student, teacher, axis_name="cp", strategy=strategy)

        shards = spec(None, "cp")
        sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=shards, out_specs=(spec(), shards)))
        jax.block_until_ready(sharded(*mine))
        start = time.perf_counter()
        loss, grads = jax.block_until_ready(sharded(*mine))
        took = time.perf_counter() - start

        off = abs(float(loss) - float(expected))
        wanted = [jnp.concatenate([parallel.shard(x, 1, r, size) for r in range(size)], 1) for x in expected_grads]
        apart = max(
            float(jnp.linalg.norm((jax.device_get(x) - jax.device_get(y)).astype("float32")))
            / float(jnp.linalg.norm(y.astype("float32")))
            for x, y in zip(grads, wanted, strict=True)
        )
        assert off <= 2e-6 * (1 + float(expected)), (strategy, off)
        assert apart <= (1e-5 if dtype == jnp.float32 else 5e-3), (strategy, apart)
        one = [jax.ShapeDtypeStruct((n, tokens // size, 64), dtype) for n in (heads, key_heads, heads, key_heads)]
        plan = parallel.plan(*one, size=size, causal=True, strategy=strategy)
        moved = (plan.traffic.forward + plan.traffic.backward) / 2**20
        print(f"{strategy:<18}  loss {float(loss):.6f}, off by {off:.0e}, {moved:6.2f} MiB, {took * 1e3:8.2f} ms")
    print("Every strategy gives what one device gives.")


if __name__ == "__main__":
    main()
