"""`record` writes the events in the steps of each rank into a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import socket
import time
import uuid
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist  # noqa: TID251 - clocks are compared through its store
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardkit import _events
from shardkit._compat import torch_groups
from shardkit._errors import StateError
from shardkit._events import StepLog
from shardkit._module.hooks import groups_in
from shardkit._module.optimizers import known_groups
from shardkit.tracing.clocks import Clock, read_clock
from shardkit.tracing.records import RankHeader, RecordFile, remove_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from shardkit._runtime.group import ParamGroup

_logger = logging.getLogger("shardkit")
_BEGIN_LIMIT_S, _END_LIMIT_S = 300.0, 60.0
_MAX_CALLS = 100_000  # Starts and ends; about 15 MB.
_now = time.perf_counter
_numbers = itertools.count()
_FAILED = "!"  # In the place of a name: what follows is the error of rank 0.


class Recording:
    """A record that is being made.

    Attributes:
        folder: Folder of the files, one for each rank.
        num_events: Number of events written so far.
    """

    def __init__(self, folder: Path, header: RankHeader) -> None:
        self.folder = folder
        self.num_events = 0
        self._file = RecordFile(folder, header)
        self._log = StepLog(_now, _MAX_CALLS, self._write)
        self._is_broken = False

    def begin(self) -> AbstractContextManager[StepLog]:
        """Return a context in which events are collected."""
        return _events.observed_by(self._log)

    def close(self, header: RankHeader) -> None:
        """Write the remaining events."""
        self._write(header)

    def _write(self, header: RankHeader | None = None) -> None:
        """Write events, and the last header. On a full disk, training continues without them."""
        events = self._log.take()
        self.num_events += len(events)
        if self._is_broken:
            return
        try:
            if events:
                self._file.write(events)
            if header is not None:
                self._file.close(header)
        except OSError as error:
            self._is_broken = True
            _logger.warning("the record of this rank ends here, training goes on: %s", error)


@contextlib.contextmanager
def record(
    model: nn.Module | None = None, folder: str | Path = "shardkit-trace"
) -> Iterator[Recording]:
    """Record the events of each step, on every rank, for ``python -m shardkit trace``.

    Call it on all ranks, at the same point of the script, around some steps: ten steps show as much
    as a thousand. Each rank writes ``folder/rank-N.jsonl.gz`` when the context ends, and also when
    a forward or backward begins after 50,000 events. Ranks on several hosts need a shared folder;
    otherwise copy their files into one folder afterwards.

    The record has gathers and reductions, the waits for them, the forwards and backwards of groups
    and roots, the memory of shardkit's buffers, and the steps of torch's optimizers. Times are the
    host's times. On an accelerator they show when work was issued, not when the device did it; on
    XLA, when it was traced.

    Args:
        model: Model whose groups are recorded; None: all of this process. Only the ranks of its
            meshes are taken from it.
        folder: Folder to write to, which is made if needed. Files of an earlier record are
            replaced.

    Yields:
        The record.

    Raises:
        StateError: A record is being made already, the folder is a file or in the place of the
            model, ranks are threads of one process or have no process group yet, or a rank did not
            call it within 300 seconds.

    Cost: about 2 us for each event, of which a group has about 20 in a step, and 5 us and 10 bytes
        more when it is written; nothing after the context has ended. At the start and the end of
        the context, ranks compare their clocks: each rank makes twelve round trips through the
        store, one rank after another.
    """
    rank, world_size = _place()
    if isinstance(model, (str, Path)):
        msg = f"shardkit.record takes a model first. Write record(folder={str(model)!r})."
        raise StateError(msg)
    if model is not None and not isinstance(model, nn.Module):
        msg = f"shardkit.record: model must be a module, got {model!r}. Leave it out for all."
        raise StateError(msg)
    if not isinstance(folder, (str, os.PathLike)):
        msg = f"shardkit.record: folder must be a path, got {folder!r}. Leave it out for a default."
        raise StateError(msg)
    if _events.observer is not None:
        msg = "shardkit.record: the steps of this process are observed already. End that first."
        raise StateError(msg)
    key = f"shardkit/record/{next(_numbers)}"
    store = torch_groups.default_store() if world_size > 1 else None
    compare = functools.partial(read_clock, store, rank=rank, world_size=world_size, now=_now)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        msg = f"shardkit.record: folder must be a directory, or not exist yet; {target} is a file."
        raise StateError(msg)
    failure = remove_records(target) if rank == 0 else ""  # Before ranks meet and begin to write.
    first = compare(f"{key}/begin", limit_s=_BEGIN_LIMIT_S)
    run = _name_of_run(store, f"{key}/name", rank, failure)
    groups = _groups_of(model)
    header = RankHeader(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        device=groups[0].mesh.device_type if groups else "cpu",
        run=run,
        axes=axes_of(groups),
        clock=first,
    )
    recording = Recording(target, header)
    with contextlib.ExitStack() as stack:
        observer = stack.enter_context(recording.begin())

        def begin_step(*_: object) -> None:
            observer.begin("compute", "optimizer", phase="optimizer")

        stack.enter_context(register_optimizer_step_pre_hook(begin_step))
        stack.enter_context(register_optimizer_step_post_hook(lambda *_: observer.end("compute")))
        try:
            yield recording
        except BaseException:
            recording.close(_with_axes(header, model))  # Other ranks may go on: no rank waits.
            raise
    header = _with_axes(header, model)
    try:
        header.clock = Clock.through(first, compare(f"{key}/end", limit_s=_END_LIMIT_S))
    except StateError as error:
        _logger.warning("the clocks of ranks were compared once, not twice: %s", error)
    recording.close(header)


def _place() -> tuple[int, int]:
    """Return the number of this rank, and the number of ranks."""
    if torch_groups.ranks_are_threads():
        msg = (
            "shardkit.record needs a process for each rank, and ranks are threads of this one. "
            "Start them by torchrun, or by `python -m shardkit launch`."
        )
        raise StateError(msg)
    if not dist.is_available() or not dist.is_initialized():
        if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
            msg = (
                f"shardkit.record: this process is one of {size} ranks, and has no process group "
                f"yet. Call init_device_mesh (or init_process_group) first."
            )
            raise StateError(msg)
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _with_axes(header: RankHeader, model: nn.Module | None) -> RankHeader:
    """Return the header with the axes of all present groups, too."""
    return dataclasses.replace(header, axes=axes_of(_groups_of(model), header.axes))


def _groups_of(model: nn.Module | None) -> list[ParamGroup]:
    """Return the groups of a model, or of this process; groups of plans do not count."""
    groups = known_groups() if model is None else groups_in(model, recurse=True)
    return [group for group in groups if not group.mesh.backend.is_dry]


def _name_of_run(store: Any, key: str, rank: int, failure: str) -> str:
    """Return on all ranks a name that rank 0 has made; raise on all of them if rank 0 failed."""
    if rank == 0:
        name = f"{_FAILED}{failure}" if failure else uuid.uuid4().hex
        if store is not None:
            store.set(key, name)
    else:
        name = str(store.get(key).decode())
    if name.startswith(_FAILED):
        msg = (
            f"shardkit.record: {name.removeprefix(_FAILED)}. It is of an earlier record. Name "
            f"another folder, or remove it."
        )
        raise StateError(msg)
    return name


def axes_of(
    groups: Iterable[ParamGroup], known: Mapping[str, list[int]] = MappingProxyType({})
) -> dict[str, list[int]]:
    """Return the ranks of axes by their names in events; axes with the same name are left out."""
    found = {name: {tuple(ranks)} for name, ranks in known.items()}

    def add(name: str, ranks: Iterable[int]) -> None:
        members = tuple(ranks)
        found.setdefault(f"{name} {len(members)}", set()).add(members)

    for group in groups:
        for axis in group.kept_axes.values():
            add("shard", getattr(axis, "members", ()))
        for bucket in group.buckets:
            plan = bucket.plan
            add("shard", getattr(plan.axis, "members", ()))
            add("replicate", getattr(plan.replicate_axis, "members", ()))
            add("", sorted(group.mesh.ranks))
    return {name: list(next(iter(members))) for name, members in found.items() if len(members) == 1}
