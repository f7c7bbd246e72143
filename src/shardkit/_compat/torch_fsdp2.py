"""Private names of FSDP2: its data about parameters, and the hooks that torch's pipelines use.

| branch | until which torch |
| --- | --- |
| ``symmetric_kinds``: there are none | 2.11 |
| ``mesh_info_of``: there are no answers of this kind | 2.12 |
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist  # noqa: TID251 - for the ranks of a pipeline

from shardkit._compat.once import once
from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class MeshInfo(NamedTuple):
    """The content of FSDP2's ``ShardPlacementResult`` for a parameter."""

    placement: Any  # The ``Shard(dim)``; None: any dim.
    mesh: Any  # Mesh of torch or of shardkit.
    shard_dim: int | None  # Axis of the mesh over which it is sharded; None: it is not.
    replicate_dim: int | None  # Axis over which it is replicated; None: it is not.
    # Mesh of the DTensor, if the parameter is one, of which `mesh` is a part; or None.
    spmd_mesh: Any = None
    # Names of the axes of `spmd_mesh` that form `mesh`: a ``DataParallelMeshDims``.
    dims: Any = None


def mesh_info_of(answer: Any) -> MeshInfo | None:
    """Read a ``ShardPlacementResult``; return None for anything else.

    The class, and the classes of its mesh infos, exist only in torch 2.13, in a private module:
    ``torch.distributed.fsdp._fully_shard._fsdp_common``.
    """
    info = getattr(answer, "mesh_info", None)
    if info is None:
        return None
    return MeshInfo(
        getattr(answer, "placement", None),
        info.mesh,
        getattr(info, "shard_mesh_dim", None),
        getattr(info, "replicate_mesh_dim", None),
        getattr(info, "spmd_mesh", None),
        getattr(info, "dp_mesh_dims", None),
    )


def symmetric_kinds(device_type: str) -> list[Any]:
    """Return FSDP2's classes of collectives on symmetric memory: all-gather, reduce-scatter.

    They exist from torch 2.12 on; devices other than CUDA's have none.
    """
    if device_type != "cuda":
        return []
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: TID251
    except ImportError:
        return []
    names = ("SymmMemAllGather", "SymmMemReduceScatter")
    return [getattr(_fsdp_collectives, n) for n in names if hasattr(_fsdp_collectives, n)]


class SymmetricComm:
    """FSDP2's collective of one kind, over the group of each call. Not tested on a card.

    FSDP2 makes it for one group, and a barrier sets up its communicator. Here this is done for
    `group` at once, and for other groups (adjacent ranks, separate reductions) in their first call.
    """

    def __init__(self, kind: Any, group: Any, backend: str) -> None:
        self._over = functools.cache(lambda group: kind(group, backend))
        self.allocate = self._over(group).allocate

    def __call__(self, *, group: Any, **options: Any) -> Any:
        """Start the collective."""
        return self._over(group)(group=group, **options)


def _contract() -> Any:
    # From sys.modules, since the package also has a function with this module's name.
    importlib.import_module("torch.distributed._composable.contract")
    return sys.modules["torch.distributed._composable.contract"]


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` was called on a module."""
    return "replicate" in getattr(module, _contract().REGISTRY_KEY, ())


def is_sharded_by_torch(module: torch.nn.Module) -> bool:
    """Whether torch's own `fully_shard` was called on a module."""
    fsdp2: Any = sys.modules.get(_FSDP2)
    return (
        fsdp2 is not None
        and isinstance(module, fsdp2.FSDPModule)
        and not isinstance(module, stage_class())
        and not is_replicated(module)
    )


def note_fully_sharded(cls: type) -> None:
    """Make torch's composable functions, such as `replicate`, ignore modules of a class."""
    key: str = _contract().REGISTRY_KEY

    def noted(module: Any) -> dict[str, Any]:
        return {**module.__dict__.get(key, {}), "fully_shard": None}

    setattr(cls, key, property(noted))


class _ReadOnly:
    """Base of what replaces FSDP2's internal objects: a few names, which nobody may set."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_INTERNAL.format(name, "read"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(_INTERNAL.format(name, "set"))


_INTERNAL = (
    "{!r} of the state of a sharded module cannot be {}: it is internal to FSDP2. Use the methods "
    "of shardkit.FSDPModule."
)


class StageGroup(_ReadOnly):
    """Replaces FSDP2's group of parameters: packages read the choices of users there."""

    def __init__(self, group: Any) -> None:
        vars(self)["_group"] = group

    @property
    def mp_policy(self) -> Any:
        """Dtypes."""
        return self._group.policy

    @property
    def reshard_after_backward(self) -> bool:
        """The choice of `set_reshard_after_backward`."""
        is_freed: bool = self._group.settings.reshard_after_backward
        return is_freed


class StageState(_ReadOnly):
    """Replaces FSDP2's state of a module, of which packages read the choices of users.

    Up to torch 2.14 `PipelineStage` ends a step by it: it has each group of the state reduce, and
    then has the state end a backward. Here that last call does all of it. From torch 2.15 on
    schedules ask whether stages have one ``_comm_ctx``, which FSDP2's stages may not share.
    """

    def __init__(self, finish_step: Callable[[], None]) -> None:
        vars(self).update(
            __self__=finish_step.__self__,  # type: ignore[attr-defined]
            _comm_ctx=finish_step.__self__,  # type: ignore[attr-defined]
            _state_ctx=types.SimpleNamespace(all_states=()),
            _root_post_backward_final_callback=finish_step,
        )

    @property
    def _mp_policy(self) -> Any:
        """Dtypes."""
        return self.__self__.policy

    @property
    def _fsdp_param_group(self) -> StageGroup | None:
        """The group; None: the module has none of its own."""
        group = self.__self__.group
        return None if group is None else StageGroup(group)


_FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module itself, since `install` replaces names of the package."""


def _fsdp2() -> Any:
    return importlib.import_module(_FSDP2)


@once
def stage_class() -> type:
    """Return a class whose modules torch's pipelines unshard, reshard and reduce like FSDP2's.

    The import costs nothing if there is an optimizer: torch imports it with the first one.
    """
    fsdp2_class: Any = _fsdp2().FSDPModule

    class Stage(fsdp2_class):  # type: ignore[misc]
        """A base by which torch's pipelines and other packages recognize FSDP2's modules.

        The methods are shardkit's: this is the last base of a sharded module's class.
        """

        def _get_fsdp_state(self) -> Any:
            caller: Any = sys._getframe(1)
            if caller.f_globals.get("__name__") != _FSDP2:
                return state_of_stage(self)
            msg = (
                f"a method of torch's FSDPModule was called on {type(self).__name__} that "
                f"shardkit has not. shardkit.FSDPModule lists those it has."
            )
            raise StateError(msg)

    return Stage


def note_stage(module: torch.nn.Module, finish_step: Callable[[], None]) -> None:
    """Make torch's pipelines call a bound method at the end of a step of a sharded stage."""
    contract = _contract()
    states = module.__dict__.setdefault(contract.STATE_KEY, {})
    states[_fsdp2().fully_shard.__wrapped__] = StageState(finish_step)


def state_of_stage(module: Any) -> Any:
    """Return what replaces FSDP2's state of a module; None: the module is not sharded."""
    return _fsdp2().fully_shard.state(module)


def goes_to_inputs_of_stage(frame: types.FrameType | None) -> bool:
    """Whether torch's pipelines run the engine for a stage's inputs, and later for its weights.

    Args:
        frame: Frame of the function that `wrap_engine` calls.
    """
    for _ in range(4):  # With the wrapper, `autograd.grad`, and in newer torch one more.
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "stage_backward_input":
            return True
    return False


def is_called_by_pipeline(frame: types.FrameType | None) -> bool:
    """Whether a method's `frame` was entered by a schedule of torch's pipelines."""
    caller = frame.f_back if frame is not None else None
    schedules = "torch.distributed.pipelining.schedules"
    return caller is not None and caller.f_globals.get("__name__") == schedules


def ranks_of_pipeline(frame: types.FrameType | None) -> list[int]:
    """Return the ranks of the pipeline of torch that runs a stage above `frame`, if one does."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage":
            stage = frame.f_locals.get("self")
            return dist.get_process_group_ranks(getattr(stage, "group", None))
        frame = frame.f_back
    return []
