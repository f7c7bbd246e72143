"""Turn failures of one rank into the same error on all ranks."""

from __future__ import annotations

import contextlib
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardkit._errors import CheckpointError
from shardkit._mesh import DeviceMesh
from shardkit._text import listed
from shardkit.backends.base import AxisComm, axes_of, first_of_all
from shardkit.backends.groups import exchange, group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint import api


T = TypeVar("T")


def rank_of(group: Any) -> int:
    """Return this process' rank in a process group (None: the default one), or raise."""
    rank = group_rank(group)
    if rank < 0:
        msg = "this rank is not in process_group. Call it on the ranks of the group only."
        raise CheckpointError(msg)
    return rank


def of_all(item: T, ranks: Any) -> list[T]:
    """Return the item of every rank of a process group or a mesh, in their order.

    Cost: an all-gather of the items; for a mesh, one over each of its axes.
    """
    if not isinstance(ranks, DeviceMesh):
        return exchange(item, ranks, "a checkpoint")
    found = [(ranks.ranks.index(ranks.rank), item)]
    for axis in axes_of(ranks):
        found = [one for some in axis.exchange(found) for one in some]
    return [item for _, item in sorted(found, key=itemgetter(0))]


_DIFFERENT = (
    "ranks mean different checkpoints. Have one rank choose, and send its path to the others by "
    "dist.broadcast_object_list"
)


def agreed(
    ranks: Any,
    what: str,
    act: Callable[[], T],
    identity: Callable[[T], object] | None = None,
    different: str = _DIFFERENT,
) -> T:
    """Run a function on all ranks of a group or mesh, and raise on all if it raised on any.

    `act` must not communicate. `identity` of its result must be the same on all ranks, else an
    error begins with `different`. Other errors begin with `what`, and give each rank's reason.
    Cost: as `of_all`.
    """
    error: Exception | None = None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others must hear of it
        error = caught
    mine = (
        None if error is None else _reason(error),
        what,
        identity(result) if identity is not None and error is None else None,
    )
    all_of_them = of_all(mine, ranks)
    raise_any(what, [reason for reason, *_ in all_of_them], error)
    if any(other[2] != mine[2] for other in all_of_them):
        meant = {rank: f"{name} ({which})" for rank, (_, name, which) in enumerate(all_of_them)}
        raise CheckpointError(_message(different, meant))
    return result


def raise_any(what: str, reasons: Sequence[str | None], cause: Exception | None = None) -> None:
    """Raise if any rank has a reason to; every rank must pass the same `reasons`, by rank."""
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if failed:
        raise CheckpointError(_message(what, failed)) from cause


class FirstRank:
    """Actions of the first of some ranks only (`is_this`), while the others wait for it."""

    def __init__(self, axes: Sequence[AxisComm], what: str) -> None:
        self.is_this = all(axis.rank == 0 for axis in axes)
        self.error: Exception | None = None
        self._axes = axes
        self._what = what

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Keep an error until `raise_error`, so that the other ranks need not wait."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.error = self.error or error

    def raise_error(self) -> None:
        """Raise the first rank's error on all ranks. Cost: an exchange per axis."""
        error, msg = self.error, None
        if error is not None:
            msg = f"rank {group_rank(None)} {self._what}: {_reason(error)}"
        msg = first_of_all(msg, self._axes)
        if msg is not None:
            raise CheckpointError(msg) from error


def error_of(what: str, exception: api.CheckpointException) -> BaseException:
    """Return what to raise for errors that DCP gathered; a KeyboardInterrupt stays one."""
    found = [error for error, _ in exception.failures.values()]
    for error in found:
        if not isinstance(error, Exception):
            return error
    failed = {rank: _reason(error) for rank, (error, _) in exception.failures.items()}
    result = CheckpointError(_message(what, failed))
    result.__cause__ = found[0]
    return result


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _message(what: str, failed: Mapping[int, str]) -> str:
    """List the reasons by rank; a reason that several ranks share is listed once."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in failed.items():
        ranks.setdefault(reason, []).append(rank)
    lines = [f"{_of_ranks(members)}{reason}" for reason, members in ranks.items()]
    return f"{what}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{what}:", *lines])


def _of_ranks(ranks: list[int]) -> str:
    if not dist.is_initialized():
        return ""
    return f"[rank{'s' if len(ranks) > 1 else ''} {listed(ranks, str)}] "


def quote(path: Path) -> str:
    """Return how messages name a checkpoint."""
    return f"checkpoint {str(path)!r}"
