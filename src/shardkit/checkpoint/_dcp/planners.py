"""What DCP's planners do otherwise here: states made in agreement, values that load safely."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem


_GROUPS = ("optim", "param_groups")


class Whole:
    """A value that is written as one entry, with all that is in it.

    DCP takes dicts and lists apart and puts them together again with strings as keys, without empty
    ones, and without tuples.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.content = _dumped(f"extra {name!r}", value)


def _dumped(what: str, value: Any) -> bytes:
    """Return a value as a file has it, of which it is known that it can be loaded.

    Raises:
        CheckpointError: It could not be loaded again without running code from the file.
    """
    content = io.BytesIO()
    try:
        torch.save(map_leaves(value, _alone), content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        msg = (
            f"{what} ({type(value).__name__}) cannot be saved: "
            f"{_reason(error)}. Save numbers, strings, tensors, lists and dicts of these, or "
            f"an object with state_dict() and load_state_dict(), or declare its class by "
            f"torch.serialization.add_safe_globals."
        )
        raise CheckpointError(msg) from error
    return content.getvalue()


def _alone(leaf: Any) -> Any:
    """Return a leaf as it is saved.

    Of a view of a larger tensor, one that does not bring all of it into a file; of a number of
    numpy, which schedules often put into optimizers, Python's: its class is not safe to load.
    """
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_meta:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    if type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == () and leaf.size == 1:
        return leaf.item()
    return leaf


def _reason(error: Exception) -> str:
    """Return the part of torch's long messages that says what is wrong."""
    found = re.search(r"([^\n:]*GLOBAL \S+[^\n]*?)\.?(?: Please|\n|$)", str(error))
    if found:
        return found[1].strip()
    return (str(error).splitlines() or [repr(error)])[0].removesuffix(".")


class SavePlanner(DefaultSavePlanner):
    """Makes the state while the ranks agree about the plan: an error there is one of all ranks."""

    def __init__(
        self, collect: Callable[[], dict[str, Any]], expect: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._collect = collect
        self._expect = expect
        self._own_names: dict[str, str] = {}
        self.stages: list[list[str]] = []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Make the state; what DCP passes is empty."""
        super().set_up_planner({**state_dict, **self._collect()}, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Spread what several ranks hold evenly over them, by bytes; called by the coordinator.

        DCP takes each box for as large as the whole tensor that it is of.
        """
        self.stages[:] = _stages(all_plans)
        renamed, own_names = _with_groups_of_all_stages(all_plans)
        plans, metadata = super().create_global_plan(_without_copies(renamed))
        return [
            dataclasses.replace(plan, planner_data=names)
            for plan, names in zip(plans, own_names, strict=True)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Count the bytes of this rank's part."""
        self._own_names = new_plan.planner_data
        plan = super().finish_plan(new_plan)
        for item in plan.items:
            if item.tensor_data is not None:
                self._expect(_nbytes(item))
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a part of this rank's state, which may have another name in the checkpoint."""
        name = self._own_names.get(index.fqn)
        if name is not None:
            index = dataclasses.replace(index, fqn=name)
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's
        """Return what is written."""
        if isinstance(object, Whole):
            return io.BytesIO(object.content)
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(_dumped(f"entry {write_item.index.fqn!r}", object))
        return super().transform_object(write_item, object)


def _stages(plans: list[SavePlan]) -> list[list[str]]:
    """Return the entries of each model, where ranks have different ones; else nothing."""
    found = dict.fromkeys(map(_entries_of_model, plans))
    return [sorted(names) for names in found] if len(found) > 1 else []


def _entries_of_model(plan: SavePlan) -> frozenset[str]:
    return frozenset(name for name, path in plan.planner_data.items() if path[0] == "model")


def _with_groups_of_all_stages(
    plans: list[SavePlan],
) -> tuple[list[SavePlan], list[dict[str, str]]]:
    """Number the parameter groups of optimizers on, where ranks have different models.

    Stages of a pipeline name their parameters differently, but each numbers its groups from 0.
    """
    firsts: dict[frozenset[str], int] = {}
    num_groups = 0
    renamed: list[SavePlan] = []
    own_names: list[dict[str, str]] = []
    for plan in plans:
        paths: dict[str, tuple[str | int, ...]] = plan.planner_data
        of_model = _entries_of_model(plan)
        numbers = [int(path[2]) for path in paths.values() if path[:2] == _GROUPS]
        if of_model not in firsts:
            firsts[of_model] = num_groups
            num_groups += max(numbers, default=-1) + 1
        first = firsts[of_model]
        if not first:
            renamed.append(plan)
            own_names.append({})
            continue
        moved = {
            name: (*_GROUPS, int(path[2]) + first, *path[3:])
            for name, path in paths.items()
            if path[:2] == _GROUPS
        }
        new_names = {name: ".".join(map(str, path)) for name, path in moved.items()}
        items = [_renamed(item, new_names.get(item.index.fqn)) for item in plan.items]
        paths = {name: path for name, path in paths.items() if name not in moved}
        paths |= {new_names[name]: path for name, path in moved.items()}
        renamed.append(dataclasses.replace(plan, items=items, planner_data=paths))
        own_names.append({new: name for name, new in new_names.items()})
    return renamed, own_names


def _renamed(item: WriteItem, name: str | None) -> WriteItem:
    if name is None:
        return item
    return dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=name))


def _without_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each item in one plan: the largest first, each in the plan that has least so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items[item.index] = item
    load = [0] * len(plans)
    chosen: dict[MetadataIndex, int] = {}
    # What only one rank has is no choice, so it comes first.
    order = sorted(items, key=lambda index: (len(holders[index]) > 1, -_nbytes(items[index])))
    for index in order:
        if items[index].tensor_data is None:
            # Values may differ from rank to rank: all of them come from the first one.
            chosen[index] = holders[index][0]
            continue
        chosen[index] = min(holders[index], key=lambda rank: load[rank])
        load[chosen[index]] += _nbytes(items[index])
    return [
        dataclasses.replace(plan, items=[i for i in plan.items if chosen[i.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class LoadPlanner(DefaultLoadPlanner):
    """Loads by flat names; runs no code from the file."""

    def __init__(self, path: object, expect: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path
        self._expect = expect
        self.loaded: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Take the targets as they are: DCP would look through them for those without memory."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count the bytes of this rank's part."""
        plan = super().finish_plan(new_plan)
        for item in plan.items:
            target = self.state_dict[item.dest_index.fqn]
            if isinstance(target, torch.Tensor):
                self._expect(math.prod(item.lengths) * target.dtype.itemsize)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value that is not a tensor.

        Raises:
            CheckpointError: It holds classes that torch does not take for safe.
        """
        name = read_item.dest_index.fqn
        try:
            self.loaded[name] = torch.load(value, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = (
                f"{self._path}: entry {name!r} is not loaded: {_reason(error)}. If you trust the "
                f"file, declare what is in it by torch.serialization.add_safe_globals."
            )
            raise CheckpointError(msg) from error
