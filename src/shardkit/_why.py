"""What ``python -m shardkit why`` prints: where the ranks of a run are, and why they wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist  # noqa: TID251 - it asks the ranks of another process group

from shardkit._errors import StateError
from shardkit.backends.watch import runs
from shardkit.backends.watch.diagnosis import describe as describe_rank
from shardkit.backends.watch.rounds import Rounds
from shardkit.backends.watch.status import RankStatus
from shardkit.backends.watch.store import connect

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONNECT = timedelta(seconds=10)
_ASKER = -1


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a run.

    Attributes:
        title: Name of the run.
        verdict: Description of who waits for whom; None: nobody waits.
        answers: Answers of its ranks, in their order.
    """

    title: str
    verdict: str | None
    answers: Sequence[RankStatus]

    def lines(self, *, stacks: bool) -> list[str]:
        """Return it as text: the verdict, then each rank, with its stack if that is wanted.

        With a rank comes what NCCL's flight recorder says of it.
        """
        lines = [self.title, self.verdict or "No rank waits.", ""]
        for answer in self.answers:
            lines += [describe_rank(answer), *(f"  {line}" for line in answer.engine)]
            if stacks and answer.stack:
                lines += ["", answer.stack.rstrip(), ""]
        return lines


def report(pid: int | None = None) -> Report:
    """Ask the ranks of the latest run on this host, or of the one with a process; else look back.

    Raises:
        StateError: There is no such run, and no verdict on one.
    """
    running = [run for run in runs.running() if pid in (None, run.pid)]
    if running:
        return _ask(running[0])
    found = runs.last_diagnosis() if pid is None else None
    if found is None:
        msg = (
            "no run of shardkit is on this host, and no verdict on an earlier one. A rank is found "
            "from its first mesh on, by its own user, with the same temporary folder."
        )
        raise StateError(msg)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["at"]))
    answers = [RankStatus.load(text) for text in found["answers"]]
    return Report(f"The last verdict on this host, of {when}:", found["text"], answers)


def _ask(run: runs.RankFile) -> Report:
    title = f"Run {run.name}: {run.world_size} ranks, store on {run.host}:{run.port}."
    try:
        store = connect(run.name, run.host, run.port, _CONNECT)
        rounds = Rounds(store, run.world_size, _ASKER)
        diagnosis = rounds.ask()
    except dist.DistError as error:
        return Report(title, f"Its store does not answer: {error}", [])
    return Report(title, None if diagnosis is None else diagnosis.text, rounds.statuses)
