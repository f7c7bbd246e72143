"""A run that ends while its last checkpoint is being written, however it ends."""

from __future__ import annotations

import pathlib
import signal

import pytest

from launching import Ended, start_ranks
from shardkit import checkpoint

pytestmark = pytest.mark.helpers

SCRIPT = pathlib.Path(__file__).with_name("forgotten_save.py")


def run(how: str, path: pathlib.Path, world_size: int) -> list[Ended]:
    return start_ranks([str(SCRIPT), how, str(path)], world_size, limit_s=60)


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("last line", [0, 0]),
        pytest.param("sys.exit", [3, 3], marks=pytest.mark.parting),
        pytest.param("one raises", [0, 1], marks=pytest.mark.parting),
        ("destroys", [0, 0]),
        ("terminated", [-signal.SIGTERM] * 2),
        pytest.param("terminated later", [-signal.SIGTERM] * 2, marks=pytest.mark.parting),
        pytest.param("own handler", [4, 4], marks=pytest.mark.parting),
    ],
)
def test_the_last_save_is_there_however_a_run_ends(
    tmp_path: pathlib.Path, how: str, codes: list[int]
) -> None:
    path = tmp_path / "x"
    ranks = run(how, path, 2)
    assert [rank.code for rank in ranks] == codes, ranks
    assert checkpoint.latest(tmp_path) == path, ranks
    for rank in ranks:
        assert ("Traceback" in rank.output) == (rank.code == 1), rank.output
        assert str(path) not in rank.output
        if how == "destroys":
            assert "destroyed True" in rank.output


def test_a_process_alone_waits_for_its_last_save(tmp_path: pathlib.Path) -> None:
    (alone,) = run("last line", tmp_path / "x", 1)
    assert (alone.code, alone.output) == (0, "")
    assert checkpoint.latest(tmp_path) == tmp_path / "x"


@pytest.mark.parametrize(
    "how", [pytest.param("too slow", marks=pytest.mark.parting), "too slow, destroys"]
)
def test_what_takes_too_long_is_named(tmp_path: pathlib.Path, how: str) -> None:
    path = tmp_path / "x"
    ranks = run(how, path, 2)
    for rank in ranks:
        assert rank.code == 0, rank
        assert f"checkpoint '{path}' is not complete after 2 s" in rank.output
        assert rank.output.count(str(path)) == (1 if rank is ranks[1] else 2), rank.output
    assert f"waits at most 2 s for checkpoint '{path}'" in ranks[0].output
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parting
def test_a_group_that_ends_unseen_is_no_silent_loss(tmp_path: pathlib.Path) -> None:
    """A function that was imported by its name before cannot be followed."""
    path = tmp_path / "x"
    for rank in run("imported, destroys", path, 2):
        assert rank.code == 0, rank
        assert f"checkpoint '{path}' was not saved" in rank.output or path.exists()


def test_an_error_that_nobody_asked_for_is_told_at_the_end(tmp_path: pathlib.Path) -> None:
    ranks = run("full", tmp_path / "x", 2)
    assert [rank.code for rank in ranks] == [0, 0]
    assert ranks[0].output.count("was not saved: [rank 1] OSError: [Errno 28]") == 1
    assert ranks[1].output == ""
