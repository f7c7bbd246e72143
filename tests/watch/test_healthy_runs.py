"""Ranks that take long, or live in unusual places: all go on, and nothing wrong is said.

Each rank asks early and often here (`ASK_SOON`), so that there is more to be wrong about. A process
that sleeps needs no core, so several trainings run at once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import subprocess
import typing

import healthy_cases
import pytest

from launching import ASK_SOON, Ended, start_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.parting

LIMIT_S = 300
AT_ONCE = 5
_FALSE = ("[W", "[E", "Traceback", "Error", "the watch over ranks met", "is gone")
_FALSE += ("has ended", "is lost")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training."""

    name: str  # What happens, of `healthy_cases`.
    world_size: int = 2  # Number of ranks.
    is_hybrid: bool = False  # The mesh has two axes.
    there: tuple[int, ...] = ()  # Ranks in another space of process ids.
    long_s: int = 25  # Seconds that a rank takes.

    def __str__(self) -> str:
        there = f"-{self.there} elsewhere for {self.long_s} s" if self.there else ""
        return f"{self.name}-{self.world_size}{'-hybrid' if self.is_hybrid else ''}{there}"

    def run(self, folder: pathlib.Path, other_host: list[str]) -> list[Ended]:
        folder.mkdir()
        more = ["hybrid"] if self.is_hybrid else []
        program = (healthy_cases.__file__, self.name, str(folder), *more)
        return start_ranks(
            program,
            self.world_size,
            limit_s=LIMIT_S,
            below=lambda rank: other_host if rank in self.there else (),
            LONG_S=str(self.long_s),
            **ASK_SOON,
        )


CASES = [
    *(Case(name, n) for name in healthy_cases.BETWEEN_STEPS for n in (2, 4)),
    *(Case(name, 4, is_hybrid=True) for name in healthy_cases.ON_HYBRID_MESHES),
    *(Case(name) for name in (*healthy_cases.BEGINS, *healthy_cases.ENDS)),
    *(
        Case(name, n, there=there, long_s=long_s)
        for n, there in ((2, (1,)), (4, (2, 3)))  # Alone there, or with one that looks at it.
        for name, long_s in (
            ("hold_the_lock", 12),
            ("hold_the_lock", 30),
            ("hold_the_lock_twice", 50),
            ("be_stopped", 25),
            ("load_a_large_pickle", 15),
        )
    ),
]


@pytest.fixture(scope="module")
def other_host() -> Iterator[list[str]]:
    """Make a space of process ids; yield the command that runs another one there."""
    holder = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "3000"],
        stderr=subprocess.DEVNULL,
    )
    try:
        child = None
        while child is None:
            if holder.poll() is not None:
                pytest.skip("no spaces of process ids here: `unshare` fails")
            listed = pathlib.Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
            child = next(iter(listed.split()), None)
        yield ["nsenter", "--target", child, "--pid", "--mount"]
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture(scope="module")
def trainings(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    other_host: list[str],
) -> Iterator[dict[Case, concurrent.futures.Future[list[Ended]]]]:
    """Start what the selected tests want, several at once."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = [call.params["case"] for call in calls if call and "case" in call.params]
    wanted = [case for case in wanted if isinstance(case, Case)]
    wanted += [Case("nothing", case.world_size, case.is_hybrid) for case in wanted]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            case: pool.submit(case.run, tmp_path_factory.mktemp("run") / "here", other_host)
            for case in dict.fromkeys(wanted)
        }


def results(ranks: list[Ended]) -> list[str]:
    """Return what each rank found; check that it ended well, and that nothing wrong was said."""
    found = []
    for rank, ended in enumerate(ranks):
        everything = "\n".join(f"rank {i}:\n{each.output}" for i, each in enumerate(ranks))
        assert ended.code == 0, everything
        lines = ended.output.splitlines()
        [line] = [line for line in lines if "result [" in line]
        found.append(line.removeprefix("(Pdb) "))
        said = "\n".join(each for each in lines if each is not line)
        said = said.replace("or that host is lost", "")
        for text in _FALSE:
            assert text not in said, f"rank {rank} says {text!r}:\n{everything}"
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_takes_long(
    case: Case, trainings: dict[Case, concurrent.futures.Future[list[Ended]]]
) -> None:
    ranks = trainings[case].result()
    plain = trainings[Case("nothing", case.world_size, case.is_hybrid)].result()
    assert results(ranks) == results(plain)
    said = "".join(ended.output for ended in ranks)
    if case.name in ("sleep", "compute_in_python", "use_own_collectives"):
        assert f"rank {case.world_size - 1} is at healthy_cases.py:" in said, said
        assert "The run goes on." in said
    if case.name == "be_stopped" and not case.there:  # There `nsenter` lets it go on at once.
        assert f"rank {case.world_size - 1} is stopped (SIGSTOP, a debugger)" in said, said
    assert said.count("The run goes on.") <= 8 * case.world_size, said  # No oftener than it helps.


# --- no place for notes ---------------------------------------------------------------------------


@functools.cache
def expected() -> list[str]:
    """Return what two ranks print where nothing happens."""
    return results(train({}))


def train(environment: dict[str, str], below: tuple[str, ...] = ()) -> list[Ended]:
    program = (healthy_cases.__file__, "nothing", "/nonexistent")
    return start_ranks(program, 2, limit_s=LIMIT_S, below=lambda _: below, **environment)


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run as some number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    nobody = 'mount --bind /dev/null /etc/passwd && exec "$@"'
    below = ("unshare", "--mount", "sh", "-c", nobody, "sh")
    probe = subprocess.run([*below, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mounts here: {probe.stderr.decode()}")
    assert results(train({}, below)) == expected()


@pytest.mark.parametrize("obstacle", ["read-only", "another user's", "a link", "a file"])
def test_no_place_for_notes(obstacle: str, tmp_path: pathlib.Path) -> None:
    """The folder of temporary files cannot be written, or holds what is not this user's."""
    from shardkit.backends.watch import runs

    place = tmp_path / "tmp"
    place.mkdir()
    notes = place / runs.folder().name
    below: tuple[str, ...] = ()
    if obstacle == "another user's":
        notes.mkdir(mode=0o700)
        os.chown(notes, 54321, 54321)
    elif obstacle == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        notes.symlink_to(tmp_path / "elsewhere")
    elif obstacle == "a file":
        notes.write_text("")
    else:
        read_only = f'mount --bind -o ro {place} {place} && exec "$@"'
        below = ("unshare", "--mount", "sh", "-c", read_only, "sh")
    assert results(train({"TMPDIR": str(place)}, below)) == expected()
    assert [*(tmp_path / "elsewhere").glob("*")] == []
    assert [*place.glob("*/*")] == []
