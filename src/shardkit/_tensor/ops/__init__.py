"""Operators on `ShardedTensor`: each has the result that it has on the whole tensor.

Elementwise operators and lists of them run on the pieces (`dispatch`). Reductions over the whole
tensor, and norms, run on the pieces and add ONE collective (`reductions`). Operators that keep the
cut are in `structural`, with views, which do nothing until they are read or written. All other
operators gather what they need (`wholes`). `dispatch` says which operator is of which kind.
"""

from __future__ import annotations

from shardkit._compat import torch_autograd, torch_modules
from shardkit._tensor.ops.dispatch import StateAllocator, dispatch, dispatch_mixed
from shardkit._tensor.ops.reductions import GlobalNumber, share_overflow, total_norm
from shardkit._tensor.ops.wholes import ShardedView
from shardkit._tensor.sharded import ShardedTensor

__all__ = ["StateAllocator", "total_norm"]

torch_autograd.register_foreach_class(ShardedTensor)
torch_autograd.after_unscaling(share_overflow)
torch_modules.run_uncompiled(ShardedTensor, ShardedView, GlobalNumber)
ShardedTensor.dispatch, ShardedTensor.dispatch_mixed = dispatch, dispatch_mixed
