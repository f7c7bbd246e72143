"""What follows from the answers of all ranks. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.backends.watch.answer import Answer, ChannelState

SILENT_S = 8.0
"""A rank on another host that has not answered for so long does not come back."""
_MAX_NAMED = 8

_SAME_ORDER = (
    "Run the same modules in the same order on all ranks, as often, and put modules that ranks "
    "choose among (experts) in one group."
)
_ALL_CALL = (
    "What communicates must be called on all ranks: forward, backward, optimizer steps with "
    "clipping, norms, full_tensor, saving and loading; not under `if rank == 0`. Ranks with less "
    "data than others have to stop, or go on, together."
)
_LOST = "Look at that rank's own output. The others cannot go on; start again from a checkpoint."


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about a wait.

    Attributes:
        is_final: It will not end.
        text: Who waits for whom, where they are, and what to do.
        wait: Which wait it is about; the same for each look at the same one.
        told_by: The rank that tells it, where it is not an error of each that waits.
    """

    is_final: bool
    text: str
    wait: str = ""
    told_by: int = 0


def judge(answers: Sequence[Answer], patience_s: float) -> Verdict | None:
    """Return what follows from the answers of all ranks; None: nobody waits.

    Args:
        answers: In rank order.
        patience_s: Ranks that all wait, each for so many seconds, wait for each other. What they
            have sent would have come by then.
    """
    known = next((a.verdict for a in answers if a.verdict is not None), None)
    if known is not None:
        return Verdict(is_final=True, text=known)
    return _contradiction(answers) or _missing(answers, patience_s)


# --- ranks that issue different collectives -----------------------------------------------------


def _contradiction(answers: Sequence[Answer]) -> Verdict | None:
    """Find the first place at which two ranks issued, or are about to issue, different things."""
    for name in dict.fromkeys(name for answer in answers for name in answer.channels):
        members = [answer for answer in answers if name in answer.channels]
        position = _first_difference([answer.channels[name] for answer in members])
        if position is None:
            continue
        at = [(member.channels[name].at(position), member) for member in members]
        told = [(what, member) for what, member in at if what is not None]
        texts = _by_collective(told)
        ranks = _ranks(member.rank for member in members)
        title = f"ranks parted. Of the collectives of {ranks}, number {position + 1} is"
        text = "\n".join([title, *texts, _SAME_ORDER])
        return Verdict(is_final=True, text=text)
    return None


def _first_difference(states: Sequence[ChannelState]) -> int | None:
    start = max(state.position - len(state.recent) for state in states)
    end = max(state.position for state in states)
    for position in range(max(start, 0), end + 1):
        told = {state.at(position) for state in states} - {None}
        if len(told) > 1:
            return position
    return None


def _by_collective(told: Sequence[tuple[str | None, Answer]]) -> list[str]:
    """Return one line per collective: who issues it, and where the first of them is."""
    by_text: dict[str, list[Answer]] = {}
    for what, answer in told:
        by_text.setdefault(str(what), []).append(answer)
    lines = []
    for what, whose in by_text.items():
        first = whose[0]
        error = f"; before that it met {first.error}" if first.error else ""
        lines.append(
            f"  {_ranks(a.rank for a in whose)}: {what}, step {first.step}, at {first.place}{error}"
        )
    return lines


# --- ranks that do not come ---------------------------------------------------------------------


def _missing(answers: Sequence[Answer], patience_s: float) -> Verdict | None:
    """Find who waits for a collective that others have not issued, and where those are."""
    waiting = [a for a in answers if a.waits is not None and a.waits.channel in a.channels]
    lacking: dict[int, Answer] = {}
    for answer in waiting:
        for other in _not_there(answer, answers):
            lacking[other.rank] = other
    if not waiting:
        return None
    first = waiting[0]
    assert first.waits is not None
    wait = (
        f"{_ranks(a.rank for a in waiting)} waited {first.waits.for_s:.0f} s, rank {first.rank} "
        f"for {first.waits.of}, step {first.step}, at {first.place}"
    )
    key = f"{first.rank} {first.waits.channel} {first.waits.position}"
    if not lacking:
        text = f"{wait}. All ranks have issued it: the network is slow, or a host hangs."
        return Verdict(is_final=False, text=text, wait=key, told_by=first.rank)
    lost = [a for a in lacking.values() if _is_lost(a)]
    # A rank that waits itself may be the victim of one that does not.
    culprits = lost or [a for a in lacking.values() if a.waits is None] or [*lacking.values()]
    lines = [f"  {describe(a)}" for a in culprits[:_MAX_NAMED]]
    if len(culprits) > _MAX_NAMED:
        lines.append(f"  and {len(culprits) - _MAX_NAMED} more")
    is_final = bool(lost) or all(_is_blocked(a, patience_s) for a in answers)
    advice = (
        _LOST if lost and all(a.state not in ("ended", "destroyed") for a in lost) else _ALL_CALL
    )
    title = f"{wait}, and these ranks have not come:"
    text = "\n".join([title, *lines, advice])
    return Verdict(is_final=is_final, text=text, wait=key, told_by=first.rank)


def _not_there(waiting: Answer, answers: Sequence[Answer]) -> list[Answer]:
    """Return the ranks that have not issued what a rank waits for."""
    assert waiting.waits is not None
    name, position = waiting.waits.channel, waiting.waits.position
    result = []
    for rank in waiting.channels[name].ranks:
        theirs = answers[rank].channels.get(name)
        if theirs is None or (theirs.position <= position and theirs.at(position) is None):
            result.append(answers[rank])
    return result


def _is_lost(answer: Answer) -> bool:
    """Whether a rank does not come back."""
    if answer.state == "silent":
        return answer.silent_s >= SILENT_S
    return answer.state in ("gone", "stopped", "ended", "raised", "destroyed")


def _is_blocked(answer: Answer, patience_s: float) -> bool:
    """Whether a rank waits for others, or for nothing any more."""
    if answer.waits is not None and answer.waits.is_main:
        return answer.waits.for_s >= patience_s
    return answer.is_still or _is_lost(answer)


_LOST_STATES = {
    "gone": "is gone: process {pid} on {host} does not exist any more",
    "stopped": "is stopped (SIGSTOP, a debugger): process {pid} on {host} goes on by `kill -CONT`",
    "silent": "has not answered for {silent_s:.0f} s: process {pid} on {host}, or the host is gone",
    "busy": "does not answer, but process {pid} on {host} lives: native code there holds Python",
    "unborn": "has not made a mesh yet",
    "raised": "has ended by {error}",
    "ended": "has ended: its script is through, after step {step}",
    "destroyed": "has destroyed its process group after step {step}, and is at {place}",
}


def describe(answer: Answer) -> str:
    """Say where a rank is, in one line."""
    error = f"; before that it met {answer.error}" if answer.error else ""
    if answer.state in _LOST_STATES:
        known = {name: getattr(answer, name) for name in answer.__slots__}
        said = _LOST_STATES[answer.state].format(**known)
        error = error if answer.state == "destroyed" else ""
    elif answer.waits is not None:
        said = f"waits for {answer.waits.of} itself, step {answer.step}, at {answer.place}"
    else:
        said = f"is at {answer.place}, after {_last(answer)} of step {answer.step}"
    return f"rank {answer.rank} {said}{error}"


def _last(answer: Answer) -> str:
    lasts = [state.recent[-1][1] for state in answer.channels.values() if state.recent]
    return lasts[0] if lasts else "nothing"


def _ranks(ranks: object) -> str:
    numbers = sorted(ranks)  # type: ignore[call-overload]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    return f"ranks {shown}{', ...' if len(numbers) > _MAX_NAMED else ''}"
