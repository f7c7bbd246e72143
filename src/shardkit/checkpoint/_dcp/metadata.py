"""Reading `.metadata`, DCP's description of a checkpoint, without executing what it contains.

The file is a pickle, and a pickle is a program. Only classes and constants that DCP itself writes
there are known to the unpickler of this module: whatever else a file asks for is an error.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit import _compat_checkpoints
from shardkit._errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

METADATA_FILE = ".metadata"
"""Its name in a checkpoint's directory."""

_MEMORY_FORMAT: Any = _compat_checkpoints.dcp_memory_format()
_STORAGE_INFO: Any = _compat_checkpoints.dcp_storage_info()
_CLASSES: tuple[type[Any], ...] = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.TensorProperties,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    _MEMORY_FORMAT,
    _STORAGE_INFO,
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


class ForeignPickleError(pickle.UnpicklingError):
    """A pickle asks for something that DCP does not write."""


class _Unpickler(pickle.Unpickler):
    """Knows DCP's classes only."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            # Made anew for each pickle, which may write to it.
            return _Function(known) if isinstance(known, FunctionType) else known
        if module.startswith("pathlib") and name in _PATHS:
            return _Function(_join)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        msg = f"it asks for {module}.{name}"
        raise ForeignPickleError(msg)


class _Function:
    """A function that a pickle may call, and nothing else: it has no attributes to be set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: object) -> Any:
        return self._call(*args)


def _join(*parts: object) -> str:
    return "/".join(map(str, parts))


def _layout(name: object) -> torch.layout:
    for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged):
        if str(layout) == name:
            return layout
    msg = f"it asks for the layout {name!r}"
    raise ForeignPickleError(msg)


def _memory_format(cls: Any, member: Any) -> Any:
    if cls is not _MEMORY_FORMAT:
        msg = f"it asks for {member!r} of {cls!r}"
        raise ForeignPickleError(msg)
    return _MEMORY_FORMAT[member]


_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in _CLASSES},
    **{("builtins", kind.__name__): kind for kind in (dict, list, tuple, set, frozenset)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    # How some releases of Python pickle the member of an enum.
    ("builtins", "getattr"): _memory_format,
}


def parse_metadata(content: bytes, path: os.PathLike[str] | str) -> dcp.Metadata:
    """Return what the bytes of a `.metadata` file describe; execute nothing.

    Args:
        content: The whole file.
        path: Names it in errors.

    Raises:
        CheckpointError: It is not a pickle, asks for anything that DCP does not write, or
            describes no checkpoint.
    """
    remedy = "The file is damaged or foreign: load another checkpoint."
    before = [dict(vars(cls)) for cls in _CLASSES]
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        msg = f"{Path(path)}: not a DCP metadata pickle: {error}. {remedy}"
        raise CheckpointError(msg) from error
    finally:
        # A pickle may also set attributes of the classes that it is given.
        changed = _restore(before)
    if changed:
        msg = f"{Path(path)}: it sets attributes of {', '.join(changed)}. {remedy}"
        raise CheckpointError(msg)
    problem = _problem(found)
    if problem:
        msg = f"{Path(path)}: {problem}. {remedy}"
        raise CheckpointError(msg)
    metadata: dcp.Metadata = found
    return metadata


def read_metadata(path: os.PathLike[str] | str) -> dcp.Metadata:
    """Read `.metadata` of a checkpoint, shardkit's or another of torch.distributed.checkpoint.

    Args:
        path: The checkpoint's directory, or the file itself.

    Raises:
        CheckpointError: There is none, or see `parse_metadata`.
    """
    file = Path(path)
    if file.is_dir():
        file /= METADATA_FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        msg = (
            f"{file}: {error.strerror or error}. A checkpoint directory holds this file once it is "
            f"complete: give the path of a complete one."
        )
        raise CheckpointError(msg) from error
    return parse_metadata(content, file)


def _restore(before: list[dict[str, Any]]) -> list[str]:
    """Give the known classes the attributes that they had; name those that had others."""
    changed = []
    for cls, attributes in zip(_CLASSES, before, strict=True):
        now = dict(vars(cls))
        # `is`: an attribute's own comparison is not to be trusted.
        names = {n for n in now.keys() | attributes.keys() if now.get(n) is not attributes.get(n)}
        for name in names:
            if name in attributes:
                setattr(cls, name, attributes[name])
            else:
                delattr(cls, name)
        if names:
            changed.append(cls.__name__)
    return changed


def _problem(found: Any) -> str:
    """Say what is wrong with unpickled metadata; empty if nothing is."""
    if not isinstance(found, dcp.Metadata):
        return f"expected DCP's Metadata, found {type(found).__name__}"
    entries: Any = found.state_dict_metadata
    stored: Any = found.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        return "expected entries and storage by name, found none"
    for name, entry in entries.items():
        if not isinstance(name, str) or not _is_entry(entry):
            return f"entry {name!r} describes neither a tensor nor bytes"
    problems = (_problem_stored(index, where) for index, where in stored.items())
    return next(filter(None, problems), "")


def _problem_stored(index: Any, where: Any) -> str:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(where, _STORAGE_INFO):
        return f"{index!r} is not stored in a file"
    file = where.relative_path
    # A name with a directory in it could point anywhere.
    if not isinstance(file, str) or Path(file).name != file or not file.strip("."):
        return f"{index.fqn!r} is stored in {file!r}, expected a file of this directory"
    if not _are_sizes((where.offset, where.length)):
        return f"{index.fqn!r} is stored at {where.offset!r} with length {where.length!r}"
    return ""


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, dcp.BytesStorageMetadata):
        return True
    return (
        isinstance(entry, dcp.TensorStorageMetadata)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and _are_sizes(entry.size)
        and all(_is_chunk(chunk, len(entry.size)) for chunk in entry.chunks)
    )


def _is_chunk(chunk: Any, ndim: int) -> bool:
    return (
        isinstance(chunk, dcp.ChunkStorageMetadata)
        and _are_sizes(chunk.offsets)
        and _are_sizes(chunk.sizes)
        and len(chunk.offsets) == len(chunk.sizes) == ndim
    )


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, int) and v >= 0 for v in values)
