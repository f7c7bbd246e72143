"""The unit of communication: the parameters of one `fully_shard` call."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from shardkit._compat import torch_tensors
from shardkit._errors import StateError
from shardkit._params.bucket import Bucket, WholeValues
from shardkit._params.gradients import GroupGradients
from shardkit._params.make import make_buckets, rebuild, restore
from shardkit._params.sites import ParamEntry
from shardkit._params.state_dicts import install_hooks
from shardkit._pickling import mesh_of_restored
from shardkit._runtime.events import ForwardRecord, GradHooks
from shardkit._settings import GroupSettings, MixedPrecisionPolicy, OffloadPolicy, watch_settings
from shardkit._tensor.sharded import user_attributes
from shardkit._tensor.written_values import fingerprint
from shardkit._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from shardkit._mesh import DeviceMesh
    from shardkit._params.flat_store import Store
    from shardkit._tensor.written_values import WrittenValue
    from shardkit.backends.base import AxisComm, Backend

    Written = tuple[ParamEntry, WrittenValue, "KnownValue | None"]


# --- while users have whole parameters ------------------------------------------------------------


def refuse_summoned(groups: Iterable[ParamGroup], what: str) -> None:
    """Raise that `what` cannot be done if modules of a group hold whole parameters for the user.

    Raises:
        StateError: The call is inside `summon_full_params`.
    """
    for group in groups:
        if group.summoned is not None:
            msg = (
                f"{what} inside of summon_full_params, where the modules of {group.name!r} hold "
                f"plain copies of whole parameters. Leave the with block first."
            )
            raise StateError(msg)


# --- groups ---------------------------------------------------------------------------------------

STATE_ATTRIBUTE = "_shardkit_state"
"""Attribute of each module that was given to `fully_shard`, even if it has no group."""

_numbers = itertools.count()

_PICKLED = ("modules", "name", "policy", "settings", "is_root", "is_innermost")
"""Attributes that are pickled as they are."""


class ParamGroup:
    """Parameters that are gathered and reduced together.

    A group is the same from step to step. The schedule's `GroupState` says where it is in a step.

    Attributes:
        modules: Modules that were given to `fully_shard`, one or a list.
        name: Names of the modules, for errors.
        buckets: Buckets of all parameters.
        num_params: Number of parameters.
        gradients: Gradients of the trainable buckets.
        grad_hooks: Hooks that bring the gradients.
        mesh: Mesh of the call. Each bucket's plan has the bucket's own mesh.
        axes: Axes of all buckets' meshes.
        replicates: Whether any bucket is all-reduced.
        kept_axes: Axes over which backward gathers, with `reshard_after_forward=n`, by the shard
            axes that they are parts of.
        index: Position among the groups of the root; its number in schedules.
        number: Number in this process, which events use.
        listener: The `Backward` of its root; None: it has none yet.
        forwards: Forwards that may still have a backward, as far as their graphs exist. A reference
            leaves the set when its graph is freed.
        is_root: Whether the module is the root, which is not resharded with
            `reshard_after_forward=None`.
        is_innermost: Whether no other group's modules are inside this one's.
        is_fed: Whether a forward of the root had inputs that require gradients, as in a later stage
            of a pipeline. It is only set if the mesh is a part of the world.
        summoned: Whether modules hold whole parameters for the user (`_module.full_params`).
        was_sampled: Whether `sample` was called, as it is in the first forward with gradients.
        samples: Samples of unsharded values, until that forward ends.
        settings: Settings that the user chose.
    """

    is_fed = False
    summoned: Any = None
    was_sampled = False
    samples: Sequence[tuple[Store, int, Tensor]] = ()
    _sampled_versions: Sequence[int] = ()

    def __init__(
        self,
        modules: Sequence[nn.Module],
        entries: Sequence[ParamEntry],
        *,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        settings: GroupSettings,
    ) -> None:
        self.modules = list(modules)
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.mesh = mesh
        self.policy = policy.for_param(None)
        self.settings = settings
        self.is_root = False
        self.is_innermost = True
        values = WholeValues(() if mesh.backend.is_traced else entries)
        buckets = make_buckets(entries, mesh=mesh, policy=policy, offload=offload)
        self._take_buckets(buckets)
        self._values = values
        self.set_reshard_after_forward(settings.reshard_after_forward)

    def _take_buckets(self, buckets: list[Bucket]) -> None:
        """Set the buckets, and leave any root."""
        self.index = -1
        self.number = next(_numbers)
        self._values = WholeValues()
        self.listener: Any = None
        self.forwards: set[weakref.ref[ForwardRecord]] = set()
        self._set_buckets(buckets)
        self._values.versions = self.shard_versions

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        """Set the buckets, and the objects that reduce their gradients."""
        self.buckets = buckets
        self.num_params = sum(len(bucket.entries) for bucket in buckets)
        for bucket in buckets:
            bucket.group = weakref.ref(self)
        self.axes = tuple(dict.fromkeys(axis for b in buckets for axis in b.plan.axes))
        self.replicates = any(bucket.plan.replicate_axis is not None for bucket in buckets)
        self.gathered = [b.store for b in buckets if not b.store.aliases_shard]
        self.set_keep_unsharded_storage(self.settings.keep_unsharded_storage)
        self.gradients = GroupGradients(
            [bucket for bucket in buckets if bucket.plan.is_differentiable],
            comm=self.settings.comm,
            weight=self.mesh.backend.gradient_weight,
        )
        places = [(b.store, i) for b in buckets for i in range(len(b.entries))]
        watched = [(place, each) for place in places for each in place[0].written_to(place[1])]
        self._writable = [place for place, _ in watched]
        self._shown = [each for _, each in watched]
        self._shown_versions = [0] * len(self._shown)
        self.note_writes()
        self.grad_hooks = GradHooks(self, at_once=not self.is_local)

    def set_keep_unsharded_storage(self, value: bool) -> None:  # noqa: FBT001
        """Set whether unsharded memory stays where it is while parameters are resharded."""
        self.settings.keep_unsharded_storage = value
        for store in self.gathered:
            store.keeps_memory = value

    def set_reshard_after_forward(self, value: bool | int | None) -> None:  # noqa: FBT001
        """Set what happens to the memory after forward; an int makes a process group."""
        self.settings.reshard_after_forward = value
        self.kept_axes: dict[AxisComm, AxisComm] = {}
        if value is None or isinstance(value, bool):
            return
        for bucket in self.buckets:
            mesh, axis = bucket.plan.mesh, bucket.plan.axis
            if axis.size > value and axis not in self.kept_axes:
                self.kept_axes[axis] = mesh.backend.split_axis(mesh.ndim - 1, value)

    # --- the user's parameters ---

    def swap_in_params(self) -> None:
        """Turn the user's parameters into sharded ones, all or none.

        Raises:
            WrapError: One of them cannot be exchanged; the others do not change.
        """
        done: list[tuple[Bucket, int]] = []
        try:
            for bucket in self.buckets:
                for index in range(len(bucket.entries)):
                    bucket.swap_in(index)
                    done.append((bucket, index))
        except Exception:
            for bucket, index in reversed(done):
                bucket.swap_in(index)
            for bucket in self.buckets:
                bucket.restore_weight_refs()
            raise
        self._values.versions = self.shard_versions
        for bucket in self.buckets:
            bucket.drop_originals()
            install_hooks(module for entry in bucket.entries for module, _ in entry.sites)

    @property
    def was_replaced(self) -> bool:
        """Whether parameters got other pieces since the last forward, e.g. by ``.to(dtype)``."""
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if not bucket.store.has_all_pieces():
                return True
        return False

    def refresh(self) -> None:
        """Follow changes of the parameters since the last forward, e.g. by ``.to(dtype)``.

        Raises:
            StateError: They cannot share a bucket any more, or unsynced gradients would be lost.
        """
        if self._has_unsynced:
            self._refuse_unsynced("were replaced")
        buckets = [rebuild(bucket, bucket.entries) for bucket in self.buckets]
        for module in self.modules:
            move_buffers(module, self.mesh.backend)  # After `to_empty(device="cpu")`.
        self._set_buckets(buckets)

    def check_conversion(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse a conversion that would lose unsynced gradients, before it changes anything.

        Raises:
            StateError: See `refresh`.
        """
        if not self._has_unsynced:
            return
        for param in itertools.chain.from_iterable(bucket.sharded for bucket in self.buckets):
            before = torch.empty(0, dtype=param.dtype, device=param.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                self._refuse_unsynced("cannot be converted")

    @property
    def _has_unsynced(self) -> bool:
        return self.gradients.buffer_nbytes > 0 or self.gradients.is_reducing

    def _refuse_unsynced(self, what: str) -> None:
        msg = (
            f"parameters of {self.name!r} {what} while gradients wait to be synced. Finish the "
            f"step before converting the module."
        )
        raise StateError(msg)

    @contextlib.contextmanager
    def converted(self) -> Iterator[None]:
        """Keep what users have set on the parameters, while the block exchanges their pieces.

        Gradients of a dtype of their own (``grad_dtype``, not None) stay in it. At the end of the
        block the pieces are laid end to end, if all of them were replaced.

        Raises:
            StateError: See `refresh`.
        """
        params = [param for bucket in self.buckets for param in bucket.sharded]
        attributes = [user_attributes(param) for param in params]
        chosen = [
            (param, torch_tensors.grad_dtype_of(param), param.grad)
            for param in params
            if torch_tensors.is_grad_dtype_chosen(param)
        ]
        for param, dtype, _ in chosen:
            if dtype is not None:
                param.grad = None
        try:
            yield
        finally:
            for param, dtype, grad in chosen:
                param.grad_dtype = dtype
                if dtype is not None:
                    param.grad = None if grad is None else grad.to(param.device)
        for param, was_set in zip(params, attributes, strict=True):
            for name, value in was_set.items():
                param.__dict__.setdefault(name, value)
        self.take_up_pieces()

    def take_up_pieces(self) -> None:
        """Lay replaced pieces end to end; do nothing while some are still on meta."""
        if self.was_replaced and all(bucket.is_uniform for bucket in self.buckets):
            self.refresh()

    def note_values(self, values: WholeValues) -> None:
        """Keep numbers of the whole parameters' values, which are now in the shards."""
        values.versions = self.shard_versions
        self._values = values

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""
        if self.mesh.backend.is_dry:
            return False
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if bucket.plan.device.type == "meta":
                return True
        return False

    def check_materialized(self) -> None:
        """Refuse a parameter on the meta device.

        Raises:
            StateError: A parameter is on the meta device, or a module holds another one instead.
        """
        on_meta = [(b, i) for b in self.buckets for i, e in enumerate(b.entries) if e.param.is_meta]
        if on_meta and not self.mesh.backend.is_dry:
            for bucket, index in on_meta:
                bucket.sites.check_held(index)
            names = [bucket.entries[index].name for bucket, index in on_meta]
            others = f" So are {listed(names[1:])}." if names[1:] else ""
            msg = (
                f"parameter {names[0]!r} of {self.name!r} is on the meta device: it has no values. "
                f"Before the first forward call shardkit.materialize(model), or "
                f"model.to_empty(device={self.mesh.device_type!r}) and initialize it (nn.init, "
                f"reset_parameters()), or load it (shardkit.checkpoint.load_full, "
                f"load_state_dict(..., assign=True)).{others}"
            )
            raise StateError(msg)

    def check_trainability(self) -> None:
        """Raise if `requires_grad` was changed while the unsharded parameters were shown."""
        for bucket in self.buckets:
            wanted = [entry.param.requires_grad for entry in bucket.entries]
            if wanted == [param.requires_grad for param in bucket.store.unsharded]:
                bucket.was_trainable = wanted
                continue
            for entry, param in zip(bucket.entries, bucket.store.unsharded, strict=True):
                if entry.param.requires_grad != param.requires_grad:
                    msg = (
                        f"requires_grad of {entry.name!r} was changed inside its module's forward, "
                        f"where it has no effect on this step and would be lost. Change it "
                        f"between steps, e.g. before the forward of the root."
                    )
                    param.requires_grad_(entry.param.requires_grad)
                    raise StateError(msg)

    def follow_trainability(self) -> None:
        """Follow which parameters were frozen since the last forward, which left them unsharded."""
        for bucket in self.buckets:
            for entry, shown, was in zip(
                bucket.entries, bucket.store.unsharded, bucket.was_trainable, strict=False
            ):
                if shown.requires_grad != was:
                    entry.param.requires_grad_(shown.requires_grad)
                elif entry.param.requires_grad != was:
                    shown.requires_grad_(entry.param.requires_grad)

    @property
    def is_user_held(self) -> bool:
        """Whether the user has called `unshard`, and works with the unsharded parameters."""
        return self.listener is not None and bool(self.listener.is_user_held(self))

    @property
    def is_shown(self) -> bool:
        """Whether modules hold the unsharded parameters."""
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if bucket.sites.is_visible:
                return True
        return False

    @property
    def was_written(self) -> bool:
        """Whether unsharded parameters, which have memory, were written since the last note."""
        if torch_tensors.versions_of(self._shown) != self._shown_versions:
            return True
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if bucket.store.has_moved():
                return True
        return False

    def sample(self) -> None:
        """Look at the unsharded values, which have memory, for `written_unseen`."""
        self.was_sampled = True
        self._sampled_versions = self.shard_versions
        self.samples = [
            (store, index, fingerprint(store.unsharded_values(index)))
            for store in self.gathered
            if store.keeps_writes and store.plan.device.type != "meta"  # A plan has no values.
            for index in range(len(store.entries))
        ]

    def written_unseen(self) -> list[str]:
        """Return the names of parameters written since `sample` without raising a counter.

        Cost: the host waits for the device.
        """
        samples, self.samples = self.samples, ()
        seen = self.written_places()
        samples = [each for each in samples if each[:2] not in seen]
        if not samples or self.shard_versions != self._sampled_versions:
            return []  # An optimizer's step inside of the forward brought other values.
        found = torch.stack([before for _, _, before in samples]).tolist()
        now = [fingerprint(store.unsharded_values(index)) for store, index, _ in samples]
        pairs = zip(samples, found, torch.stack(now).tolist(), strict=True)
        return [store.entries[index].name for (store, index, _), old, new in pairs if old != new]

    def note_views(self, outputs: Sequence[Tensor]) -> None:
        """Know views of unsharded parameters among what a forward returns."""
        for view in outputs:
            for store in self.gathered:
                store.note_view(view)

    def note_writes(self) -> list[tuple[Store, int]]:
        """Return the places of written unsharded parameters, and count these writes as known."""
        moved = [(b.store, i) for b in self.buckets for i in b.store.take_back()]
        found = list(dict.fromkeys((*self.written_places(), *moved)))
        with torch_tensors.plain_torch_functions():
            self._shown_versions = torch_tensors.versions_of(self._shown)
        return found

    def written_places(self) -> list[tuple[Store, int]]:
        """Return the places of unsharded parameters written since the last note."""
        with torch_tensors.plain_torch_functions():
            versions = torch_tensors.versions_of(self._shown)
        pairs = zip(self._shown_versions, versions, self._writable, strict=True)
        return list(dict.fromkeys(place for old, new, place in pairs if old != new))

    @contextlib.contextmanager
    def unnoticed_writes(self) -> Iterator[None]:
        """Ignore writes inside the block, though they raise version counters."""
        was_written = self.was_written
        yield
        if not was_written:
            self.note_writes()

    # --- sizes and state ---

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter requires a gradient."""
        for gradients in self.gradients.buckets:  # noqa: SIM110 - faster, and asked often
            if gradients.bucket.is_trainable:
                return True
        return False

    def may_train(self, module: nn.Module) -> bool:
        """Whether any parameter that a module of the group holds requires a gradient."""
        if len(self.modules) == 1:
            return self.is_trainable
        inside = set(module.modules())
        entries = (entry for bucket in self.buckets for entry in bucket.entries)
        return any(
            entry.param.requires_grad and any(holder in inside for holder, _ in entry.sites)
            for entry in entries
        )

    @property
    def num_trainable(self) -> int:
        """Number of parameters that require a gradient."""
        number = 0
        for gradients in self.gradients.buckets:
            for entry in gradients.bucket.entries:
                number += entry.param.requires_grad
        return number

    @property
    def device(self) -> torch.device:
        """Device of the unsharded parameters."""
        return self.buckets[0].plan.device

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the memory is freed between forward and backward."""
        if self.settings.reshard_after_forward is None:
            return not self.is_root
        return bool(self.settings.reshard_after_forward)

    @property
    def shard_versions(self) -> tuple[int, ...]:
        """Versions of the shards, which change with every write to a shard."""
        return tuple([bucket.store.shard_version for bucket in self.buckets])

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(bucket.store.shard_nbytes for bucket in self.buckets)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffers while they exist."""
        nbytes = 0
        for store in self.gathered:
            nbytes += store.unsharded_nbytes
        return nbytes

    @property
    def needs_memory(self) -> bool:
        """Whether unsharding takes any memory and time."""
        return bool(self.gathered)

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to gather and nothing to reduce: one rank, no casts."""
        return not self.gathered and self.gradients.is_local

    @property
    def is_stale(self) -> bool:
        """Whether a shard changed since the group was gathered."""
        for store in self.gathered:  # noqa: SIM110 - faster, and asked often
            if store.is_stale:
                return True
        return False

    @property
    def has_pending(self) -> bool:
        """Whether a reduction would now have any gradients."""
        gradients = self.gradients
        return gradients.has_pending if self.settings.all_reduce else gradients.has_collected

    @property
    def has_reduce_hook(self) -> bool:
        """Whether the user has a hook on reduced gradients, which may be collective."""
        return self.settings.comm.all_reduce_hook is not None

    def show(self, *, unsharded: bool) -> None:
        """Let the modules hold the unsharded parameters, or the sharded ones."""
        for bucket in self.buckets:
            bucket.sites.show(unsharded=unsharded)

    @property
    def has_only_given(self) -> bool:
        """Whether its forward computes only with tensors that `functional_call` was given."""
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if not bucket.sites.has_only_given:
                return False
        return True

    @property
    def gets_only_given(self) -> bool:
        """Whether the forward that begins needs no parameters of the group."""
        for bucket in self.buckets:  # noqa: SIM110 - faster, and asked often
            if not bucket.sites.gets_only_given:
                return False
        return True

    def return_given(self) -> None:
        """Put back the tensors that `functional_call` was given, at the end of a forward."""
        for bucket in self.buckets:
            bucket.sites.return_given()

    def end_functional_call(self, *, is_live: bool) -> None:
        """Handle the end of the root's `functional_call`, which puts back what modules held."""
        for bucket in self.buckets:
            bucket.sites.end_functional_call(has_memory=is_live or bucket.store.aliases_shard)

    def known_values(self) -> dict[int, KnownValue | None]:
        """Return what is known of whole parameters, by the entry's id, for ranks to compare.

        It is None if any value may be right, because pieces were written in unknown ways.
        """
        if self.mesh.backend.is_traced or not watch_settings.compare_values:
            return {}
        is_untouched = self.shard_versions == self._values.versions
        first = self._values.known(self.shard_versions)
        written = {id(entry): value for entry, _, value in self._written(first)}
        found: dict[int, KnownValue | None] = {}
        for bucket in self.buckets:
            for index, entry in enumerate(bucket.entries):
                if not hasattr(entry.param, "flat"):  # `swap_tensors` has put a plain one there.
                    found[id(entry)] = None
                    continue
                is_own = bucket.store.has_piece_of(index)
                number: int | None = first.get(id(entry))
                if number is None:
                    version = torch_tensors.version_of(entry.param.local_piece)  # type: ignore[attr-defined]
                    number = 0 if (is_untouched if is_own else version == 0) else None
                default = None if number is None else unwritten(entry, number)
                found[id(entry)] = written.get(id(entry), default)
        return found

    def _written(self, first: dict[int, int]) -> list[Written]:
        """Return the writes since the last comparison, with numbers by which to compare them.

        `first` has numbers of the values that parameters had before a part was written.
        """
        result = []
        for bucket in self.buckets:
            # Other ranks may have written pieces, which this rank cannot see.
            has_elements = any(spec.piece_numel for spec in bucket.store.specs)
            for entry in bucket.entries:
                written = entry.written
                if written is not None:
                    value = None
                    if has_elements and written.is_seen and written.holds_for(entry.param):
                        base = first.get(id(entry), 0) if written.steps else 0
                        value = KnownValue(written.number + base, is_written=True)
                    result.append((entry, written, value))
        return result

    def take_written(self) -> list[Written]:
        """Return and drop the writes since the last comparison."""
        result = self._written({})
        for entry, _, _ in result:
            entry.written = None
        return result

    # --- copies and pickles ---

    def copy_for(self, memo: dict[int, Any]) -> Self:
        """Return a group for deep copies of the modules and parameters, found in `memo`."""
        result = copy.copy(self)
        result.modules = [memo[id(module)] for module in self.modules]
        result.settings = self.settings.copy()
        result._take_buckets(  # noqa: SLF001 - own class
            [
                rebuild(bucket, [_copied(entry, memo) for entry in bucket.entries])
                for bucket in self.buckets
            ]
        )
        return result

    def __copy__(self) -> Self:
        """Return a group with the same attributes; `copy_for` makes it independent."""
        result = type(self).__new__(type(self))
        result.__dict__.update(self.__dict__)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle of the group: settings, modules, parameters and their layouts."""
        state = {name: getattr(self, name) for name in _PICKLED}
        state["settings"] = self.settings.copy()
        state["buckets"] = [
            (bucket.entries, bucket.store.layout, bucket.plan.policy, bucket.plan.offload)
            for bucket in self.buckets
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the pickled state; modules of the group may or may not have been unpickled yet."""
        self.__dict__.update(state)
        self._restore_if_complete()

    def note_restored(self) -> None:
        """Note that another of its modules has been unpickled."""
        self.__dict__["num_restored"] = self.__dict__.get("num_restored", 0) + 1
        self._restore_if_complete()

    def _restore_if_complete(self) -> None:
        """Make anew what is not pickled, after modules and parameters have been unpickled.

        The group is on the mesh that the parameters were bound to. With a number as
        `reshard_after_forward` this makes a process group, so all ranks must load.
        """
        modules = self.__dict__.get("modules")
        if modules is None or self.__dict__.get("num_restored") != len(modules):
            return
        del self.__dict__["num_restored"]
        written: Any = self.buckets
        meshes = [mesh_of_restored(entries[0].param) for entries, *_ in written]
        self.mesh = max(meshes, key=lambda mesh: mesh.size())
        self._take_buckets(
            [
                restore(entries, mesh=mesh, policy=policy, layout=layout, offload=offload)
                for mesh, (entries, layout, policy, offload) in zip(meshes, written, strict=True)
            ]
        )
        self.set_reshard_after_forward(self.settings.reshard_after_forward)


@dataclass(frozen=True, slots=True)
class KnownValue:
    """Facts about a parameter that ranks compare."""

    number: int  # Number of the parameter's values; 0 if nothing is known of them.
    is_written: bool = False  # Whether it was written on this rank since ranks compared.
    is_empty: bool = False  # Whether it was not written, and this rank has no piece that could be.
    # First element, end and fingerprint of this rank's piece, as it is now; None: it was not read.
    piece: tuple[int, int, int] | None = None


def unwritten(entry: Any, number: int = 0) -> KnownValue:
    """Return the facts to compare for a parameter that was not written on this rank."""
    return KnownValue(number, is_empty=not entry.param.to_local().numel())


def _copied(entry: ParamEntry, memo: dict[int, Any]) -> ParamEntry:
    """Return the entry of a copy; most is in `memo`, but the model may not hold all of it now."""
    sites = [(copy.deepcopy(module, memo), attribute) for module, attribute in entry.sites]
    return ParamEntry(entry.name, copy.deepcopy(entry.param, memo), sites)


def move_buffers(module: nn.Module, backend: Backend) -> None:
    """Move a module's buffers from the host to the device of its forward, as FSDP2 does.

    With offloaded parameters the module as a whole stays on the host. A model that is made on the
    host and sharded over an accelerator may be there, too.
    """
    if not backend.has_own_memory:
        return
    for child in module.modules():
        for name, buffer in child._buffers.items():  # noqa: SLF001 - named_buffers skips None
            if buffer is not None and buffer.device.type == "cpu":
                exchange_buffer(child, name, buffer.to(backend.device))


def exchange_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer other contents. The object stays the same: other modules may hold it."""
    buffer: Any = module._buffers[name]  # noqa: SLF001 - past the checks of `setattr`
    try:
        buffer.data = value
    except (RuntimeError, TypeError):  # Some kinds of devices do not support this.
        module._buffers[name] = value  # noqa: SLF001
