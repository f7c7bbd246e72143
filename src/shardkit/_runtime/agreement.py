"""Do the ranks agree? The model at the first forward, the collectives of every backward.

Collectives of ranks that do different things pair up wrongly without an error, so what was issued
is noted, and one small all-reduce per synced backward compares a digest of it. The same all-reduce
tells which parameters any rank used.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import warnings
import weakref
from array import array
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.base import AxisComm, CheckHandle, CommStreams

GATHER, REDUCE = 0, 1
_MAX_LOG = 1 << 16
_VERBS = ("all-gathers", "reduce-scatters")


def _digest(content: bytes) -> int:
    """Return 62 bits: the value and its negative both fit an int64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 2


def check_same_model(groups: Sequence[ParamGroup], axes: Sequence[AxisComm]) -> None:
    """Compare groups, names, shapes, dtypes and trainability over every axis in use.

    Raises:
        RankMismatchError: On every rank of an axis whose ranks differ, naming the first difference.

    Cost: one all-reduce of 16 bytes per axis; details travel only on a mismatch.
    """
    description = [(group.name, *group.describe()) for group in groups]
    digest = _digest(repr(description).encode())
    backend = groups[0].mesh.backend
    # What is read here and now is no part of a graph.
    device = torch.device("cpu") if backend.is_traced else backend.device
    for axis in axes:
        if axis.size == 1:
            continue
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
        axis.all_reduce(extremes, "max")
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise RankMismatchError(_first_model_difference(axis.exchange(description)))


def _first_model_difference(descriptions: Sequence[Sequence[Any]]) -> str:
    mine = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other == mine:
            continue
        hint = "Build the same model and call fully_shard in the same way on every rank."
        if len(other) != len(mine):
            return (
                f"ranks have different models: position 0 of the process group has {len(mine)} "
                f"groups, position {rank} has {len(other)}. {hint}"
            )
        for group_a, group_b in zip(mine, other, strict=True):
            if group_a == group_b:
                continue
            if len(group_a) != len(group_b) or group_a[0] != group_b[0]:
                return (
                    f"ranks have different models: group {group_a[0]!r} has {len(group_a) - 1} "
                    f"parameters on position 0 of the process group; on position {rank} there is "
                    f"{group_b[0]!r} with {len(group_b) - 1}. {hint}"
                )
            for param_a, param_b in zip(group_a[1:], group_b[1:], strict=True):
                if param_a != param_b:
                    return (
                        f"ranks have different models: parameter {param_a[0]!r} is "
                        f"{_show_param(param_a)} on position 0 of the process group, but "
                        f"{param_b[0]!r} is {_show_param(param_b)} on position {rank}. {hint}"
                    )
    return "ranks have different models, but no difference could be found in their descriptions."


def _show_param(param: Sequence[Any]) -> str:
    _, shape, orig_dtype, param_dtype, reduce_dtype, trainable, device_type = param
    return (
        f"{shape} {orig_dtype} on {device_type} (computed in {param_dtype}, "
        f"reduced in {reduce_dtype}, {'trainable' if trainable else 'frozen'})"
    )


class StepCheck:
    """Notes the collectives of a step and compares them once per synced backward.

    Args:
        groups: All groups of the root.
        axes: Every mesh axis in use.
    """

    def __init__(self, groups: Sequence[ParamGroup], axes: Sequence[AxisComm]) -> None:
        self._groups = groups
        self._axes = [axis for axis in axes if axis.size > 1]
        self._logs = _new_logs()
        self._sent_logs = self._logs
        self._folded = 0
        self._handle: CheckHandle | None = None
        self._vector = torch.empty(0, dtype=torch.int64)
        _at_exit.add(self)

    def note(self, kind: int, group_index: int) -> None:
        """Note a collective that is being issued."""
        log = self._logs[kind]
        log.append(group_index)
        if len(log) >= _MAX_LOG:  # E.g. evaluation for ever: nothing is compared there.
            self._folded = _digest(self._folded.to_bytes(8, "big") + log.tobytes())
            del log[:]

    def start(self, streams: CommStreams) -> None:
        """Send the digest and which parameters fired here.

        Cost: one all-reduce of 16 bytes and 8 per parameter, on every axis.
        """
        if not self._axes:
            return
        self.finish()  # The last comparison: another backward may have come right after it.
        # Apart: where a rank does not use a module, its reductions may come later between gathers.
        content = [self._folded.to_bytes(8, "big"), *(log.tobytes() for log in self._logs)]
        digest = _digest(b"|".join(content))
        fired = [int(f) for g in self._groups for each in g.gradients.buckets for f in each.fired]
        self._vector = torch.tensor([digest, -digest, *fired], dtype=torch.int64)
        self._handle = streams.start_all_reduce_max(self._vector, self._axes)
        self._sent_logs, self._logs, self._folded = self._logs, _new_logs(), 0

    def used_anywhere(self) -> list[list[list[int]]]:
        """Wait; return per group and bucket which parameters fired on any rank."""
        self.finish()
        if not self._axes:
            return [
                [list(gradients.fired) for gradients in group.gradients.buckets]
                for group in self._groups
            ]
        flags = self._vector[2:].tolist()
        result, position = [], 0
        for group in self._groups:
            buckets = []
            for gradients in group.gradients.buckets:
                num_params = len(gradients.fired)
                buckets.append(flags[position : position + num_params])
                position += num_params
            result.append(buckets)
        return result

    def finish_on_host(self) -> None:
        """Wait for the comparison, if no device needs to be waited for.

        Raises:
            RankMismatchError: See `finish`.
        """
        if self._handle is not None and self._handle.is_of_host:
            self.finish()

    def finish(self) -> None:
        """Wait for the comparison, if one is under way.

        Raises:
            RankMismatchError: On every rank, if ranks issued different collectives.
        """
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        if self._found_difference():
            logs: list[Any] = [[list(log) for log in self._sent_logs]]
            for axis in self._axes:
                logs = [entry for part in axis.exchange(logs) for entry in part]
            raise RankMismatchError(
                self.difference(logs) or "ranks issued different collectives in this step."
            )

    def _found_difference(self) -> bool:
        highest, lowest = self._vector[:2].tolist()
        return bool(highest != -lowest)

    def warn_of_last(self) -> None:
        """Say at the end of the process what the last comparison found, if it is there by now."""
        handle, self._handle = self._handle, None
        if handle is None or not handle.is_done():
            return
        handle.wait()
        if self._found_difference():
            msg = (
                "ranks issued different collectives in the last backward of this process, so data "
                "of different groups was mixed up: do not use what came of it. Run the same "
                "modules in the same order on all ranks."
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=1)

    def reset(self) -> None:
        """Forget the step, after an exception."""
        self._handle = None
        self._logs = _new_logs()
        self._folded = 0

    # --- for who looks into a hang ---

    def snapshot(self) -> list[list[int]]:
        """Return what was issued since the ranks last compared."""
        logs = self._logs if self._handle is None else self._sent_logs
        return [list(log) for log in logs]

    def contradicts(self, snapshots: Sequence[list[list[int]]]) -> bool:
        """Return whether snapshots differ even where they overlap, whoever is ahead."""
        return any(
            mine[: len(other)] != other[: len(mine)]
            for snapshot in snapshots
            for mine, other in zip(snapshots[0], snapshot, strict=True)
        )

    def difference(self, snapshots: Sequence[list[list[int]]]) -> str | None:
        """Return the first difference between ranks' collectives as an error message, or None."""
        for kind, verb in enumerate(_VERBS):
            of_kind = [snapshot[kind] for snapshot in snapshots]
            for step in range(max(map(len, of_kind))):
                entries = [log[step] if step < len(log) else None for log in of_kind]
                if len(set(entries)) == 1:
                    continue
                rank = next(i for i, entry in enumerate(entries) if entry != entries[0])
                return (
                    f"ranks entered different groups: after {step} {verb} of this step, rank 0 of "
                    f"the mesh {self._show(of_kind[0], step, verb)}, rank {rank} "
                    f"{self._show(of_kind[rank], step, verb)}. Data of different groups was mixed "
                    f"up, so do not use this step's gradients. Run the same modules in the same "
                    f"order on all ranks, or put modules that ranks choose among (experts) in one "
                    f"group."
                )
        return None

    def _show(self, log: Sequence[int], step: int, verb: str) -> str:
        if step < len(log):
            return f"{verb} {self._groups[log[step]].name!r}"
        if not log:
            return "has none"
        return f"has no more, {self._groups[log[-1]].name!r} was its last"


_at_exit: weakref.WeakSet[StepCheck] = weakref.WeakSet()


@atexit.register
def _warn_of_last_checks() -> None:
    """Say what nobody came to read: no step followed."""
    for check in list(_at_exit):
        with contextlib.suppress(RuntimeError):  # The device, or its library, has ended before.
            check.warn_of_last()


def _new_logs() -> tuple[array[int], array[int]]:
    """Return one empty log per kind of collective."""
    return array("q"), array("q")
