"""Deep copies and pickles of groups."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

from shardkit._params.make import rebuild, restore
from shardkit._params.sites import ParamEntry

if TYPE_CHECKING:
    from torch import nn

    from shardkit._mesh import DeviceMesh
    from shardkit._params.bucket import Bucket
    from shardkit._policy import MixedPrecisionPolicy
    from shardkit._settings import GroupSettings

_REMADE = (
    "mesh",
    "shard_axis",
    "replicate_axis",
    "kept_axis",
    "gradients",
    "grad_buckets",
    "grad_hooks",
)
"""Attributes of a group that are not pickled."""


class CopiedGroup:
    """What a group is copied as and pickled as: the part that makes others of it."""

    modules: list[nn.Module]
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    settings: GroupSettings
    buckets: list[Bucket]

    def _reset_place(self) -> None:
        """Belong to no root, with no step under way."""
        raise NotImplementedError

    def _find_axes(self) -> None:
        """Take the axes from the mesh."""
        raise NotImplementedError

    def _make_gradients(self) -> None:
        """Make what belongs to the buckets."""
        raise NotImplementedError

    def set_reshard_after_forward(self, value: bool | int | None) -> None:  # noqa: FBT001
        """Choose what happens to the memory after forward."""
        raise NotImplementedError

    def copy_for(self, memo: dict[int, Any]) -> Self:
        """Return a group for deep copies of the modules and parameters, found in `memo`."""
        result = copy.copy(self)
        result._reset_place()  # noqa: SLF001 - own class
        result.modules = [memo[id(module)] for module in self.modules]
        result.settings = self.settings.copy()
        result.buckets = [
            rebuild(
                bucket,
                [
                    ParamEntry(
                        entry.name,
                        memo[id(entry.param)],
                        [(memo[id(module)], attribute) for module, attribute in entry.sites],
                    )
                    for entry in bucket.entries
                ],
            )
            for bucket in self.buckets
        ]
        result._make_gradients()  # noqa: SLF001
        return result

    def __copy__(self) -> Self:
        """Return a group with the same attributes; `copy_for` makes it independent."""
        result = type(self).__new__(type(self))
        result.__dict__.update(self.__dict__)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return what is written of the group: settings, modules, parameters and their layouts."""
        transient = type(self).__new__(type(self))
        transient._reset_place()  # noqa: SLF001 - own class
        left_out = {*_REMADE, *transient.__dict__}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["settings"] = self.settings.copy()
        state["buckets"] = [
            (bucket.entries, bucket.layout, bucket.offload) for bucket in self.buckets
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was written; modules of the group may have been unpickled before or not."""
        self.__dict__.update(state)
        self._restore_if_complete()

    def note_restored(self) -> None:
        """Another of its modules has been unpickled."""
        self.__dict__["num_restored"] = self.__dict__.get("num_restored", 0) + 1
        self._restore_if_complete()

    def _restore_if_complete(self) -> None:
        modules = self.__dict__.get("modules")
        if modules is not None and self.__dict__.get("num_restored") == len(modules):
            del self.__dict__["num_restored"]
            self._restore()

    def _restore(self) -> None:
        """Make anew what is not pickled, when modules and parameters have been unpickled.

        On the mesh that the parameters were bound to. With a number as `reshard_after_forward`
        this makes a process group, so all ranks must load.
        """
        self._reset_place()
        written: Any = self.buckets
        self.mesh = written[0][0][0].param.spec.mesh
        self.buckets = [
            restore(entries, mesh=self.mesh, policy=self.policy, layout=layout, offload=offload)
            for entries, layout, offload in written
        ]
        self._find_axes()
        self._make_gradients()
        self.set_reshard_after_forward(self.settings.reshard_after_forward)
