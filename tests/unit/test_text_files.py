"""Files of text are read and written in UTF-8, whatever the locale is."""

from __future__ import annotations

import ast
import pathlib

SOURCE = pathlib.Path(__file__).parents[2] / "src" / "shardkit"
PLACES = {"read_text": 0, "write_text": 1}
"""Place of the encoding among the arguments of functions that need one."""


def lacks_encoding(call: ast.Call) -> bool:
    """Whether a call opens text without saying how it is encoded."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "open":
        modes = [*call.args[:2], *(each.value for each in call.keywords if each.arg == "mode")]
        given = {mode.value for mode in modes if isinstance(mode, ast.Constant)}
        is_text = any(set(str(mode)) <= set("rwxat+") for mode in given)
        return is_text and all(each.arg != "encoding" for each in call.keywords)
    if ast.unparse(call.func).startswith("subprocess."):
        given = {each.arg for each in call.keywords}
        return bool(given & {"text", "universal_newlines"}) and "encoding" not in given
    place = PLACES.get(name)
    return place is not None and len(call.args) <= place and not call.keywords


def test_every_file_of_text_has_an_encoding() -> None:
    """Python warns of the others under ``-X warn_default_encoding``."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and lacks_encoding(node)
    ]
    assert not found, found
