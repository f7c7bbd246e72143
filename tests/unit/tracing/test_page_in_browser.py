"""The page of `trace` in Chromium: it opens, draws, searches and zooms, and fits a phone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import typing

import pytest
from synthetic_runs import SyntheticRun

from shardkit.tracing.page import write_page
from shardkit.tracing.trace import Trace

if typing.TYPE_CHECKING:
    import pathlib

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
LATE = 2

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
]

_ERRORS = """<script>
const errors = []; addEventListener("error", e => errors.push(e.message));
</script>"""
_PROBE = """<script>
const rows = () => [...$("shares").rows].filter(row => !row.hidden).length;
const colors = () => {
  const image = g.getImageData(0, AXIS, canvas.width, canvas.height - AXIS);
  return new Set(new Uint32Array(image.data.buffer)).size;
};
const type = (id, text) => {
  $(id).value = text; $(id).dispatchEvent(new Event("input")); paint();
};
const seen = {ready: +document.documentElement.dataset.ready, colors: colors(), rows: rows(),
  width: innerWidth, needs: document.documentElement.scrollWidth};
type("search", "layers.1"); seen.found = rows(); type("search", "");
$("in").onclick(); seen.zoomed = (t1 - t0) / D.us; $("all").onclick();
type("ranks", "1-2, 0"); seen.shown = shown.length; type("ranks", "");
const box = canvas.getBoundingClientRect();
const [x, y] = [box.left + width / 2, box.top + AXIS + 8];
canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y}));
seen.tip = $("tip").textContent; seen.errors = errors;
parent.postMessage(JSON.stringify(seen).replace(/[^ -~]/g, "?"), "*");
</script></body>"""
_FRAME = """<!doctype html><body>
<iframe src="probed.html" style="border:0;width:{width}px;height:800px"></iframe><script>
addEventListener("message", e => {{ document.body.textContent = "SEEN" + btoa(e.data); }});
</script>"""


def seen_by(trace: Trace, folder: pathlib.Path, width: int) -> dict[str, typing.Any]:
    """Return what a browser sees of the page, as wide as this, in CSS pixels."""
    assert BROWSER is not None
    write_page(trace, folder / "trace.html")
    page = (folder / "trace.html").read_text()
    page = page.replace("<head>", f"<head>{_ERRORS}").replace("</body>", _PROBE)
    (folder / "probed.html").write_text(page)
    (folder / "frame.html").write_text(_FRAME.format(width=width))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile")
    result = subprocess.run(
        [BROWSER, *options, "--timeout=60000", "--dump-dom", f"file://{folder}/frame.html"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search("SEEN([A-Za-z0-9+/=]+)", result.stdout)
    assert found is not None, result.stdout[-2000:] + result.stderr[-2000:]
    seen: dict[str, typing.Any] = json.loads(base64.b64decode(found[1]))
    return seen


def late(rank: int, step: int, *where: str) -> float:
    del step
    return 0.02 * (rank == LATE and where == ("backward", "layers.1"))


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_draws_searches_zooms_and_fits(tmp_path: pathlib.Path, width: int) -> None:
    seen = seen_by(Trace.of(SyntheticRun(4, num_steps=8, delay=late).records()), tmp_path, width)
    assert seen["errors"] == []
    assert seen["needs"] <= seen["width"] == width
    assert seen["colors"] > 5
    assert 0 < seen["found"] < seen["rows"]
    assert seen["zoomed"] == pytest.approx(0.5)
    assert seen["shown"] == 3
    assert "rank 0" in seen["tip"]


def test_ten_steps_of_1024_ranks_open_in_five_seconds(tmp_path: pathlib.Path) -> None:
    trace = Trace.of(SyntheticRun(1024, num_steps=10, delay=late).records())
    for width in (1280, 390):
        seen = seen_by(trace, tmp_path, width)
        print(f"{width} wide: ready after {seen['ready']} ms")
        assert seen["ready"] < 5000
        assert seen["errors"] == []
        assert seen["needs"] <= seen["width"] == width
        assert seen["colors"] > 5
