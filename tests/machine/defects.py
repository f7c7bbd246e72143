"""Defects of shardkit, each put in by exchanging one function, that `twins` must find.

A defect is what somebody may really forget: a gather, a write, a reduction. Each is put in in all
ranks alike, so that nothing but a wrong value, a lost object or memory tells of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from unittest import mock

from shardkit import compression
from shardkit._module import activation_checkpoint, fsdp_module, full_params
from shardkit._params import flat_store, gradients, sites
from shardkit._runtime import backward, runtime, traffic
from shardkit._tensor import sharded
from shardkit.checkpoint import _save
from shardkit.checkpoint._state import model_and_optimizer
from shardkit.optim import _matrix

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

DEFECTS: dict[str, list[tuple[typing.Any, str, Callable[[typing.Any], typing.Any]]]] = {}
"""For each the functions that are exchanged: owner, name, what makes the new one of the old one."""


def exchange(owner: object, name: str, *, of: str) -> typing.Any:
    """Add to a defect: what is decorated makes a function's replacement."""
    assert name in vars(owner), f"{of!r} exchanges {name!r}, which {owner} does not have"

    def add(make: typing.Any) -> typing.Any:
        DEFECTS.setdefault(of, []).append((owner, name, make))
        return make

    return add


@contextlib.contextmanager
def put_in(defect: str | None) -> Iterator[None]:
    """Have a defect inside of the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, make in DEFECTS[defect] if defect else ():
            new = make(vars(owner)[name])
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def is_of(entries: typing.Any, name: str) -> bool:
    return any(entry.name.startswith(name) for entry in entries)


# --- memory and gathers ---------------------------------------------------------------------------


@exchange(flat_store.FlatStore, "gather_jobs", of="the second layer is gathered once only")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, comm: object) -> typing.Any:
        jobs = old(self, comm)
        self.num_gathers = getattr(self, "num_gathers", 0) + 1
        return [] if self.num_gathers > 1 and is_of(self.entries, "blocks.1") else jobs

    return new


@exchange(flat_store.Store, "is_stale", of="a changed shard is not gathered anew")
def _(old: typing.Any) -> typing.Any:
    del old
    return property(lambda _: False)


@exchange(flat_store.FlatStore, "release", of="the memory of a layer is kept")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, pool: object, fence: object) -> None:
        if not is_of(self.entries, "blocks.2"):
            old(self, pool, fence)

    return new


# --- gradients ------------------------------------------------------------------------------------


@exchange(traffic.Reductions, "_reduce", of="the reduction of a layer is lost")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, of: typing.Any) -> None:
        if "blocks.1" not in of.name:
            old(self, of)

    return new


@exchange(gradients.GroupGradients, "_scale_of", of="gradients are averaged twice")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, num_ranks: int) -> float:
        return float(old(self, num_ranks) / num_ranks)

    return new


@exchange(gradients.GroupGradients, "_reduction_of", of="replicas are not averaged")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, of: typing.Any) -> typing.Any:
        result = old(self, of)
        result.replicate_axis = None
        return result

    return new


@exchange(flat_store.SendBuffer, "write_all", of="a second gradient replaces the first one")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, grads: dict[int, object], *args: object) -> None:
        self.written.difference_update(grads)
        old(self, grads, *args)

    return new


@exchange(traffic.Reductions, "reset", of="what was not synced outlives an exception")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any) -> None:
        with mock.patch.object(gradients.GroupGradients, "reset", nothing):
            old(self)

    return new


@exchange(runtime.Runtime, "reset", of="an exception is not cleaned up after")
def _(old: typing.Any) -> typing.Any:
    del old

    def new(self: typing.Any) -> None:
        self._interrupted = False
        self.pass_root = None
        self.backward.is_running = False

    return new


@exchange(sharded, "_relay", of="a hook that was removed is called again")
def _(old: typing.Any) -> typing.Any:
    del old
    known_of: dict[int, dict[int, typing.Any]] = {}

    def new(hooks_ref: typing.Any, grad: torch.Tensor) -> torch.Tensor:
        known = known_of.setdefault(id(hooks_ref), {})
        known.update(hooks_ref() or {})
        for hook in known.values():
            if not isinstance(hook, sharded.OwnHook):
                result = hook(grad)
                grad = grad if result is None else result
        return grad

    return new


@exchange(backward, "averaged", of="gradients that were asked for are not averaged")
def _(old: typing.Any) -> typing.Any:
    return lambda grad, like: old(grad, like) * like.spec.axis.size


@exchange(backward, "_pair", of="gradients of chosen parameters are not asked for")
def _(old: typing.Any) -> typing.Any:
    del old
    return lambda tensor: (tensor, None)


@exchange(compression.Matrix, "view", of="a matrix is compressed beside its place")
def _(old: typing.Any) -> typing.Any:
    return lambda self, flat: old(self, flat.roll(1))


# --- values ---------------------------------------------------------------------------------------


@exchange(sharded.ShardedTensor, "copy_values", of="a value that is loaded is lost")
def _(old: typing.Any) -> typing.Any:
    del old
    return nothing


@exchange(runtime, "keep_writes", of="what a forward writes is lost")
def _(old: typing.Any) -> typing.Any:
    del old
    return lambda of, _: of.note_writes()


@exchange(full_params.WholeBucket, "_write", of="what is written to a whole parameter is lost")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, index: int, *args: object) -> None:
        if index == 0:
            old(self, index, *args)

    return new


@exchange(full_params.WholeBucket, "_write", of="what is written to a whole gradient is lost")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, *args: object) -> None:
        options = self._options
        self._options = dataclasses.replace(options, with_grads=False)
        old(self, *args)
        self._options = options

    return new


@exchange(_matrix.OwnedParams, "_is_stale", of="the owner of a matrix misses a write")
def _(old: typing.Any) -> typing.Any:
    del old
    return lambda self, index: self.marks[index] is None


@exchange(flat_store, "note_raised", of="the owner of a matrix misses what a forward writes")
def _(old: typing.Any) -> typing.Any:
    del old
    return nothing


@exchange(_save.Staging, "copy", of="a save in the background has what was written since")
def _(old: typing.Any) -> typing.Any:
    del old
    return lambda _, state: state


@exchange(
    model_and_optimizer, "numbered_states", of="state of the optimizer comes to other parameters"
)
def _(old: typing.Any) -> typing.Any:
    @functools.wraps(old)
    def new(*args: typing.Any, **options: typing.Any) -> typing.Any:
        for each, state in old(*args, **options):
            if {1, 3} <= set(state["state"]):
                entries = state["state"]
                entries[1], entries[3] = entries[3], entries[1]
            yield each, state

    return new


# --- models that change ---------------------------------------------------------------------------


@exchange(fsdp_module.FSDPModule, "__deepcopy__", of="a copy has the method of its model")
def _(old: typing.Any) -> typing.Any:
    def new(self: typing.Any, memo: dict[int, object]) -> typing.Any:
        result = old(self, memo)
        if "short" in vars(self):
            result.short = self.short
        return result

    return new


@exchange(sites.ParamSites, "_refuse_replaced", of="another parameter is computed with")
def _(old: typing.Any) -> typing.Any:
    del old
    return nothing


@exchange(activation_checkpoint, "torch_modules", of="functional_call is repeated without values")
def _(old: typing.Any) -> typing.Any:
    del old
    return types.SimpleNamespace(in_functional_call=lambda: False)


@exchange(sites.ParamSites, "end_functional_call", of="functional_call leaves freed parameters")
def _(old: typing.Any) -> typing.Any:
    del old
    return lambda self, **_: self.show(unsharded=False)
