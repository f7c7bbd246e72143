"""State dicts of sharded modules: torch's ``state_dict()``, and its full ones from all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_checkpoints, torch_modules, torch_tensors
from shardkit._errors import CheckpointError, ShardkitError
from shardkit._params.bucket import Bucket, bucket_showing
from shardkit._params.memory import give_back
from shardkit._params.subclass_store import PackedStore
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.groups import exchange, group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# --- whole tensors and pieces ---------------------------------------------------------------------
#
# The common part of `shardkit.checkpoint` and torch's own functions for state dicts (through
# `_compat`).

STATE_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers that is one number for each parameter, whatever its shape."""


def holds_sharded(value: object) -> bool:
    """Whether there is a sharded tensor in nested dicts, lists and tuples."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, ShardedTensor):
            return True
        # Once: in a file, values may be shared at many levels, and would be visited far too often.
        if isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each
    return False


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples like these, with `change` applied to the leaves."""
    if isinstance(value, dict):
        return {key: map_leaves(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [map_leaves(entry, change) for entry in value]
    if type(value) is tuple:
        return tuple(map_leaves(entry, change) for entry in value)
    return change(value)


def zip_leaves(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Return `join` of the leaves at each place of several values, nested as the first one."""
    first = values[0]
    if isinstance(first, dict):
        return {key: zip_leaves([each[key] for each in values], join) for key in first}
    if isinstance(first, list) or type(first) is tuple:
        return type(first)(zip_leaves(each, join) for each in zip(*values, strict=True))
    return join(values)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves that `map_leaves` changes."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return found


@torch.no_grad()
def whole_tensor(tensor: Tensor, *, keep: bool, to_cpu: bool) -> Tensor | None:
    """Return a sharded tensor or DTensor as a plain whole one, others as a copy. Collective.

    A rank without `keep` takes part and gets None.
    """
    device = torch.device("cpu") if to_cpu else tensor.device
    detached: Any = tensor.detach()
    if hasattr(detached, "full_tensor"):
        is_ours = isinstance(detached, ShardedTensor)
        result: Tensor = detached.whole_values() if is_ours else detached.full_tensor()
        return result.to(device) if keep else None
    return tensor.detach().to(device, copy=True) if keep else None


@torch.no_grad()
def cut_whole(whole: Tensor, like: ShardedTensor, name: str) -> Tensor:
    """Return this rank's piece of a whole tensor, sharded like `like`, in new memory.

    Pieces of one bucket lie end to end, as in an optimizer's state.
    """
    check_shape(name, tuple(whole.shape), tuple(like.shape))
    if like.is_meta:
        new = torch.empty_like(like, dtype=whole.dtype, device=like.spec.device)
    else:
        new = torch.zeros_like(like, dtype=whole.dtype)
    return new.copy_(whole.detach())


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape; every rank does, since ranks know the same shapes."""
    if found != expected:
        msg = (
            f"{name!r} has shape {found} in the state dict, and {expected} here. Make the model as "
            f"it was when the state was saved, or leave the entry out and load with strict=False."
        )
        raise CheckpointError(msg)


# --- state dicts of modules -----------------------------------------------------------------------
#
# Hooks on every module that holds a parameter of a group, even if `fully_shard` was not called on
# it. They are functions of this file and hold no state: copies and pickles of a module keep them,
# and in a copy that is not sharded they do nothing.


def install_hooks(modules: Iterable[nn.Module]) -> None:
    """Let the state dicts of these modules hold and take sharded parameters, at any time."""
    for module in modules:
        if save_sharded not in torch_modules.state_dict_hooks(module):
            module.register_state_dict_post_hook(save_sharded)
            module.register_load_state_dict_pre_hook(load_into_sharded)


def save_sharded(module: nn.Module, state_dict: Any, prefix: str, local_metadata: object) -> None:
    """Save sharded parameters where the module shows unsharded ones, which lose their memory.

    The module itself is not changed, since its forward may be under way.
    """
    del local_metadata
    for name, param in module._parameters.items():  # noqa: SLF001 - None and tied ones as well
        bucket = bucket_showing(param)
        if bucket is not None and isinstance(bucket.store, PackedStore):
            # The module itself saves parts beside the parameter; here the parameter has them all.
            for key in [key for key in state_dict if key.startswith(f"{prefix}{name}.")]:
                del state_dict[key]
        saved = state_dict.get(prefix + name)
        if param is not None and bucket is not None and saved is not None:
            sharded = bucket.sharded_of(param)
            state_dict[prefix + name] = sharded if saved is param else sharded.detach()
        elif param is not None and bucket is not None and bucket.store.keeps_writes:
            _save_renamed(param, bucket, state_dict)


def _save_renamed(param: nn.Parameter, bucket: Bucket, state_dict: Any) -> None:
    """Find a parameter that is saved under other names, or in parts, by its memory."""
    memory = param.untyped_storage().data_ptr()
    for key, value in list(state_dict.items()):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            continue
        if value.is_meta or value.untyped_storage().data_ptr() != memory:
            continue
        place = (param.data_ptr(), param.shape, param.stride())
        if (value.data_ptr(), value.shape, value.stride()) == place:
            sharded = bucket.sharded_of(param)
            state_dict[key] = sharded if value is param else sharded.detach()
        elif param.data_ptr() <= value.data_ptr() < param.data_ptr() + param.nbytes:
            state_dict[key] = value.detach().clone()  # The memory of a part will be freed.


def load_into_sharded(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """Show the sharded parameters; with ``assign=True`` give them the values of the state dict.

    Torch would put the state dict's tensors in their place. Here the parameters stay the same
    objects, for optimizers and references made before, and take over values and dtype.
    """
    params = module._parameters  # noqa: SLF001
    for param in list(params.values()):
        bucket = bucket_showing(param)
        if bucket is not None:
            bucket.sites.show(unsharded=False)
    errors = rest[-1]
    for name, shown in params.items():
        _pack_value(shown, state_dict, prefix + name, errors)
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, shown in params.items():
        value = state_dict.get(prefix + name)
        if not isinstance(shown, ShardedTensor) or not isinstance(value, Tensor):
            continue
        if value.shape != shown.shape:
            continue  # Torch reports it.
        if value.dtype != shown.dtype:
            shown.grad = None
        try:
            shown.copy_values(value)
        except (ShardkitError, RuntimeError) as error:
            errors.append(f'While assigning the parameter named "{prefix + name}": {error}')
        # Torch registers what it finds here as the module's parameter, so leave the present one.
        state_dict[prefix + name] = shown


def _pack_value(shown: object, state_dict: Any, key: str, errors: list[str]) -> None:
    """Replace a whole value of a packed parameter's own class by the bytes that are cut here."""
    value = state_dict.get(key)
    packing = shown.spec.packing if isinstance(shown, ShardedTensor) else None
    if packing is None or not isinstance(value, packing.cls):
        return
    try:
        state_dict[key] = packing.pack(value)
    except ShardkitError as error:
        errors.append(f'While loading the parameter named "{key}": {error}')


# --- torch's state-dict functions -----------------------------------------------------------------
#
# The functions of ``torch.distributed.checkpoint.state_dict`` look for DTensors when they gather,
# cut and broadcast. They would return pieces as if they were whole tensors, and put whole tensors
# into optimizers. So `_compat` wraps the helpers that they call: sharded tensors are handled here,
# everything else goes to torch's helper unchanged.


def gather_state_dict(original: Callable[..., Any], state_dict: Any, **kwargs: Any) -> Any:
    """Gather sharded tensors one by one; return nothing on ranks that are to have nothing."""
    if not holds_sharded(state_dict):
        return original(state_dict, **kwargs)
    ranks = kwargs.get("ranks_only") or ()
    keep = not ranks or group_rank(kwargs.get("pg")) in ranks
    to_cpu = bool(kwargs.get("cpu_offload"))

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return whole_tensor(leaf, keep=keep, to_cpu=to_cpu)
        return original({"": leaf}, **kwargs).get("")

    result = map_leaves(state_dict, gather)
    return result if keep else {}


def distribute_state_dict(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Cut the pieces of sharded tensors out of whole tensors that every rank has."""
    others = {}
    for key, value in full_state_dict.items():
        local = local_state_dict.get(key)
        if not isinstance(local, ShardedTensor) or not isinstance(value, Tensor):
            others[key] = value
        elif isinstance(value, ShardedTensor) or isinstance(local, nn.Parameter):
            local_state_dict[key] = value.detach()  # `load_state_dict` cuts or refuses it.
        else:
            local_state_dict[key] = _put(_decoded(value, local), local, key)
    original(others, local_state_dict, *args, **kwargs)


def broadcast_state_dict(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Also cut tensors without dims, which torch sends separately.

    Raises:
        CheckpointError: Rank 0 has pieces, not whole tensors. Every rank raises.

    Cost: an all-gather of a few bytes besides what torch sends.
    """
    sharded = _sharded_ones(local_state_dict)
    has_pieces = holds_sharded(dict(full_state_dict))
    if sharded and exchange(has_pieces, None, "what rank 0 sends")[0]:
        msg = (
            "broadcast_from_rank0: the state dict of rank 0 has sharded tensors, of which it has a "
            "shard. Pass whole tensors there, such as those of get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), or leave out broadcast_from_rank0 "
            "and full_state_dict: then each rank loads its shards."
        )
        raise CheckpointError(msg)
    original(full_state_dict, local_state_dict, *args, **kwargs)
    _cut_received(local_state_dict, sharded)


def broadcast_tensors(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Cut each received tensor before the next one comes, so that only one whole exists.

    Torch sees plain tensors in place of sharded ones, because it would cut rows of sharded tensors
    that answer as DTensors.
    """
    sharded = _sharded_ones({key: local_state_dict.get(key) for key in keys})
    local_state_dict.update(dict.fromkeys(sharded, torch.empty(0)))
    sent = {key: full_state_dict[key] for key in keys}
    sent |= {key: _decoded(sent[key], local) for key, local in sharded.items()}
    # Gloo sends memory as it lies: a transposed tensor would come with its elements mixed up.
    sent = {
        key: each.contiguous() if isinstance(each, Tensor) else each for key, each in sent.items()
    }
    original(sent, local_state_dict, keys, *args, **kwargs)
    _cut_received(local_state_dict, sharded)


def agree_on_parts(
    original: Callable[..., Any], model: nn.Module, *args: Any, optim_only: bool, **kwargs: Any
) -> Any:
    """Let rank 0 say whether it sends a model's state; the dicts of other ranks may be empty.

    Cost: with ``broadcast_from_rank0`` an all-gather of a few bytes.
    """
    options = kwargs.get("options")
    if getattr(options, "broadcast_from_rank0", False) and any(
        isinstance(param, ShardedTensor) for param in model.parameters()
    ):
        optim_only = exchange(optim_only, None, "which state dicts are set")[0]
    return original(model, *args, optim_only=optim_only, **kwargs)


def fill_optimizer_state(original: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state by a step, also where gradients have a dtype of their own.

    Torch gives each parameter zeros of the parameter's dtype for it. Where ``grad_dtype`` is
    another one, torch would refuse them (pytorch#191918).
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    chosen = {
        param: torch_tensors.grad_dtype_of(param)
        for param in params
        if isinstance(param, ShardedTensor) and param.grad is None
        if torch_tensors.is_grad_dtype_chosen(param)
    }
    for param in chosen:
        torch_tensors.set_grad_dtype(param, None)
    try:
        original(optimizer)
    finally:
        for param, dtype in chosen.items():
            param.grad = None
            torch_tensors.set_grad_dtype(param, dtype)


def load_optimizers(
    original: Callable[..., Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state_dict: Any,
    info: Any,
) -> None:
    """Give all ranks the options that only rank 0's state has, such as ``initial_lr``.

    Torch sends the options that an optimizer has before. A scheduler takes a learning rate from the
    others, so ranks would train with different ones.

    Cost: with ``broadcast_from_rank0`` an all-gather of the options.
    """
    original(model, optimizers, state_dict, info)
    if not info.handle_optim or not info.broadcast_from_rank0:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(isinstance(param, ShardedTensor) for group in groups for param in group["params"]):
        own = [{key: group[key] for key in group if key != "params"} for group in groups]
        on_host = map_leaves(own, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)
        for group, options in zip(groups, exchange(on_host, None, "options")[0], strict=True):
            for key, value in options.items():
                group.setdefault(key, value)


def _sharded_ones(state: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    return {key: value for key, value in state.items() if isinstance(value, ShardedTensor)}


def _cut_received(state: dict[str, Any], sharded: Mapping[str, ShardedTensor]) -> None:
    for key, local in sharded.items():
        received = state.get(key)
        if isinstance(received, Tensor) and not isinstance(received, ShardedTensor):
            state[key] = _put(received, local, key)
            if received.device.type == "cpu":
                give_back(received.nbytes)  # Frees the one before it; this one is still in use.


@torch.no_grad()
def _decoded(whole: Any, local: ShardedTensor) -> Any:
    """Return the numbers of state that torchao's optimizers code: collectives take no codes."""
    plain = (Tensor, nn.Parameter, ShardedTensor)
    # A DTensor has its own method for the whole, `full_tensor`.
    is_coded = isinstance(whole, Tensor) and type(whole) not in plain
    is_coded &= not hasattr(whole, "full_tensor")
    if not is_coded or local.spec.packing is not None or local.spec.subclass is not None:
        return whole
    return torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).copy_(whole)


@torch.no_grad()
def _put(whole: Tensor, local: ShardedTensor, name: str) -> Tensor:
    """Write a whole tensor to a sharded one, or to a new one if that has no memory or dtype."""
    check_shape(name, tuple(whole.shape), tuple(local.shape))
    if local.is_meta or (local.dtype != whole.dtype and not isinstance(local, nn.Parameter)):
        return cut_whole(whole, local, name)
    local.detach().copy_(whole)
    return local


torch_checkpoints.wrap_state_dict_helpers(
    {
        "_gather_state_dict": gather_state_dict,
        "_distribute_state_dict": distribute_state_dict,
        "_broadcast_state_dict": broadcast_state_dict,
        "_broadcast_tensors": broadcast_tensors,
        "_verify_options": agree_on_parts,
        "_init_optim_state": fill_optimizer_state,
        "_load_optim_state_dict": load_optimizers,
    }
)
