"""`fully_shard` and the order of its steps; methods other than forward that gather parameters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from shardkit import _pickling  # noqa: F401 - lets sharded tensors be pickled
from shardkit._compat import torch_autograd, torch_fsdp2, torch_groups, torch_modules
from shardkit._errors import StateError, WrapError
from shardkit._host_values import HostValues
from shardkit._module import checks
from shardkit._module.fsdp_module import FSDPModule, swap_class
from shardkit._module.hooks import ModuleState, get_state, groups_in
from shardkit._module.on_meta import execute_sharding
from shardkit._module.optimizers import note_ignored, watch_optimizers
from shardkit._module.placements import SpmdMesh, data_parallel_mesh, mark_parts, place_params
from shardkit._params.memory import give_back
from shardkit._runtime.backward import refuse_compiled, run_backward
from shardkit._runtime.group import ParamGroup, exchange_buffer, move_buffers
from shardkit._runtime.runtime import note_failed_backward
from shardkit._settings import (
    CPUOffloadPolicy,
    GroupSettings,
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_mixed_precision,
    as_offload,
    refuse_non_module,
)
from shardkit.backends import TorchDeviceMesh, accelerator_type, as_device_mesh
from shardkit.backends.groups import accelerator_of_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardkit._mesh import DeviceMesh
    from shardkit._params.sites import ParamEntry


# --- methods other than forward -------------------------------------------------------------------


class ForwardMethod:
    """Stand-in for a module's method, which runs the method as a forward of the module.

    It is an object and not a closure, so that deep copies and pickles of the module get their own.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._module = module
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method while the module's parameters are unsharded."""
        state = get_state(self._module)
        if state is None:  # The module is a copy that holds no shards.
            return self._method(*args, **kwargs)
        return state.run_method(self._method, args, kwargs)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module use its parameters as forward does.

    Use it for a method that is called from outside, such as ``generate`` of an encoder-decoder
    model, which calls the encoder by itself. Within the method the module's own parameters are
    unsharded, and modules inside are gathered and freed as usual. When the method returns, the
    module is in the state that it has after a forward. The method may call the module's forward
    any number of times: the module's own parameters are gathered once. All ranks must call the
    method, and in it the same modules in the same order:

        fully_shard(model)
        register_fsdp_forward_method(model, "generate")

    Inputs and outputs are cast as those of forward. Call this after `fully_shard`. It does nothing
    to a module that is not sharded, so that one script runs with and without sharding.

    Args:
        module: The module that `fully_shard` was called on.
        method_name: Name of one of its methods.

    Raises:
        StateError: The module has no such method.

    Cost: that of one forward, plus what the method calls.
    """
    refuse_non_module(StateError, module)
    if get_state(module) is None:
        return
    method = getattr(module, str(method_name), None)
    if not callable(method):
        msg = (
            f"{type(module).__name__} has no method {method_name!r} to register as a forward: "
            f"expected the name of a method, got {method!r}. Check the name, and that it belongs "
            f"to this module and not to one inside it."
        )
        raise StateError(msg)
    if not isinstance(method, ForwardMethod):
        module.__dict__[method_name] = ForwardMethod(module, method)


# --- fully_shard ----------------------------------------------------------------------------------


@overload
def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    reshard_after_forward: bool | int | None = None,
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    reshard_after_forward: bool | int | None = None,
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Sequence[FSDPModule]: ...


def fully_shard(  # noqa: PLR0913 - the signature of FSDP2
    module: Any,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    reshard_after_forward: bool | int | None = None,
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    All parameters in `module` that no earlier call took form one group. One all-gather gathers
    them just before the module's forward (and again before its backward), and they are freed after
    it. One reduce-scatter averages their gradients. So call it on the layers first, then on the
    root:

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    The user's own Parameter objects become the sharded ones (`ShardedTensor`): an optimizer, its
    parameter groups and every other reference made before this call stay valid. All ranks must
    hold equal parameters when they call it. The call sends nothing.

    Parameters on the meta device are sharded there, so that no rank ever holds the whole model.
    Give them memory and values afterwards: by `materialize` or `shardkit.checkpoint.load_full`; by
    ``model.to_empty(device=...)``, then ``nn.init`` and each module's ``reset_parameters()``; or by
    ``load_state_dict`` (with ``assign=True`` also without `to_empty`). Where layers have memory
    from the start, call this on each layer as soon as it is made: it frees the whole parameters.

    Parameters that are DTensors on another axis of the mesh stay split over that axis, and are
    sharded over this one; call ``parallelize_module`` before this. Their Parameter objects are
    replaced: make the optimizer after this call.

    Args:
        module: Module with a forward and its parameters on the mesh's device. Or a list of modules:
            they form one group, which is gathered when one of them runs, and freed when a module of
            another group runs, or the root's forward ends. A list suits small modules that run one
            after the other, and experts that ranks choose among. If no sharded module is around
            them, each of them runs as a root.
        mesh: Mesh of shardkit or of torch. 1-D: shard over it. 2-D: replicate over the first axis,
            shard over the second (hybrid sharding). None: all ranks, 1-D, without names.
        mp_policy: Dtypes of compute, communication and outputs. FSDP2's policy works as well.
        reshard_after_forward: Choice of memory after forward. True: free the unsharded parameters
            after forward, and gather them again for backward (ZeRO-3). False: keep them from
            forward to backward (ZeRO-2). None: False for the root, True for other modules. A
            number n that divides the size of the shard axis: between forward and backward each
            rank keeps 1/n of them, and backward gathers from n neighbouring ranks, such as those
            of one host.
        shard_placement_fn: Function that takes a parameter and returns where it lies. None: sharded
            over `mesh`. A ``Shard(dim)``: the same; the dim has no effect, since a shard is a flat
            range. A mesh (1-D or 2-D like `mesh`), or FSDP2's ``ShardPlacementResult``: sharded
            over that mesh, such as the ranks that hold the same experts. ``Replicate()`` of torch
            or shardkit: each rank of `mesh` holds the parameter whole, and its gradient is
            all-reduced. All of these parameters are one group. A gradient is divided by the number
            of ranks of its parameter's mesh, as FSDP2 does, unless `set_gradient_divide_factor`
            says otherwise.
        offload_policy: `CPUOffloadPolicy`: shards, gradients and optimizer state on the host.
            `OffloadPolicy` or None: where they are. FSDP2's policies work as well.
        ignored_params: Parameters to leave alone: they are not sharded or gathered, and their
            gradients are not averaged.
        dp_mesh_dims: FSDP2's ``DataParallelMeshDims``. Then all parameters are DTensors, or plain
            ones that the package ``spmd_types`` describes. `mesh` is their mesh, and they are
            replicated over the axes that this names. They are sharded over the axes in `shard`
            (several count as one), and replicated over those in `replicate`. Parameters for which
            `shard_placement_fn` returns a ``ShardPlacementResult`` may lie on another mesh, with
            dims of its own. None: `mesh` is the one to shard over.

    Returns:
        `module`, whose class is now ``FSDP<Class>``, a subclass of `FSDPModule` and of its former
        class. For type checkers and editors it is an `FSDPModule`.

    Raises:
        WrapError: A module is a container without forward, or is wrapped twice. Or a parameter is
            on another device, has sparse gradients, is a DTensor with a placement such as Partial,
            is held by another group in another place (tied weights), or cannot be exchanged in
            place. The module is as it was.
        MeshError: There is no process group, or the mesh does not hold this rank, has more than two
            axes, or shares an axis with the mesh of a DTensor. The same holds for the mesh of a
            single parameter, which must be a part of `mesh` if the parameter is a plain one.

    Cost: per group and step (m micro-batches, P parameters): all-gather of ``P`` elements of
    `param_dtype` twice (once without resharding), reduce-scatter of ``P`` of `reduce_dtype`,
    m times. Memory per rank: ``1/N`` of parameters, gradients and optimizer state. Where modules in
    `module` lack an axis of replicas of `mesh`: one all-reduce of 16 bytes on each axis, once.
    Source: ZeRO-3, arXiv:1910.02054; PyTorch FSDP2.
    """
    torch_groups.refuse_to_split_sharded()
    torch_groups.refuse_sharded_in_lists(HostValues)
    modules = _modules_of(module)
    for each in modules:
        checks.check_module(each)
    mp_policy, offload_policy = as_mixed_precision(mp_policy), as_offload(offload_policy)
    ignored = checks.checked_ignored(ignored_params)
    inside = [*dict.fromkeys(g for each in modules for g in groups_in(each, recurse=True))]
    for inner in inside:
        inner.show(unsharded=False)
    checks.check_ties(modules, ignored)
    candidates = list(checks.find_params(modules, ignored))
    checks.check_not_taken(modules, candidates)
    checks.check_kinds(candidates)
    if dp_mesh_dims is not None:
        shard_mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    else:
        device_type = device_type_of(candidates, offload_policy, inside)
        shard_mesh = as_device_mesh(mesh, device_type=device_type)
    checks.check_mesh(shard_mesh)
    spmd = None if dp_mesh_dims is None else SpmdMesh(mesh, dp_mesh_dims)
    others = place_params(candidates, shard_placement_fn, shard_mesh, spmd=spmd)
    reshard = checks.checked_reshard(reshard_after_forward, shard_mesh, others)
    checks.check_params(candidates, shard_mesh, offload_policy)
    _detach_computed_weights(candidates)
    checks.warn_of_shared_memory(candidates, shard_mesh)
    checks.warn_of_lost_classes(candidates, shard_mesh)
    group = None
    whole_nbytes = sum(item.param.nbytes for item in candidates if item.param.device.type == "cpu")
    if candidates:
        group = ParamGroup(
            modules,
            candidates,
            mesh=shard_mesh,
            policy=mp_policy,
            offload=offload_policy,
            settings=GroupSettings(reshard_after_forward=reshard),
        )
        group.swap_in_params()
        give_back(whole_nbytes)
    if not shard_mesh.backend.is_traced:
        mark_parts(inside if group is None else [*inside, group], shard_mesh)
    note_ignored(modules[0], ignored)
    watch_optimizers()
    torch_autograd.wrap_engine(run_backward, refuse_compiled, note_failed_backward)
    for each in modules:
        move_buffers(each, shard_mesh.backend)
        if mp_policy.buffer_dtype is not None:
            _cast_buffers(each, mp_policy.buffer_dtype)
        ModuleState(each, group, mp_policy.for_param(None)).install()
        swap_class(each)
    if shard_mesh.backend.is_traced:
        execute_sharding(shard_mesh.backend.region)
    return module


fully_shard.state = torch_fsdp2.state_of_stage  # type: ignore[attr-defined]  # FSDP2's has it.


def _modules_of(module: Any) -> list[nn.Module]:
    """Return the modules to shard together, without modules that are inside another of them."""
    if not isinstance(module, (list, tuple)):
        return [module]
    if not module:
        msg = "fully_shard got an empty list. Pass the modules that are to form a group."
        raise WrapError(msg)
    inside = {
        inner
        for each in module
        if isinstance(each, nn.Module)
        for inner in each.modules()
        if inner is not each
    }
    return [each for each in dict.fromkeys(module) if each not in inside]


def device_type_of(
    found: list[ParamEntry], offload: OffloadPolicy, inside: Sequence[ParamGroup] = ()
) -> str:
    """Return the device type of the default mesh: that of groups inside if there are no parameters.

    As with FSDP2, parameters on the host are sharded over the accelerator if the default process
    group has an engine for it. They stay on the host if there is no such group, if it has gloo
    alone, or if shardkit has started it for a mesh of the CPU.
    """
    if inside and not found:
        return inside[0].mesh.device_type
    types = [item.param.device.type for item in found]
    type_ = next((each for each in types if each != "meta"), None)
    accelerator = accelerator_type() if found and type_ in (None, "cpu") else None
    if type_ == "cpu" and not isinstance(offload, CPUOffloadPolicy):
        accelerator = accelerator_of_world(accelerator)
    return accelerator or type_ or "cpu"


def _detach_computed_weights(found: list[ParamEntry]) -> None:
    """Cut the graphs of weights that hooks compute before a forward, and keep on their modules.

    Graphs hold the parameters, which would then not be exchanged in place. The next forward
    computes the weights again.
    """
    kinds = (WeightNorm, SpectralNorm, BasePruningMethod)
    for module in dict.fromkeys(module for item in found for module, _ in item.sites):
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - no public way to list
            if isinstance(hook, kinds):
                name = torch_modules.computed_name(hook)
                setattr(module, name, getattr(module, name).detach())


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of `module`, but not those inside of sharded modules in it.

    The buffer objects stay the same: modules may share them, also with modules of another group.
    """
    sharded = [each for each in module.modules() if get_state(each) is not None]
    of_others = {inner for each in sharded for inner in each.modules()}
    for child in module.modules():
        if child in of_others:
            continue
        for name, buffer in child._buffers.items():  # noqa: SLF001 - named_buffers skips None
            if buffer is not None and buffer.is_floating_point():
                exchange_buffer(child, name, buffer.to(dtype))
