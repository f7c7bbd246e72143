"""`auto_shard` makes a plan from a model and a policy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardkit._errors import MeshError, WrapError
from shardkit._module import checks
from shardkit._module.fsdp_module import own_class
from shardkit._module.fully_shard import device_type_of
from shardkit._module.hooks import get_state
from shardkit._settings import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_mixed_precision,
    as_number,
    as_offload,
    refuse_non_functions,
    refuse_texts,
)
from shardkit._wrapping.experts import ExpertMeshes, Experts, PlacedExperts, axis_of
from shardkit._wrapping.plan import (
    ShardPlan,
    Unit,
    assign_params,
    is_shape_only,
    mesh_of_shape,
    units_in_order,
)
from shardkit._wrapping.policies import (
    Choice,
    ModuleTree,
    choose,
    choose_by_name,
    size_policy,
    word_of,
)
from shardkit._wrapping.strategies import Strategy, StrategyName
from shardkit._wrapping.strategies import strategy as strategy_of
from shardkit.backends import TorchDeviceMesh, as_device_mesh, init_device_mesh

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn

    from shardkit._mesh import DeviceMesh

_ROOT = ("",)


def auto_shard(  # noqa: PLR0913 - all decisions, in one call
    model: Any,
    mesh: DeviceMesh | TorchDeviceMesh | int | Sequence[int] | None = None,
    policy: Any = None,
    *,
    units: Mapping[Any, Any] | Collection[Any] = (),
    strategy: StrategyName | enum.Enum | Strategy | None = None,
    experts: Mapping[Any, str] | None = None,
    before: Callable[[nn.Module], Any] | None = None,
    offload_budget_nbytes: int | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    apply: bool = True,
    verbose: bool = False,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    auto_wrap_policy: Any = None,
    auto_wrapper_callable: Callable[..., Any] | None = None,
    fsdp_min_num_params: int | None = None,
) -> ShardPlan:
    """Call `fully_shard` on the modules that a policy chooses, then on the root.

        plan = auto_shard(model, mesh=mesh, apply=False)
        print(plan)  # Groups, bytes, collectives. Nothing is changed yet.
        plan.apply()

    A policy is one of these:

    - ``None`` or ``"balanced"``: groups are chosen from sizes and order, see below;
    - a class of modules, the name of one, or a collection of these: ``{Block, "Head"}``;
    - ``"no_split_modules"``: the classes that a model of transformers names in its
      ``_no_split_modules``;
    - ``"size"``: groups of at least 100 million parameters, as in `size_based_auto_wrap_policy`;
    - ``"no_wrap"``: one group, the root's;
    - a mapping from names of modules to arguments of their `fully_shard` call:
      ``{"layers.*": {}, ("norm", "head"): {"reshard_after_forward": False}}``. A ``*`` matches one
      part of a name between dots, a tuple is one group, ``""`` is the root. The words of
      transformers' ``_fsdp_plan`` are accepted as arguments;
    - a callable that gets a module, or its name and the module, and returns True, False, or a dict
      of such arguments;
    - a callable in torch_xla's and FSDP1's protocol, ``policy(module, recurse, unwrapped_params)``,
      such as ``functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})``,
      torch_xla's and torch's own functions, ``ModuleWrapPolicy`` and ``CustomPolicy``.

    The balanced choice keeps the largest group small, because two groups are unsharded at a time,
    and the smallest one large, because a small collective costs its latency. Children of
    ``ModuleList`` and ``Sequential`` become groups of up to an eighth of the model each. Adjacent
    children below 128 KiB for each rank are one group; a large embedding or head becomes a group of
    its own. A small model is one group. The choice assumes that modules are called: if a forward
    reads the weight of a module without calling it, name the groups yourself. It also assumes that
    all children of the outermost ``ModuleList`` or ``ModuleDict``, the layers, run on all ranks. A
    ``ModuleList`` or ``ModuleDict`` inside a layer is never divided, because it may hold experts,
    of which each rank may run different ones.

    A tied weight belongs to the innermost group that holds all of its modules. The same holds for
    the parameters of a module that several modules share. Modules in an ``nn.MultiheadAttention``,
    which reads their weights, are never separate groups, unless a mapping names them.

    Args:
        model: The root, which must be neither sharded nor wrapped.
        mesh: A mesh for `fully_shard`. With `experts` it must be torch's, with names and one more
            axis. With ``apply=False`` it may be a number of ranks or a mesh shape, to plan for
            ranks that do not exist. The last number of a shape is then the axis of the experts.
        policy: The choice of modules that form groups.
        units: Groups beside those of the policy: a mapping like that of a policy, or a collection
            of names and tuples. Modules that are named here leave the groups of the policy.
        strategy: Name such as ``"zero2"``, see `strategy`, instead of `reshard_after_forward`.
        experts: Mapping from modules that hold stacked experts to the axis of `mesh` over which
            they are spread: ``{"MixtralExperts": "ep"}``. A module is named by its class, the name
            of its class, or a pattern as above. Dim 0 of each of its own parameters counts experts.
            The parameters are DTensors on that axis, or become such, as new objects: make the
            optimizer after this call. Experts are sharded over the other axes of the mesh, (shard)
            or (replicate, shard). All other parameters are sharded over the shard axis and the
            experts' axis as one. Gradients of experts are divided by the number of all ranks, since
            they get tokens from all ranks. The model itself must send the tokens.
        before: Function of each module of a group that is not the root, called before it is
            sharded, for example `checkpoint_module`. If it returns another module, that one takes
            the module's place.
        offload_budget_nbytes: Bytes of shards, gradients and AdamW's state that may stay on the
            device of a rank. Groups get a `CPUOffloadPolicy`, the largest savings first, until the
            rest fits.
        param_init_fn: Function that initializes a model on the meta device, module by module, when
            all groups exist; it is passed to `materialize`.
        apply: Whether to shard the model; False: only plan.
        verbose: Whether the first rank prints the plan.
        mp_policy: Mixed-precision policy of `fully_shard`, unless the policy gives another one. The
            same holds for the next four arguments.
        reshard_after_forward: Argument of `fully_shard`.
        shard_placement_fn: Argument of `fully_shard`.
        offload_policy: Argument of `fully_shard`.
        ignored_params: Argument of `fully_shard`.
        auto_wrap_policy: torch_xla's name of `policy`.
        auto_wrapper_callable: torch_xla's name of `before`. It is called with the module and the
            arguments of `fully_shard`, and may itself call `fully_shard`.
        fsdp_min_num_params: Accelerate's name of a policy by size, with this number.

    Returns:
        The plan, which has been applied unless `apply` is False.

    Raises:
        WrapError: The policy chooses nothing, or names modules that do not exist; groups overlap; a
            module is sharded already or is wrapped in DDP; or an error of `fully_shard`. Nothing
            has been changed.
        MeshError: The mesh does not fit the strategy, or has no axis for the experts; or an error
            of `fully_shard`.

    Cost: no collective, unless there are `experts` or `shard_placement_fn` returns ``Replicate()``:
    these make process groups once, so all ranks must call this, even for a plan. All ranks make the
    same plan, since only names, shapes and dtypes count.
    """
    refuse_texts(WrapError, apply=apply, verbose=verbose)
    refuse_non_functions(
        WrapError,
        before=before,
        auto_wrapper_callable=auto_wrapper_callable,
        param_init_fn=param_init_fn,
    )
    policy = _policy_of(policy, auto_wrap_policy, fsdp_min_num_params)
    prepare = _prepare_of(before, auto_wrapper_callable)
    _check_model(model)
    ignored = checks.checked_ignored(ignored_params)
    checks.check_kinds(checks.find_params([model], ignored))
    chosen = None if strategy is None else strategy_of(strategy)
    if chosen is not None and reshard_after_forward is not None:
        msg = (
            f"the strategy {chosen.name!r} says what is resharded after forward. Leave out "
            f"reshard_after_forward, or the strategy."
        )
        raise WrapError(msg)
    common = {
        "mp_policy": as_mixed_precision(mp_policy),
        "reshard_after_forward": (
            reshard_after_forward if chosen is None else chosen.reshard_after_forward
        ),
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": as_offload(offload_policy),
        "ignored_params": ignored,
    }
    axis = None if experts is None else axis_of(experts)
    shard_mesh, meshes = _meshes_of(model, mesh, chosen, common, is_plan=not apply, axis=axis)
    tree = ModuleTree(model, ignored)
    choice = _choice(tree, policy, units, shard_mesh, common)
    spread = None if meshes is None else Experts.of(tree, [*(experts or ())], meshes)
    planned = _planned(tree, shard_mesh, choice, common, spread)
    if offload_budget_nbytes is not None:
        offload_to_fit(planned, offload_budget_nbytes)
    plan = ShardPlan(
        model, shard_mesh, planned, strategy=chosen, prepare=prepare, init_fn=param_init_fn
    )
    if verbose and shard_mesh.rank == shard_mesh.ranks[0] and sys.stdout is not None:
        sys.stdout.write(f"{plan}\n")
    if apply:
        plan.apply()
    return plan


def _policy_of(policy: Any, auto_wrap_policy: Any, min_num_params: int | None) -> Any:
    """Return the policy that was passed under one of three names, or None."""
    by_size = None if min_num_params is None else size_policy(min_num_params)
    given = [p for p in (policy, auto_wrap_policy, by_size) if p is not None]
    if len(given) > 1:
        msg = "policy, auto_wrap_policy and fsdp_min_num_params all choose modules. Pass one."
        raise WrapError(msg)
    return given[0] if given else None


def _prepare_of(
    before: Callable[[nn.Module], Any] | None, auto_wrapper_callable: Callable[..., Any] | None
) -> Callable[[nn.Module, dict[str, Any]], Any] | None:
    """Return a function to call with a module and the arguments of its `fully_shard` call."""
    if before is not None and auto_wrapper_callable is not None:
        msg = "before and auto_wrapper_callable both prepare modules. Pass one of them."
        raise WrapError(msg)
    if before is not None:
        return lambda module, _: before(module)
    if auto_wrapper_callable is not None:
        return lambda module, arguments: auto_wrapper_callable(module, **arguments)
    return None


def _check_model(model: Any) -> None:
    """Raise if a model is not a root that can be sharded now."""
    if isinstance(model, (list, tuple)):
        msg = "auto_shard takes one model. To shard modules as one group, pass them to fully_shard."
        raise WrapError(msg)
    checks.check_module(model)
    for name, module in model.named_modules():
        if get_state(module) is not None:
            msg = (
                f"{name!r} of this {type(model).__name__} is sharded already, as "
                f"{own_class(module).__name__}. Let auto_shard take the whole model, or call "
                f"fully_shard on the rest yourself."
            )
            raise WrapError(msg)


def _meshes_of(
    model: nn.Module,
    mesh: Any,
    chosen: Strategy | None,
    common: dict[str, Any],
    *,
    is_plan: bool,
    axis: str | None,
) -> tuple[DeviceMesh, ExpertMeshes | None]:
    """Return the mesh to shard over, and the meshes of experts; a shape is enough for a plan.

    `axis` is the one over which experts are spread; None: there are no experts.
    """
    meshes = None
    if _is_shape(mesh):
        shape = (mesh,) if isinstance(mesh, int) else tuple(mesh)
        if chosen is not None and isinstance(mesh, int) and axis is None:
            shape = chosen.mesh_shape(mesh)
        if not is_plan:
            remedy = f"a mesh: init_device_mesh(device_type, {shape})"
            if axis is not None:
                remedy = f"a mesh of torch with names of its axes, of which {axis!r} is one"
            msg = (
                f"{mesh} is a mesh shape, for which auto_shard can only plan. Pass apply=False, or "
                f"{remedy}."
            )
            raise MeshError(msg)
        result = mesh_of_shape(shape)
        if axis is not None:
            meshes = ExpertMeshes.split(result, result.ndim - 1, axis)
    elif axis is not None:
        meshes = ExpertMeshes.of(mesh, axis)
    else:
        entries = [*checks.find_params([model], common["ignored_params"])]
        device_type = device_type_of(entries, common["offload_policy"])
        result = as_device_mesh(mesh, device_type=device_type)
        if mesh is None and chosen is not None and chosen.mesh_ndim > 1:
            shape = chosen.mesh_shape(result.size())
            result = init_device_mesh(device_type, shape, mesh_dim_names=chosen.mesh_dim_names)
    if meshes is not None:
        result = meshes.dense
    checks.check_mesh(result)
    if chosen is not None:
        chosen.check_mesh_shape(result.shape)
    return result, meshes


def _is_shape(mesh: Any) -> bool:
    return (isinstance(mesh, int) and not isinstance(mesh, bool)) or (
        isinstance(mesh, (tuple, list)) and all(isinstance(size, int) for size in mesh)
    )


def _choice(
    tree: ModuleTree,
    policy: Any,
    units: Mapping[Any, Any] | Collection[Any],
    mesh: DeviceMesh,
    common: dict[str, Any],
) -> Choice:
    """Return the groups of the policy, and those in `units`."""
    named = choose_by_name(tree, (units,) if isinstance(units, str) else units)
    if named and word_of(policy) == "balanced":
        # Named groups are fixed; the rest is balanced without them. The root takes the remainder.
        inner = [tree.modules[name] for names in named for name in names if name]
        inside = {param for module in inner for param in module.parameters()}
        tree = ModuleTree(tree.model, {*common["ignored_params"], *inside})
    choice = choose(tree, policy, mp_policy=common["mp_policy"], num_ranks=mesh.shape[-1])
    taken = {name for names in named for name in names}
    left = {tuple(n for n in names if n not in taken): given for names, given in choice.items()}
    left.pop((), None)
    return left | named


def _planned(
    tree: ModuleTree,
    mesh: DeviceMesh,
    choice: Choice,
    common: dict[str, Any],
    experts: Experts | None,
) -> list[Unit]:
    """Return the groups in the order of sharding, with all arguments."""
    of_root = choice.pop(_ROOT, {})
    ordered = units_in_order(tree, choice)
    ordered[-1].arguments.update(of_root)
    ignored = set(common["ignored_params"])
    for unit in ordered:
        ignored |= checks.checked_ignored(unit.arguments.get("ignored_params"))
    assign_params(tree, ordered, ignored)
    for unit in ordered:
        own_mesh = unit.arguments.get("mesh")
        is_other = own_mesh is not None and not is_shape_only(mesh)
        given = {**common, **unit.arguments}
        unit.arguments = {
            **given,
            "ignored_params": ignored | unit.left_out,
            "mp_policy": as_mixed_precision(given["mp_policy"]),
            "offload_policy": as_offload(given["offload_policy"]),
            "mesh": as_device_mesh(own_mesh, device_type=mesh.device_type) if is_other else mesh,
        }
        if experts is not None and any(e.param in experts.params for e in unit.entries):
            _place_experts(unit, experts)
        unit.check()
        unit.plan()
    return ordered


def _place_experts(unit: Unit, experts: Experts) -> None:
    """Pass the mesh of the experts in a unit to that unit."""
    if unit.mesh is not experts.meshes.dense:
        msg = (
            f"the policy gives the group ({', '.join(unit.names)}) a mesh of its own, and "
            f"experts= those of the call, for experts are in it. Leave out one of them."
        )
        raise MeshError(msg)
    fn = unit.arguments["shard_placement_fn"]
    unit.arguments["shard_placement_fn"] = PlacedExperts(experts, fn)
    unit.experts = experts
    experts.plan(unit.entries)


# --- offload by a budget --------------------------------------------------------------------------


def offload_to_fit(units: Sequence[Unit], budget_nbytes: int) -> None:
    """Offload groups, the largest savings first, until the rest fits.

    What counts is the memory that a rank keeps of a group between steps: its shard and, if it is
    trainable, the gradients and two tensors of optimizer state (AdamW). Groups that are on the host
    already stay there. Of equal groups, the one that is sharded first is offloaded first.
    """
    budget = as_number(budget_nbytes)
    if not budget >= 0:  # Also NaN.
        msg = f"offload_budget_nbytes must be 0 or more bytes, got {budget_nbytes!r}."
        raise WrapError(msg)
    on_device = [
        unit for unit in units if not isinstance(unit.arguments["offload_policy"], CPUOffloadPolicy)
    ]
    excess = sum(unit.state_nbytes for unit in on_device) - budget
    for unit in sorted(on_device, key=lambda unit: -unit.state_nbytes):
        if excess <= 0 or not unit.state_nbytes:
            return
        excess -= unit.state_nbytes
        unit.arguments["offload_policy"] = CPUOffloadPolicy()
        unit.plan()
