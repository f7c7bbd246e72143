"""A session of tests leaves no file in the repository: a plugin of pytest, used by `conftest`."""

from __future__ import annotations

import os
import pathlib

import pytest

# Caches, environments, and what git writes.
NOT_LOOKED_AT = frozenset(
    {
        "__pycache__",
        ".git",
        ".hypothesis",
        ".import_linter_cache",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".venv",
    }
)
_BEFORE = pytest.StashKey[set[str]]()


def files_under(root: pathlib.Path) -> set[str]:
    """Return the paths of all files, and of empty directories, but for caches."""
    found = set()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LOOKED_AT]
        paths = files if files or folders else [""]
        here = pathlib.Path(folder).relative_to(root)
        found |= {str(here / name) for name in paths}
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = files_under(session.config.rootpath)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if there are files that were not there: at last, when nothing runs."""
    if hasattr(session.config, "workerinput"):  # Of pytest-xdist, beside others.
        return
    root = session.config.rootpath
    left = sorted(files_under(root) - session.config.stash.get(_BEFORE, files_under(root)))
    if left:
        message = f"the tests left files behind in {root}: {', '.join(left)}"
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nERROR: {message}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
