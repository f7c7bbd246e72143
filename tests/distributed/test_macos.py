"""What a laptop needs: everything on CPU ranks works without the files and calls of Linux."""

from __future__ import annotations

import typing

import laptop_training
import pytest
import torch

import as_macos
from launching import start_ranks

if typing.TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.helpers

LIMIT_S = 240


def test_training_and_saving_need_no_call_of_linux(tmp_path: pathlib.Path) -> None:
    """The numbers are those of Linux, and nothing is left beside the checkpoints."""
    found = {}
    for system, below in (("Linux", ()), ("macOS", (as_macos.__file__,))):
        folder = tmp_path / system
        folder.mkdir()
        script = (*below, laptop_training.__file__, str(folder))
        ranks = start_ranks(script, 2, limit_s=LIMIT_S)
        assert [rank.code for rank in ranks] == [0, 0], ranks
        found[system] = [torch.load(folder / f"rank-{rank}") for rank in range(2)]
        assert sorted(each.name for each in folder.iterdir()) == SAVED
    name, losses = found["Linux"][0]
    assert name == "b"
    assert losses[3] == losses[2] != losses[1]
    assert found["macOS"] == found["Linux"] == [found["Linux"][0]] * 2


SAVED = ["b", "model.pt", "rank-0", "rank-1", "trace"]


def test_the_doctor_needs_no_file_of_linux() -> None:
    command = (as_macos.__file__, "-m", "shardkit", "doctor", "--device", "cpu")
    ranks = start_ranks(command, 2, limit_s=LIMIT_S)
    # What it finds of this machine is the machine's own.
    assert "/dev/shm none" in ranks[0].output, ranks
    assert not any("Traceback" in rank.output for rank in ranks), ranks
