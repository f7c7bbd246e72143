"""`load`: a saved state into a model, optimizers and other objects."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit.backends.groups import exchange
from shardkit.checkpoint._agreement import agreed, any_rank, quote, raise_any, rank_of
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.manifest import DAMAGED, MANIFEST_FILE
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._dcp.reader import check_is_checkpoint
from shardkit.checkpoint._files.disk import asides_in
from shardkit.checkpoint._full import load_full
from shardkit.checkpoint._save import check_arguments, wait_for_last_save
from shardkit.checkpoint._state.misfits import Misfits
from shardkit.checkpoint._state.parts import ExtrasPart, ModelPart, OptimizerPart
from shardkit.checkpoint._state.sections import entries_of_models, entries_of_optimizers
from shardkit.checkpoint._state.sources import DistributedCheckpoint

if TYPE_CHECKING:
    import os
    import pathlib
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn

    from shardkit._progress import Progress

_logger = logging.getLogger("shardkit")
T = TypeVar("T")


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
    """Load a checkpoint that `save` wrote, another of DCP, or a full file; call it on all ranks.

    The number of ranks, the mesh, and how parameters are grouped may be others than when it was
    saved: each rank reads what it holds. Nothing in the files is executed. What has a manifest is
    verified by checksums.

    Args:
        path: The checkpoint's directory, see `latest`; or whole tensors, see `load_full`.
        model: Module that gets its parameters and buffers in place; those on the meta device get
            memory.
        optimizer: One optimizer or several; they need not have been stepped.
        strict: Error if entries are missing, or left over on all ranks. Entries of another shape
            are always an error.
        process_group: The ranks that load; default: all.
        progress: Argument of `save`, here of bytes read.
        **extra: Objects with ``state_dict`` and ``load_state_dict``, by the names that they were
            saved under.

    Returns:
        The other extras by name. Tensors among them are whole, on the host.

    Raises:
        CheckpointError: On all ranks, with the reason of each rank that failed. It lists all
            entries that do not fit; then nothing has been changed. If it is damage found while
            reading, the model and optimizers may hold a part of the checkpoint; if an object among
            the extras refuses its state, all of it.

    Cost: four all-gathers of a few bytes, with optimizers six. Of memory beside the state: for
    one saved chunk, where it must be cut or converted.
    """
    wait_for_last_save()
    target = directory.normalized(path)
    what = f"{quote(target)} was not loaded"
    rank = rank_of(process_group)
    with Meter(progress, f"loading {target.name}", rank=rank) as meter:
        if is_full(target):
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
            together(lambda: _look(target) if rank == 0 else None)  # Before anybody reads.
            planned = together(plan, lambda made: made.identity)
            everyone = exchange(planned.misfits, process_group, "a checkpoint")
            raise_any(what, [_report(each.common(everyone), strict=strict) for each in everyone])
            if rank == 0 and planned.leaves_optimizers_out:
                _logger.info(
                    "%s has the state of an optimizer, which is left out: load() got none. Pass "
                    "the optimizer to go on training.",
                    quote(target),
                )
            return planned.carry_out(together)

        for _ in range(directory.READ_AGAIN):
            try:
                return attempt()
            except _ReplacedError as error:
                found = error.__cause__
        assert found is not None
        raise found


def _report(misfits: Misfits, *, strict: bool) -> str | None:
    remedy = "Make the model and the optimizer as they were when it was saved"
    if not misfits.wrong:
        remedy += ", or pass strict=False to leave these as they are"
    return misfits.report("entries do not fit", f"{remedy}.", strict=strict)


class _ReplacedError(Exception):
    """Another job has replaced a checkpoint while it was read: it is read once more."""


class _Together:
    """Runs each part of a load on all ranks of a group; none goes on where one failed."""

    def __init__(self, target: pathlib.Path, what: str, group: Any) -> None:
        self._target = target
        self._what = what
        self._group = group
        self._before = directory.stamp(target)

    def __call__(self, act: Callable[[], T], same: Callable[[T], object] | None = None) -> T:
        """Run something that does not communicate; return its result.

        Raises:
            CheckpointError: On all ranks.
            _ReplacedError: On all ranks: this is not the checkpoint that it was.
        """
        try:
            return agreed(self._group, self._what, lambda: self._noting_damage(act), same)
        except CheckpointError as error:
            if any_rank(self._group, self._is_replaced()):
                raise _ReplacedError from error
            raise

    def _is_replaced(self) -> bool:
        found = directory.stamp(self._target)
        if found is None:  # Where names cannot be exchanged, nothing has it for a moment.
            beside = asides_in(self._target.parent)
            return any(aside.name == self._target.name for aside in beside)
        return found != self._before

    def _noting_damage(self, act: Callable[[], T]) -> T:
        """Have `latest` pass over the checkpoint if something of it is damaged."""
        try:
            return act()
        except CheckpointError as error:
            if DAMAGED not in str(error) or not (self._target / MANIFEST_FILE).exists():
                raise
            # Another job may have put another one in its place.
            if not directory.note_damage(self._target, str(error), self._before):
                raise
            msg = f"{error} latest() passes over this one from now on."
            raise CheckpointError(msg) from error


def is_full(path: pathlib.Path) -> bool:
    """Whether a path is that of whole tensors: a file, or a directory as Hugging Face's."""
    return path.is_file() or (
        path.is_dir()
        and not (path / METADATA_FILE).exists()
        and any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.index.json"))
    )


def _look(path: pathlib.Path) -> None:
    """Finish what a crash left, and look whether there is a checkpoint; on one rank."""
    directory.recover(path)
    check_is_checkpoint(path)


class _LoadPlan:
    """What is read where, for all parts."""

    def __init__(
        self,
        source: DistributedCheckpoint,
        model: nn.Module | None,
        optimizers: Any,
        objects: Mapping[str, Any],
    ) -> None:
        _check_arguments(model, optimizers, objects)
        self.misfits = misfits = Misfits()
        self.identity = source.identity
        self._source = source
        self._model: ModelPart | None = None
        self._optimizers: OptimizerPart | None = None
        claimed = of_optimizers = entries_of_optimizers(source.entries)
        if model is None:
            claimed = claimed | entries_of_models(source.entries)
        else:
            self._model = ModelPart(source, model, misfits)
            claimed = claimed | self._model.claimed
            if optimizers is not None:
                self._optimizers = OptimizerPart(source, self._model, optimizers, misfits)
        self.leaves_optimizers_out = model is not None and optimizers is None and of_optimizers
        self._extras = ExtrasPart(source, claimed, objects, misfits)

    def carry_out(self, together: _Together) -> dict[str, Any]:
        """Read all, and give it to its objects; return the extras."""
        optimizers, extras = self._optimizers, self._extras
        if optimizers is None:
            return together(lambda: extras.put(self._load_model()))
        loaded = together(self._load_model)
        # Optimizers of whole matrices communicate where they show their state, and where they get
        # it. No rank does so before all have read what they need.
        room = optimizers.make_room()
        optimizers.put(together(lambda: self._source.fill(room)))
        return together(lambda: extras.put(loaded))

    def _load_model(self) -> dict[str, Any]:
        """Read the model's and the extras' entries; give the model its own."""
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
