"""Every script of examples/ has its section on the page, and is run by a session."""

from __future__ import annotations

import pytest
from code_blocks import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "howto" / "examples.md").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_shown_with_its_command(name: str) -> None:
    assert f"[`{name}`](#" in PAGE, f"{name} is not in the table of docs/howto/examples.md"
    assert f" examples/{name}" in PAGE, f"no command of docs/howto/examples.md runs {name}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_run_by_a_session(name: str) -> None:
    sessions = (ROOT / "noxfile.py").read_text()
    named = (f'"examples/{name}"', f'"{name.removesuffix(".py")}"')
    assert any(each in sessions for each in named), f"no session of noxfile.py runs {name}"
