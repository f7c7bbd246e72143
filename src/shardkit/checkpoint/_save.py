"""`save` and `async_save`: a model, its optimizers and other state into one directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit.checkpoint._agreement import rank_of
from shardkit.checkpoint._background import Background, SaveHandle
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._job import Job, write

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from torch import nn

    from shardkit._progress import Progress

_background = Background()


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

    Each rank writes what it holds into one file of a directory that all ranks see: a standard
    checkpoint of ``torch.distributed.checkpoint`` (``dcp.load`` reads it, also for FSDP2), and a
    manifest with checksums. Under its name there is at any moment, also after a crash, a complete
    checkpoint or what was there before: nothing if there was nothing.

    Args:
        path: The checkpoint's directory, such as ``checkpoints/step-1000``.
        model: Module, sharded or not.
        optimizer: One optimizer or several.
        keep_last: Number of checkpoints that stay: once this one is complete, the older ones
            beside it are deleted, and what killed runs left there. The directory should then be
            that of one run only, and of one `process_group`.
        overwrite: Permission to replace a checkpoint of this name.
        process_group: The ranks that save; default: all. On the first of them in rank order falls
            the work for all. Stages of a pipeline, which hold different models, save all together
            if each parameter has a name of its own; else one group and one path each.
        progress: Way to show progress: by default a bar on rank 0's terminal, if it takes longer
            than a second and rich is installed; False: none; or a function of the bytes that this
            rank has written and will write.
        **extra: Values that ``torch.load(weights_only=True)`` can load, those of the first rank; or
            objects with ``state_dict`` and ``load_state_dict``, such as schedulers. An integer
            `step` is noted in the manifest.

    Returns:
        The directory's absolute path.

    Raises:
        CheckpointError: On all ranks, with the reason of each rank that failed. What was there
            before is still there, and nothing of the new one. Also if an asynchronous save before
            failed and nobody asked for its result.

    Cost: the planning of DCP (a gather and a scatter of descriptions of all tensors), 16 MiB of
    memory for each rank; sharded tensors are not copied.
    """
    job = Job(directory.normalized(path), model, optimizer, extra, keep_last, overwrite, progress)
    job.check()
    error = _background.last_error()

    def collect() -> dict[str, Any]:
        _raise_last(error)
        return job.collect()

    with Meter(progress, f"saving {job.path.name}", rank=rank_of(process_group)) as meter:
        return write(job, collect, process_group, meter)


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
    """Save as `save` does, but return when the state has been copied to memory of its own.

    A thread writes the copy. It is one at a time: another save waits for it. Call it on all ranks.

    A process that ends by its last line, ``sys.exit`` or an exception, and
    ``dist.destroy_process_group()``, wait for it, at most 600 s. So does SIGTERM, at most 25 s, if
    the process has no handler of its own. What is not complete then, or could not be written, is
    named in the log (`shardkit`). ``result()`` waits as long as it takes.

    Args:
        path: Same as for `save`.
        model: Same as for `save`.
        optimizer: Same as for `save`.
        keep_last: Same as for `save`.
        overwrite: Same as for `save`.
        process_group: Same as for `save`.
        progress: Same as for `save`, but by default nothing is shown.
        **extra: Same as for `save`.

    Returns:
        A handle: ``result()`` waits for the checkpoint and raises if it could not be written. If
        nobody asks, the next save raises this error; ask on all ranks or on none.

    Raises:
        CheckpointError: An argument is wrong, or the last asynchronous save failed unheard.

    Cost: memory on the host for a copy of what this rank holds; it is kept for the next time,
    until `release_staging_memory`. The first call makes a process group.
    """
    job = Job(directory.normalized(path), model, optimizer, extra, keep_last, overwrite, progress)
    job.check()
    _raise_last(_background.last_error())
    directory.check_free(job.path, overwrite=overwrite)
    return _background.start(job, _background.group_like(process_group))


def wait_for_last_save() -> None:
    """Wait for the asynchronous save under way; its error stays for who asks for its result."""
    _background.wait()


def release_staging_memory() -> None:
    """Give back the memory that asynchronous saves copy to, after the one under way.

    Raises:
        CheckpointError: It failed, and nobody has asked for its result.
    """
    _background.staging.release()
    _raise_last(_background.last_error())


def _raise_last(error: BaseException | None) -> None:
    if error is not None:
        msg = f"the last asynchronous save failed: {error}"
        raise CheckpointError(msg) from error
