"""ARCHITECTURE.md is the map of the house: what it names is there, and all rooms are on it."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardkit"
MAP = (ROOT / "ARCHITECTURE.md").read_text()
ROOMS = MAP.partition("<!-- rooms -->")[2].partition("<!-- end of rooms -->")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in ROOMS.splitlines()
    if line.startswith("| `")
]


def files_of(room: str) -> list[str]:
    """Return the names of a room's files and folders, without what only hands names on."""
    path = SOURCE / room
    if not path.is_dir():
        return []
    found = [each for each in path.iterdir() if each.suffix == ".py" or each.is_dir()]
    return sorted(each.stem for each in found if not each.name.startswith("__"))


def layers() -> list[str]:
    """Return the lines of the contract, as the map draws them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [rooms] = [c for c in settings["tool"]["importlinter"]["contracts"] if c["name"] == "rooms"]
    return [line.replace(" : ", "  ") for line in rooms["layers"]]


def test_the_map_draws_the_contract() -> None:
    drawn = ROOMS.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert [set(re.findall(r"\w+", line)) for line in drawn] == [
        set(re.findall(r"\w+", line)) for line in layers()
    ]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_what_is_there(row: list[str]) -> None:
    for name in re.findall(r"`(\w+)(?:/|\.py)?`", row[0]):
        assert (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file(), name


@pytest.mark.parametrize("row", [row for row in ROWS if "/`" in row[0]], ids=lambda row: row[0])
def test_a_row_names_all_files_of_its_room(row: list[str]) -> None:
    room = row[0].strip("`/")
    missing = [name for name in files_of(room) if f"`{name}" not in row[2]]
    assert not missing, f"{room}: {missing}"


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", MAP)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_every_room_is_on_the_map() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(\w+)(?:/|\.py)?`", row[0])}
    there = {each.stem for each in SOURCE.iterdir() if not each.name.startswith("__")}
    assert there - {"py"} == named
