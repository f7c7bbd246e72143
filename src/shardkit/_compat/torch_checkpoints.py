"""Private names of torch for checkpoints and state dicts, whose modules take long to import.

| branch | until which torch |
| --- | --- |
| a helper for full state dicts is missing: the public functions refuse sharded models | none yet |
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d  # noqa: TID251 - a private name of it

from shardkit._compat.once import is_wrapped, wrap
from shardkit._errors import StateError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after its import, once; see `when_imported`."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._is_asking = False

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        """Let other finders find the module; add the call to its loader.

        A search by ``importlib.util.find_spec`` loads nothing, so it does not call the function.
        """
        del path, target
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            sys.meta_path.remove(self)  # There is no such module.
        else:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                is_first = self in sys.meta_path
                if is_first:
                    sys.meta_path.remove(self)
                execute(module)
                if is_first:
                    self._then(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[types.ModuleType], None]) -> AfterImport:
    """Call a function with a module: now if it is imported, otherwise right after its import."""
    finder = AfterImport(name, then)
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)
    return finder


def dcp_storage_info() -> Any:
    """Return the class that records where an entry is stored, which is part of every `.metadata`.

    It is a function, like `dcp_memory_format`, because torch.distributed.checkpoint takes as long
    to import as torch.
    """
    from torch.distributed.checkpoint import filesystem  # noqa: TID251 - a record

    return filesystem._StorageInfo


def dcp_memory_format() -> Any:
    """Return the enum of memory formats that is in every `.metadata`."""
    from torch.distributed.checkpoint import metadata  # noqa: TID251 - a record

    return metadata._MEM_FORMAT_ENCODING


def save_alone(writer: Any, planner: Any) -> None:
    """Do what ``dcp.save`` does in one process, without its warning that there is only one."""
    from torch.distributed.checkpoint import state_dict_saver  # noqa: TID251 - a private name of it

    state_dict_saver._save_state_dict({}, writer, no_dist=True, planner=planner)


_HELPERS_MODULE = "torch.distributed._state_dict_utils"

_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"

_WRITER_MODULE = "torch.distributed.checkpoint.hf_storage"

_READER_MODULE = "torch.distributed.checkpoint.format_utils"

_PUBLIC_STATE_DICT_FUNCTIONS = (
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
)

HelperWrapper = Any
"""``wrapper(original, *args, **kwargs)``: a function to call instead of a helper of torch."""


def wrap_state_dict_helpers(wrappers: Mapping[str, HelperWrapper]) -> None:
    """Make torch's functions for state dicts call `wrappers` in place of their helpers.

    Most helpers ask ``isinstance(value, DTensor)`` and recognize no other sharded tensors. Both
    modules take long to import, so they are wrapped at their import. Helpers with these names and
    arguments are in torch 2.9.0 to 2.13.0. If one is missing, the public functions refuse a full
    state dict of a sharded model, instead of returning pieces as whole tensors.
    """

    def wrap_helpers(module: types.ModuleType) -> None:
        if module.__name__ == _STATE_DICT_MODULE:
            helpers = {*vars(module), *vars(sys.modules[_HELPERS_MODULE])}
            if not helpers.issuperset(wrappers):
                _refuse_full_state_dicts(module)
                return
        for name, wrapper in wrappers.items():
            if hasattr(module, name) and not is_wrapped(module, name):
                wrap(module, name, wrapper)

    for name in (_HELPERS_MODULE, _STATE_DICT_MODULE):
        when_imported(name, wrap_helpers)


ASK_THE_CLASS = (
    ("torch.utils", "swap_tensors"),
    ("torch.distributed.checkpoint.planner_helpers", "_iterate_state_dict"),
    ("torch.distributed.checkpoint.default_planner", "_create_default_metadata_only_plan"),
    ("torch.distributed.pipelining._utils", "extract_tensor_meta"),
    ("torch._dynamo.variables.builder.VariableBuilder", "wrap_tensor"),
    ("torch._dynamo.variables.user_defined.UserDefinedObjectVariable", "lookup_class_mro_attr"),
)
"""Functions of torch that need a tensor's actual class; torch 2.9.0 to 2.13.0.

They read fields of DTensor if ``isinstance(value, DTensor)`` is true, make DTensors of rows for the
value, or give its class to another tensor. Each entry has a module, or a class in one, and a name.
A version of torch may lack some.
"""


def write_boxes_apart() -> None:
    """Make torch's writer of safetensors keep all boxes that a rank has of a tensor.

    Its files have one entry for each name. A piece that begins or ends inside a row is several
    boxes, of which only the last one would stay. And safetensors refuses tensors of one file that
    share memory, as those of tied parameters do. So such boxes go into files of their own, which
    torch consolidates like those of other ranks. Torch's class and arguments are those of 2.9.0 to
    2.13.0.
    """
    _wrap_method(_WRITER_MODULE, "HuggingFaceStorageWriter", "write_data", _write_in_rounds)


def _wrap_method(module: str, cls: str, name: str, replacement: Callable[..., Any]) -> None:
    """Wrap a method of a class of torch when its module is imported, if torch has it."""

    def wrap_it(imported: types.ModuleType) -> None:
        owner: Any = getattr(imported, cls, None)
        if owner is not None and not is_wrapped(owner, name):
            wrap(owner, name, replacement)

    when_imported(module, wrap_it)


def _write_in_rounds(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
    rounds: list[list[Any]] = []
    seen: dict[object, int] = {}
    for item in plan.items:
        parts = [item.index.fqn]
        if "shard_index" in plan.storage_data and item.tensor_data is not None:
            parts.append(planner.resolve_data(item).data_ptr())
        number = 1 + max(seen.get(part, -1) for part in parts)
        seen.update(dict.fromkeys(parts, number))
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    if len(rounds) < 2:  # noqa: PLR2004 - nothing is written twice
        return original(writer, plan, planner)
    if "shard_index" not in plan.storage_data:
        msg = (
            f"HuggingFaceStorageWriter without save_distributed=True has one entry for each name, "
            f"and this rank has several parts of {rounds[1][0].index.fqn!r}. Pass "
            f"save_distributed=True, or use shardkit.checkpoint.save_full(path, model, "
            f'format="safetensors").'
        )
        raise StateError(msg)
    results: list[Any] = []
    for number, items in enumerate(rounds):
        index = plan.storage_data["shard_index"] + number * c10d.get_world_size()
        storage_data = {**plan.storage_data, "shard_index": index}
        part = dataclasses.replace(plan, items=items, storage_data=storage_data)
        results += original(writer, part, planner).wait()
    done: torch.futures.Future[list[Any]] = torch.futures.Future()
    done.set_result(results)
    return done


def refuse_broadcasting_reader() -> None:
    """Make torch's reader of whole files refuse sharded tensors, on all ranks.

    It sends a tensor once for each box that a rank needs of it. Ranks need different numbers of
    boxes, so they would wait for each other without end. Torch's class is that of 2.9.0 to 2.13.0.
    """
    _wrap_method(_READER_MODULE, "BroadcastingTorchSaveReader", "read_data", _read_if_not_sharded)


def _read_if_not_sharded(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    sharded = [name for name, value in planner.state_dict.items() if hasattr(value, "local_piece")]
    if sharded:
        msg = (
            f"BroadcastingTorchSaveReader cannot read into sharded tensors, such as "
            f"{sharded[0]!r}. Use shardkit.checkpoint.load_full(path, model), or convert the file "
            f"once by torch_save_to_dcp of torch.distributed.checkpoint.format_utils."
        )
        raise StateError(msg)
    return original(reader, plan, planner)


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
        wrap(module, name, refuse)
