"""Sequences that several GPUs hold, over transports that exist: torch.distributed, axes of JAX meshes, threads."""

from .api import (
    attention_kl,
    attention_kl_backward,
    attention_kl_forward,
    attention_kl_state,
    attention_kl_value_and_grad,
    plan,
    warmup,
)
from .gathering import gather
from .ranks import LocalWorld
from .shards import Ownership, positions, shard, unshard
from .states import KLState, finish_kl_state, merge_kl_states

__all__ = [
    "KLState",
    "LocalWorld",
    "Ownership",
    "attention_kl",
    "attention_kl_backward",
    "attention_kl_forward",
    "attention_kl_state",
    "attention_kl_value_and_grad",
    "finish_kl_state",
    "gather",
    "merge_kl_states",
    "plan",
    "positions",
    "shard",
    "unshard",
    "warmup",
]
