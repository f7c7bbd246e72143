"""Defects of shardkit, each put in by exchanging one function, that `twins` must find.

A defect is what somebody may really forget: a gather, a write, a reduction. Each is put in in all
ranks alike, so that nothing but a wrong value, a lost object or memory tells of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from unittest import mock

from shardkit import compression
from shardkit._compat.once import wrapped
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


def exchange(owner: object, name: str, *, of: str, by: object = None) -> typing.Any:
    """Add to a defect: `by` replaces a function, or what is decorated, which gets that first."""
    assert name in vars(owner), f"{of!r} exchanges {name!r}, which {owner} does not have"
    exchanged = DEFECTS.setdefault(of, [])

    def add(new: typing.Any) -> typing.Any:
        exchanged.append((owner, name, lambda old: wrapped(old, new)))
        return new

    if by is not None:
        exchanged.append((owner, name, lambda _: by))
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
def _(old: typing.Any, self: typing.Any, comm: object) -> typing.Any:
    jobs = old(self, comm)
    self.num_gathers = getattr(self, "num_gathers", 0) + 1
    return [] if self.num_gathers > 1 and is_of(self.entries, "blocks.1") else jobs


exchange(
    flat_store.Store,
    "is_stale",
    of="a changed shard is not gathered anew",
    by=property(lambda _: False),
)


@exchange(flat_store.FlatStore, "release", of="the memory of a layer is kept")
def _(old: typing.Any, self: typing.Any, pool: object, fence: object) -> None:
    if not is_of(self.entries, "blocks.2"):
        old(self, pool, fence)


# --- gradients ------------------------------------------------------------------------------------


@exchange(traffic.Reductions, "_reduce", of="the reduction of a layer is lost")
def _(old: typing.Any, self: typing.Any, of: typing.Any) -> None:
    if "blocks.1" not in of.name:
        old(self, of)


@exchange(gradients.GroupGradients, "_scale_of", of="gradients are averaged twice")
def _(old: typing.Any, self: typing.Any, num_ranks: int) -> float:
    return float(old(self, num_ranks) / num_ranks)


@exchange(gradients.GroupGradients, "_reduction_of", of="replicas are not averaged")
def _(old: typing.Any, self: typing.Any, of: typing.Any) -> typing.Any:
    result = old(self, of)
    result.replicate_axis = None
    return result


@exchange(flat_store.SendBuffer, "write_all", of="a second gradient replaces the first one")
def _(old: typing.Any, self: typing.Any, grads: dict[int, object], *args: object) -> None:
    self.written.difference_update(grads)
    old(self, grads, *args)


@exchange(traffic.Reductions, "reset", of="what was not synced outlives an exception")
def _(old: typing.Any, self: typing.Any) -> None:
    with mock.patch.object(gradients.GroupGradients, "reset", nothing):
        old(self)


@exchange(runtime.Runtime, "reset", of="an exception is not cleaned up after")
def _(old: typing.Any, self: typing.Any) -> None:
    del old
    self._interrupted = False
    self.pass_root = None
    self.backward.is_running = False


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
def _(old: typing.Any, grad: typing.Any, like: typing.Any) -> typing.Any:
    return old(grad, like) * like.spec.axis.size


exchange(
    backward,
    "_pair",
    of="gradients of chosen parameters are not asked for",
    by=lambda tensor: (tensor, None),
)


@exchange(compression.Matrix, "view", of="a matrix is compressed beside its place")
def _(old: typing.Any, self: typing.Any, flat: typing.Any) -> typing.Any:
    return old(self, flat.roll(1))


# --- values ---------------------------------------------------------------------------------------


exchange(sharded.ShardedTensor, "copy_values", of="a value that is loaded is lost", by=nothing)


exchange(
    runtime, "keep_writes", of="what a forward writes is lost", by=lambda of, _: of.note_writes()
)


@exchange(full_params.WholeBucket, "_write", of="what is written to a whole parameter is lost")
def _(old: typing.Any, self: typing.Any, index: int, *args: object) -> None:
    if index == 0:
        old(self, index, *args)


@exchange(full_params.WholeBucket, "_write", of="what is written to a whole gradient is lost")
def _(old: typing.Any, self: typing.Any, *args: object) -> None:
    options = self._options
    self._options = dataclasses.replace(options, with_grads=False)
    old(self, *args)
    self._options = options


exchange(
    _matrix.OwnedParams,
    "_is_stale",
    of="the owner of a matrix misses a write",
    by=lambda self, index: self.marks[index] is None,
)


exchange(
    flat_store, "note_raised", of="the owner of a matrix misses what a forward writes", by=nothing
)


exchange(
    _save.Staging,
    "copy",
    of="a save in the background has what was written since",
    by=lambda _, state: state,
)


@exchange(
    model_and_optimizer, "numbered_states", of="state of the optimizer comes to other parameters"
)
def _(old: typing.Any, *args: typing.Any, **options: typing.Any) -> typing.Any:
    for each, state in old(*args, **options):
        if {1, 3} <= set(state["state"]):
            entries = state["state"]
            entries[1], entries[3] = entries[3], entries[1]
        yield each, state


# --- models that change ---------------------------------------------------------------------------


@exchange(fsdp_module.FSDPModule, "__deepcopy__", of="a copy has the method of its model")
def _(old: typing.Any, self: typing.Any, memo: dict[int, object]) -> typing.Any:
    result = old(self, memo)
    if "short" in vars(self):
        result.short = self.short
    return result


exchange(sites.ParamSites, "_refuse_replaced", of="another parameter is computed with", by=nothing)


exchange(
    activation_checkpoint,
    "torch_modules",
    of="functional_call is repeated without values",
    by=types.SimpleNamespace(in_functional_call=lambda: False),
)


exchange(
    sites.ParamSites,
    "end_functional_call",
    of="functional_call leaves freed parameters",
    by=lambda self, **_: self.show(unsharded=False),
)
