"""`load` puts a saved state into a model, optimizers and other objects."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._compat import torch_modules
from shardkit._errors import CheckpointError
from shardkit._module.materialize import rebuild_buffers
from shardkit._progress import Meter
from shardkit._settings import refuse_texts
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._agreement import agreed, of_all, quote, raise_any, rank_of
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.directory import newest
from shardkit.checkpoint._dcp.manifest import MANIFEST_FILE
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint, check_is_checkpoint
from shardkit.checkpoint._files.disk import (
    DAMAGED,
    Keys,
    TensorInfo,
    asides_in,
    is_plain,
    is_sparse,
    join_keys,
    key_in_dict,
    nested,
)
from shardkit.checkpoint._full import load_full
from shardkit.checkpoint._save import background, check_arguments
from shardkit.checkpoint._state.model_and_optimizer import (
    get_model_state_dict,
    get_optimizer_state_dict,
    optimizer_template,
    parameters_by_name,
    put_optimizer_state,
    room_for,
    set_model_state_dict,
    unflatten,
)
from shardkit.checkpoint._state.names import (
    EXTRA_STATE,
    as_optimizers,
    device_of,
    give_memory,
    memory_of,
    names_of_parameters,
    split_at_name,
    state_of,
)
from shardkit.checkpoint._state.sources import Misfits, described

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardkit._progress import Progress


_logger = logging.getLogger("shardkit")
T = TypeVar("T")


def latest(directory: os.PathLike[str] | str) -> Path | None:
    """Return the newest complete checkpoint in a directory, None if there is none.

    The newest is the one saved last, by the sequence in its manifest. A checkpoint that was being
    written when a run died is not complete. `latest` passes over a checkpoint whose files cannot be
    read or have been damaged since (missing, of another size, a wrong checksum of a manifest), and
    warns why. `load` compares the checksums of tensors. If one is wrong, `load` raises and leaves a
    file ``shardkit.damaged`` in the checkpoint, and `latest` passes over it from then on. If no
    checkpoint has a manifest, because other programs wrote them, a warning says so.

    An asynchronous save of this process that is under way is waited for.

    Args:
        directory: Directory that holds checkpoints; it need not exist.

    Raises:
        CheckpointError: The directory is a checkpoint itself, or a URL; or the disk fails (not by
            missing permission), and no checkpoint can be read. None would make a run begin anew.

    Cost: reads the first line of each checkpoint's manifest, and all of the newest manifest.
    """
    background.wait()
    return newest(directory)


@torch.inference_mode(mode=False)
def load(
    path: os.PathLike[str] | str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    strict: bool = True,
    process_group: Any = None,
    progress: Progress = None,
    **extra: Any,
) -> dict[str, Any]:
    """Load a checkpoint of `save` or DCP, or a file of whole tensors; call it on all ranks.

    The number of ranks, the mesh and the grouping of parameters may differ from those at the save:
    each rank reads what it holds. Nothing in the files is executed. A checkpoint with a manifest is
    verified by checksums.

    Args:
        path: The checkpoint's directory, see `latest`; or whole tensors, see `load_full`.
        model: Module whose parameters and buffers are filled in place; those on the meta device get
            memory. Buffers there that no state dict has are computed by their modules if possible.
        optimizer: One optimizer or several; they need not have been stepped.
        strict: Whether it is an error if entries are missing, or if no rank uses an entry;
            otherwise the first rank logs a warning that lists them. Entries of another shape are
            always an error.
        process_group: The ranks that load; default: all.
        progress: Argument of `save`, here for the bytes that are read.
        **extra: Objects with ``state_dict`` and ``load_state_dict``, by the names under which they
            were saved.

    Returns:
        The other extras by name. Tensors among them are whole, on the host.

    Raises:
        CheckpointError: On all ranks, with the reason of each rank that failed. It lists all
            entries that do not fit; then nothing has been changed. If damage is found while
            reading, the model and optimizers may hold a part of the checkpoint. If an object among
            the extras refuses its state, they hold all of it.

    Cost: five all-gathers of a few bytes, seven with optimizers. Memory beside the state: one saved
    chunk, where a chunk must be cut or converted.
    """
    background.wait()
    refuse_texts(CheckpointError, strict=strict)
    target = directory.normalized(path)
    what = f"{quote(target)} was not loaded"
    rank = rank_of(process_group)
    with Meter(progress, f"loading {target.name}", rank=rank) as meter:
        if agreed(process_group, quote(target), lambda: is_full(target), _kind_of, _NOT_SHARED):
            _check_arguments(model, optimizer, extra)
            if model is None or optimizer is not None or extra:
                msg = f"{what}: it holds a model only. Pass a model, no optimizer and no extras."
                raise CheckpointError(msg)
            agreed(
                process_group,
                what,
                lambda: load_full(target, model, strict=strict, progress=progress),
            )
            return {}

        def plan() -> _LoadPlan:
            source = DistributedCheckpoint(target, meter)
            if rank == 0:
                source.reader.check_files()
            return _LoadPlan(source, model, optimizer, extra)

        def attempt() -> dict[str, Any]:
            together = _Together(target, what, process_group)
            together(lambda: _look(target) if rank == 0 else None)  # Before any rank reads.
            planned = together(plan, lambda made: made.identity)
            everyone = of_all(planned.misfits, process_group)
            _check_fit(target, what, everyone, rank, strict=strict)
            if rank == 0 and planned.leaves_optimizers_out:
                _logger.info(
                    "%s has the state of an optimizer, which is left out: load() got none. Pass "
                    "the optimizer to go on training.",
                    quote(target),
                )
            extras = planned.carry_out(together)
            if model is not None and any(buffer.is_meta for buffer in model.buffers()):
                rebuild_buffers(model, state_of(model).values())
            return extras

        for _ in range(directory.READ_AGAIN):
            try:
                return attempt()
            except _ReplacedError as error:
                found = error.__cause__
        assert found is not None
        raise found


_NOT_SHARED = (
    "the ranks do not find the same. Give all of them a path that they all see, or have the first "
    "rank send whole tensors by load_full(path, model, broadcast_from_rank0=True)"
)


def _check_fit(
    target: Path, what: str, everyone: Sequence[Misfits], rank: int, *, strict: bool
) -> None:
    """Raise on all ranks if entries do not fit; the first rank logs those that are left out."""
    found = [each.common(everyone) for each in everyone]
    raise_any(what, [_report(each, strict=strict) for each in found])
    head = f"{quote(target)} is loaded without these entries, as strict=False allows"
    tail = "What is missing stays as it is; missing state of optimizers begins anew."
    left = found[rank].report(head, tail, strict=True)
    if rank == 0 and left is not None:
        _logger.warning("%s", left)


def _report(misfits: Misfits, *, strict: bool) -> str | None:
    remedy = "Make the model and the optimizer as they were when it was saved"
    if not misfits.wrong:
        remedy += ", or pass strict=False to leave these as they are"
    return misfits.report("entries do not fit", f"{remedy}.", strict=strict)


class _ReplacedError(Exception):
    """Another job has replaced a checkpoint while it was read; it is read once more."""


class _Together:
    """Runs each part of a load on all ranks of a group; if one rank fails, no rank goes on."""

    def __init__(self, target: Path, what: str, group: Any) -> None:
        self._target = target
        self._what = what
        self._group = group
        self._before = directory.stamp(target)

    def __call__(self, act: Callable[[], T], same: Callable[[T], object] | None = None) -> T:
        """Call a function that does not communicate; return its result, or raise on all ranks."""
        try:
            return agreed(self._group, self._what, lambda: self._noting_damage(act), same)
        except CheckpointError as error:
            if any(of_all(self._is_replaced(), self._group)):
                raise _ReplacedError from error
            raise

    def _is_replaced(self) -> bool:
        found = directory.stamp(self._target)
        if found is None:  # Where names cannot be exchanged, the name is unused for a moment.
            beside = asides_in(self._target.parent)
            return any(aside.name == self._target.name for aside in beside)
        return found != self._before

    def _noting_damage(self, act: Callable[[], T]) -> T:
        """Have `latest` pass over the checkpoint if a part of it is damaged."""
        try:
            return act()
        except CheckpointError as error:
            if DAMAGED not in str(error) or not (self._target / MANIFEST_FILE).exists():
                raise
            # Another job may have put another checkpoint in its place.
            if not directory.note_damage(self._target, str(error), self._before):
                raise
            msg = f"{error} latest() passes over this one from now on."
            raise CheckpointError(msg) from error


def is_full(path: Path) -> bool:
    """Whether a path holds whole tensors: a file, or a directory in the format of Hugging Face."""
    return path.is_file() or (
        path.is_dir()
        and not (path / METADATA_FILE).exists()
        and any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.index.json"))
    )


def _kind_of(is_whole: bool) -> str:  # noqa: FBT001 - the only argument
    return "whole tensors" if is_whole else "no file of whole tensors"


def _look(path: Path) -> None:
    """Finish what a crash interrupted, and check that there is a checkpoint; on one rank."""
    directory.recover(path)
    check_is_checkpoint(path)


class _LoadPlan:
    """Which entries are read into which memory, for all parts."""

    def __init__(
        self,
        source: DistributedCheckpoint,
        model: nn.Module | None,
        optimizers: Any,
        objects: Mapping[str, Any],
    ) -> None:
        _check_arguments(model, optimizers, objects)
        self.misfits = misfits = Misfits()
        self.identity = source.reader.identity
        self._source = source
        self._model: ModelPart | None = None
        self._optimizers: OptimizerPart | None = None
        claimed = of_optimizers = entries_of_optimizers(source.entries)
        if model is None:
            prefixes = tuple(filter(None, MODEL_PREFIXES))
            claimed = claimed | {entry for entry in source.entries if entry.startswith(prefixes)}
        else:
            self._model = ModelPart(source, model, misfits)
            claimed = claimed | self._model.claimed
            if optimizers is not None:
                self._optimizers = OptimizerPart(source, self._model, optimizers, misfits)
        self.leaves_optimizers_out = model is not None and optimizers is None and of_optimizers
        self._extras = ExtrasPart(source, claimed, objects, model, misfits)

    def carry_out(self, together: _Together) -> dict[str, Any]:
        """Read all entries, and give them to their objects; return the extras."""
        optimizers, extras = self._optimizers, self._extras
        if optimizers is None:
            return together(lambda: extras.put(self._load_model()))
        loaded = together(self._load_model)
        # Optimizers of whole matrices communicate when they return their state and when they
        # receive it. No rank does so before all ranks have read what they need.
        room = optimizers.make_room()
        optimizers.put(together(lambda: self._source.fill(room)))
        return together(lambda: extras.put(loaded))

    def _load_model(self) -> dict[str, Any]:
        """Read the model's and the extras' entries; give the model its entries."""
        of_model = {} if self._model is None else self._model.targets
        loaded = self._source.fill({**self._extras.targets, **of_model})
        if self._model is not None:
            self._model.put(loaded)
        return loaded


def _check_arguments(model: nn.Module | None, optimizers: Any, objects: Mapping[str, Any]) -> None:
    check_arguments(model, optimizers)
    for name, value in objects.items():
        if not hasattr(value, "load_state_dict"):
            msg = (
                f"extra {name!r} ({type(value).__name__}) has no load_state_dict(). Leave it out: "
                f"values are in what load() returns."
            )
            raise CheckpointError(msg)


# --- model, optimizers, extras --------------------------------------------------------------------
#
# Each part lists the entries to read and the memory for them, notes what does not fit, and puts
# what was read into its objects. Nothing is changed before all parts have been checked.

_HOST = torch.device("cpu")
_NOT_STRICT = StateDictOptions(strict=False)  # Missing entries have been noted before.


def room(info: TensorInfo | None) -> Tensor | None:
    """Return memory on the host for a whole tensor."""
    return None if info is None else torch.empty(info.shape, dtype=info.dtype, device=_HOST)


class ModelPart:
    """A model, whose tensors are filled in place."""

    def __init__(self, source: DistributedCheckpoint, model: nn.Module, misfits: Misfits) -> None:
        self.model = model
        state = get_model_state_dict(model)
        self._in_place: set[str] = set()
        self._on_meta: dict[str, Tensor] = {}  # Plain tensors of the model without memory.
        self._nested: dict[str, dict[str, Keys]] = {}
        infos = source.entries
        prefix = model_prefix(infos, state)
        self.entries = {name: prefix + name for name in state}  # By the model's own names.
        self.targets: dict[str, Any] = {}  # Tensors to fill, by entry.
        device = device_of(state.values())
        storages = {_storage_of(tensor) for tensor in _tensors_of(model)}
        on_meta = _plain_on_meta(model)
        for name, value in state.items():
            entry = self.entries[name]
            if name.rpartition(".")[2] == EXTRA_STATE and self._find_extra_state(source, name):
                continue
            if entry not in infos:
                misfits.missing.append(f"model: {name!r}: expected {described(value)}")
            elif is_sparse(value) and infos[entry] is None:
                self.targets[entry] = None
            elif misfits.compare(f"model: {name!r}", value, infos[entry]):
                target = _with_memory(value, device)
                # Copies that hooks made of the model's tensors must go back through
                # `load_state_dict`.
                if target is value and value is not None and _storage_of(value) in storages:
                    self._in_place.add(name)
                elif name in on_meta:
                    self._on_meta[name] = on_meta[name]
                self.targets[entry] = target
        own = set(self.entries.values()).union(*self._nested.values())
        of_others = entries_of_other_stages(source.stages, own)
        # Names that other stages of a pipeline saved. They may be left over.
        self.of_others = {entry.removeprefix(prefix) for entry in of_others}
        others = entries_of_optimizers(infos) - own
        # Entries of the model, and entries that have its prefix.
        self.claimed = {entry for entry in infos if entry.startswith(prefix)} - others
        for entry in infos:
            if entry in self.claimed and entry not in own:
                line = f"model: {entry.removeprefix(prefix)!r}: found {described(infos[entry])}"
                misfits.left_over(line, is_of_others=entry in of_others)

    def _find_extra_state(self, source: DistributedCheckpoint, name: str) -> bool:
        """Find a module's extra state, in one entry or in the several that DCP makes of a dict.

        Any shape is accepted: only the module itself knows what fits.
        """
        entry = self.entries[name]
        found: dict[str, Keys] = {entry: ()}
        if entry not in source.entries:
            below = entries_below(source.paths, entry)
            found = {one: keys or tuple(text.split(".")) for one, text, keys in below}
        self._nested[name] = found
        self.targets |= {one: room(source.entries[one]) for one in found}
        return bool(found)

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Give the model the entries that could not be read in place, and have its hooks called."""
        with torch_modules.without_weight_refs(self.model.modules()):
            for name, tensor in self._on_meta.items():
                give_memory(tensor, loaded[self.entries[name]])
        state = {
            name: loaded[entry]
            for name, entry in self.entries.items()
            if entry in self.targets and name not in self._in_place | self._on_meta.keys()
        }
        for name, found in self._nested.items():
            if found:
                state[name] = nested({path: loaded[one] for one, path in found.items()})
        set_model_state_dict(self.model, state, options=_NOT_STRICT)


def _plain_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's plain tensors that have no memory, by their names in its state."""
    tensors = {tensor for tensor in _tensors_of(model) if is_plain(tensor) and tensor.is_meta}
    state = state_of(model) if tensors else {}
    return {name: v for name, v in state.items() if isinstance(v, Tensor) and v in tensors}


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from names_of_parameters(model)
    yield from model.buffers()


def _storage_of(tensor: Tensor) -> int | None:
    """Return a number that identifies a tensor's memory; None if the tensor has none of its own."""
    memory = memory_of(tensor)
    if not is_plain(memory):
        return None
    try:
        return memory.untyped_storage().data_ptr()
    except RuntimeError:  # Traced tensors have no address, but sharded ones share the piece.
        return id(memory)


def _with_memory(value: Any, device: torch.device) -> Any:
    """Return a tensor to read into: the model's own, or a new one if that is on meta."""
    if not isinstance(value, Tensor):
        return None
    if not value.is_meta:
        return value
    if isinstance(value, ShardedTensor):
        return torch.empty_like(value, device=value.spec.device)
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
        self._model = model = model_part.model
        self._optimizers = optimizers
        self._infos = source.entries
        self._places: dict[str, tuple[str, Keys]] = {}
        self._saved: dict[str, dict[str, TensorInfo | None]] = {}
        self._groups: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {}
        prefix = optimizer_prefix(source.entries)
        if prefix is None:
            misfits.missing.append("optimizer: all of its state")
            return
        first_name: dict[str, str] = {}
        self._params = params = dict[str, nn.Parameter]()
        for names, param in parameters_by_name(model, optimizers):
            first_name |= dict.fromkeys(names, names[0])
            params |= dict.fromkeys(names, param)
        self._groups = self._read_groups(source, prefix)
        known = first_name.keys() | model_part.entries.keys()
        for entry, name, keys in optimizer_entries(source.paths, prefix, known):
            info = source.entries[entry]
            if name not in first_name:
                line = f"optimizer: {join_keys((name, *keys))!r}: found {described(info)}"
                misfits.left_over(line, is_of_others=name in model_part.of_others)
                continue
            self._places[entry] = (name, keys)
            of_parameter = self._saved.setdefault(name, {})
            if len(keys) == 1:
                key: Any = key_in_dict(keys[0])
                of_parameter[key] = info
        _compare_names(first_name, self._saved, self._groups, model_part.of_others, misfits)
        _compare_classes(model, optimizers, self._saved, misfits)
        for entry, (name, keys) in self._places.items():
            info = self._infos[entry]
            # Entries of the saved parameter's shape must have the shape of the present parameter.
            of_model = self._infos.get(model_part.entries.get(name, ""))
            if info is not None and of_model is not None and info.shape == of_model.shape:
                where = join_keys((name, *keys))
                misfits.compare(f"optimizer: {where!r}", params[name], info)

    def make_room(self) -> dict[str, Any]:
        """Return the memory to read into, by entry, once the model's parameters have memory."""
        if not self._places and not self._groups:
            return {}
        # The optimizers' present tensors are read into: allocating memory takes longer than
        # reading.
        present = get_optimizer_state_dict(self._model, self._optimizers)["state"]
        self._state = optimizer_template(self._model, self._optimizers, self._saved, present)
        if self._groups:
            self._state["param_groups"] = self._groups
        targets = {}
        for entry, (name, keys) in self._places.items():
            target = element(self._state["state"], (name, *keys))
            info = self._infos[entry]
            if target is None and info is not None:  # Inside of a dict or list.
                target = room_for(self._params[name], str(keys[0]), info, self._saved)
            targets[entry] = target
        return targets

    def _read_groups(self, source: DistributedCheckpoint, prefix: str) -> list[dict[str, Any]]:
        """Return the saved parameter groups; empty if there are none."""
        head = f"{prefix}param_groups"
        entries = [e for e in source.entries if e == head or e.startswith(f"{head}.")]
        values = source.fill({entry: room(source.entries[entry]) for entry in entries})
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
        found: dict[str, dict[Keys, Any]] = {}
        for entry, (name, keys) in self._places.items():
            found.setdefault(name, {})[keys] = loaded[entry]
        for name, values in found.items():
            self._state["state"].setdefault(name, {}).update(nested(values))  # Lists stay lists.
        put_optimizer_state(self._model, self._optimizers, self._state, strict=False)


def _compare_names(
    first_name: Mapping[str, str],
    saved: Collection[str],
    groups: list[dict[str, Any]],
    of_others: Collection[str],
    misfits: Misfits,
) -> None:
    """Note parameters without saved state; those that were never stepped are in groups only."""
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
    "Adafactor": ("step", "row_var", "col_var", "variance"),
    "Muon": ("momentum_buffer",),
}
"""State that torch's optimizers keep for each parameter."""
_KEPT_BESIDE = ("step", "master")  # Not compared: an inner optimizer may keep them.


def _compare_classes(
    model: nn.Module,
    optimizers: Any,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
    misfits: Misfits,
) -> None:
    """Note state that an optimizer never uses, since another class of optimizer saved it."""
    for optimizer in as_optimizers(optimizers):
        kind = getattr(optimizer, "optimizer_class", type(optimizer))
        is_known = f"{kind.__module__}.".startswith("torch.optim.") and kind.__name__ in _KEPT
        kept: Collection[str] = (
            _KEPT[kind.__name__]
            if is_known  # The keys of other classes are unknown before they step.
            else {key for state in optimizer.state.values() for key in state}
        )
        found: dict[str, str] = {}
        for aliases, _ in parameters_by_name(model, optimizer):
            for name in aliases:
                keys = {key for key in saved.get(name, ()) if key not in _KEPT_BESIDE}
                # With other settings an unknown class may keep more keys, but some are the same.
                if kept and (is_known or keys.isdisjoint(kept)):
                    found |= dict.fromkeys(sorted(keys.difference(kept, found), key=str), name)
        misfits.unexpected += [
            f"optimizer: {key!r} of {name!r} and others, which {kind.__name__} does not keep: "
            f"another class of optimizer was saved"
            for key, name in found.items()
        ]


class ExtrasPart:
    """The other entries, which are loaded into objects or returned."""

    def __init__(
        self,
        source: DistributedCheckpoint,
        claimed: Collection[str],
        objects: Mapping[str, Any],
        model: nn.Module | None,
        misfits: Misfits,
    ) -> None:
        """Find the extras."""
        self._objects = objects
        self._paths = {
            entry: path[1:] if len(path) > 1 and path[0] in _OUTER else path
            for entry, path in source.paths.items()
            if entry not in claimed
        }
        names = {path[0] for path in self._paths.values()}
        misfits.missing += [
            f"extra: {name!r} ({type(value).__name__})"
            for name, value in objects.items()
            if name not in names
        ]
        states: dict[Any, Any] = {}
        self.targets: dict[str, Any] = {}
        filled = set(map(_storage_of, () if model is None else _tensors_of(model)))
        for entry, path in self._paths.items():
            info = source.entries[entry]
            target = None
            if info is not None and path[0] in objects:
                # Tensors of the object's own state are read into, sharded ones too.
                if path[0] not in states:
                    states[path[0]] = objects[str(path[0])].state_dict()
                target = element(states[path[0]], path[1:])
            self.targets[entry] = _own_or_new(target, info, filled)

    def put(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Load the objects; return the values for which no object was passed."""
        values = {path: loaded[entry] for entry, path in self._paths.items()}
        extras: dict[str, Any] = nested(values) if values else {}
        for name, value in self._objects.items():
            if name not in extras:
                continue
            state = extras.pop(name)
            if isinstance(value, nn.Module):
                for key, tensor in _plain_on_meta(value).items():
                    if key in state and state[key].shape == tensor.shape:
                        give_memory(tensor, state[key])
                        state[key] = tensor  # Tied ones stay one tensor.
                is_meta = any(tensor.is_meta for tensor in _tensors_of(value))
                value.load_state_dict(state, assign=is_meta)
            else:
                value.load_state_dict(state)
        return extras


def _own_or_new(target: Any, info: TensorInfo | None, filled: set[int | None]) -> Tensor | None:
    """Return memory for an entry of an extra: the object's own tensor, or a new one like it.

    A new one, if the object's own has another dtype, or memory that gets another entry as well. A
    new object may hold one tensor by several names, or those of the model.
    """
    if info is None or not isinstance(target, Tensor) or tuple(target.shape) != info.shape:
        return room(info)
    own: Tensor = _with_memory(target, _HOST)
    storage = _storage_of(own)
    if storage in filled or own.dtype != info.dtype or not own.is_contiguous():
        return torch.empty_like(own, dtype=info.dtype, memory_format=torch.contiguous_format)
    filled.add(storage)
    return own


# --- which entry is whose -------------------------------------------------------------------------
#
# Entries are matched by their names, whichever program wrote them. shardkit writes ``model.``,
# ``optim.`` and ``extra.``. Training scripts that use DCP themselves often write other prefixes, or
# none.

MODEL_PREFIXES = ("model.", "app.model.", "state.model.", "")
OPTIMIZER_PREFIXES = (
    "optim.",
    "optimizer.",
    "app.optim.",
    "app.optimizer.",
    "state.optim.",
    "state.optimizer.",
    "",
)
_OUTER = ("app", "state", "extra")


def model_prefix(entries: Collection[str], names: Collection[str]) -> str:
    """Return the prefix under which most of a model's names are found."""
    return max(MODEL_PREFIXES, key=lambda prefix: sum(prefix + name in entries for name in names))


def entries_of_other_stages(
    stages: Sequence[frozenset[str]], wanted: Collection[str]
) -> frozenset[str]:
    """Return the entries of those stages of a pipeline that saved no part of this model."""
    everything = frozenset().union(*stages)
    own, rest = frozenset[str](), everything.intersection(wanted)
    while rest:
        stage = max(stages, key=lambda each: (len(each & rest), each <= rest))
        own, rest = own | stage, rest - stage
    return everything - own


def optimizer_prefix(entries: Collection[str]) -> str | None:
    """Return the prefix of an optimizer's state; None if there is none."""
    for prefix in OPTIMIZER_PREFIXES:
        # The state itself does not tell: it may be empty, and modules may have that name.
        if any(entry.startswith(f"{prefix}param_groups") for entry in entries):
            return prefix
    return None


def entries_of_optimizers(entries: Collection[str]) -> set[str]:
    """Return the entries that are an optimizer's."""
    prefix = optimizer_prefix(entries)
    if prefix is None:
        return set()
    heads = (f"{prefix}state.", f"{prefix}param_groups")
    return {entry for entry in entries if entry.startswith(heads)}


def optimizer_entries(
    paths: Mapping[str, Keys], prefix: str, known: Collection[str]
) -> Iterator[tuple[str, str, Keys]]:
    """Yield the entries of parameters' state, each with the parameter's name and further keys.

    Names of parameters contain dots, and so may the keys; names in `known` are recognized.
    """
    for entry, text, keys in entries_below(paths, f"{prefix}state"):
        if len(keys) > 1:
            yield entry, str(keys[0]), keys[1:]
        else:
            name, _, last = text.rpartition(".")
            yield entry, *(split_at_name(text, known) or (name, (last,)))


def entries_below(paths: Mapping[str, Keys], head: str) -> Iterator[tuple[str, str, Keys]]:
    """Yield the entries below the name `head`, each with the rest of its name and of its keys.

    The keys are empty where only the name is known.
    """
    for entry, path in paths.items():
        if entry.startswith(f"{head}."):
            depths = range(1, len(path))
            depth = next((d for d in depths if join_keys(path[:d]) == head), len(path))
            yield entry, entry.removeprefix(f"{head}."), path[depth:]


def element(values: Any, path: Keys) -> Any:
    """Return the value at a path in nested dicts and lists; None if there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
