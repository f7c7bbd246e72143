"""State dicts of modules that hold sharded parameters: these are what is saved and loaded.

Hooks on every module that holds a parameter of a group, whether `fully_shard` was called on it or
not. They are functions of this module, which hold nothing: copies and pickles of a module take them
along, and in a copy that is not sharded they do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardkit import _compat_modules
from shardkit._errors import ShardkitError
from shardkit._params.bucket import bucket_showing
from shardkit._params.packed_store import PackedStore
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit._params.bucket import Bucket


def install_hooks(modules: Iterable[nn.Module]) -> None:
    """Let the state dicts of these modules hold and take sharded parameters, at any time."""
    for module in modules:
        if save_sharded not in _compat_modules.state_dict_hooks(module):
            module.register_state_dict_post_hook(save_sharded)
            module.register_load_state_dict_pre_hook(load_into_sharded)


def save_sharded(module: nn.Module, state_dict: Any, prefix: str, local_metadata: object) -> None:
    """Put sharded parameters where the module shows unsharded ones: these lose their memory.

    What the module shows is left as it is: its forward may be under way.
    """
    del local_metadata
    for name, param in module._parameters.items():  # noqa: SLF001 - None and tied ones as well
        bucket = bucket_showing(param)
        if bucket is not None and isinstance(bucket.store, PackedStore):
            # Parts that the module itself saves beside the parameter, which is all of them here.
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
        if type(value) not in (Tensor, nn.Parameter):
            continue
        if value.is_meta or value.untyped_storage().data_ptr() != memory:
            continue
        place = (param.data_ptr(), param.shape, param.stride())
        if (value.data_ptr(), value.shape, value.stride()) == place:
            sharded = bucket.sharded_of(param)
            state_dict[key] = sharded if value is param else sharded.detach()
        elif param.data_ptr() <= value.data_ptr() < param.data_ptr() + param.nbytes:
            state_dict[key] = value.detach().clone()  # A part, whose memory will be given back.


def load_into_sharded(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    """Show the sharded parameters; with ``assign=True`` give them what the state dict has.

    Torch would put the state dict's tensors in their place. Here the parameters stay the objects
    that they are, for optimizers and references made before, and take over values and dtype.
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
            continue  # Torch says so.
        if value.dtype != shown.dtype:
            shown.grad = None
        try:
            shown.copy_values(value)
        except (ShardkitError, RuntimeError) as error:
            errors.append(f'While assigning the parameter named "{prefix + name}": {error}')
        # Torch registers what it finds here as the module's parameter: the one that is there.
        state_dict[prefix + name] = shown


def _pack_value(shown: object, state_dict: Any, key: str, errors: list[str]) -> None:
    """Let a whole value of a packed parameter's own class be the bytes that are cut here."""
    value = state_dict.get(key)
    packing = shown.spec.packing if isinstance(shown, ShardedTensor) else None
    if packing is None or not isinstance(value, packing.cls):
        return
    try:
        state_dict[key] = packing.pack(value)
    except ShardkitError as error:
        errors.append(f'While loading the parameter named "{key}": {error}')
