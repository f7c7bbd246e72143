"""Changes to a run that does not fit or could be faster; each is tried in a dry run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardkit._settings import CPUOffloadPolicy
from shardkit._text import shown_nbytes
from shardkit._tree import iter_tensors, map_tensors
from shardkit._wrapping.policies import size_policy
from shardkit.planning._plan import Advice, Choice
from shardkit.planning._run import Run, dry_run
from shardkit.planning._time import time_of

if TYPE_CHECKING:
    import torch

    from shardkit.planning._profile import HardwareProfile

Change = Callable[[Run], Run | None]
"""Function that returns a changed run; None: there is nothing to change."""


def _fuse(run: Run) -> Run | None:
    make = run.optimizer
    if make is None:
        return None

    def fused(params: Any) -> torch.optim.Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            if "fused" not in group or group["differentiable"]:
                msg = f"{type(optimizer).__name__} has no fused kernel."
                raise TypeError(msg)
            group.update(fused=True, foreach=False)
        return optimizer

    return replace(run, optimizer=fused)


def _recompute(run: Run) -> Run | None:
    return None if run.recompute is not None else replace(run, recompute={})


def _reshard(run: Run) -> Run | None:
    is_chosen = run.shard is not None or "strategy" in run.options
    if is_chosen or run.options.get("reshard_after_forward", True) is True:
        return None
    return _with_options(run, reshard_after_forward=True)


def _shard_over_all(run: Run) -> Run | None:
    if len(run.mesh) == 1 or run.mesh[0] == 1 or run.shard is not None or "strategy" in run.options:
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
    ("step with a fused kernel (fused=True)", "other rounding", _fuse),
    ("compute activations of blocks again in backward", "a third more compute", _recompute),
    ("reshard after forward", "one all-gather more of each group", _reshard),
    ("shard over all ranks, without replicas", "all-gathers over more ranks", _shard_over_all),
    ("keep shards and optimizer state on the host", "copies, and a step on the CPU", _offload),
    ("half the batch, twice the micro-batches", "twice the all-gathers", _halve_batch),
)


def advise(run: Run, peak_nbytes: int, budget_nbytes: int) -> tuple[Advice, ...]:
    """Try changes from the cheapest on, each alone; all together if none is enough.

    Changes that are impossible for the model, or leave its peak, are left out.
    """
    found: list[Advice] = []
    together = run
    for change, costs, apply in _CHANGES:
        changed = apply(run)
        peak = None if changed is None else _peak(changed)
        if peak is None or peak >= peak_nbytes:
            continue
        found.append(Advice(change, costs, peak, peak <= budget_nbytes))
        together = apply(together) or together
    if len(found) > 1 and not any(each.fits for each in found):
        peak = _peak(together)
        if peak is not None:
            found.append(Advice("all of these", "all of that", peak, peak <= budget_nbytes))
    return tuple(found)


def _peak(run: Run) -> int | None:
    """Return the peak memory of a run; None if the run fails, with whatever error."""
    with contextlib.suppress(Exception):
        return dry_run(run).peak_nbytes()
    return None


def _with_options(run: Run, **options: Any) -> Run:
    return replace(run, options={**run.options, **options})


# --- the fastest that fits ------------------------------------------------------------------------

_NUM_CHOICES = 3
_NUM_MESHES = 5
_GROUP_PARTS = (4, 16)
"""Sizes of groups that are tried beside the user's choice, as fractions of the model."""


def choose_among(run: Run, budget_nbytes: int, profile: HardwareProfile) -> tuple[Choice, ...]:
    """Return the fastest ways to shard that fit; empty if nothing that was tried fits.

    It changes one thing after the other: the mesh, resharding, the groups, recompute, offload.
    After each of them, the best run so far is the basis for the next one.
    """
    first = _tried(run, (), profile, None)
    tried = [] if first is None else [(run, first)]
    best, changes = run, tuple[str, ...]()
    for variants in (_meshes, _reshards, _groupings, _recomputes, _offloads):
        for change, variant in variants(best):
            if (choice := _tried(variant, (*changes, change), profile, first)) is not None:
                tried.append((variant, choice))
        if tried:  # Runs that fit compare by time, others by size.
            best, choice = min(
                tried,
                key=lambda each: (max(each[1].peak_nbytes - budget_nbytes, 0), each[1].seconds),
            )
            changes = choice.changes
    fitting = [choice for _, choice in tried if choice.peak_nbytes <= budget_nbytes]
    return tuple(sorted(fitting, key=lambda choice: choice.seconds)[:_NUM_CHOICES])


def _tried(
    run: Run, changes: tuple[str, ...], profile: HardwareProfile, first: Choice | None
) -> Choice | None:
    """Return the time and memory of a run; None if the run fails, with whatever error."""
    with contextlib.suppress(Exception):
        seen = dry_run(run, is_timed=True)
        time, peak = time_of(run, seen, profile), seen.peak_nbytes()
        why = (
            f"{time.seconds * 1e3:.1f} ms, collectives cost {time.exposed_s * 1e3:z.1f} ms, "
            f"peak {shown_nbytes(peak)}"
        )
        if first is not None:
            sent_ms = (time.exposed_s - first.exposed_s) * 1e3
            computed_ms = (time.seconds - first.seconds) * 1e3 - sent_ms
            why += (
                f"; compared with what was asked for: collectives {sent_ms:+z.1f} ms, compute "
                f"{computed_ms:+z.1f} ms, peak {peak / first.peak_nbytes - 1:+z.0%}"
            )
        return Choice(changes, time.seconds, time.exposed_s, peak, why)
    return None


Variants = list[tuple[str, Run]]


def _meshes(run: Run) -> Variants:
    if "strategy" in run.options:
        return []
    size = math.prod(run.mesh)
    shapes = [(size // n, n) if n < size else (size,) for n in range(2, size + 1) if size % n == 0]
    asked = run.mesh[-1:] if run.mesh[0] == 1 else run.mesh  # (1, n) is (n,).
    steps = [shape for shape in shapes if shape != asked][-_NUM_MESHES:]
    return [(f"a mesh of {'x'.join(map(str, shape))}", replace(run, mesh=shape)) for shape in steps]


def _reshards(run: Run) -> Variants:
    if "strategy" in run.options:
        return []
    chosen = run.options.get("reshard_after_forward", True)
    words = {True: "reshard after forward", False: "no reshard after forward"}
    return [
        (word, _with_options(run, reshard_after_forward=value))
        for value, word in words.items()
        if value is not chosen
    ]


def _groupings(run: Run) -> Variants:
    if {"units", "auto_wrap_policy", "fsdp_min_num_params"} & set(run.options):
        return []
    num_params = sum(param.numel() for param in run.model.parameters())
    return [
        (
            f"groups of {num_params // parts:,} parameters or more",
            _with_options(run, policy=size_policy(num_params // parts)),
        )
        for parts in _GROUP_PARTS
    ]


def _recomputes(run: Run) -> Variants:
    if run.recompute is None:
        return [("recompute", replace(run, recompute={}))]
    return [("no recompute", replace(run, recompute=None))]


def _offloads(run: Run) -> Variants:
    changed = _offload(run)
    return [] if changed is None else [("shards and optimizer state on the host", changed)]
