"""Scripts of real work on 2 and 4 ranks, beside the same scripts by plain torch, in fp64."""

from __future__ import annotations

import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from scripts import SCRIPTS, KilledError, Run, pretrain

from reference import Differences, assert_within

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-11  # Sums come in another order, and errors grow for a few steps.


def compare(run: Run, plain: Run, num_before: int = 0) -> Differences:
    """Compare losses, those of the first run from a later step on, and final weights."""
    differences = Differences()
    for ours, theirs in zip(run.losses, plain.losses[num_before:], strict=True):
        differences.note("loss", ours, theirs)
    for ours, theirs in zip(run.models, plain.models, strict=True):
        differences.note_parameters(ours, theirs)
    return differences


def run_both(name: str, folder: str) -> Differences:
    plain, run = Run(is_plain=True), Run(is_plain=False)
    SCRIPTS[name](plain, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCRIPTS[name](run, folder)
    return compare(run, plain)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_by_plain_torch(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, world_size: int
) -> None:
    by_rank = spawn(run_both, world_size, name, str(tmp_path))
    assert_within(by_rank, loss=TOLERANCE, parameter=TOLERANCE)


# --- a run that is killed -------------------------------------------------------------------------


def pretrain_until_killed(folder: str, kill_at: int) -> list[torch.Tensor]:
    run = Run(is_plain=False)
    with pytest.raises(KilledError):
        pretrain(run, folder, kill_at)
    return run.losses


def pretrain_on(folder: str, num_before: int) -> Differences:
    plain, run = Run(is_plain=True), Run(is_plain=False)
    pretrain(plain, folder)
    pretrain(run, folder)
    dist.barrier()
    return compare(run, plain, num_before)


def test_pretraining_goes_on_on_another_number_of_ranks(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    """Two ranks are killed in step 5, after a save at step 4; four go on from there."""
    before = spawn(pretrain_until_killed, 2, str(tmp_path), 5)
    assert [len(losses) for losses in before] == [5, 5]
    by_rank = spawn(pretrain_on, 4, str(tmp_path), 4)
    assert_within(by_rank, loss=TOLERANCE, parameter=TOLERANCE)
