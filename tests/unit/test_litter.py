"""The session of tests itself fails where a test leaves a file in the repository."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]


def run_session(root: pathlib.Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test of its own in a project of its own."""
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "kept.txt").write_text("was there before")
    (root / "test_it.py").write_text(f"import pathlib\n\ndef test_it(tmp_path):\n    {test}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "litter", "-p", "no:hypothesispytest"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("test", "left"),
    [
        ("pathlib.Path('nowhere.pt').write_bytes(b'')", "nowhere.pt"),
        ("pathlib.Path('deep/er').mkdir(parents=True)", str(pathlib.Path("deep", "er"))),
    ],
    ids=["file", "folder"],
)
def test_a_session_that_leaves_something_fails(
    test: str, left: str, tmp_path: pathlib.Path
) -> None:
    done = run_session(tmp_path, test)
    assert "1 passed" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"the tests left files behind in {tmp_path}: {left}\n" in done.stdout


@pytest.mark.parametrize(
    "test",
    [
        "(tmp_path / 'file').write_text('in its own folder')",
        "pathlib.Path('kept.txt').write_text('is there after')",
        "pathlib.Path('kept.txt').unlink()",
    ],
)
def test_others_do_not(test: str, tmp_path: pathlib.Path) -> None:
    done = run_session(tmp_path, test)
    assert done.returncode == 0, done.stdout


_MAX_NBYTES = 2**20


@pytest.mark.skipif(not (TESTS.parent / ".git").exists(), reason="needs the repository")
def test_the_repository_has_no_large_files() -> None:
    """A wheel or a checkpoint that is committed by mistake stays in all clones."""
    root = TESTS.parent
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    files = [root / name for name in listed.stdout.split("\0") if name]
    assert [str(f) for f in files if f.is_file() and f.stat().st_size > _MAX_NBYTES] == []
