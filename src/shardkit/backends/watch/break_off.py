"""How waits end that cannot end by themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.watch.place import instruction_of, main_frame

logger = logging.getLogger("shardkit")

_PROBE_TAG = 7
_STUCK_S = 20.0
_EXIT_CODE = 70


def break_off(group: dist.ProcessGroup | None) -> None:
    """End all waits for a process group: it cannot be used any more."""
    if group is None:
        return
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError):
            group.abort()
    if _compat.process_group_backend(group, torch.device("cpu")) is None:
        return
    # A receive that times out closes gloo's connections, all of them. One from a rank that has gone
    # fails at once and closes none, so each rank is tried.
    for offset in range(1, group.size()):
        source = (group.rank() + offset) % group.size()
        with contextlib.suppress(RuntimeError):
            probe = dist.irecv(torch.zeros(1), group=group, group_src=source, tag=_PROBE_TAG)
            assert probe is not None, "this rank is in the group"
            probe.wait(timedelta(milliseconds=1))


def end_if_stuck(rank: int, verdict: str, after_s: float = _STUCK_S) -> None:
    """End this process if its main thread is where it is now after a while, too.

    An engine that was told to abort may wait itself: for a card, or for a rank that is stopped.
    Nobody else could end the process then.

    Args:
        rank: This one.
        verdict: What was found, to be said once more.
        after_s: Seconds.
    """
    if not torch.accelerator.is_available():
        return  # Waits for hosts' engines do end.
    before = instruction_of(main_frame())

    def look() -> None:
        time.sleep(after_s)
        if instruction_of(main_frame()) == before:
            logger.critical("rank %d cannot be freed, so its process ends: %s", rank, verdict)
            os._exit(_EXIT_CODE)

    threading.Thread(target=look, name="shardkit-ends", daemon=True).start()
