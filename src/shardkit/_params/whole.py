"""Whole parameters of one bucket for users: plain tensors in storage dtype, and the way back.

What a forward uses is something else: the unsharded parameters are in compute dtype, may be
DTensors, and their memory belongs to the schedule. These here are copies in memory of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardkit._errors import StateError, WrapError
from shardkit._params.flat_store import FlatStore
from shardkit._tensor.sharded import ShardedTensor, user_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._params.bucket import Bucket


class WholeBucket:
    """Copies of a bucket's whole parameters, which the modules hold until `hide`. Collective.

    Args:
        bucket: Bucket that has them.
        keep: Whether this rank wants them; a rank that does not takes part in the gathers only.
        to_cpu: Whether to put them into the memory of the host.
        with_grads: Whether to gather their gradients as well.

    Cost: one all-gather of the bucket in storage dtype, with gradients two, and what tensor
    parallelism takes; memory for the bucket. Where operators are traced, one all-gather of each
    parameter, in the graph.
    """

    def __init__(self, bucket: Bucket, *, keep: bool, to_cpu: bool, with_grads: bool) -> None:
        self._bucket = bucket
        self._version = -1
        self.params: list[nn.Parameter] = []
        wholes = self._gather(bucket.sharded, keep=keep, to_cpu=to_cpu)
        for index, whole in wholes.items():
            self.params.append(self._new_param(index, whole))
        if with_grads:
            grads = [param.grad for param in bucket.sharded]
            for index, grad in self._gather(grads, keep=keep, to_cpu=to_cpu).items():
                self.params[index].grad = grad

    @torch.no_grad()
    def _gather(
        self, tensors: Sequence[Tensor | None], *, keep: bool, to_cpu: bool
    ) -> dict[int, Tensor]:
        """Gather parameters or gradients; return those that there are, by the number."""
        store = self._bucket.store
        given = {i: each for i, each in enumerate(tensors) if isinstance(each, ShardedTensor)}
        if isinstance(store, FlatStore):
            values = torch.zeros_like(store.shard)
            for index, each in given.items():
                store.piece(values, index).copy_(each.local_piece)
            full = store.gather_values(values)
            wholes = {index: store.whole_of(index, full) for index in range(len(tensors))}
        else:
            wholes = {i: each.spec.gather(each.local_piece).clone() for i, each in given.items()}
        if not keep:
            return {}
        return {i: wholes[i].cpu() if to_cpu else wholes[i] for i in given}

    def _new_param(self, index: int, whole: Tensor) -> nn.Parameter:
        sharded, store = self._bucket.sharded[index], self._bucket.store
        grad = sharded.requires_grad
        if isinstance(store, FlatStore):
            param = store.as_parameter(index, whole, requires_grad=grad)
        else:
            param = nn.Parameter(whole, requires_grad=grad)
        own = param.__dict__
        own.update({k: v for k, v in user_attributes(sharded).items() if k not in own})
        return param

    def show(self) -> None:
        """Let the modules hold the whole parameters."""
        self._version = self._bucket.store.shard_version
        self._bucket.sites.show_others(self.params or None)

    def hide(self, *, write_back: bool, with_grads: bool) -> None:
        """Let the modules hold the sharded parameters again; no communication.

        Args:
            write_back: Whether to copy this rank's pieces of what the modules held: values,
                `requires_grad` and, with `with_grads`, gradients.
            with_grads: Whether `write_back` copies gradients, too.

        Raises:
            StateError: Something else was put in the place of a parameter, or its shard was written
                meanwhile. The sharded parameters are shown and unchanged then.
        """
        sites = self._bucket.sites
        held: list[nn.Parameter] = []
        try:
            if write_back:
                held = [self._found(index) for index in range(len(self.params))]
                self._check_not_written()
        finally:
            sites.show_others(None)
        for index, param in enumerate(held):
            self._write(index, param, with_grads=with_grads)

    def _found(self, index: int) -> nn.Parameter:
        """Return what modules hold of a parameter: the whole one, or another of its shape."""
        entry, whole = self._bucket.entries[index], self.params[index]
        shape = tuple(whole.shape)
        places = self._bucket.sites.held(index)
        found = next((param for param in places if param is not whole), whole)
        if not isinstance(found, nn.Parameter) or tuple(found.shape) != shape:
            what = type(found).__name__
            if isinstance(found, Tensor):
                what = f"a {what} of shape {tuple(found.shape)}"
            msg = (
                f"inside of summon_full_params parameter {entry.name!r} of shape {shape} was "
                f"replaced by {what}, which cannot be cut as it is. Write to the parameter in "
                f"place (copy_(), nn.init), or change the model before fully_shard."
            )
            raise StateError(msg)
        packing = self._bucket.store.specs[index].packing
        if packing is not None:
            try:
                packing.check(found)
            except WrapError as error:
                msg = f"inside of summon_full_params: {error}"
                raise StateError(msg) from None
        return found

    def _check_not_written(self) -> None:
        if self._bucket.store.shard_version != self._version:
            name = self._bucket.entries[0].name
            msg = (
                f"the shard of {name!r} was written inside of summon_full_params, which would now "
                f"be lost. Step optimizers outside of it, or pass writeback=False."
            )
            raise StateError(msg)

    @torch.no_grad()
    def _write(self, index: int, whole: nn.Parameter, *, with_grads: bool) -> None:
        param = self._bucket.sharded[index]
        self._write_values(index, whole)
        if param.requires_grad != whole.requires_grad:
            param.requires_grad_(whole.requires_grad)
        if with_grads:
            self._write_grad(param, whole.grad)

    def _write_values(self, index: int, whole: Tensor) -> None:
        param = self._bucket.sharded[index]
        assert isinstance(param, ShardedTensor)
        if param.spec.packing is None:
            param.detach().copy_(_on_traced_device(param, whole))
        else:  # Bytes; `detach` would leave attributes of its class out.
            param.local_piece.copy_(param.spec.slice_full(whole))

    def _write_grad(self, param: nn.Parameter, grad: Tensor | None) -> None:
        if grad is None:
            param.grad = None
            return
        if param.grad is None:
            param.grad = torch.zeros_like(param.detach(), dtype=grad.dtype)
        param.grad.copy_(_on_traced_device(param, grad.detach()))


def _on_traced_device(param: nn.Parameter, value: Tensor) -> Tensor:
    """Return a value where the graph has it; elsewhere only this rank's piece of it is moved."""
    is_traced = isinstance(param, ShardedTensor) and param.spec.is_traced
    return value.to(param.device) if is_traced else value
