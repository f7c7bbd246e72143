"""What NCCL's flight recorder in torch knows of this rank, in a line for each communicator.

Torch keeps the last collectives of each communicator (``TORCH_FR_BUFFER_SIZE``; 2000 of them where
it is not set). It tells which of them the card has begun and ended, of users' groups as well.
"""

from __future__ import annotations

import json
from typing import Any

from shardkit import _compat


def recorded() -> list[str]:
    """Return the lines of this process; none where NCCL is not in use."""
    record = _compat.nccl_flight_record()
    return [] if record is None else describe_record(json.loads(record))


def describe_record(record: dict[str, Any]) -> list[str]:
    """Return a line for each communicator in a record of collectives that are not done.

    Args:
        record: A record that torch dumped.
    """
    pending: dict[str, list[dict[str, Any]]] = {}
    for entry in record.get("entries", ()):
        if entry.get("state") != "completed":
            pending.setdefault(str(entry.get("pg_id")), []).append(entry)
    lines = []
    for number, status in sorted(record.get("pg_status", {}).items()):
        config = record.get("pg_config", {}).get(number, {})
        enqueued = int(status["last_enqueued_collective"])
        completed = int(status["last_completed_collective"])
        name = config.get("desc") or config.get("name") or number
        line = f"NCCL, {name}: {max(enqueued, 0)} collectives issued, {max(completed, 0)} done"
        if of_group := pending.get(number):
            oldest = min(of_group, key=lambda entry: int(entry.get("record_id", 0)))
            what = str(oldest.get("profiling_name", "?")).removeprefix("nccl:")
            line += f"; the oldest that is not done is {what} ({oldest.get('state')})"
        lines.append(f"{line}.")
    return lines
