"""Private names of FSDP2: what it says of parameters, and what torch's pipelines ask of it.

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

from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class MeshInfo(NamedTuple):
    """What FSDP2's ``ShardPlacementResult`` says of a parameter.

    Attributes:
        placement: The ``Shard(dim)``; None: any dim.
        mesh: Mesh of torch or of shardkit.
        shard_dim: Axis of the mesh that it is sharded over; None: it is not.
        replicate_dim: Axis that it is replicated over; None: it is not.
        spmd_mesh: Mesh of the DTensor that it is, of which `mesh` is a part; None: no part of it.
        dims: Names of the axes of `spmd_mesh` that make up `mesh`: a ``DataParallelMeshDims``.
    """

    placement: Any
    mesh: Any
    shard_dim: int | None
    replicate_dim: int | None
    spmd_mesh: Any = None
    dims: Any = None


def mesh_info_of(answer: Any) -> MeshInfo | None:
    """Read a ``ShardPlacementResult``; None of what is another thing.

    The class, and those of the mesh infos in it, are in a private module of torch 2.13 only:
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
    """Return FSDP2's classes of collectives out of symmetric memory: all-gather, reduce-scatter.

    From torch 2.12 on; none at all for other devices than CUDA's.
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
    """FSDP2's collective of one kind, over whichever group it is called with. Not tried on a card.

    FSDP2 makes it for one group, whose communicator a barrier makes ready. Here that is done for
    `group` at once, and for others (neighbours, separate reductions) with their first call.
    """

    def __init__(self, kind: Any, group: Any, backend: str) -> None:
        self._over = functools.cache(lambda group: kind(group, backend))
        self.allocate = self._over(group).allocate

    def __call__(self, *, group: Any, **options: Any) -> Any:
        """Start it."""
        return self._over(group)(group=group, **options)


def _contract() -> Any:
    # From the list of modules: the package has a function of this module's name as well.
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
    """Have torch's composable functions, `replicate` for one, leave modules of a class alone."""
    key: str = _contract().REGISTRY_KEY

    def noted(module: Any) -> dict[str, Any]:
        return {**module.__dict__.get(key, {}), "fully_shard": None}

    setattr(cls, key, property(noted))


class StageState:
    """Stands for FSDP2's state of a module, which torch's `PipelineStage` asks for one thing.

    At the end of a step it has each group of the state reduce, and then the state end a backward.
    Here the end does all of it.
    """

    def __init__(self, finish_step: Callable[[], None]) -> None:
        self.__self__ = finish_step.__self__  # type: ignore[attr-defined]
        self._state_ctx = types.SimpleNamespace(all_states=())
        self._root_post_backward_final_callback = finish_step


_FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard"
"""Not the package, whose names `install` replaces."""


def _fsdp2() -> Any:
    return importlib.import_module(_FSDP2)


@functools.cache
def stage_class() -> type:
    """Return a class whose modules torch's pipelines unshard, reshard and reduce as FSDP2's.

    The import costs nothing where there is an optimizer: torch makes it with the first one.
    """
    fsdp2_class: Any = _fsdp2().FSDPModule

    class Stage(fsdp2_class):  # type: ignore[misc]
        """What torch's pipelines and other packages take for FSDP2's; the methods are shardkit's.

        It is the last base of a sharded module's class.
        """

        def _get_fsdp_state(self) -> Any:
            msg = (
                f"a method of torch's FSDPModule was called on {type(self).__name__} that "
                f"shardkit has not. shardkit.FSDPModule lists those it has."
            )
            raise StateError(msg)

    return Stage


def note_stage(module: torch.nn.Module, finish_step: Callable[[], None]) -> None:
    """Have torch's pipelines call a bound method at the end of a step of a sharded stage."""
    contract = _contract()
    states = module.__dict__.setdefault(contract.STATE_KEY, {})
    states[_fsdp2().fully_shard.__wrapped__] = StageState(finish_step)


def goes_to_inputs_of_stage(frame: types.FrameType | None) -> bool:
    """Whether torch's pipelines run the engine for a stage's inputs, and for its weights later.

    Args:
        frame: Frame of what `wrap_engine` calls.
    """
    for _ in range(4):  # The wrapper, `autograd.grad` and, in newer torch, one more lie between.
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "stage_backward_input":
            return True
    return False


def is_called_by_pipeline(frame: types.FrameType | None) -> bool:
    """Whether a method's `frame` was entered by a schedule of torch's pipelines."""
    caller = frame.f_back if frame is not None else None
    schedules = "torch.distributed.pipelining.schedules"
    return caller is not None and caller.f_globals.get("__name__") == schedules
