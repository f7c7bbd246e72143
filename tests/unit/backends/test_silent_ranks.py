"""What is said of a rank that does not answer: its process is looked up only where that can be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from shardkit._processes import machine_id
from shardkit._settings import watch_settings
from shardkit.backends.watch import rounds
from shardkit.backends.watch.liveness import NOWHERE
from shardkit.backends.watch.runs import RunStore

ELSEWHERE = "another boot pid:[1]"


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("machine", "is_alive", "state"),
    [
        (machine_id(), False, "gone"),
        (machine_id(), True, "busy"),
        (ELSEWHERE, False, "silent"),  # Also where the host has the same name, as clones have.
        (ELSEWHERE, True, "silent"),
    ],
)
def test_equal_names_of_hosts_do_not_mislead(
    monkeypatch: pytest.MonkeyPatch, machine: str, is_alive: bool, state: str
) -> None:
    monkeypatch.setattr(watch_settings, "answer_s", 0.01)
    store = RunStore("run", dist.HashStore())
    pid = os.getpid() if is_alive else dead_process()
    store.set("hello/0", json.dumps([socket.gethostname(), pid, "", machine, NOWHERE]))
    asker = rounds.Rounds(store, 1, -1)
    asker.ask()
    assert [answer.state for answer in asker.statuses] == [state]
