"""`save` and `async_save` write a model, its optimizers and other state into one directory."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import mmap
import numbers
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardkit._compat import torch_checkpoints, torch_groups
from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import leaves_of, map_leaves
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.groups import OfWorld, new_group
from shardkit.backends.watch.watchdog import channel_of
from shardkit.checkpoint._agreement import agreed, error_of, quote, rank_of
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.writer import CheckpointWriter, SavePlanner, Whole
from shardkit.checkpoint._files.disk import SIZE_LIMIT, is_plain, is_sparse, saved_key
from shardkit.checkpoint._state.model_and_optimizer import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from shardkit.checkpoint._state.names import memory_of

if TYPE_CHECKING:
    import types
    from pathlib import Path

    from shardkit._progress import Progress


# --- what goes into a checkpoint ------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The state to save, and how to save it."""

    path: Path  # Directory of the checkpoint.
    model: nn.Module | None  # Module, or None.
    # One optimizer, several, or None.
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
    extra: Mapping[str, Any]  # Values, or objects with ``state_dict``.
    keep_last: int | None  # Number of checkpoints to keep; None: all.
    overwrite: bool  # Permission to replace a checkpoint of this name.
    progress: Progress  # Argument of `save`.

    def __post_init__(self) -> None:
        """Refuse wrong arguments before anything has been done, on every rank alike."""
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
        """Return the state in the form that DCP takes, without copies of sharded tensors."""
        state: dict[str, Any] = {}
        if self.model is not None:
            state["model"] = {
                name: value if _is_kept(value) else Whole(name, value)
                for name, value in get_model_state_dict(self.model).items()
            }
            if self.optimizers is not None:
                optim = get_optimizer_state_dict(self.model, self.optimizers)
                state["optim"] = {part: _with_keys(part, of_it) for part, of_it in optim.items()}
        if self.extra:
            state["extra"] = {name: _extra(name, value) for name, value in self.extra.items()}
        return state


def check_arguments(model: Any, optimizers: Any) -> None:
    """Refuse a wrong model or optimizer, on every rank alike."""
    if model is not None and not isinstance(model, nn.Module):
        msg = (
            f"model: expected a module, not {type(model).__name__}. Pass the model itself, not its "
            f"state dict; other state is passed by a name of its own."
        )
        raise CheckpointError(msg)
    if optimizers is None:
        return
    several = () if hasattr(optimizers, "param_groups") else optimizers
    # The list is iterated several times, which a generator does not allow.
    if not isinstance(several, Collection) or not all(hasattr(o, "param_groups") for o in several):
        msg = (
            f"optimizer: expected an optimizer or a list of them, not {type(optimizers).__name__}. "
            f"Pass it itself, not its state dict; schedulers and others by names of their own."
        )
        raise CheckpointError(msg)
    if model is None:
        msg = "optimizer: its state goes by parameter names, so pass the model as well."
        raise CheckpointError(msg)


def write(job: Job, collect: Callable[[], dict[str, Any]], group: Any) -> Path:
    """Write a checkpoint; see `save`."""
    rank, step = rank_of(group), job.extra.get("step")
    number = int(step) if isinstance(step, numbers.Integral) else None
    with Meter(job.progress, f"saving {job.path.name}", rank=rank) as meter:
        writer = CheckpointWriter(
            job.path,
            overwrite=job.overwrite,
            step=number if number is not None and abs(number) < SIZE_LIMIT else None,
            report=meter.add,
        )

        planner = SavePlanner(collect, meter.expect, writer)
        try:
            if dist.is_initialized():
                with channel_of(group).section("saving", "a checkpoint"):
                    dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
            else:
                torch_checkpoints.save_alone(writer, planner)
        except BaseException as error:
            if rank == 0:
                with contextlib.suppress(OSError):
                    writer.discard()
            if isinstance(error, CheckpointException):
                what = f"{quote(job.path)} was not saved"
                raise error_of(what, error) from error
            raise
        if job.keep_last is not None and rank == 0:
            directory.prune(job.path, job.keep_last)
    return job.path


def _extra(name: str, value: Any) -> Any:
    """Return an extra in the form that DCP takes: one entry, or one per tensor if it is sharded."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value = value.state_dict()
    return _in_entries(name, value) if _is_distributed_state(value) else Whole(name, value)


def _in_entries(name: str, value: Any) -> Any:
    """Return a value with one entry per sharded tensor, and one for each part that has none.

    Raises:
        CheckpointError: DCP would turn the keys that lead to sharded tensors into strings.
    """
    if not _is_distributed_state(value):
        is_entry = isinstance(value, (Tensor, dict)) and _is_kept(value)
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


_DEPTH_OF_VALUES = 2  # Below ``state.<parameter>`` and ``param_groups.<number>``.


def _with_keys(name: str, value: Any, depth: int = 0) -> Any:
    """Return a part of an optimizer's state in the form that DCP takes.

    A dict whose keys no path can have is one entry. So is an empty dict that is a value, since DCP
    would drop it. A tuple that holds sharded tensors becomes a list, because DCP takes only lists
    apart.

    Raises:
        CheckpointError: A dict whose keys no path can have holds sharded tensors.
    """
    if isinstance(value, list) or (type(value) is tuple and _is_distributed_state(value)):
        return [_with_keys(f"{name}.{i}", entry, depth + 1) for i, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not value and depth >= _DEPTH_OF_VALUES:
        return Whole(name, value)
    for key in value:
        try:
            saved_key(key)
        except ValueError as error:
            if not _is_distributed_state(value):
                return Whole(name, value)
            msg = (
                f"{name!r} of the optimizer holds sharded tensors by a key that cannot be saved "
                f"({key!r}, a {type(key).__name__}). Make the keys strings or numbers."
            )
            raise CheckpointError(msg) from error
    return {key: _with_keys(f"{name}.{key}", entry, depth + 1) for key, entry in value.items()}


def _is_kept(value: Any) -> bool:
    """Whether a value comes back unchanged after DCP has taken its dicts and lists apart."""
    if isinstance(value, dict):
        keys_stay = bool(value) and all(isinstance(key, str) for key in value)
        return keys_stay and all(map(_is_kept, value.values()))
    if isinstance(value, (list, tuple)):
        return not any(isinstance(entry, (dict, list, tuple, Tensor)) for entry in value)
    return not is_sparse(value)  # DCP cuts tensors into chunks, which sparse ones have not.


def _is_distributed_state(value: Any) -> bool:
    """Whether a value has sharded tensors in it, so that each rank holds a different part."""
    return any(hasattr(leaf, "__create_write_items__") for leaf in leaves_of(value))


# --- saves in the background ----------------------------------------------------------------------
#
# A process that ends, or destroys its default process group, waits for a save under way. The log
# names a save that never completes.

END_LIMIT_S = 600.0
"""How long the end of a process, or of the default process group, waits for a save."""

_SIGTERM_LIMIT_S = 25.0  # torchrun, SLURM and Kubernetes kill 30 s after SIGTERM.
_SILENT_S = 5.0  # A wait no longer than this logs nothing.

_logger = logging.getLogger("shardkit")


_ALIGNMENT = 64


class Staging:
    """Memory on the host for copies of a state's tensors.

    It is kept from one copy to the next, because writing to fresh memory takes several times as
    long as the copy itself. Training goes on while a copy is written to the disk, so giving the
    memory back in between would not lower the peak.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def release(self) -> None:
        """Give the memory back to the system; no copy uses it any more."""
        self._buffer = None
        # Torch keeps page-locked memory; newer versions (not 2.9) give it back when asked.
        if torch.accelerator.is_available() and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; its tensors overwrite those of the last one."""
        leaves = (leaf for leaf in leaves_of(state) if isinstance(leaf, Tensor))
        tensors = {id(leaf): memory_of(leaf) for leaf in leaves}
        starts, total = {}, 0
        for key, tensor in tensors.items():
            if is_plain(tensor) and not tensor.is_quantized:
                starts[key] = total
                total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_accelerator = {t.device for t in tensors.values()} - {torch.device("cpu")}
        if self._buffer is None or self._buffer.numel() < total:
            self.release()  # First, since there is no room for both.
            self._buffer = _allocate(total, pinned=bool(on_accelerator))
        copies = {}
        for key, tensor in tensors.items():
            if key not in starts:
                copies[key] = tensor.detach().cpu().clone()
                continue
            memory = self._buffer[starts[key] : starts[key] + tensor.nbytes]
            copies[key] = memory.view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor, non_blocking=True)
        for device in on_accelerator:
            if device.type not in {"meta", "xla"}:  # XLA's copies are done when they return.
                torch.accelerator.synchronize(device)

        def copied(leaf: Any) -> Any:
            is_tensor = id(leaf) in copies
            return _like(leaf, copies[id(leaf)]) if is_tensor else copy.deepcopy(leaf)

        result: dict[str, Any] = map_leaves(state, copied)
        return result


def _allocate(nbytes: int, *, pinned: bool) -> Tensor:
    if pinned and torch.accelerator.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # The first copy then takes fewer page faults.
    return torch.frombuffer(memory, dtype=torch.uint8)


def _like(tensor: Any, memory: Tensor) -> Any:
    """Return a tensor like `tensor` whose part on this rank is `memory`."""
    if isinstance(tensor, ShardedTensor):
        return ShardedTensor(memory, tensor.spec)
    if hasattr(tensor, "to_local"):
        return type(tensor).from_local(
            memory,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return memory


class SaveHandle:
    """A checkpoint that is being written."""

    def __init__(self, job: Job, state: dict[str, Any] | Exception, group: Any) -> None:
        """Start to write, or to tell the other ranks why this rank has nothing to write."""
        self._path = job.path
        self._error: BaseException | None = None
        self._is_asked = False
        self._is_given_up = False
        self._rank = rank_of(group)
        self._ended = threading.Event()
        # A daemon thread: the end of the process waits for it through `end`, which has a limit.
        self._thread = threading.Thread(
            target=self._write, args=(job, state, group), name="shardkit-save", daemon=True
        )
        self._catch_sigterm()
        self._thread.start()

    def _write(self, job: Job, state: dict[str, Any] | Exception, group: Any) -> None:
        def collected() -> dict[str, Any]:
            if isinstance(state, Exception):
                raise state
            return state

        try:
            write(job, collected, group)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        finally:
            if signal.getsignal(signal.SIGTERM) == self._end_by_sigterm:
                # Only the main thread may call signal.signal. A main thread that is blocked in a
                # collective would never run a Python handler. So SIGTERM ends the process at once,
                # as before.
                ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
            self._ended.set()

    def _catch_sigterm(self) -> None:
        """Let SIGTERM wait for this save, unless the user has set a handler."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            is_ours = isinstance(getattr(handler, "__self__", None), SaveHandle)
            if handler is signal.SIG_DFL or is_ours:
                signal.signal(signal.SIGTERM, self._end_by_sigterm)

    def _end_by_sigterm(self, number: int, _: types.FrameType | None) -> None:
        self.end(_SIGTERM_LIMIT_S, "SIGTERM")
        self.tell_error()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def done(self) -> bool:
        """Whether the save has ended: its checkpoint is complete, or it failed."""
        return self._ended.is_set() or not self._thread.is_alive()  # A fork has no such thread.

    def _ends_within(self, limit_s: float | None) -> bool:
        """Wait until the save has ended, at most `limit_s` seconds; return whether it has."""
        # Not `join`: if ctrl-C interrupts that, Python before 3.13 takes the thread for ended.
        return self.done() or self._ended.wait(limit_s)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save has ended, at most `timeout` seconds.

        Raises:
            TimeoutError: The save has not ended.
        """
        if not self._ends_within(timeout):
            msg = f"{quote(self._path)} is not complete after {timeout} s."
            raise TimeoutError(msg)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its path.

        Args:
            timeout: Limit in seconds; None: as long as it takes.

        Raises:
            CheckpointError: The checkpoint was not saved; all ranks raise the same error.
            TimeoutError: The checkpoint is not complete yet.
        """
        self.wait(timeout)
        self._is_asked = True
        if self._error is not None:
            raise self._error
        return self._path

    def unheard_error(self) -> BaseException | None:
        """Wait until the save has ended; return its error if nobody has asked for the result."""
        self.wait()
        heard, self._is_asked = self._is_asked, True
        return None if heard else self._error

    def end(self, limit_s: float, what: str) -> None:
        """Wait until the save has ended, at most `limit_s` seconds; log it if that is too short."""
        if self._is_given_up:
            return
        silent_s = min(_SILENT_S, limit_s / 2)
        try:
            if not self._ends_within(silent_s) and self._rank == 0:
                where = quote(self._path)
                _logger.warning("%s waits at most %.0f s for %s.", what, limit_s, where)
            self._ends_within(limit_s - silent_s)
        finally:  # Also after a ctrl-C.
            if not self.done():
                self._is_given_up = True
                _logger.error(
                    "rank %d: %s is not complete after %.0f s, and is given up. Ask for the "
                    "result() of the last async_save: it waits as long as it takes.",
                    *(self._rank, quote(self._path), limit_s),
                )

    def tell_error(self) -> None:
        """Log the error of a save that has ended, if nobody has asked for the result."""
        if self.done() and (error := self.unheard_error()) is not None:
            is_of_all = isinstance(error, CheckpointError)  # Then rank 0 logs it for all.
            if self._rank == 0 or not is_of_all:
                path = quote(self._path)
                text = str(error) if is_of_all else f"{path} was not saved: {error!r}"
                _logger.error("rank %d: %s", self._rank, text)


class Background:
    """What asynchronous saves share: the save under way, the memory, the process groups."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._last: SaveHandle | None = None
        self._groups: OfWorld[Any] = OfWorld()
        self._ends_are_seen = False

    def start(self, job: Job, group: Any) -> SaveHandle:
        """Copy a state, and write the copy in the background.

        If the copy fails on one rank, the other ranks have begun to write. All ranks raise its
        error, as any other error of a save.
        """
        state: dict[str, Any] | Exception
        try:
            state = self.staging.copy(job.collect())
        except Exception as error:  # noqa: BLE001 - raised on all ranks by `result`
            state = error
        if not self._ends_are_seen:
            self._ends_are_seen = True
            torch_groups.before_threads_end(self._end_process)
            torch_groups.around_end_of_world(before=lambda: self._end("destroy_process_group"))
        self._last = SaveHandle(job, state, group)
        return self._last

    def _end_process(self) -> None:
        self._end("the end of the process")
        if self._last is not None:
            self._last.tell_error()

    def _end(self, what: str) -> None:
        if self._last is not None:
            self._last.end(END_LIMIT_S, what)

    def wait(self) -> None:
        """Wait for the save under way, and keep its error for the caller of its `result`."""
        if self._last is not None:
            self._last.wait()

    def last_error(self) -> BaseException | None:
        """Wait for the save under way; return its error if nobody has asked for its result."""
        error = None if self._last is None else self._last.unheard_error()
        self._last = None  # Only now: if the wait is interrupted, the save is still under way.
        return error

    def group_like(self, group: Any) -> Any:
        """Return a gloo group of the ranks of `group`; the first call is collective.

        The background thread needs a group of its own. If two threads issue collectives on one
        group, the collectives come in a different order on each rank.
        """
        if not dist.is_initialized():
            return None
        groups, ranks = self._groups.now(), tuple(dist.get_process_group_ranks(group))
        if ranks not in groups:
            groups[ranks] = new_group(ranks, "gloo")
        return groups[ranks]


# --- save and async_save --------------------------------------------------------------------------

background = Background()


def save(  # noqa: PLR0913 - the state, where it goes, and how
    path: os.PathLike[str] | str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Progress = None,
    **extra: Any,
) -> Path:
    """Save a model, optimizers and other state; call it on all ranks.

    Each rank writes the state that it holds into one file of a directory that all ranks see. The
    directory is a standard checkpoint of ``torch.distributed.checkpoint`` (``dcp.load`` reads it,
    also for FSDP2) and has a manifest with checksums. At any moment, also after a crash, its name
    leads to a complete checkpoint or to what was there before (nothing, if there was nothing). What
    is not sharded, such as buffers, comes from the first rank.

    Args:
        path: The checkpoint's directory, such as ``checkpoints/step-1000``.
        model: Module, sharded or not.
        optimizer: One optimizer or several, each with parameters of its own.
        keep_last: Number of checkpoints to keep. Once this one is complete, the older ones beside
            it are deleted, and so are leftovers of killed runs. Damaged ones do not count, and
            what a link in the same directory leads to (``best``) stays. The directory should then
            belong to one run only, and to one `process_group`.
        overwrite: Permission to replace a checkpoint of this name. An empty directory needs none.
        process_group: The ranks that save; default: all. The first of them in rank order does the
            work that is done once for all. Stages of a pipeline hold different models. They save
            all together if each parameter has a name of its own; otherwise each stage needs its own
            group and path.
        progress: Way to show progress: by default a bar on rank 0's terminal, if the save takes
            longer than a second and rich is installed; False: none; or a function of two numbers,
            the bytes that this rank has written and all that it will write.
        **extra: Values that ``torch.load(weights_only=True)`` can load (the first rank's are
            saved), or objects with ``state_dict`` and ``load_state_dict``, such as schedulers. An
            integer `step` is noted in the manifest.

    Returns:
        The directory's absolute path.

    Raises:
        CheckpointError: On all ranks, with the reason of each rank that failed. What was there
            before is still there, and nothing of the new checkpoint is. Also if an earlier
            asynchronous save failed and nobody asked for its result.

    Cost: the planning of DCP (a gather and a scatter of descriptions of all tensors), and 16 MiB of
    memory for each rank. Sharded tensors are not copied.
    """
    job = Job(directory.normalized(path), model, optimizer, extra, keep_last, overwrite, progress)
    error = background.last_error()

    def collect() -> dict[str, Any]:
        _raise_last(error)
        return job.collect()

    return write(job, collect, process_group)


def async_save(  # noqa: PLR0913 - as `save`
    path: os.PathLike[str] | str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Progress = None,
    **extra: Any,
) -> SaveHandle:
    """Save as `save` does, but return when the state has been copied to separate memory.

    A thread writes the copy. One save runs at a time; another one waits for it. Call it on all
    ranks.

    The process waits for the save, at most 600 s, when it ends by its last line, ``sys.exit`` or an
    exception, and in ``dist.destroy_process_group()``. After SIGTERM it waits at most 25 s, unless
    it has a handler of its own. If a checkpoint is not complete by then, or could not be written,
    the log (`shardkit`) names it. ``result()`` waits as long as the save takes.

    The arguments are those of `save`; by default no progress is shown.

    Returns:
        A handle: ``result()`` waits for the checkpoint and raises if it could not be written. If
        nobody calls it, the next save raises this error. Call it on all ranks or on none.

    Raises:
        CheckpointError: An argument is wrong, the name is taken, or the last asynchronous save
            failed and nobody asked for its result.

    Cost: an all-gather of a few bytes, and memory on the host for a copy of what this rank holds.
    It is kept for the next save, until `release_staging_memory`. The first call makes a process
    group.
    """
    shown: Progress = False if progress is None else progress
    job = Job(directory.normalized(path), model, optimizer, extra, keep_last, overwrite, shown)
    _raise_last(background.last_error())
    is_first = rank_of(process_group) == 0  # Other hosts may not see yet what it sees.
    agreed(
        process_group,
        f"{quote(job.path)} was not saved",
        lambda: directory.check_free(job.path, overwrite=overwrite) if is_first else None,
    )
    return background.start(job, background.group_like(process_group))


def release_staging_memory() -> None:
    """Free the memory that asynchronous saves copy to, after the save under way has ended.

    Raises:
        CheckpointError: The save failed, and nobody has asked for its result.
    """
    error = background.last_error()
    background.staging.release()
    _raise_last(error)


def _raise_last(error: BaseException | None) -> None:
    if error is not None:
        msg = f"the last asynchronous save failed: {error}"
        raise CheckpointError(msg) from error
