"""Writing a checkpoint: what of a training run goes into one, and the call of DCP."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardkit._errors import CheckpointError
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.watch.channel import channel_of
from shardkit.checkpoint._agreement import error_of, quote, rank_of
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.planners import SavePlanner, Whole
from shardkit.checkpoint._dcp.writer import CheckpointWriter
from shardkit.checkpoint._state.model_and_optimizer import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import torch

    from shardkit._progress import Meter, Progress


@dataclass(frozen=True)
class Job:
    """What is to be saved, and how.

    Attributes:
        path: Directory of the checkpoint.
        model: Module, or None.
        optimizers: One optimizer, several, or None.
        extra: Values, or objects with ``state_dict``.
        keep_last: Number of checkpoints that stay beside each other; None: all.
        overwrite: Permission to replace a checkpoint of this name.
        progress: Same as for `save`.
    """

    path: Path
    model: nn.Module | None
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
    extra: Mapping[str, Any]
    keep_last: int | None
    overwrite: bool
    progress: Progress

    def check(self) -> None:
        """Refuse what cannot be meant, before anything has been done.

        Raises:
            CheckpointError: On every rank alike.
        """
        check_arguments(self.model, self.optimizers)
        if self.model is None and not self.extra:
            msg = f"{quote(self.path)}: there is nothing to save. Pass a model or extras."
            raise CheckpointError(msg)
        keep_last: object = self.keep_last
        is_count = isinstance(keep_last, numbers.Integral) and not isinstance(keep_last, bool)
        if keep_last is not None and not (is_count and int(keep_last) >= 1):  # type: ignore[call-overload]
            msg = f"keep_last must be at least 1, the new checkpoint, not {keep_last!r}."
            raise CheckpointError(msg)

    def collect(self) -> dict[str, Any]:
        """Return the state as DCP takes it: sharded tensors are not copied."""
        state: dict[str, Any] = {}
        if self.model is not None:
            state["model"] = {
                name: value if _is_kept(value) else Whole(name, value)
                for name, value in get_model_state_dict(self.model).items()
            }
            if self.optimizers is not None:
                state["optim"] = get_optimizer_state_dict(self.model, self.optimizers)
        if self.extra:
            state["extra"] = {name: _extra(name, value) for name, value in self.extra.items()}
        return state

    @property
    def step(self) -> int | None:
        """The `step` among the extras, for the manifest."""
        step = self.extra.get("step")
        return int(step) if isinstance(step, numbers.Integral) else None


def check_arguments(model: Any, optimizers: Any) -> None:
    """Refuse what is no model or no optimizer.

    Raises:
        CheckpointError: On every rank alike.
    """
    if model is not None and not isinstance(model, nn.Module):
        msg = (
            f"model: expected a module, not {type(model).__name__}. Pass the model itself, not its "
            f"state dict; other state is passed by a name of its own."
        )
        raise CheckpointError(msg)
    if optimizers is None:
        return
    several = () if hasattr(optimizers, "param_groups") else optimizers
    # A list is asked for several times, which a generator does not bear.
    if not isinstance(several, Collection) or not all(hasattr(o, "param_groups") for o in several):
        msg = (
            f"optimizer: expected an optimizer or a list of them, not {type(optimizers).__name__}. "
            f"Pass it itself, not its state dict; schedulers and others by names of their own."
        )
        raise CheckpointError(msg)
    if model is None:
        msg = "optimizer: its state goes by parameter names, so pass the model as well."
        raise CheckpointError(msg)


def write(job: Job, collect: Callable[[], dict[str, Any]], group: Any, meter: Meter) -> Path:
    """Write a checkpoint; see `save`.

    Args:
        job: Things to save.
        collect: Function that makes the state; its errors are raised on all ranks.
        group: Process group that this thread alone uses now.
        meter: Counts.
    """
    writer = CheckpointWriter(
        job.path,
        overwrite=job.overwrite,
        step=job.step,
        report=meter.add,
    )

    def make_state() -> dict[str, Any]:
        state = collect()
        writer.layout = layout_of(state.get("model", {}))
        return state

    planner = SavePlanner(make_state, meter.expect)
    writer.stages = planner.stages  # Known when all ranks have planned.
    try:
        if dist.is_initialized():
            with channel_of(group).section("saving", "a checkpoint"):
                dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
        else:
            _write_alone(writer, planner)
    except BaseException as error:
        if rank_of(group) == 0:
            with contextlib.suppress(OSError):
                writer.discard()
        if isinstance(error, CheckpointException):
            what = f"{quote(job.path)} was not saved"
            raise error_of(what, error) from error
        raise
    if job.keep_last is not None and rank_of(group) == 0:
        directory.prune(job.path, job.keep_last)
    return job.path


def _write_alone(writer: CheckpointWriter, planner: SavePlanner) -> None:
    """Do what ``dcp.save`` does in one process, without its warning that there is but one."""
    try:
        planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True, rank=0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        writer.finish(metadata, [results])
    except Exception as error:
        failures: Any = {0: (error, None)}
        raise CheckpointException("save", failures) from error  # noqa: EM101


def _extra(name: str, value: Any) -> Any:
    """Return an extra as DCP takes it: in one entry, or if it is sharded in one for each tensor."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value = value.state_dict()
    return _in_entries(name, value) if _is_distributed_state(value) else Whole(name, value)


def _in_entries(name: str, value: Any) -> Any:
    """Return a value with entries for its tensors, and for what has none in it one entry.

    Raises:
        CheckpointError: DCP would make strings of the keys that lead to sharded tensors.
    """
    if not _is_distributed_state(value):
        is_entry = isinstance(value, Tensor) or (isinstance(value, dict) and _is_kept(value))
        return value if is_entry else Whole(name, value)
    if isinstance(value, (list, tuple)):
        return [_in_entries(f"{name}.{i}", entry) for i, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    numbers = [key for key in value if not isinstance(key, str)]
    if numbers:
        msg = (
            f"extra {name!r} holds sharded tensors by keys that are no strings ({numbers[0]!r}, of "
            f"{len(numbers)}), which would come back as strings. Pass optimizers as `optimizer`, "
            f"several as a list; of other states make the keys strings."
        )
        raise CheckpointError(msg)
    return {key: _in_entries(f"{name}.{key}", entry) for key, entry in value.items()}


def _is_kept(value: Any) -> bool:
    """Whether a value comes back as it was after DCP has taken its dicts and lists apart."""
    if isinstance(value, dict):
        keys_stay = bool(value) and all(isinstance(key, str) for key in value)
        return keys_stay and all(map(_is_kept, value.values()))
    if isinstance(value, (list, tuple)):
        return not any(isinstance(entry, (dict, list, tuple, Tensor)) for entry in value)
    return True


def _is_distributed_state(value: Any) -> bool:
    """Whether ranks hold different parts of a value: it has sharded tensors in it."""
    if isinstance(value, dict):
        return any(map(_is_distributed_state, value.values()))
    if isinstance(value, list) or type(value) is tuple:
        return any(map(_is_distributed_state, value))
    return hasattr(value, "__create_write_items__")


def layout_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Describe how a model's parameters are spread over ranks, for people who look at a file.

    Args:
        model: State dict of it.
    """
    meshes: list[dict[str, Any]] = []
    params: dict[str, int] = {}
    for name, param in model.items():
        if isinstance(param, ShardedTensor):
            mesh = param.spec.mesh
            described = {
                "device_type": mesh.device_type,
                "shape": list(mesh.shape),
                "axes": list(mesh.mesh_dim_names or ()),
                "ranks": list(mesh.ranks),
            }
            if described not in meshes:
                meshes.append(described)
            params[name] = meshes.index(described)
    return {"meshes": meshes, "mesh_of": params}
