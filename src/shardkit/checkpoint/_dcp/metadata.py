"""Reading `.metadata`, DCP's description of a checkpoint: compared before it is believed."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit._compat import torch_checkpoints
from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.metadata_pickle import shown, unpickle
from shardkit.checkpoint._files.disk import is_plain_name, read_index, reading

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

METADATA_FILE = ".metadata"
"""Its name in a checkpoint's directory."""

_STORAGE_INFO: Any = torch_checkpoints.dcp_storage_info()
_LIMIT = 1 << 62  # Of sizes and offsets: sums of a few of them fit the system's numbers.
_MAX_DEPTH = 100  # Of keys that lead to an entry.
_CHUNK_NBYTES = 32  # At least of a chunk's description: entries share no lists of them.
_PACKED = 64  # Values at most in the bytes of one: tensors of classes that pack them.
_SMALL_NBYTES = 1 << 20
# Its own seed: nobody foresees its numbers, and the user's do not change.
_random_place = functools.partial(random.Random().getrandbits, 64)  # noqa: S311 - not shown


def parse_metadata(content: bytes, path: os.PathLike[str] | str) -> dcp.Metadata:
    """Return what the bytes of a `.metadata` file describe; execute nothing.

    Raises:
        CheckpointError: It is not a pickle, asks for anything that DCP does not write, or
            describes no checkpoint.
    """
    remedy = "The file is damaged or foreign: load another checkpoint."
    try:
        with _without_collections():
            found = unpickle(content)
    except Exception as error:
        msg = f"{Path(path)}: not a DCP metadata pickle: {error}. {remedy}"
        raise CheckpointError(msg) from error
    with reading(path):
        problem = _problem(found, len(content))
    if problem:
        msg = f"{Path(path)}: {problem}. {remedy}"
        raise CheckpointError(msg)
    metadata: dcp.Metadata = found
    return metadata


def metadata_content(directory: Path) -> bytes:
    """Return what is in `.metadata` of a checkpoint."""
    file = directory / METADATA_FILE
    try:
        return read_index(file)
    except OSError as error:
        msg = (
            f"{file}: {error.strerror or error}. A checkpoint directory holds this file once it is "
            f"complete: give the path of a complete one."
        )
        raise CheckpointError(msg) from error


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage again and again while many objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _problem(found: Any, nbytes: int) -> str:
    """Say what is wrong with unpickled metadata; empty if nothing is."""
    if not isinstance(found, dcp.Metadata):
        return f"expected DCP's Metadata, found {type(found).__name__}"
    entries: Any = found.state_dict_metadata
    stored: Any = found.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        return "expected entries and storage by name, found none"
    num_chunks = 0
    for name, entry in entries.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            num_chunks += len(entry.chunks)
            if num_chunks * _CHUNK_NBYTES > nbytes:
                return "it has more chunks than it describes"
        if not isinstance(name, str) or not _is_entry(entry):
            return f"entry {shown(name)} describes neither a tensor nor bytes"
    problems = itertools.chain(
        (_problem_stored(index, where) for index, where in stored.items()),
        (_problem_entry(name, entry, stored) for name, entry in entries.items()),
    )
    problem = next(filter(None, problems), "")
    paths = found.planner_data
    if not problem and isinstance(paths, dict) and not all(map(_is_path, paths.values())):
        return "it does not say where its entries stood"
    return problem


def _problem_entry(name: str, entry: Any, stored: dict[Any, Any]) -> str:
    """Say why an entry cannot be read from where it is stored."""
    is_tensor = isinstance(entry, dcp.TensorStorageMetadata)
    offsets = [chunk.offsets for chunk in entry.chunks] if is_tensor else [None]
    places: list[Any] = [stored.get(dcp.MetadataIndex(name, each)) for each in offsets]
    # Before a dict has offsets as keys: as each is that of a stored index, no two have one hash.
    if None in places:
        return f"{shown(name)} is listed but stored nowhere"
    if not is_tensor:
        return ""
    uncovered = _uncovered(entry.size, entry.chunks)
    if uncovered:
        return f"{shown(name)} of shape {tuple(entry.size)}: {uncovered}"
    nbytes = math.prod(entry.size) * entry.properties.dtype.itemsize
    stored_nbytes = sum(place.length for place in places)
    is_dense = entry.properties.layout is torch.strided
    if is_dense and nbytes > _PACKED * stored_nbytes + _SMALL_NBYTES:
        return f"{shown(name)} would take {nbytes} bytes, and {stored_nbytes} are stored"
    return ""


def _uncovered(size: torch.Size, chunks: list[dcp.ChunkStorageMetadata]) -> str:
    """Say why chunks are not a tensor cut into parts; empty if they are."""
    boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in chunks}
    volume = 0
    for offsets, lengths in boxes.items():
        if any(o + n > whole for o, n, whole in zip(offsets, lengths, size, strict=True)):
            return f"a chunk of shape {lengths} at {offsets} lies beyond it"
        volume += math.prod(lengths)
    if volume != math.prod(size):
        return f"its chunks have {volume} of its {math.prod(size)} elements"
    if len(boxes) == 1 or volume == 0:
        return ""
    # As many as there are: so there is a hole if two overlap. Cuts are moved to random places: the
    # volumes of parts add up to that of the whole wherever cuts lie. Those of others do so by
    # chance, with a probability of ndim / 2**64 at most: the difference is a polynomial in the
    # places, which is not zero (Schwartz and Zippel).
    moved, moved_whole = [1] * len(boxes), 1
    for dim, whole in enumerate(size):
        spans = [(offsets[dim], lengths[dim]) for offsets, lengths in boxes.items()]
        if spans.count((0, whole)) < len(spans):
            place: defaultdict[int, int] = defaultdict(_random_place)
            moved_whole *= place[whole] - place[0]
            moved = [
                volume * (place[o + n] - place[o])
                for volume, (o, n) in zip(moved, spans, strict=True)
            ]
    return "" if sum(moved) == moved_whole else "its chunks overlap"


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (tuple, list))
        and len(path) <= _MAX_DEPTH
        and all(isinstance(key, (str, int)) for key in path)
    )


def _problem_stored(index: Any, where: Any) -> str:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(where, _STORAGE_INFO):
        return f"{shown(index)} is not stored in a file"
    file = where.relative_path
    # A name with a directory in it could point anywhere.
    if not is_plain_name(file):
        return f"{shown(index.fqn)} is stored in {shown(file)}, expected a file of this directory"
    if not _are_sizes((where.offset, where.length)):
        place = shown((where.offset, where.length))
        return f"{shown(index.fqn)} is stored at offset and length {place}"
    return ""


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, dcp.BytesStorageMetadata):
        return True
    return (
        isinstance(entry, dcp.TensorStorageMetadata)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and _are_sizes(entry.size)
        and type(entry.chunks) is list
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
    if not isinstance(values, tuple):
        return False
    for value in values:  # noqa: SIM110 - half the time of all()
        if not isinstance(value, int) or not 0 <= value < _LIMIT:
            return False
    return True
