"""The watch looks at frames of the main thread while other threads start, end and collect."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from shardkit.backends.watch.status import main_frame

SCRIPT = """
import faulthandler
import socket
import sys
import threading
import time

from shardkit.backends.watch.status import main_frame

faulthandler.dump_traceback_later(40, exit=True)
sys.setswitchinterval(1e-6)  # The threads take turns at as many places as they can.
end = time.monotonic() + 4


class Cycle:
    def __init__(self):
        self.itself = self
        self.socket = socket.socket()  # Closing it lets another thread run.


def look():
    while time.monotonic() < end:
        Cycle()
        for _ in range(20):
            main_frame()
        time.sleep(1e-3)


threads = [threading.Thread(target=look) for _ in range(6)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    short = threading.Thread(target=len, args=("",))
    short.start()
    short.join()
for thread in threads:
    thread.join()
print("through")
"""


def test_threads_that_start_and_end_do_not_stop_a_look() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "through" in done.stdout, done.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_a_look_leaves_the_garbage_collector_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert main_frame() is not None
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
