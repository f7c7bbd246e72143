"""Whole parameters of one bucket for users: plain tensors in storage dtype, and the way back.

What a forward uses is something else: the unsharded parameters are in compute dtype, may be
DTensors, and their memory belongs to the schedule. These here are copies in memory of their own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import StateError, WrapError
from shardkit._params.flat_store import FlatStore
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit._tensor.written_values import note_written

if TYPE_CHECKING:
    from shardkit._params.bucket import Bucket


class WholeBucket:
    """Copies of a bucket's whole parameters, which the modules hold until `hide`. Collective.

    Args:
        bucket: Bucket of a backend that runs operators at once; see `TracedWholeBucket` for the
            others.
        keep: Whether this rank wants them; a rank that does not takes part in the gathers only.
        to_cpu: Whether to put them into the memory of the host.
        with_grads: Whether to gather their gradients as well.

    Cost: one all-gather of the bucket in storage dtype, with gradients two, and what tensor
    parallelism takes; memory for the bucket.
    """

    def __init__(self, bucket: Bucket, *, keep: bool, to_cpu: bool, with_grads: bool) -> None:
        self._bucket = bucket
        self._to_cpu = to_cpu
        self._version = -1
        self.params: list[nn.Parameter] = []
        wholes = self._whole_values(keep=keep)
        grads = self._whole_grads(keep=keep) if with_grads else {}
        for index, whole in enumerate(wholes):
            self.params.append(self._new_param(index, whole))
        for index, grad in grads.items():
            self.params[index].grad = grad

    @property
    def _store(self) -> FlatStore:
        assert isinstance(self._bucket.store, FlatStore)
        return self._bucket.store

    def _whole_values(self, *, keep: bool) -> list[Tensor]:
        """Gather the parameters."""
        return self._wholes(self._store.shard, keep=keep)

    @torch.no_grad()
    def _wholes(self, values: Tensor, *, keep: bool) -> list[Tensor]:
        """Gather what is laid out as the shard."""
        store = self._store
        full = store.gather_values(values)
        wholes = [store.whole_of(index, full) for index in range(len(store.entries))]
        if not keep:
            return []
        if self._to_cpu and full.device.type != "cpu":
            return [whole.cpu() for whole in wholes]
        return wholes

    @torch.no_grad()
    def _whole_grads(self, *, keep: bool) -> dict[int, Tensor]:
        """Gather the gradients, zeros for parameters without; return those that there are."""
        store, params = self._store, self._bucket.sharded
        values = torch.zeros_like(store.shard)
        for index, param in enumerate(params):
            if isinstance(param.grad, ShardedTensor):
                store.piece(values, index).copy_(param.grad.to_local())
        wholes = self._wholes(values, keep=keep)
        return {i: whole for i, whole in enumerate(wholes) if params[i].grad is not None}

    def _new_param(self, index: int, whole: Tensor) -> nn.Parameter:
        sharded = self._bucket.sharded[index]
        param = self._as_parameter(index, whole, requires_grad=sharded.requires_grad)
        own = param.__dict__
        own.update({k: v for k, v in user_attributes(sharded).items() if k not in own})
        return param

    def _as_parameter(self, index: int, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        return self._store.as_parameter(index, whole, requires_grad=requires_grad)

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
        for index, param in enumerate(held):  # Later: pieces of all were written past operators.
            if type(param) is nn.Parameter:
                target: Any = self._bucket.sharded[index]
                note_written(target, functools.partial(list, (param,)))

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
        self._write_values(index, whole)  # `detach` leaves attributes of a class out.
        if param.requires_grad != whole.requires_grad:
            param.requires_grad_(whole.requires_grad)
        if not with_grads:
            return
        if whole.grad is None or param.grad is None:
            param.grad = None if whole.grad is None else self._cut_grad(index, whole.grad.detach())
        else:
            self._write_grad(index, whole.grad.detach())

    def _write_values(self, index: int, whole: Tensor) -> None:
        store = self._store
        store.piece(store.shard, index).copy_(store.specs[index].slice_full(whole))

    def _cut_grad(self, index: int, grad: Tensor) -> Tensor:
        return self._store.sharded_grad(index, grad)

    def _write_grad(self, index: int, grad: Tensor) -> None:
        own = self._bucket.sharded[index].grad
        assert isinstance(own, ShardedTensor)
        own.to_local().copy_(self._store.specs[index].slice_full(grad))


class TracedWholeBucket(WholeBucket):
    """The same where operators are traced: by those of sharded tensors, one after the other.

    Cost: one all-gather of each parameter, with gradients two, in the graph.
    """

    @torch.no_grad()
    def _whole_values(self, *, keep: bool) -> list[Tensor]:
        wholes = [self._whole(param) for param in self._bucket.sharded]
        return wholes if keep else []

    @torch.no_grad()
    def _whole_grads(self, *, keep: bool) -> dict[int, Tensor]:
        grads = [(index, param.grad) for index, param in enumerate(self._bucket.sharded)]
        wholes = {i: self._whole(grad) for i, grad in grads if isinstance(grad, ShardedTensor)}
        return wholes if keep else {}

    def _whole(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, ShardedTensor)
        whole = tensor.spec.gather(tensor.local_piece)
        return whole.cpu() if self._to_cpu else whole.clone()

    def _as_parameter(self, index: int, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        del index
        return nn.Parameter(whole, requires_grad=requires_grad)

    def _write_values(self, index: int, whole: Tensor) -> None:
        param = self._bucket.sharded[index]
        param.detach().copy_(whole.to(param.device))

    def _cut_grad(self, index: int, grad: Tensor) -> Tensor:
        param = self._bucket.sharded[index].detach()
        return torch.zeros_like(param, dtype=grad.dtype).copy_(grad.to(param.device))

    def _write_grad(self, index: int, grad: Tensor) -> None:
        own = self._bucket.sharded[index].grad
        assert own is not None
        own.copy_(grad.to(own.device))


def whole_bucket(bucket: Bucket, *, keep: bool, to_cpu: bool, with_grads: bool) -> WholeBucket:
    """Return copies of a bucket's whole parameters; see `WholeBucket`."""
    is_flat = isinstance(bucket.store, FlatStore)
    made = WholeBucket if is_flat else TracedWholeBucket
    return made(bucket, keep=keep, to_cpu=to_cpu, with_grads=with_grads)
