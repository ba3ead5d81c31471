"""PyTorch: ranks of a process group or of a dimension of a device mesh, and autograd round a whole strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import a_kind_of
from ..results import KLForwardRows
from .engine import NAMES
from .job import Job
from .moving import gathered, scattered
from .ranks import Arriving, Known, Pending, Starting, known_ranks
from .shards import Runs
from .strategies import TABLE

# Renamed in torch 2.13.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchRanks(Known):
    """A process group. Collectives run on its own stream beside kernels, and are waited for by the caller's stream."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self.key = (group.group_name, self.rank, self.size)
        # Types of devices whose sends and receives must go together.
        self._together = {device for device, backend in self._backends().items() if backend == "nccl"}
        # By GPU, a stream from which NCCL starts, and what this one waits for.
        self._aside: dict[torch.device, tuple[Any, Any]] = {}

    def all_gather(self, x: Tensor) -> Pending:
        # Gathered along the first axis: some backends know no other way.
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if x.dim() else x.new_empty(self.size)
        work = _gather(out, x.contiguous(), group=self._group, async_op=True)
        return self._after(work, out.view(self.size, *x.shape))

    def post(self, sent: Mapping[int, Sequence[Tensor]], room: Mapping[int, Sequence[Tensor]]) -> Starting:
        # What torch.distributed.batch_isend_irecv does, which costs the host as much again.
        group, works = self._group, []
        away = [(to, tag, x.contiguous()) for to, xs in sent.items() for tag, x in enumerate(xs)]
        here = [(source, tag, x) for source, xs in room.items() for tag, x in enumerate(xs)]
        marks = [self._marked(x.device) for _, _, x in (away + here)[:1] if x.device.type in self._together]

        def moves() -> list[Any]:
            # Tags tell them apart where a backend has no order.
            found = [group.send([x], to, tag) for to, tag, x in away]
            return found + [group.recv([x], source, tag) for source, tag, x in here]

        def start() -> Arriving:
            for device, stream, mark in marks:
                stream.wait_event(mark)
                with torch.cuda.stream(stream):
                    group._start_coalescing(device)
                    moves()
                    works.append(group._end_coalescing(device))
            if not marks:
                works.extend(moves())
            return wait

        def wait() -> dict[int, list[Tensor]]:
            while works:
                works.pop().wait()
            away.clear()  # what was sent is let go, but not before it has gone
            return {source: list(xs) for source, xs in room.items()}

        return start

    def _marked(self, device: torch.device) -> tuple[torch.device, Any, Any]:
        """A stream, and an event that has come where the current stream has done what it has been asked for by now."""
        found = self._aside.get(device)
        if found is None:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            found = self._aside[device] = (stream, torch.cuda.Event())  # type: ignore[no-untyped-call]
        stream, mark = found
        mark.record(torch.cuda.current_stream(device))
        return device, stream, mark

    def reduce_scatter(self, x: Tensor) -> Pending:
        out = x.new_empty(x.shape[1:])
        work = _scatter(out, x.contiguous().flatten(0, 1), group=self._group, async_op=True)
        return self._after(work, out)

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self._group)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=self._group)
        return out

    def shift(self, xs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        arrived = self.post({after: xs}, {before: [x.new_empty(x.shape) for x in xs]})()
        return lambda: tuple(arrived()[before])

    def exchange(self, numbers: Sequence[int], like: Tensor) -> list[list[int]]:
        device = like.device if isinstance(like, Tensor) and self._takes(like.device) else self._device()
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        found: list[list[int]] = self.all_gather(mine)().tolist()
        return found

    def check(self, name: str, x: Tensor) -> None:
        """Refuse tensors that the group's backend does not move."""
        if not self._takes(x.device):
            raise ValueError(
                f"{name} is on {x.device}, but the group's backend is {dist.get_backend_config(self._group)}; "
                f"allowed are tensors on the group's device: NCCL moves those of GPUs, gloo those of the CPU"
            )

    def _takes(self, device: torch.device) -> bool:
        return self._backends().get(device.type, "") in {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "mpi")}.get(
            device.type, ()
        )

    def _backends(self) -> dict[str, str]:
        pairs = (x.split(":") for x in dist.get_backend_config(self._group).split(","))
        return {pair[0]: pair[1] for pair in pairs}

    def _device(self) -> torch.device:
        if self._backends().get("cpu") in ("gloo", "mpi"):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @staticmethod
    def _after(work: Any, out: Tensor) -> Pending:
        def wait() -> Tensor:
            work.wait()
            return out

        return wait


_known: dict[Any, TorchRanks] = {}


def ranks_of_torch(group: Any) -> TorchRanks:
    """Of a process group, of one dimension of a device mesh, or of all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group in every process, or start them by torchrun"
        )
    if group is None:
        group = dist.group.WORLD
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; allowed is one of them: "
                f"pass mesh[name]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {a_kind_of(group)}; allowed are a torch.distributed process group of which this process is one, "
            f"a dimension of a DeviceMesh, and None for all processes"
        )
    return known_ranks(_known, group, TorchRanks)


class _Rows(torch.autograd.Function):
    """Rows of a whole strategy, with its backward: nothing differentiates through collectives."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, job, keep = args
        rows, kept = TABLE[job.strategy].forward(job, inputs)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, keep and kept is not None
        ctx.save_for_backward(*inputs, *rows, *(kept if ctx.kept else ()))
        ctx.mark_non_differentiable(rows.teacher_lse, rows.student_lse)
        return rows.kl, rows.teacher_lse, rows.student_lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_lse_grads: None) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(NAMES)
        end = count + len(KLForwardRows._fields)
        inputs, rows = saved[:count], KLForwardRows(*saved[count:end])
        wrt = tuple(name for name, needed in zip(NAMES, ctx.needs_input_grad) if needed)
        # A rank whose rows nobody asked about has keys that others saw: it takes part.
        grad = torch.zeros_like(rows.kl) if grad is None else grad.to(rows.kl.dtype)
        kept = saved[end:] if ctx.kept else None
        return (*TABLE[ctx.job.strategy].backward(ctx.job, grad, inputs, rows, kept, wrt), None, None)


class _Sum(torch.autograd.Function):
    """A sum over ranks, of which every rank's own part has the derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TorchRanks) -> Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Everybody's shards as one, whose gradient goes back to where they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TorchRanks, axis: int, owners: tuple[Runs, ...]) -> Tensor:
        ctx.job = ranks, axis, owners
        found: Tensor = gathered(ranks, x, axis, owners)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, axis, owners = ctx.job
        return scattered(ranks, grad, axis, owners), None, None, None


def gathered_by_autograd(ranks: Any, x: Tensor, axis: int, owners: tuple[Runs, ...]) -> Tensor:
    """Everybody's shards as one, with the derivative."""
    found: Tensor = _Gather.apply(x, ranks, axis, owners)  # type: ignore[no-untyped-call]
    return found


def rows(job: Job, inputs: Sequence[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values and log-sum-exps of this rank's rows, with their derivative."""
    found: tuple[Tensor, Tensor, Tensor] = _Rows.apply(*inputs, job, keep)  # type: ignore[no-untyped-call]
    return found


def total(ranks: Any, x: Tensor) -> Tensor:
    """The sum over ranks, with its derivative."""
    found: Tensor = _Sum.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def wanted_by_autograd(inputs: Sequence[Any]) -> tuple[str, ...]:
    """What autograd will ask for."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(name for name, x in zip(NAMES, inputs) if isinstance(x, Tensor) and x.requires_grad)
