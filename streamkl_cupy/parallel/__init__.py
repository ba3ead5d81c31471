"""Sequences that several GPUs hold, over transports that exist: torch.distributed and ranks in threads."""

from .api import attention_kl, attention_kl_backward, attention_kl_forward, attention_kl_state
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
    "finish_kl_state",
    "merge_kl_states",
    "positions",
    "shard",
    "unshard",
]
