"""What operators do on `ShardedTensor`.

Elementwise operators run on the pieces (`pointwise`, `lists`). Reductions over the whole tensor run
on the pieces and add ONE collective (`reductions`, `norms`). Structural operators keep the cut
(`structural`). All others are refused by an error that names the parameter and the remedy.
`dispatch` says which operator is of which kind.
"""

from __future__ import annotations

from shardkit import _compat
from shardkit._tensor.ops.dispatch import dispatch
from shardkit._tensor.ops.norms import total_norm
from shardkit._tensor.ops.state_allocator import StateAllocator
from shardkit._tensor.sharded import ShardedTensor, set_dispatcher

__all__ = ["StateAllocator", "total_norm"]

_compat.register_foreach_class(ShardedTensor)
set_dispatcher(dispatch)
