"""`fully_shard` and the methods that a sharded module gains."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from shardkit import _pickling  # noqa: F401 - lets sharded tensors be pickled
from shardkit._bucket import FoundParam
from shardkit._errors import MeshError, StateError, WrapError
from shardkit._group import Group
from shardkit._hooks import ModuleState, get_state
from shardkit._policy import MixedPrecisionPolicy
from shardkit._sharded import ShardedTensor
from shardkit.backends import as_device_mesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardkit._mesh import DeviceMesh
    from shardkit.backends import TorchDeviceMesh

_MAX_MESH_NDIM = 2
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    reshard_after_forward: bool | None = None,  # noqa: FBT001 - the signature FSDP2's users know
    *,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    All parameters in `module` that no earlier call took form one group: gathered by one
    all-gather just before the module's forward (and again before its backward), freed after, their
    gradients averaged by one reduce-scatter. So call it on the layers first, then on the root::

        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)

    The user's own Parameter objects become the sharded ones (`ShardedTensor`): an optimizer, its
    parameter groups and every other reference made before this call stay valid. All ranks must
    hold equal parameters when they call it; nothing is sent.

    Parameters on the meta device are sharded there, so that no rank ever holds the whole model.
    Give them memory afterwards, ``model.to_empty(device=...)``, and values: by ``nn.init`` and each
    module's ``reset_parameters()``, or by ``load_state_dict`` (with ``assign=True`` also without
    `to_empty`).

    Args:
        module: Has a forward. Its parameters are on the mesh's device.
        mesh: 1-D: shard over it. 2-D: replicate over the first axis, shard over the second (hybrid
            sharding). shardkit's or torch's; None: all ranks, 1-D.
        mp_policy: Dtypes of compute, communication and outputs.
        reshard_after_forward: True: free the unsharded parameters after forward, gather again
            for backward (ZeRO-3). False: keep them from forward to backward (ZeRO-2). None: False
            for the root, True for others.
        ignored_params: Left as they are: not sharded, not gathered, gradients not averaged.

    Returns:
        `module`, whose class is now ``FSDP<Class>``, a subclass of `FSDPModule` and of its own.

    Raises:
        WrapError: A module without forward, wrapped twice, a parameter on another device, or one
            that cannot be exchanged in place. The module is as it was.
        MeshError: No process group, a mesh that does not hold this rank, more than two axes.

    Cost: per group and step (m micro-batches, P parameters): all-gather of ``P`` elements of
        `param_dtype` twice (once without resharding), reduce-scatter of ``P`` of `reduce_dtype`,
        m times. Memory per rank: ``1/N`` of parameters, gradients and optimizer state.
    Source: ZeRO-3, arXiv:1910.02054; PyTorch FSDP2.
    """
    _check_module(module)
    ignored = ignored_params or set()
    _check_options(reshard_after_forward, ignored)
    candidates = list(_find_params(module, ignored))
    shard_mesh = as_device_mesh(mesh, device_type=_device_type(candidates))
    _check_mesh(shard_mesh)
    _check_params(candidates, shard_mesh)
    _check_reparametrized(candidates)
    group = None
    if candidates:
        group = Group(
            [module],
            candidates,
            mesh=shard_mesh,
            policy=mp_policy,
            reshard_after_forward=reshard_after_forward,
        )
        group.adopt_params()
    if mp_policy.buffer_dtype is not None:
        _cast_buffers(module, mp_policy.buffer_dtype)
    ModuleState(module, group, mp_policy).install()
    _swap_class(module)
    return module


# --- checks: nothing is changed before all have passed ------------------------------------------


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        msg = f"fully_shard takes a module, got {type(module).__name__}."
        raise WrapError(msg)
    if get_state(module) is not None:
        msg = (
            f"fully_shard was called on this {_own_class(module).__name__} before. Call it once "
            f"per module, on the layers first and on the root last."
        )
        raise WrapError(msg)
    if isinstance(module, _CONTAINERS) or type(module).forward is nn.Module.forward:
        msg = (
            f"{type(module).__name__} has no forward, so its parameters would never be gathered. "
            f"Call fully_shard on each module in it, then on the module that holds it."
        )
        raise WrapError(msg)


def _check_options(reshard_after_forward: object, ignored: set[nn.Parameter]) -> None:
    if reshard_after_forward not in (True, False, None):
        msg = (
            f"reshard_after_forward must be True, False or None (False for the root, True for "
            f"others), got {reshard_after_forward!r}."
        )
        raise WrapError(msg)
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            msg = (
                f"ignored_params takes Parameter objects, got {param!r}. Pass e.g. "
                f"{{module.gate.weight}}, not names."
            )
            raise WrapError(msg)


def _find_params(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[FoundParam]:
    """Yield parameters that no group has taken, each with all the places that hold it."""
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, FoundParam] = {}
    for prefix, child in module.named_modules():
        for attribute, param in child._parameters.items():  # noqa: SLF001 - keeps tied ones apart
            if param is None or id(param) in ignored_ids or isinstance(param, ShardedTensor):
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            item = found.setdefault(id(param), FoundParam(name, param, []))
            item.sites.append((child, attribute))
    yield from found.values()


def _device_type(found: list[FoundParam]) -> str:
    for item in found:
        if item.param.device.type != "meta":
            return item.param.device.type
    return "cuda" if found and torch.cuda.is_available() else "cpu"


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim > _MAX_MESH_NDIM:
        msg = (
            f"fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard), got "
            f"{mesh.ndim} axes {mesh.mesh_dim_names or mesh.shape}. Pass a submesh, "
            f"e.g. mesh['shard']."
        )
        raise MeshError(msg)
    if mesh.get_coordinate() is None:
        msg = (
            f"rank {mesh.rank} is not in the mesh of ranks {mesh.describe_ranks()}. Call "
            f"fully_shard only on ranks of the mesh, or make a mesh that holds all of them."
        )
        raise MeshError(msg)


def _check_params(found: list[FoundParam], mesh: DeviceMesh) -> None:
    for item in found:
        param = item.param
        if param.device.type not in (mesh.device_type, "meta"):
            msg = (
                f"parameter {item.name!r} is on {param.device}, the mesh is of device type "
                f"{mesh.device_type!r}. Move the module first: "
                f"module.to({str(mesh.backend.device)!r})."
            )
            raise WrapError(msg)


def _check_reparametrized(found: list[FoundParam]) -> None:
    """Refuse what keeps a whole weight, computed from parameters, on the module for good."""
    for item in found:
        for module, _ in item.sites:
            for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - no public way to list
                for kind, remedy in _KEEP_WHOLE_WEIGHTS.items():
                    if isinstance(hook, kind):
                        msg = (
                            f"parameter {item.name!r} of a {type(module).__name__} is used by "
                            f"{kind.__module__}, which leaves a whole weight, computed in every "
                            f"forward, on the module: it would never be sharded. {remedy}"
                        )
                        raise WrapError(msg)


_KEEP_WHOLE_WEIGHTS = {
    WeightNorm: "Use torch.nn.utils.parametrizations.weight_norm instead.",
    SpectralNorm: "Use torch.nn.utils.parametrizations.spectral_norm instead.",
    BasePruningMethod: "Call torch.nn.utils.prune.remove() before fully_shard.",
}
"""Hooks of older ways to compute weights, and what to do."""


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of `module`, not those of sharded modules in it."""
    for child in module.modules():
        if child is not module and get_state(child) is not None:
            continue
        for name, buffer in child._buffers.items():  # noqa: SLF001 - named_buffers skips None
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)  # noqa: SLF001


# --- the module's class ---------------------------------------------------------------------------

_sharded_classes: dict[type, type] = {}


def _own_class(module: Any) -> type[nn.Module]:
    """Return the class the module had before `fully_shard`."""
    cls: type[Any] = type(module)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def _swap_class(module: nn.Module) -> None:
    cls = type(module)
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.__class__ = _sharded_classes[cls]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def wait(self) -> None:
        """Return when the module's parameters are the unsharded ones."""
        if self._state.group is not None and self._state.runtime is not None:
            self._state.runtime.wait_unshard(self._state.group)


class FSDPModule:
    """Methods of a module that `fully_shard` has sharded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: containers build new ones when sliced."""
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent sharded copy: own pieces, same mesh, process groups and options.

        For EMA and teacher models. No communication. A copy of a part of a model is its own root.
        """
        state = _state_of(self)
        if state.runtime is not None and state.group is not None:
            state.runtime.reshard(state.group)
        original = _own_class(self)
        result: Any = nn.Module.__new__(original)
        memo[id(self)] = result
        for name, value in state.without_own_hooks(self.__dict__).items():
            result.__dict__[name] = copy.deepcopy(value, memo)
        group = state.group.copy_for(memo) if state.group is not None else None
        ModuleState(result, group, state.policy).install()
        _swap_class(result)
        return result

    def __copy__(self) -> Any:
        """Refuse: a shallow copy would have the same parameters, gathered and freed by two."""
        msg = (
            f"copy.copy of a sharded {_own_class(self).__name__} would share its parameters with "
            f"it. Use copy.deepcopy, which copies this rank's pieces."
        )
        raise StateError(msg)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle this rank's pieces and the options; the copy is sharded on a mesh alike.

        For `torch.save` and ``torch.load(weights_only=False)``, each rank its own file.
        """
        del protocol
        state = _state_of(self)
        self.reshard()
        attributes = state.without_own_hooks(dict(self.__getstate__()))  # type: ignore[call-overload]
        group = state.group.for_pickle() if state.group is not None else None
        pickled = (attributes, group, state.policy)
        return _new_module, (_own_class(self),), pickled, None, None, _restore

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the pieces (``to``, ``half``, ``to_empty``, ...), and lay them end to end again.

        Group by group, so that beside the shards only one group's pieces exist a second time.
        """
        state = _state_of(self)
        self.reshard()
        if state.group is None:
            return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        attributes = state.group.param_attributes()
        result = super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        state.group.take_up(attributes)
        return result

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this module's parameters now; the next `reshard`, forward or backward frees them.

        Not recursive. Call it on all ranks.

        Args:
            async_op: Return at once, with a handle; the module's forward waits by itself.

        Cost: one all-gather per bucket, none if they are unsharded already.
        """
        state = _state_of(self)
        if state.runtime is None:
            state.make_runtime()
        if state.group is not None and state.runtime is not None:
            state.runtime.unshard(state.group)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters and show the sharded ones. Not recursive."""
        state = _state_of(self)
        if state.group is not None and state.runtime is not None:
            state.runtime.reshard(state.group)

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether backward averages gradients over the ranks.

        For gradient accumulation: False for all micro-batches but the last. Unsynced gradients are
        summed in a full-size buffer per group, in `reduce_dtype` (see `memory_stats`).

        Args:
            requires_gradient_sync: The flag.
            recurse: Also for sharded modules inside.
        """
        for group in _groups(self, recurse=recurse):
            group.sync = requires_gradient_sync

    def set_requires_all_reduce(
        self,
        requires_all_reduce: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether backward all-reduces over the replicate axis of a 2-D mesh.

        While False, gradients are reduce-scattered, and the sums kept as 1/N-size partial sums;
        ``.grad`` is set by the first backward with True.
        """
        for group in _groups(self, recurse=recurse):
            group.all_reduce = requires_all_reduce

    def set_reshard_after_forward(
        self,
        reshard_after_forward: bool,  # noqa: FBT001 - FSDP2's signature
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Set whether the parameters are freed after forward, from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            msg = f"reshard_after_forward must be True or False, got {reshard_after_forward!r}."
            raise StateError(msg)
        for group in _groups(self, recurse=recurse):
            group.reshard_after_forward = reshard_after_forward
        runtime = _state_of(self).runtime
        if runtime is not None:
            runtime.update_kept()

    def memory_stats(self) -> dict[str, int]:
        """Return bytes on this rank, of this module and the sharded modules in it.

        Keys: ``shard_nbytes`` (parameters), ``unsharded_nbytes`` and ``peak_unsharded_nbytes``
        (unsharded buffers now, and the most there ever were), ``reduce_buffer_nbytes`` (the most
        that send and receive buffers of gradients ever took) and ``unsynced_grad_nbytes``
        (gradients that wait to be synced). The middle three are those of the whole root.
        """
        groups = list(_groups(self, recurse=True))
        runtime = _state_of(self).runtime
        return {
            "shard_nbytes": sum(group.shard_nbytes for group in groups),
            "unsharded_nbytes": runtime.unsharded_nbytes if runtime else 0,
            "peak_unsharded_nbytes": runtime.peak_unsharded_nbytes if runtime else 0,
            "reduce_buffer_nbytes": runtime.peak_reduce_nbytes if runtime else 0,
            "unsynced_grad_nbytes": sum(group.gradients.buffer_nbytes for group in groups),
        }


def _new_module(original: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(original)


def _restore(module: Any, pickled: tuple[dict[str, Any], dict[str, Any] | None, Any]) -> None:
    """Turn an unpickled module into what it was."""
    attributes, group, policy = pickled
    module.__setstate__(attributes)
    # Hooks keep the numbers they had in another process; new ones must not take their places.
    numbers = [
        number
        for child in module.modules()
        for name, hooks in child.__dict__.items()
        if name.endswith("hooks") and isinstance(hooks, dict)
        for number in hooks
    ]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(n + 1 for n in numbers)])
    ModuleState(module, Group.from_pickle(group) if group else None, policy).install()
    _swap_class(module)


def _state_of(module: Any) -> ModuleState:
    state = get_state(module)
    assert state is not None, "an FSDPModule has a state"
    return state


def _groups(module: Any, *, recurse: bool) -> Iterable[Group]:
    modules = module.modules() if recurse else [module]
    for child in modules:
        state = get_state(child)
        if state is not None and state.group is not None:
            yield state.group
