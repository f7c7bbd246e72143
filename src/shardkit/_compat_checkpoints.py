"""Private torch names of checkpoints and state dicts: why, and the versions they were tried on.

Tried on torch 2.9.0 and 2.13.0 (CPU). All others are in `_compat`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardkit._after_import import AfterImport
from shardkit._errors import StateError

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Mapping


def dcp_storage_info() -> Any:
    """Return the record of where an entry of a checkpoint is stored: part of every `.metadata`.

    Like `dcp_memory_format` a function: torch.distributed.checkpoint takes as long to import as
    torch.
    """
    from torch.distributed.checkpoint import filesystem  # noqa: TID251 - a record

    return filesystem._StorageInfo


def dcp_memory_format() -> Any:
    """Return the enum of memory formats that stands in every `.metadata`."""
    from torch.distributed.checkpoint import metadata  # noqa: TID251 - a record

    return metadata._MEM_FORMAT_ENCODING


# --- torch's functions for state dicts ------------------------------------------------------------

_HELPERS_MODULE = "torch.distributed._state_dict_utils"
_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_PUBLIC_STATE_DICT_FUNCTIONS = (
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
)

HelperWrapper = Any
"""``wrapper(original, *args, **kwargs)``: what to call instead of a helper of torch."""


def wrap_state_dict_helpers(wrappers: Mapping[str, HelperWrapper]) -> None:
    """Let torch's functions for full state dicts call `wrappers` in the place of their helpers.

    They ask ``isinstance(value, DTensor)`` and have no way to learn of other sharded tensors. Both
    modules take long to import, so it is done when they are. Helpers by these names and arguments
    are in torch 2.9.0 to 2.13.0. Where one is missing, the public functions refuse a full state
    dict of a sharded model, instead of returning pieces as whole tensors.
    """

    def wrap(module: types.ModuleType) -> None:
        if module.__name__ == _STATE_DICT_MODULE and not _has_all(wrappers):
            _refuse_full_state_dicts(module)
            return
        for name, wrapper in wrappers.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "wraps_torch"):
                setattr(module, name, _wrapped(original, wrapper))

    for name in (_HELPERS_MODULE, _STATE_DICT_MODULE):
        if name in sys.modules:
            wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport(name, wrap))


def _has_all(names: Iterable[str]) -> bool:
    modules = (sys.modules[_HELPERS_MODULE], sys.modules[_STATE_DICT_MODULE])
    return all(any(hasattr(module, name) for module in modules) for name in names)


def _wrapped(original: Any, wrapper: HelperWrapper) -> Any:
    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    helper.wraps_torch = True  # type: ignore[attr-defined]
    return helper


def _refuse_full_state_dicts(module: types.ModuleType) -> None:
    def refuse(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("options")
        is_sharded = any(hasattr(param, "local_piece") for param in model.parameters())
        if is_sharded and getattr(options, "full_state_dict", False):
            msg = (
                f"{original.__name__} of torch {torch.__version__} cannot handle full_state_dict="
                f"True for modules sharded by shardkit. Use the function of the same name in "
                f"shardkit.checkpoint."
            )
            raise StateError(msg)
        return original(model, *args, **kwargs)

    for name in _PUBLIC_STATE_DICT_FUNCTIONS:
        setattr(module, name, _wrapped(getattr(module, name), refuse))
