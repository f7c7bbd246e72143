"""One bucket: parameters of a group with one mesh, storage dtype, compute dtype and trainability.

The sharded parameter is the user's own Parameter object, turned into a `ShardedTensor`. The
bucket's store has the shard of which it is a piece, and the unsharded parameters.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_modules, torch_tensors
from shardkit._errors import WrapError
from shardkit._params.packing import packing_of
from shardkit._params.sites import ParamEntry, ParamSites
from shardkit._settings import watch_settings
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import fingerprint
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardkit._mesh import DeviceMesh
    from shardkit._params.flat_store import Store

_PATIENCE_S = 1.0  # Time in which threads must drop their references to a parameter.


def swap_tensors(param: nn.Parameter, other: nn.Parameter, name: str) -> None:
    """Exchange two parameters, after other threads have dropped their references to them.

    The thread of a process group holds a parameter for a moment longer than its broadcast takes.

    Raises:
        WrapError: A reference is still there after a second, or is a weak one.
    """
    last_try_at = time.monotonic() + _PATIENCE_S
    while True:
        is_last = time.monotonic() > last_try_at
        try:
            torch.utils.swap_tensors(param, other)
        except RuntimeError as error:
            if is_last or weakref.getweakrefs(param):
                msg = (
                    f"parameter {name!r} cannot be sharded in place: "
                    f"{str(error).removesuffix('.')}. Call fully_shard before anything keeps weak "
                    f"references to the parameter or a graph that uses it (delete old outputs and "
                    f"losses first). A profiler with stacks keeps them, too: "
                    f"start it afterwards."
                )
                raise WrapError(msg) from error
            time.sleep(0.001)
        else:
            return


# --- fingerprints ---------------------------------------------------------------------------------


class WholeValues:
    """Fingerprints of the parameters of a group, when they were whole.

    Args:
        entries: The parameters, before they are cut; parameters on meta, and those of classes that
            gather themselves, are left out.
    """

    def __init__(self, entries: Iterable[ParamEntry] = ()) -> None:
        self.versions: tuple[int, ...] = ()  # Versions of the shards when they were cut.
        self._by_entry: dict[int, Tensor] = {}
        if watch_settings.compare_values:
            for entry in entries:
                part = _plain_part(entry)
                if part is not None:
                    self.note(entry, part)

    def note(self, entry: ParamEntry, whole: Tensor) -> None:
        """Add the values of one parameter."""
        if watch_settings.compare_values:
            self._by_entry[id(entry)] = fingerprint(whole)

    def known(self, versions: tuple[int, ...]) -> dict[int, int]:
        """Return the fingerprints by the entry's id; none if the shards were written since."""
        if versions != self.versions or not self._by_entry:
            return {}
        values = torch.stack([*self._by_entry.values()]).tolist()  # One transfer from the device.
        return dict(zip(self._by_entry, values, strict=True))


def _plain_part(entry: ParamEntry) -> Tensor | None:
    """Return a parameter, a DTensor's local part, or the bytes of a packed one.

    The result is None if the parameter is of another kind, or on meta.
    """
    param: Any = entry.param
    packing = None if param.is_meta else packing_of(entry)
    if packing is not None:
        return packing.pack(param)
    part: Tensor = param.to_local() if tensor_parallel_of(param) is not None else param
    if part.is_meta or type(part) not in (torch.Tensor, nn.Parameter):
        return None
    return part


# --- buckets --------------------------------------------------------------------------------------

_showing: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()
"""Buckets by the id of their unsharded parameters, which live at least as long."""


def bucket_showing(param: object) -> Bucket | None:
    """Return the bucket of an unsharded parameter that a module holds; None for other objects."""
    return _showing.get(id(param))


def settled(param: Any) -> Any:
    """Return the user's parameter for an unsharded one that a forward has left in its module.

    Any other parameter is returned as it is, also one that the user has by `unshard`.
    """
    bucket = bucket_showing(param)
    group = None if bucket is None or bucket.group is None else bucket.group()
    if bucket is None or group is None or group.is_user_held:
        return param
    return bucket.sharded_of(param)


class Bucket:
    """Parameters, the modules that hold them, and their store. Nothing changes before `swap_in`."""

    # Weak reference to the group that the bucket is part of, once that is made.
    group: weakref.ref[Any] | None = None
    # Flags of the parameters: whether each required gradients when its last forward ended. Empty
    # before the first forward.
    was_trainable: Sequence[bool] = ()
    # Mesh for `lie_within`, to be used from the first forward on in which one of the parameters is
    # trained; None: training changes nothing.
    around_if_trained: DeviceMesh | None = None
    # Whether other ranks of the mesh around hold copies of the parameters.
    has_copies: bool = False

    def __init__(self, store: Store) -> None:
        self.store = store  # Store of the bucket.
        self.plan = store.plan  # Dtypes and devices.
        self.entries = store.entries  # The parameters, and every module that holds one.
        self._replacements = [
            None if isinstance(entry.param, ShardedTensor) else self._new_sharded(i)
            for i, entry in enumerate(self.entries)
        ]
        for spec, entry, unsharded in zip(store.specs, self.entries, store.unsharded, strict=True):
            spec.entry, spec.unsharded = weakref.ref(entry), weakref.ref(unsharded)
        _showing.update({id(param): self for param in store.unsharded})
        # Places of the parameters; they exchange what modules hold.
        self.sites = ParamSites(self.entries, store.unsharded)

    def lie_within(self, mesh: DeviceMesh) -> None:
        """Note that other ranks of `mesh` hold other parameters in the place of these.

        DTensors are left out, since they know themselves what they are parts of.
        """
        self.plan = self.store.plan = replace(self.plan, around=mesh)
        for spec in self.store.specs:
            if spec.tensor_parallel is None:
                spec.lie_within(mesh, has_copies=self.has_copies)
        self.around_if_trained = None

    def follow_trainability(self) -> None:
        """Lie within the mesh around if a parameter was unfrozen: other ranks may train others."""
        if self.around_if_trained is not None and self.is_trainable:
            self.lie_within(self.around_if_trained)

    def lie_as(self, bucket: Bucket) -> None:
        """Lie within the mesh around like another bucket, which this one replaces."""
        self.has_copies, self.around_if_trained = bucket.has_copies, bucket.around_if_trained
        if self.has_copies and self.plan.around is not None:
            self.lie_within(self.plan.around)

    # --- exchange of the user's parameters ---

    def _new_sharded(self, index: int) -> nn.Parameter:
        """Make the parameter with which the user's parameter is exchanged."""
        old = self.entries[index].param
        new = nn.Parameter(self.store.sharded(index), requires_grad=old.requires_grad)
        new.__dict__.update(self.store.attributes_of(index))
        torch_tensors.keep_grad_dtype(new, old)
        if old.grad is not None:
            new.grad = self.store.sharded_grad(index, old.grad.detach())
        for hook in torch_autograd.post_accumulate_grad_hooks(old):
            new.register_post_accumulate_grad_hook(hook)
        return new

    def swap_in(self, index: int) -> None:
        """Turn the user's parameter `index` into the sharded one; the same call undoes it.

        A DTensor is replaced instead, because its object cannot be turned into another. A parameter
        of a module made by torch.export is replaced, too: its weak references forbid the exchange.

        Raises:
            WrapError: Something else keeps a reference that forbids the exchange.
        """
        entry, replacement = self.entries[index], self._replacements[index]
        for rnn in self._rnns(index):
            torch_modules.rnn_forget_weight_refs(rnn)
        if replacement is None:
            assert isinstance(entry.param, ShardedTensor)
            sharded = self.store.sharded(index)
            entry.param.repoint(sharded.local_piece, sharded.spec, sharded.flat)
            return
        is_exported = all(torch_modules.is_exported(module) for module, _ in entry.sites)
        if is_exported or self._was_dtensor(index):
            torch_autograd.share_hooks(replacement, torch_autograd.tensor_hooks(entry.param))
            entry.param, self._replacements[index] = replacement, entry.param
            for module, attribute in entry.sites:
                setattr(module, attribute, entry.param)
            return
        swap_tensors(entry.param, replacement, entry.name)

    def _was_dtensor(self, index: int) -> bool:
        tensor_parallel = self.store.specs[index].tensor_parallel
        return tensor_parallel is not None and not tensor_parallel.is_plain

    def restore_weight_refs(self) -> None:
        """Let RNNs keep weak references again, after `swap_in` was undone."""
        for index in range(len(self.entries)):
            for module in self._rnns(index):
                torch_modules.rnn_restore_weight_refs(module)

    def _rnns(self, index: int) -> Iterator[nn.RNNBase]:
        modules = (module for module, _ in self.entries[index].sites)
        return (module for module in modules if isinstance(module, nn.RNNBase))

    def drop_originals(self) -> None:
        """Drop the full-size tensors; from now on there is no way back."""
        for index, replaced in enumerate(self._replacements):
            if replaced is not None and self._was_dtensor(index):
                spec = self.store.specs[index]
                spec.tensor_parallel.retire(replaced, spec.name)
        self._replacements = []
        self.store.drop_originals()

    # --- state of the parameters ---

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The user's parameters."""
        return [entry.param for entry in self.entries]

    def sharded_of(self, unsharded: nn.Parameter) -> nn.Parameter:
        """Return the user's parameter of an unsharded one."""
        pairs = zip(self.entries, self.store.unsharded, strict=True)
        return next(entry.param for entry, param in pairs if param is unsharded)

    @property
    def is_uniform(self) -> bool:
        """Whether the parameters have one dtype and device, as a bucket needs."""
        return len({(param.dtype, param.device) for param in self.sharded}) == 1

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        for entry in self.entries:  # noqa: SIM110 - faster, and asked often
            if entry.param.requires_grad:
                return True
        return False

    def rename(self, index: int, name: str) -> None:
        """Give a parameter its full name."""
        self.entries[index].name = name
        self.store.rename(index, name)
