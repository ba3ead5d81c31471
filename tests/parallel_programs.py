"""What tests of sharded calls start as processes of their own: ranks of torch and of MPI, JAX with several devices.

python parallel_programs.py torch SEED PORT                 three processes over gloo, two of them a group as well
python parallel_programs.py nccl SEED PORT                  two processes over NCCL, a GPU each
python parallel_programs.py jax SEED                        four devices of the CPU
mpiexec -n 3 python parallel_programs.py mpi SEED
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

ALL = ("teacher_q", "teacher_k", "student_q", "student_k")
STRATEGIES = ("all_gather", "a2a", "all_gather_queries", "p2p")


def numbers(seed: int, heads: int, key_heads: int, tokens: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, h, tokens, 8)).astype(np.float32) for h in (heads, key_heads, heads, key_heads)]


def close(name: str, found: Any, wanted: Any, tolerance: float = 3e-6) -> None:
    error = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max(initial=0)
    assert error <= tolerance * max(1e-3, np.abs(np.asarray(wanted)).max(initial=0)), (name, error)


def refused(options: dict[str, Any], inputs: list[Any], words: str, call: str = "attention_kl") -> None:
    from streamkl_cupy import parallel as cp

    try:
        getattr(cp, call)(*inputs, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        if words not in str(error):
            raise
    else:
        raise AssertionError(f"no error: {options}")


def torch_ranks(rank: int, port: int, seed: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    import streamkl_cupy as skl
    from streamkl_cupy import parallel as cp
    from streamkl_cupy import patterns

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    made = [torch.from_numpy(x) for x in numbers(seed, 12, 6, 53)]
    made.append(torch.rand(1, 1, 53, generator=torch.Generator().manual_seed(seed)))
    full = [x.double() for x in made]  # whose keys are gathered shard by shard, while those of float32 come all at once

    def one(reduction: str) -> tuple[Any, list[Any]]:
        inputs = [x.clone().requires_grad_() for x in full]
        value = skl.attention_kl(*inputs[:4], causal=True, reduction=reduction, row_weight=inputs[4])
        value.sum().backward()
        return value.detach(), [x.grad for x in inputs]

    def shards(size: int, ownership: str) -> list[Any]:
        return [cp.shard(x, 2, rank, size, ownership).contiguous().requires_grad_() for x in full]

    def check(group: Any, size: int, reduction: str, through: Any = None, **how: Any) -> None:
        ownership = how.get("ownership", "zigzag")
        value, grads = one(reduction)
        mine = shards(size, ownership)

        def loss(*inputs: Any) -> Any:
            options = {"causal": True, "reduction": reduction, "row_weight": inputs[4], "group": group, **how}
            return cp.attention_kl(*inputs[:4], **options)

        found = loss(*mine) if through is None else through(loss, *mine)
        found.sum().backward()
        wanted = cp.shard(value, 2, rank, size, ownership) if reduction == "none" else value
        close(f"{how} {reduction}", found.detach(), wanted)
        for name, x, grad in zip((*ALL, "row_weight"), mine, grads):
            close(f"{how} {name}", x.grad, cp.shard(grad, 2, rank, size, ownership))

    def masked() -> None:
        """Masks, which are in positions of the whole, by the explicit functions, of shards that are empty too."""
        bounds = torch.tensor([0, 20, 20, 31, 47], dtype=torch.int32)
        seen = torch.rand(1, 48, generator=torch.Generator().manual_seed(seed)) < 0.7
        pattern = patterns.local(20, queries=48, block=16, causal=True) | patterns.strided(
            2, [0, 1] * 6, queries=48, block=16
        )
        uneven = [range(30, 48), range(30), []]
        for ownership, options in (
            ("zigzag", {"causal": True, "window": (9, 0), "key_mask": seen, "query_mask": seen}),
            ("zigzag", {"causal": True, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}),
            ("contiguous", {"causal": True, "block_mask": pattern}),
            (uneven, {"window": (-1, 3), "q_offset": -2}),
        ):
            packed = "cu_seqlens_q" in options
            x = [x[0, :, :48].transpose(0, 1) if packed else x[:, :, :48] for x in full[:4]]
            axis = 0 if packed else 2
            rows = skl.attention_kl_forward(*x, **options)
            grads = skl.attention_kl_backward(rows.student_lse.nan_to_num(neginf=0), *x, saved=rows, wrt=ALL, **options)

            mine = [cp.shard(x, axis, rank, 3, ownership) for x in x]
            for strategy in STRATEGIES:
                how = {"strategy": strategy, "ownership": ownership, **options}
                found = cp.attention_kl_forward(*mine, **how)
                back = cp.attention_kl_backward(
                    found.student_lse.nan_to_num(neginf=0), *mine, saved=found, wrt=ALL, **how
                )
                for name, x_, y in zip(found._fields, found, rows):
                    close(
                        f"{how} {name}",
                        x_.nan_to_num(neginf=0),
                        cp.shard(y, axis, rank, 3, ownership).nan_to_num(neginf=0),
                    )
                for name, x_, y in zip(ALL, back, grads):
                    close(f"{how} {name}", x_, cp.shard(y, axis, rank, 3, ownership))

    def one_rank() -> None:
        """A dimension of a mesh that is one process gives the bits of the plain call; two dimensions are none."""
        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("cp", "tp"))
        check(mesh["cp"], 3, "sum")
        found = []
        for call, how in ((skl.attention_kl, {}), (cp.attention_kl, {"group": mesh["tp"]})):
            inputs = [x.clone().requires_grad_() for x in made]
            value = call(*inputs[:4], causal=True, reduction="mean", row_weight=inputs[4], **how)
            value.backward()
            found.append([value, *(x.grad for x in inputs)])
        for x, y in zip(*found):
            assert torch.equal(x, y)
        refused({"group": mesh}, shards(3, "zigzag")[:4], "DeviceMesh of 2 dimensions")

    for strategy in STRATEGIES:
        check(None, 3, "mean", strategy=strategy)
    check(None, 3, "none", strategy="all_gather", ownership="contiguous", keep_gathered=False, head_groups=3)
    check(None, 3, "sum", through=lambda f, *x: checkpoint(f, *x, use_reentrant=False))
    # Any other operation, with keys that are gathered.
    leaves = [x.clone().requires_grad_() for x in (full[0], full[1], full[3])]
    skl.sparse_attention(*leaves, causal=True).square().sum().backward()
    mine = [cp.shard(x.detach(), 2, rank, 3, "contiguous").requires_grad_() for x in leaves]
    keys = [cp.gather(x, 2, ownership="contiguous") for x in mine[1:]]
    first = int(cp.positions(53, 3, "contiguous")[rank][0])
    skl.sparse_attention(mine[0], *keys, causal=True, q_offset=first).square().sum().backward()
    for name, x, leaf in zip("qkv", mine, leaves):
        close(f"gather {name}", x.grad, cp.shard(leaf.grad, 2, rank, 3, "contiguous"))
    masked()
    full = made
    check(None, 3, "mean")
    one_rank()
    if rank < 2:
        check(pair, 2, "mean")
        check(pair, 2, "sum", strategy="p2p", ownership="contiguous")
    mine = shards(3, "zigzag")[:4]
    refused({"window": (4 if rank else 3, 0)}, mine, "options differ")
    refused({"strategy": "p2p" if rank == 1 else "all_gather"}, mine, "strategy differ")
    refused({"key_mask": torch.ones(1, mine[0].shape[2], dtype=torch.bool)}, mine, "")
    # What was agreed on before is not compared again, so this is a call that has not been.
    short = [x[:, :, 1:] if rank == 2 else x for x in mine[:3]]
    refused({"window": (5, 0)}, [*short, mine[3]], "a rank holds the same" if rank == 2 else "rank 2")
    elsewhere = [x.detach().to("meta") if rank == 1 and i == 1 else x for i, x in enumerate(mine)]
    refused({}, elsewhere, "teacher_k is on meta" if rank == 1 else "rank 1")
    refused({"row_weight": 2.0} if rank == 0 else {}, mine, "row_weight is a float" if rank == 0 else "rank 0")
    # What ranks have agreed on is compared again there.
    refused({"causal": rank != 1}, mine, "options differ", "warmup")
    dist.destroy_process_group()


def nccl_ranks(rank: int, port: int, seed: int) -> None:
    """Calls one after the other, without waiting in between: what a transport moves must be there, and be its own."""
    import torch
    import torch.distributed as dist

    import streamkl_cupy as skl
    from streamkl_cupy import parallel as cp
    from streamkl_cupy.parallel import job

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    job.LEAST = 1  # so that own rows go in two halves
    make = torch.Generator(device="cuda").manual_seed(seed)
    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": make}
    full = [torch.randn(1, heads, 3000, 64, **how) for heads in (8, 2, 8, 2)]
    upstream = torch.rand(1, 8, 3000, device="cuda", generator=make)
    rows = skl.attention_kl_forward(*full, causal=True)
    wanted = skl.attention_kl_backward(upstream, *full, saved=rows, causal=True)
    for strategy in STRATEGIES:
        leaves = [[cp.shard(x, 2, rank, 2).contiguous().requires_grad_() for x in full] for _ in range(3)]
        values = []
        for mine in leaves:
            values.append(cp.attention_kl(*mine, causal=True, strategy=strategy))
            values[-1].backward(cp.shard(upstream, 2, rank, 2))
        for value, mine in zip(values, leaves):
            close(f"{strategy} values", value.detach().cpu(), cp.shard(rows.kl, 2, rank, 2).cpu(), 1e-5)
            for name, x, whole in zip(ALL[2:], mine[2:], wanted[2:]):
                y = cp.shard(whole, 2, rank, 2).float()
                apart = float((x.grad.float() - y).norm() / y.norm())
                assert apart < 5e-3, (strategy, name, apart)
    dist.destroy_process_group()


def jax_devices(seed: int) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    import streamkl_cupy as skl
    from streamkl_cupy import parallel as cp

    size, tokens = 4, 32
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    full = [jnp.asarray(x[0]) for x in numbers(seed, 8, 4, tokens)]
    weight = jnp.asarray(np.random.default_rng(seed).random(tokens).astype(np.float32))

    def check(strategy: str, inside: bool, check_vma: bool, reduction: str = "mean", **options: Any) -> None:
        """Value and gradients, of a function that is differentiated inside of `shard_map` or outside of it."""
        ownership = options.pop("ownership", "zigzag")

        def of_rows(rows: Any) -> Any:
            return jnp.sum(rows**2) if reduction == "none" else rows

        def whole(inputs: Any, weight: Any) -> Any:
            return of_rows(skl.attention_kl(*inputs, reduction=reduction, row_weight=weight, **options))

        def loss(inputs: Any, weight: Any) -> Any:
            how = {"axis_name": "cp", "strategy": strategy, "ownership": ownership}
            return cp.attention_kl(*inputs, reduction=reduction, row_weight=weight, **how, **options)

        def in_ranks(x: Any, axis: int) -> Any:
            return jnp.concatenate([cp.shard(x, axis, rank, size, ownership) for rank in range(size)], axis)

        value, (grads, of_weight) = jax.value_and_grad(whole, argnums=(0, 1))(full, weight)
        mine, specs = [in_ranks(x, 1) for x in full], (PartitionSpec(None, "cp"), PartitionSpec("cp"))
        none = PartitionSpec(None, "cp") if reduction == "none" else PartitionSpec()
        if inside:
            step = jax.value_and_grad(loss, argnums=(0, 1))
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(none, specs), check_vma=check_vma)
        else:
            of_all = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=none, check_vma=check_vma)
            step = jax.value_and_grad(lambda *args: of_rows(of_all(*args)), argnums=(0, 1))
        found, (found_grads, found_of_weight) = jax.jit(step)(mine, in_ranks(weight, 0))
        name = f"{strategy}, inside {inside}, check_vma {check_vma}, {reduction}"
        close(name, found, value)
        for x, y in zip((*found_grads, found_of_weight), (*[in_ranks(x, 1) for x in grads], in_ranks(of_weight, 0))):
            close(name, x, y)

    seen = jnp.asarray(np.random.default_rng(seed).random(tokens) < 0.7)
    check("all_gather", True, False, causal=True)
    check("all_gather", False, False, "none", causal=True, window=(9, 0))
    check("a2a", False, True, key_mask=seen, query_mask=seen)
    check("all_gather_queries", True, False, "sum", window=(-1, 3), q_offset=-2, ownership="contiguous")
    check("p2p", True, True, causal=True, key_mask=seen)
    refused_in_program(mesh, full)


def refused_in_program(mesh: Any, full: Any) -> None:
    """What cannot be is said while the program is written."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from streamkl_cupy import parallel as cp

    bounds = jnp.asarray([0, 32], jnp.int32)
    for options, words in (
        ({"axis_name": "dp"}, "axis_name='dp' is no axis here"),
        ({}, "axis_name is a NoneType"),
        ({"axis_name": "cp", "strategy": "a2a", "ownership": [range(8)] * 3}, "position 0 is owned twice"),
        ({"axis_name": "cp", "strategy": "a2a", "head_groups": 2}, "head_groups=2 is of strategy"),
        ({"axis_name": "cp", "row_weight": jnp.ones(32)}, "row_weight: shape (32,) does not broadcast"),
        ({"axis_name": "cp", "reduction": "max"}, "reduction='max' is unknown"),
        ({"axis_name": "cp", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}, "not built inside of shard_map"),
    ):

        def rows(*inputs: Any, options: Any = options) -> Any:
            return cp.attention_kl(*inputs, **options)

        spec = PartitionSpec(None, "cp")
        try:
            jax.eval_shape(jax.shard_map(rows, mesh=mesh, in_specs=spec, out_specs=spec), *full)
        except (TypeError, ValueError, NotImplementedError) as error:
            if words not in str(error):
                raise
        else:
            raise AssertionError(f"no error: {options}")


def mpi_ranks(seed: int) -> None:
    from mpi4py import MPI

    import streamkl_cupy as skl
    from streamkl_cupy import parallel as cp

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    full = numbers(seed, 12, 6, 53)
    rows = skl.attention_kl_forward(*full, causal=True)
    grads = skl.attention_kl_backward(rows.kl, *full, saved=rows, wrt=ALL, causal=True)
    mean = skl.attention_kl(*full, causal=True, reduction="mean")
    for strategy, kind in zip((*STRATEGIES, "all_gather"), ("f4", "f8", "f8", "f8", "f8")):
        mine = [cp.shard(x, 2, rank, size).astype(kind) for x in full]
        how: dict[str, Any] = {"causal": True, "strategy": strategy, "group": world}
        found = cp.attention_kl_forward(*mine, **how)
        back = cp.attention_kl_backward(found.kl, *mine, saved=found, wrt=ALL, **how)
        for x, y in zip((*found, *back), (*rows, *grads)):
            close(strategy, x, cp.shard(y, 2, rank, size), 1e-5)
        close(strategy, cp.attention_kl(*mine, reduction="mean", **how), mean)


if __name__ == "__main__":
    kind, seed = sys.argv[1], int(sys.argv[2])
    if kind in ("torch", "nccl"):
        import torch.multiprocessing as mp

        started, count = (torch_ranks, 3) if kind == "torch" else (nccl_ranks, 2)
        mp.spawn(started, (int(sys.argv[3]), seed), nprocs=count)
    elif kind == "mpi":
        mpi_ranks(seed)
    else:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax_devices(seed)
    print("all right")
