"""The unit of communication: the parameters of one `fully_shard` call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._errors import StateError
from shardkit._params.gradients import GroupGradients
from shardkit._params.make import make_buckets, rebuild
from shardkit._runtime.grad_hooks import GradHooks
from shardkit._runtime.group_copies import CopiedGroup
from shardkit._state.state_dict import install_hooks
from shardkit._tensor.sharded import user_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from shardkit._mesh import DeviceMesh
    from shardkit._params.bucket import Bucket
    from shardkit._params.memory import SlotPool
    from shardkit._params.sites import ParamEntry
    from shardkit._policy import MixedPrecisionPolicy, OffloadPolicy
    from shardkit._runtime.forward_record import ForwardRecord
    from shardkit._runtime.grad_hooks import BackwardListener
    from shardkit._settings import GroupSettings
    from shardkit.backends.base import AxisComm, Backend, CommStreams, Gather, Handle


class ParamGroup(CopiedGroup):
    """Parameters that are gathered and reduced together.

    Attributes:
        name: Names of the modules, for errors.
        buckets: All parameters.
        gradients: Of the trainable buckets.
        arrivals: Where they come from.
        index: Position among the groups of the root; its name in schedules.
        listener: The root's runtime.
        records: Forwards that backward is inside of.
        num_watched: Those of them that tell when backward leaves.
        num_arrived: Gradients that came in this backward.
        num_expected: Gradients that come if this backward uses every parameter.
        is_complete: This backward brings no more of them.
        gathering: The all-gather under way; may be shared with other groups.
        has_warned: About outputs that require no gradient.
        is_root: The module is the root: with `reshard_after_forward=None` it is not resharded.
        is_innermost: No other group's modules are inside this one's.
        modules_run: Those of its modules that ran in this pass.
        settings: What the user chose.
    """

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
        self.policy = policy
        self.settings = settings
        self.is_root = False
        self.is_innermost = True
        self._reset_place()
        self.buckets: list[Bucket] = make_buckets(
            entries, mesh=mesh, policy=policy, offload=offload
        )
        self._find_axes()
        self._make_gradients()
        self.set_reshard_after_forward(settings.reshard_after_forward)

    def _find_axes(self) -> None:
        mesh = self.mesh
        self.shard_axis: AxisComm = mesh.backend.axis(mesh.ndim - 1)
        self.replicate_axis: AxisComm | None = mesh.backend.axis(0) if mesh.ndim > 1 else None

    def set_reshard_after_forward(self, value: bool | int | None) -> None:  # noqa: FBT001
        """Choose what happens to the memory after forward; an int makes a process group."""
        self.settings.reshard_after_forward = value
        self.kept_axis: AxisComm | None = None
        if value is not None and not isinstance(value, bool):
            self.kept_axis = self.mesh.backend.split_axis(self.mesh.ndim - 1, value)

    def _reset_place(self) -> None:
        """Belong to no root, with no step under way."""
        self.index = -1
        self.listener: BackwardListener | None = None
        self.records: list[ForwardRecord] = []
        self._noted_versions: tuple[int, ...] = ()
        self.num_watched = 0
        self.num_arrived = 0
        self.num_expected = 0
        self.is_complete = False
        self.has_warned = False
        self.modules_run: set[nn.Module] = set()
        self.gathering: Handle | None = None

    @property
    def was_replaced(self) -> bool:
        """Whether parameters were given other pieces since the last forward."""
        return any(bucket.was_replaced for bucket in self.buckets)

    def refresh(self) -> None:
        """Take up what became of the parameters since the last forward, e.g. by ``.to(dtype)``.

        Raises:
            StateError: They cannot share a bucket any more, or unsynced gradients would be lost.
        """
        if self.gradients.buffer_nbytes:
            msg = (
                f"parameters of {self.name!r} were replaced while gradients wait to be synced. "
                f"Finish the step before converting the module."
            )
            raise StateError(msg)
        self.buckets = [rebuild(bucket, bucket.entries) for bucket in self.buckets]
        for module in self.modules:
            move_buffers(module, self.mesh.backend)  # After `to_empty(device="cpu")`.
        self._make_gradients()

    def param_attributes(self) -> list[dict[str, Any]]:
        """Return what users have set on the parameters, in order."""
        return [user_attributes(param) for bucket in self.buckets for param in bucket.sharded]

    def refresh_params(self, attributes: Sequence[dict[str, Any]]) -> None:
        """Take up what became of the parameters, if all have, and set on them what was set.

        Raises:
            StateError: See `refresh`.
        """
        params = [param for bucket in self.buckets for param in bucket.sharded]
        for param, found in zip(params, attributes, strict=True):
            for name, value in found.items():
                param.__dict__.setdefault(name, value)
        if self.was_replaced and all(bucket.is_uniform for bucket in self.buckets):
            self.refresh()

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""
        return any(bucket.device.type == "meta" for bucket in self.buckets)

    def check_materialized(self) -> None:
        """Refuse to go on with a parameter on the meta device.

        Raises:
            StateError: There is one.
        """
        for bucket in self.buckets:
            for entry in bucket.entries:
                if entry.param.is_meta:
                    msg = (
                        f"parameter {entry.name!r} of {self.name!r} is on the meta device: it has "
                        f"no values. Before the first forward call "
                        f"model.to_empty(device={self.mesh.device_type!r}) and initialize it "
                        f"(nn.init, reset_parameters()), or load_state_dict(..., assign=True)."
                    )
                    raise StateError(msg)

    def _make_gradients(self) -> None:
        """Make what takes gradients from the unsharded parameters and what reduces them."""
        self.grad_buckets = [
            bucket
            for bucket in self.buckets
            if bucket.param_dtype.is_floating_point or bucket.param_dtype.is_complex
        ]
        self.gradients = GroupGradients(
            self.grad_buckets,
            shard_axis=self.shard_axis,
            replicate_axis=self.replicate_axis,
            receive_chunks=self.mesh.backend.receive_chunks(self.shard_axis),
            comm=self.settings.comm,
            weight=self.mesh.backend.gradient_weight,
        )
        at_once = self.needs_memory or not self.gradients.is_local
        self.grad_hooks = GradHooks(self, self.grad_buckets, at_once=at_once)

    # --- adopting the user's parameters ---

    def swap_in_params(self) -> None:
        """Turn the user's parameters into sharded ones, all or none.

        Raises:
            WrapError: One of them cannot be exchanged; the others are as they were.
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
        for bucket in self.buckets:
            bucket.drop_originals()
            install_hooks(module for entry in bucket.entries for module, _ in entry.sites)

    # --- sizes and state ---

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(bucket.is_trainable for bucket in self.grad_buckets)

    @property
    def device(self) -> torch.device:
        """Where the unsharded parameters are."""
        device: torch.device = self.buckets[0].device
        return device

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the memory is given back between forward and backward."""
        if self.settings.reshard_after_forward is None:
            return not self.is_root
        return bool(self.settings.reshard_after_forward)

    @property
    def shard_versions(self) -> tuple[int, ...]:
        """Changes whenever a shard is written to."""
        return tuple(bucket.shard_version for bucket in self.buckets)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffers while they exist."""
        return sum(bucket.unsharded_nbytes for bucket in self.buckets)

    @property
    def needs_memory(self) -> bool:
        """Whether unsharding takes memory and time at all."""
        return any(not bucket.aliases_shard for bucket in self.buckets)

    @property
    def is_stale(self) -> bool:
        """Whether a shard changed since the group was gathered."""
        return any(bucket.is_stale for bucket in self.buckets)

    def note_versions(self) -> bool:
        """Return whether a shard was written to since the last call."""
        last, self._noted_versions = self._noted_versions, self.shard_versions
        return last != self._noted_versions

    @property
    def has_pending(self) -> bool:
        """Whether a reduction of now would carry anything."""
        gradients = self.gradients
        return gradients.has_pending if self.settings.all_reduce else gradients.has_collected

    @property
    def has_reduce_hook(self) -> bool:
        """Whether the user does something to reduced gradients, which may be collective."""
        return self.settings.comm.all_reduce_hook is not None

    # --- unshard and reshard ---

    def acquire(self, pool: SlotPool) -> tuple[list[Gather], list[Any]]:
        """Get memory; return what to gather into it, and the fences to wait for first."""
        buckets = [bucket for bucket in self.buckets if not bucket.aliases_shard]
        fences = [bucket.acquire(pool) for bucket in buckets]
        fences += [bucket.kept_part.fence for bucket in buckets if bucket.kept_part is not None]
        comm = self.settings.comm.all_gather
        return [job for bucket in buckets for job in bucket.gather_jobs(comm)], fences

    @property
    def gather_axis(self) -> AxisComm:
        """The axis that the next gather goes over."""
        parts = [bucket.kept_part for bucket in self.buckets if not bucket.aliases_shard]
        if self.kept_axis is not None and parts and all(part is not None for part in parts):
            return self.kept_axis
        self.drop_parts()
        return self.shard_axis

    def drop_parts(self) -> None:
        """Forget what was kept for a gather over `kept_axis`."""
        for bucket in self.buckets:
            bucket.drop_part()

    def wait_unshard(self) -> None:
        """Let compute issued from now on see the gathered parameters."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            for bucket in self.buckets:
                bucket.finish_gather()

    def free(self, streams: CommStreams, pool: SlotPool, *, keep_parts: bool) -> None:
        """Give the memory back and show the sharded parameters.

        Args:
            streams: Mark the compute that reads the memory.
            pool: Where the memory goes.
            keep_parts: Keep what a gather over `kept_axis` needs: a backward may follow.
        """
        self.wait_unshard()
        self.show(unsharded=False)
        buckets = [bucket for bucket in self.buckets if not bucket.aliases_shard]
        for bucket in buckets:
            if self.kept_axis is None or not keep_parts or bucket.is_stale:
                bucket.drop_part()
            else:
                bucket.keep_part(self.kept_axis, streams.fence)
        if buckets:
            fence = streams.fence()
            for bucket in buckets:
                bucket.release(pool, fence)

    def show(self, *, unsharded: bool) -> None:
        """Let the modules hold the unsharded parameters, or the sharded ones."""
        for bucket in self.buckets:
            bucket.sites.show(unsharded=unsharded)

    def is_unfinished(self, module: nn.Module) -> bool:
        """Note that one of the group's modules ran; return whether others have not in this pass."""
        if len(self.modules) == 1:
            return False
        self.modules_run.add(module)
        return len(self.modules_run) < len(self.modules)

    def check_trainability(self) -> None:
        """Raise if `requires_grad` was changed while the unsharded parameters were shown."""
        for bucket in self.buckets:
            for entry, param in zip(bucket.entries, bucket.unsharded, strict=True):
                if entry.param.requires_grad != param.requires_grad:
                    msg = (
                        f"requires_grad of {entry.name!r} was changed inside its module's forward, "
                        f"where it has no effect on this step and would be lost. Change it "
                        f"between steps, e.g. before the forward of the root."
                    )
                    param.requires_grad_(entry.param.requires_grad)
                    raise StateError(msg)

    # --- gradients ---

    def count_arrival(self) -> bool:
        """Note that a gradient came; return whether it was the last expected one."""
        if self.num_arrived == 0:
            self.num_expected = sum(
                param.requires_grad for bucket in self.grad_buckets for param in bucket.sharded
            )
        self.num_arrived += 1
        return self.num_arrived == self.num_expected

    @property
    def has_all_arrived(self) -> bool:
        """Whether a gradient came for every parameter that wants one."""
        return 0 < self.num_expected <= self.num_arrived

    def close_records(self) -> None:
        """Backward needs the parameters no more for the forwards that it is inside of."""
        for record in self.records:
            record.active = False
        self.records.clear()
        self.num_watched = 0

    def forget_backward(self) -> None:
        """A backward is over."""
        if self.records:
            self.close_records()
        self.num_watched = self.num_arrived = self.num_expected = 0
        self.is_complete = False

    def describe(self) -> Any:
        """Return what ranks must agree on, in order: for the check at the first forward."""
        return [
            (
                entry.name,
                tuple(bucket.layout.shapes[i]),
                str(bucket.orig_dtype),
                str(bucket.param_dtype),
                str(bucket.reduce_dtype),
                entry.param.requires_grad,
                entry.param.device.type,
            )
            for bucket in self.buckets
            for i, entry in enumerate(bucket.entries)
        ]


def move_buffers(module: nn.Module, backend: Backend) -> None:
    """Move a module's buffers from the host to where its forward runs, as FSDP2 does.

    With offloaded parameters the module as a whole stays on the host; so may models be that are
    made there and sharded over an accelerator.
    """
    if not backend.has_own_memory:
        return
    for child in module.modules():
        for name, buffer in child._buffers.items():  # noqa: SLF001 - named_buffers skips None
            if buffer is not None and buffer.device.type == "cpu":
                moved = buffer.to(backend.device)
                try:
                    buffer.data = moved  # The object stays: others may hold it.
                except (RuntimeError, TypeError):  # Not for each kind of device.
                    child._buffers[name] = moved  # noqa: SLF001


def start_unshard(
    groups: Sequence[ParamGroup], axis: AxisComm, streams: CommStreams, pool: SlotPool
) -> None:
    """Get memory for groups whose `gather_axis` is `axis` and gather into it, in one go.

    Cost: one all-gather per bucket, of `param_dtype` bytes; small ones may travel together.
    """
    jobs, fences = [], []
    for group in groups:
        group_jobs, group_fences = group.acquire(pool)
        jobs += group_jobs
        fences += group_fences
    if jobs:
        handle = streams.start_gather(jobs, axis, fences)
        for group in groups:
            group.gathering = handle
