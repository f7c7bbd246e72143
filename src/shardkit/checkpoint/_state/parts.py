"""The parts that a checkpoint is loaded in: model, optimizers, extras.

Each says what it wants to have read where, notes what does not fit, and puts what was read into
its objects. Nothing is changed before all parts have been looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp.item_file import is_plain
from shardkit.checkpoint._dcp.writer import memory_of
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._state.misfits import described
from shardkit.checkpoint._state.model_and_optimizer import (
    get_model_state_dict,
    get_optimizer_state_dict,
    optimizer_template,
    parameters_by_name,
    put_optimizer_state,
    set_model_state_dict,
    unflatten,
)
from shardkit.checkpoint._state.names import (
    EXTRA_STATE,
    as_optimizers,
    device_of,
    names_of_parameters,
)
from shardkit.checkpoint._state.sections import (
    element,
    entries_of_optimizers,
    entries_of_other_stages,
    extra_path,
    model_prefix,
    nested,
    optimizer_entries,
    optimizer_prefix,
    paths_below,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardkit.checkpoint._state.misfits import Misfits
    from shardkit.checkpoint._state.sections import Path
    from shardkit.checkpoint._state.sources import DistributedCheckpoint


_HOST = torch.device("cpu")
_NOT_STRICT = StateDictOptions(strict=False)  # What is missing has been looked for before.


def room(info: TensorInfo | None) -> Tensor | None:
    """Return memory on the host for a whole tensor."""
    return None if info is None else torch.empty(info.shape, dtype=info.dtype)


class ModelPart:
    """A model, whose tensors are read into in place.

    Attributes:
        targets: Tensors to fill, by entry.
        entries: Names of entries by those of the model's state.
        claimed: Entries that are the model's, or would be.
        of_others: Names of what a pipeline's other stages saved, which are no fault.
    """

    def __init__(self, source: DistributedCheckpoint, model: nn.Module, misfits: Misfits) -> None:
        self._model = model
        self._state = get_model_state_dict(model)
        self._in_place: set[str] = set()
        self._nested: dict[str, dict[str, Path]] = {}
        infos = source.entries
        prefix = model_prefix(infos, self._state)
        self.entries = {name: prefix + name for name in self._state}
        self.targets: dict[str, Any] = {}
        device = device_of(self._state.values())
        storages = {_storage_of(tensor) for tensor in _tensors_of(model)}
        for name, value in self._state.items():
            entry = self.entries[name]
            if name.rpartition(".")[2] == EXTRA_STATE and self._find_extra_state(source, name):
                continue
            if entry not in infos:
                misfits.missing.append(f"model: {name!r}: expected {described(value)}")
            elif misfits.compare(f"model: {name!r}", value, infos[entry]):
                target = _with_memory(value, device)
                # What hooks made of the model's tensors must go back through `load_state_dict`.
                if target is value and value is not None and _storage_of(value) in storages:
                    self._in_place.add(name)
                self.targets[entry] = self._state[name] = target
        own = set(self.entries.values()).union(*self._nested.values())
        of_others = entries_of_other_stages(source.stages, own)
        self.of_others = {entry.removeprefix(prefix) for entry in of_others}
        others = entries_of_optimizers(infos) - own
        self.claimed = {entry for entry in infos if entry.startswith(prefix)} - others
        for entry in infos:
            if entry in self.claimed and entry not in own:
                line = f"model: {entry.removeprefix(prefix)!r}: found {described(infos[entry])}"
                misfits.left_over(line, is_of_others=entry in of_others)

    def _find_extra_state(self, source: DistributedCheckpoint, name: str) -> bool:
        """Find a module's extra state, of whatever shape: as one entry, or as DCP flattens dicts.

        It is the module that made it that knows what fits.
        """
        entry = self.entries[name]
        whole: dict[str, Path] = {entry: ()}
        found = whole if entry in source.entries else paths_below(source.paths, entry)
        self._nested[name] = found
        self.targets |= {one: room(source.entries[one]) for one in found}
        return bool(found)

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Give the model what could not be read in place, and have its hooks called."""
        state = {
            name: loaded.get(entry, self._state[name])
            for name, entry in self.entries.items()
            if entry in self.targets and name not in self._in_place
        }
        for name, found in self._nested.items():
            if found:
                state[name] = nested(
                    {path: loaded.get(one, self.targets[one]) for one, path in found.items()}
                )
        set_model_state_dict(self._model, state, options=_NOT_STRICT)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from names_of_parameters(model)
    yield from model.buffers()


def _storage_of(tensor: Tensor) -> int | None:
    """Return what tells memory from other memory; None of tensors that have none of their own."""
    memory = memory_of(tensor)
    if not is_plain(memory):
        return None
    try:
        return memory.untyped_storage().data_ptr()
    except RuntimeError:  # Traced tensors have no address; what is sharded shares its piece.
        return id(memory)


def _with_memory(value: Any, device: torch.device) -> Any:
    """Return a tensor to read into: the model's own, or if it is on meta a new one."""
    if not isinstance(value, Tensor):
        return None
    if not value.is_meta:
        return value
    if isinstance(value, ShardedTensor):
        spec = value.spec
        piece = torch.empty(spec.piece_numel, dtype=value.dtype, device=spec.device)
        return ShardedTensor(piece, spec)
    mesh: Any = getattr(value, "device_mesh", None)
    return torch.empty_like(value, device=device if mesh is None else mesh.device_type)


class OptimizerPart:
    """Optimizers, which get new tensors."""

    def __init__(
        self,
        source: DistributedCheckpoint,
        model_part: ModelPart,
        optimizers: Any,
        misfits: Misfits,
    ) -> None:
        self._model = model = model_part._model  # noqa: SLF001 - of the same file
        self._optimizers = optimizers
        self.targets: dict[str, Any] = {}
        self.claimed: set[str] = set()
        self._infos = source.entries
        self._places: dict[str, tuple[str, Path]] = {}
        self._saved: dict[str, dict[str, TensorInfo | None]] = {}
        self._groups: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {}
        prefix = optimizer_prefix(source.entries)
        if prefix is None:
            misfits.missing.append("optimizer: all of its state")
            return
        self.claimed = entries_of_optimizers(source.entries) - set(model_part.entries.values())
        first_name: dict[str, str] = {}
        params: dict[str, nn.Parameter] = {}
        for names, param in parameters_by_name(model, optimizers):
            first_name |= dict.fromkeys(names, names[0])
            params |= dict.fromkeys(names, param)
        self._groups = self._read_groups(source, prefix)
        known = first_name.keys() | model_part.entries.keys()
        for found in optimizer_entries(source.paths, prefix, known):
            name, keys, info = found.parameter, found.keys, source.entries[found.entry]
            if name not in first_name:
                where = ".".join(map(str, (name, *keys)))
                line = f"optimizer: {where!r}: found {described(info)}"
                misfits.left_over(line, is_of_others=name in model_part.of_others)
                continue
            self._places[found.entry] = (name, keys)
            of_parameter = self._saved.setdefault(name, {})
            if len(keys) == 1:
                of_parameter[str(keys[0])] = info
        _compare_names(first_name, self._saved, self._groups, model_part.of_others, misfits)
        _compare_classes(model, optimizers, self._saved, misfits)
        for entry, (name, keys) in self._places.items():
            info = self._infos[entry]
            # State of the saved parameter's shape, if the parameter has another.
            of_model = self._infos.get(model_part.entries.get(name, ""))
            if info is not None and of_model is not None and info.shape == of_model.shape:
                where = ".".join(map(str, (name, *keys)))
                misfits.compare(f"optimizer: {where!r}", params[name], info)

    def make_room(self) -> dict[str, Any]:
        """Return what is read where, by entry; called when the model's parameters have memory."""
        if not self._places and not self._groups:
            return {}
        # What the optimizers have is read into: fresh memory takes longer than reading does.
        present = get_optimizer_state_dict(self._model, self._optimizers)["state"]
        lacking = {
            name: {
                key: info
                for key, info in infos.items()
                if not _is_room(element(present, (name, key)), info)
            }
            for name, infos in self._saved.items()
        }
        self._state = optimizer_template(self._model, self._optimizers, lacking)
        for name, infos in self._saved.items():
            values = self._state["state"].setdefault(name, {})
            for key in infos.keys() - lacking[name].keys():
                values[key] = present[name][key]
        if self._groups:
            self._state["param_groups"] = self._groups
        for entry, (name, keys) in self._places.items():
            target = element(self._state["state"], (name, *keys))
            self.targets[entry] = room(self._infos[entry]) if target is None else target
        return self.targets

    def _read_groups(self, source: DistributedCheckpoint, prefix: str) -> list[dict[str, Any]]:
        """Return the saved parameter groups; empty if there are none."""
        head = f"{prefix}param_groups"
        entries = [e for e in source.entries if e == head or e.startswith(f"{head}.")]
        values = {entry: room(source.entries[entry]) for entry in entries}
        values |= source.fill(values)
        depth = prefix.count(".") + 1
        paths = {entry: source.paths[entry] for entry in entries}
        if all(len(path) >= depth for path in paths.values()):
            groups = nested({paths[entry][depth:]: values[entry] for entry in entries})
            if isinstance(groups, list):
                return groups
        flat = {entry.removeprefix(prefix): values[entry] for entry in entries}
        unflat = unflatten(self._model, self._optimizers, flat)
        return list(unflat["param_groups"])

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Give the optimizers their state."""
        if not self._state:
            return
        found: dict[str, dict[Path, Any]] = {}
        for entry, (name, keys) in self._places.items():
            found.setdefault(name, {})[keys] = loaded.get(entry, self.targets[entry])
        for name, values in found.items():
            self._state["state"].setdefault(name, {}).update(nested(values))  # Lists are lists.
        put_optimizer_state(self._model, self._optimizers, self._state, strict=False)


def _is_room(value: Any, info: TensorInfo | None) -> bool:
    """Whether what an optimizer has can be read into: sharded tensors; others are small."""
    return (
        isinstance(value, ShardedTensor)
        and not value.is_meta
        and info == TensorInfo(tuple(value.shape), value.dtype)
    )


def _compare_names(
    first_name: Mapping[str, str],
    saved: Collection[str],
    groups: list[dict[str, Any]],
    of_others: Collection[str],
    misfits: Misfits,
) -> None:
    """Note parameters of which nothing was saved; those never stepped stand in groups only."""
    in_groups = {name for group in groups for name in group.get("params", ())}
    found = {first_name[alias] for alias in (*saved, *in_groups) if alias in first_name}
    misfits.missing += [
        f"optimizer: all state of {name!r}"
        for name in dict.fromkeys(first_name.values())
        if name not in found
    ]
    for name in sorted(in_groups - first_name.keys() - set(saved)):
        line = f"optimizer: {name!r} in a parameter group"
        misfits.left_over(line, is_of_others=name in of_others)


_KEPT = {
    "SGD": ("momentum_buffer",),
    "Adam": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "NAdam": ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Adagrad": ("step", "sum"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "RMSprop": ("step", "square_avg", "momentum_buffer", "grad_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "ASGD": ("step", "eta", "mu", "ax"),
}
"""What torch's optimizers keep of a parameter."""
_KEPT_BESIDE = ("step", "master")  # Also where a class has its inner one keep it.


def _compare_classes(
    model: nn.Module,
    optimizers: Any,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
    misfits: Misfits,
) -> None:
    """Note state that an optimizer never uses: it was saved by one of another class."""
    for optimizer in as_optimizers(optimizers):
        kind = getattr(optimizer, "optimizer_class", type(optimizer))
        is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ in _KEPT
        kept: Collection[str]
        if is_known:
            kept = _KEPT[kind.__name__]
        else:  # Nobody knows before it steps.
            kept = {key for state in optimizer.state.values() for key in state}
        found: dict[str, str] = {}
        for aliases, _ in parameters_by_name(model, optimizer):
            for name in aliases:
                keys = {key for key in saved.get(name, ()) if key not in _KEPT_BESIDE}
                # An unknown class may have more at other settings, but not nothing in common.
                if kept and (is_known or keys.isdisjoint(kept)):
                    found |= dict.fromkeys(sorted(keys.difference(kept, found)), name)
        misfits.unexpected += [
            f"optimizer: {key!r} of {name!r} and others, which {kind.__name__} does not keep: "
            f"another class of optimizer was saved"
            for key, name in found.items()
        ]


class ExtrasPart:
    """What else there is: loaded into objects, or returned."""

    def __init__(
        self,
        source: DistributedCheckpoint,
        claimed: Collection[str],
        objects: Mapping[str, Any],
        misfits: Misfits,
    ) -> None:
        """Find the extras."""
        self._objects = objects
        self._paths = {
            entry: extra_path(path) for entry, path in source.paths.items() if entry not in claimed
        }
        names = {path[0] for path in self._paths.values()}
        misfits.missing += [
            f"extra: {name!r} ({type(value).__name__})"
            for name, value in objects.items()
            if name not in names
        ]
        states: dict[str | int, Any] = {}
        self.targets: dict[str, Any] = {}
        for entry, path in self._paths.items():
            info = source.entries[entry]
            target = None
            if info is not None and path[0] in objects:
                # Sharded tensors of the object are read into; others are too.
                if path[0] not in states:
                    states[path[0]] = objects[str(path[0])].state_dict()
                target = element(states[path[0]], path[1:])
            fits = isinstance(target, Tensor) and tuple(target.shape) == info.shape  # type: ignore[union-attr]
            self.targets[entry] = _with_memory(target, _HOST) if fits else room(info)

    def put(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Load objects; return what nobody was given for."""
        values: dict[Path, Any] = {
            path: loaded.get(entry, self.targets[entry]) for entry, path in self._paths.items()
        }
        extras = nested(values) if values else {}
        for name, value in self._objects.items():
            if name not in extras:
                continue
            state = extras.pop(name)
            if isinstance(value, nn.Module):
                is_meta = any(tensor.is_meta for tensor in _tensors_of(value))
                value.load_state_dict(state, assign=is_meta)
            else:
                value.load_state_dict(state)
        result: dict[str, Any] = extras
        return result
