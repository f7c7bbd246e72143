"""What to change where a run does not fit: each change is tried by a dry run of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardkit._policy import CPUOffloadPolicy
from shardkit._tree import iter_tensors, map_tensors
from shardkit.planning._plan import Advice
from shardkit.planning._run import Run, dry_run

Change = Callable[[Run], Run | None]
"""Returns a run that is changed; None: there is nothing to change."""


def _recompute(run: Run) -> Run | None:
    return None if run.recompute is not None else replace(run, recompute={})


def _reshard(run: Run) -> Run | None:
    if run.shard is not None or "strategy" in run.options:
        return None
    is_resharded = run.options.get("reshard_after_forward") is not False
    return None if is_resharded else _with_options(run, reshard_after_forward=True)


def _shard_over_all(run: Run) -> Run | None:
    if len(run.mesh) == 1 or run.shard is not None or "strategy" in run.options:
        return None
    return replace(run, mesh=(math.prod(run.mesh),))


def _offload(run: Run) -> Run | None:
    if run.on_cpu or run.shard is not None or "offload_policy" in run.options:
        return None
    return _with_options(run, offload_policy=CPUOffloadPolicy())


def _halve_batch(run: Run) -> Run | None:
    sizes = {tensor.shape[0] for tensor in iter_tensors(run.batch) if tensor.dim()}
    if len(sizes) != 1 or (size := sizes.pop()) % 2:
        return None
    half = map_tensors(lambda t: t[: size // 2] if t.dim() else t, run.batch)
    return replace(run, batch=half, accumulate=run.accumulate * 2)


_CHANGES: tuple[tuple[str, str, Change], ...] = (
    ("compute activations of blocks again in backward", "a third more compute", _recompute),
    ("reshard after forward", "one all-gather more of each group", _reshard),
    ("shard over all ranks, without replicas", "all-gathers over more ranks", _shard_over_all),
    ("keep shards and optimizer state on the host", "copies, and a step on the CPU", _offload),
    ("half the batch, twice the micro-batches", "twice the all-gathers", _halve_batch),
)


def advise(run: Run, budget_nbytes: int) -> tuple[Advice, ...]:
    """Try changes in the order of their costs, each alone; all together if none is enough.

    Changes that the model does not allow are left out.
    """
    found: list[Advice] = []
    together = run
    names: list[str] = []
    for change, costs, apply in _CHANGES:
        changed = apply(run)
        peak = None if changed is None else _peak(changed)
        if peak is None:
            continue
        found.append(Advice(change, costs, peak, peak <= budget_nbytes))
        together, names = apply(together) or together, [*names, change]
    if len(names) > 1 and not any(each.fits for each in found):
        peak = _peak(together)
        if peak is not None:
            found.append(Advice("all of these", "all of that", peak, peak <= budget_nbytes))
    return tuple(found)


def _peak(run: Run) -> int | None:
    """Return the most bytes of a run; None: it cannot be, whatever the user's code raises."""
    with contextlib.suppress(Exception):
        seen = dry_run(run)
        return max(seen.meter.totals()[seen.begin :])
    return None


def _with_options(run: Run, **options: Any) -> Run:
    return replace(run, options={**run.options, **options})
