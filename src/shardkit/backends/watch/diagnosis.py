"""Conclusions from the statuses of all ranks. Nothing here communicates.

Time proves nothing: a rank may compute, load or save for as long as it likes. A run ends only on
proof that some ranks can never go on:

- A rank has ended, and another one waits for it.
- Ranks wait for each other in a circle: each waits for a collective that the next one has not
  issued, and cannot issue, because it waits itself.

Of the user's own collectives the watch sees only where they are called. If the proof uses them, two
rounds in a row must see the same state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._text import listed, listed_lines
from shardkit.backends.watch.status import LEFT, RankStatus, WaitStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAX_DETAILS = 16

WRITTEN_SINCE = "written since it was gathered"
"""Words in descriptions of gathers that only some ranks need: others still have the memory."""

_SAME_ORDER = (
    "Run the same modules in the same order on all ranks, as often. Call norms, full_tensor, "
    "saving and loading on all ranks as well, not under `if rank == 0`. Put modules that ranks "
    "choose among (experts) in one group, of which each rank runs at least one. If losses of ranks "
    "use different outputs, add 0 * output.sum() of the others to the loss."
)
_ALL_WRITE = (
    "Parameters were written to on some ranks, and not on others. Each rank writes its own shards: "
    "load, reset and update on all ranks, an average of weights (EMA) as well. Code that leaves "
    "out empty shards has to call reshard() on the model afterwards."
)
_ALL_CALL = (
    "What communicates must be called on all ranks: forward (of a list of modules that is one "
    "group, at least one), backward, optimizer steps with clipping, norms, full_tensor, saving and "
    "loading; not under `if rank == 0`. Ranks with less data than others have to stop, or go on, "
    "together."
)
_LOST = "Look at that rank's own output. The others cannot go on; start again from a checkpoint."
_GOES_ON = "The run goes on."


@dataclass(slots=True)
class Diagnosis:
    """Knowledge about the waits of a run."""

    is_final: bool  # Whether the waits will never end.
    text: str  # Text that says who waits for whom, where they are, and what to do.
    told_by: int = 0  # Rank that logs it, if it is not an error of each waiting rank.
    # Waits of the ranks that cannot go on, by rank: a rank accepts the diagnosis only if its wait
    # is among them.
    doomed: dict[str, str] = field(default_factory=dict)
    in_calls: list[int] = field(default_factory=list)  # Such ranks inside a user's collective.
    suspicion: str = ""  # State that the next round must see, too, before the run ends.
    details_of: list[int] = field(default_factory=list)  # Ranks whose details improve the text.


def what_is_awaited(status: RankStatus) -> str | None:
    """Return a name for the wait, or the call, of a rank; None: it does not wait."""
    if status.wait is not None:
        kind = "issued" if status.wait.is_issued else "agreed"
        return f"{status.wait.group} {status.wait.position} {kind}"
    return f"{status.call.group} {status.call.name}" if status.call is not None else None


def diagnose(
    statuses: Sequence[RankStatus], *, silent_after_s: float, suspicion: str = ""
) -> Diagnosis | None:
    """Return the diagnosis from the statuses of all ranks; None: no rank waits.

    Args:
        statuses: Status of each rank, in rank order.
        silent_after_s: Seconds after which a rank of a silent host counts as lost.
        suspicion: Suspicion of the round before.
    """
    lost = {s.rank for s in statuses if _is_lost(s, silent_after_s)}
    lacking = {s.rank: _lacking(s, statuses) for s in statuses if what_is_awaited(s) is not None}
    if not lacking:
        return None
    details_of: list[int] = []
    for status in statuses:
        if passed := _passed(status, statuses, details_of):
            lost.add(status.rank)  # The ranks never agreed to what it asks for.
            lacking[status.rank] = sorted({*lacking[status.rank], *passed})
    parted = lost.intersection(lacking)
    # First use only what shardkit itself knows, from one round.
    sure = {rank: them for rank, them in lacking.items() if statuses[rank].wait is not None}
    doomed = _doomed(statuses, sure, lost) | parted
    if doomed:
        return _final(statuses, doomed, lacking, lost - parted)
    # Then use the user's own collectives as well.
    doomed = _doomed(statuses, lacking, lost)
    passing = dataclasses.replace(_passing(statuses, lacking), details_of=details_of)
    if not doomed:
        return passing
    exactly = [
        (rank, what_is_awaited(statuses[rank]), getattr(statuses[rank].call, "number", None))
        for rank in sorted(doomed)
    ]
    if suspicion == (suspected := repr(exactly)):
        return _final(statuses, doomed, lacking, lost)
    return dataclasses.replace(passing, suspicion=suspected)


def explain_error(statuses: Sequence[RankStatus], rank: int, silent_after_s: float) -> str | None:
    """Return why a rank's wait ended in an error; None if no other rank is the cause."""
    lost = [s.rank for s in statuses if s.rank != rank and _is_lost(s, silent_after_s)]
    known = next((s.gave_up for s in statuses if s.gave_up is not None), None)
    if known is not None or not lost:
        return known
    own = statuses[rank]
    ended = f"a collective of rank {rank} has ended in an error"
    what = ended if what_is_awaited(own) is None else _waiting(statuses, [rank])
    return "\n".join([f"{what}, and these ranks are lost:", *_described(statuses, lost), _LOST])


# --- who can go on --------------------------------------------------------------------------------


def _is_lost(status: RankStatus, silent_after_s: float) -> bool:
    """Whether a rank will not issue any more collectives."""
    if status.state == "silent":
        return status.silent_s >= silent_after_s
    return status.gave_up is not None or status.state in LEFT


def _lacking(status: RankStatus, statuses: Sequence[RankStatus]) -> list[int]:
    """Return the ranks that have not issued the collective that a rank waits for."""
    wait, call = status.wait, status.call
    if wait is not None:
        members = status.groups[wait.group].ranks if wait.group in status.groups else ()
        return [
            rank for rank in members if rank != status.rank and not _has_come(statuses[rank], wait)
        ]
    assert call is not None
    here = (call.name, call.group)
    calls = ((rank, statuses[rank].call) for rank in call.ranks if rank != status.rank)
    return [rank for rank, other in calls if other is None or (other.name, other.group) != here]


def _has_come(other: RankStatus, wait: WaitStatus) -> bool:
    """Whether a rank has issued the awaited collective, or will do so after agreement."""
    if other.gave_up is not None:  # It has ended all that it had issued.
        return False
    theirs = other.groups.get(wait.group)
    if theirs is None or theirs.position < wait.position:
        return False
    is_asking = not wait.is_issued and theirs.wish == wait.of
    return theirs.position > wait.position or is_asking


def _passed(status: RankStatus, statuses: Sequence[RankStatus], details_of: list[int]) -> list[int]:
    """Return the ranks that issued another collective at the place where this rank asks.

    Args:
        status: Status of the rank that asks.
        statuses: Status of each rank.
        details_of: List that gets the ranks whose collective is not known without details: they may
            have agreed, and this rank has not noticed it yet.
    """
    wait = status.wait
    if wait is None or wait.is_issued or wait.group not in status.groups:
        return []
    found = []
    for rank in status.groups[wait.group].ranks:
        theirs = statuses[rank].groups.get(wait.group)
        if rank == status.rank or theirs is None or theirs.position <= wait.position:
            continue
        issued = theirs.at(wait.position)
        if issued is None and not theirs.recent and len(details_of) < _MAX_DETAILS:
            details_of.append(rank)
        elif issued is not None and issued != wait.of:
            found.append(rank)
    return found


def _doomed(
    statuses: Sequence[RankStatus], lacking: Mapping[int, Sequence[int]], lost: set[int]
) -> set[int]:
    """Return the ranks that can never go on.

    A rank that is not blocked may issue what others wait for. So may a rank that waits only for
    such ranks. All other ranks wait for lost ranks, or in a circle.
    """
    blocked = {rank for rank in lacking if rank not in lost and _is_blocked(statuses[rank])}
    live = {status.rank for status in statuses} - blocked - lost
    while True:
        freed = {
            rank
            for rank in blocked
            if all(
                other in live or (other not in lost and _may_come(statuses[other], statuses[rank]))
                for other in lacking[rank]
            )
        }
        if not freed:
            break
        live |= freed
        blocked -= freed
    # A thread beside the main one waits in vain, too, if the rank that it waits for is lost.
    beside = {rank for rank, them in lacking.items() if rank in live and not lost.isdisjoint(them)}
    return blocked | {rank for rank in beside if statuses[rank].wait is not None}


def _is_blocked(status: RankStatus) -> bool:
    """Whether the main thread of a rank cannot go on before other ranks have come.

    A user's collective that carries data may take long, with ranks that have started it and gone
    on.
    """
    if status.wait is not None:
        return status.wait.is_main
    return status.call is not None and "barrier" in status.call.name


def _may_come(other: RankStatus, status: RankStatus) -> bool:
    """Whether a waiting rank may still issue the collective that another rank waits for."""
    if status.wait is not None:  # By a thread beside the main one.
        theirs = other.groups.get(status.wait.group)
        return theirs is not None and not theirs.is_main
    # A user's collective may follow another one: calls in a loop look the same.
    return other.wait is None and other.call is not None


# --- what is said ---------------------------------------------------------------------------------


def _final(
    statuses: Sequence[RankStatus],
    doomed: set[int],
    lacking: Mapping[int, Sequence[int]],
    lost: set[int],
) -> Diagnosis:
    known = next((s.gave_up for s in statuses if s.gave_up is not None), None)
    text = known if known is not None else _parted(statuses, doomed)
    if text is None:
        text = _missing(statuses, doomed, lacking, lost)
    return Diagnosis(
        is_final=True,
        text=text,
        told_by=min(doomed),
        doomed={str(rank): what_is_awaited(statuses[rank]) or "" for rank in sorted(doomed)},
        in_calls=[rank for rank in sorted(doomed) if statuses[rank].call is not None],
    )


def _parted(statuses: Sequence[RankStatus], doomed: set[int]) -> str | None:
    """Say where ranks issued, or want to issue, different collectives; None: not known."""
    names = dict.fromkeys(
        status.wait.group for status in statuses if status.rank in doomed and status.wait
    )
    for name in names:
        members = [status for status in statuses if name in status.groups]
        known: dict[int, list[tuple[str, RankStatus]]] = {}
        for status in members:
            theirs = status.groups[name]
            issued = [*theirs.recent, *([theirs.wish] if theirs.wish is not None else [])]
            for position, what in enumerate(issued, theirs.position - len(theirs.recent)):
                known.setdefault(position, []).append((what, status))
        for position, told in sorted(known.items()):
            if len({what for what, _ in told}) > 1:
                ranks = _ranks(status.rank for status in members)
                title = f"ranks parted. Of the collectives of {ranks}, number {position + 1} is"
                is_written = any(WRITTEN_SINCE in what for what, _ in told)
                advice = _ALL_WRITE if is_written else _SAME_ORDER
                lines = [title, *_by_collective(told), *_begun_elsewhere(members), advice]
                return "\n".join(lines)
    return None


def _by_collective(told: Sequence[tuple[str, RankStatus]]) -> list[str]:
    """Return one line per collective: who issues it, and where the first of them is."""
    by_text: dict[str, list[RankStatus]] = {}
    for what, status in told:
        by_text.setdefault(what, []).append(status)
    lines = []
    for what, whose in by_text.items():
        first = whose[0]
        error = f"; before that it met {first.error}" if first.error else ""
        ranks = _ranks(s.rank for s in whose)
        lines.append(f"  {ranks}: {what}, step {first.step}, at {first.place}{error}")
    return lines


def _begun_elsewhere(members: Sequence[RankStatus]) -> list[str]:
    """Return the lines of the first recent forward that ranks called at different lines.

    If one rank runs one forward more, that issues the same collectives as the next forward of the
    other ranks. So ranks diverge only after the end of that forward.
    """
    known = [status for status in members if status.begun]
    if not known:
        return []
    first = max(status.step - len(status.begun) + 1 for status in known)
    for step in range(first, min(status.step for status in known) + 1):
        by_line: dict[str, list[int]] = {}
        for status in known:
            by_line.setdefault(status.begun[step - status.step - 1], []).append(status.rank)
        if len(by_line) > 1:
            lines = [f"{_ranks(ranks)}: {line}" for line, ranks in by_line.items()]
            title = f"Forward {step} was not called at the same line:"
            return [title, *(f"  {line}" for line in listed_lines(lines))]
    return []


def _waiting(statuses: Sequence[RankStatus], ranks: Sequence[int]) -> str:
    """Say who waits for what, and where the first of them is."""
    first = statuses[ranks[0]]
    for_s = max((s.wait or s.call).for_s for s in map(statuses.__getitem__, ranks))  # type: ignore[union-attr]
    what = first.wait.of if first.wait is not None else f"its {first.call.name}"  # type: ignore[union-attr]
    whose = f", rank {first.rank}" if len(ranks) > 1 else ""
    return (
        f"{_ranks(ranks)} waited {for_s:.0f} s{whose} for {what}, step {first.step}, at "
        f"{first.place}"
    )


def _missing(
    statuses: Sequence[RankStatus],
    doomed: set[int],
    lacking: Mapping[int, Sequence[int]],
    lost: set[int],
) -> str:
    """Say who waits for ranks that do not come, and where those are."""
    waiting = [rank for rank in sorted(doomed) if statuses[rank].wait is not None] or sorted(doomed)
    awaited = sorted({other for rank in waiting for other in lacking[rank]})
    gone = [rank for rank in awaited if rank in lost]
    # Without lost ranks these wait for each other, so who else has not come does not matter.
    in_circle = [rank for rank in awaited if rank in doomed]
    shown = gone or in_circle or awaited
    has_left = any(statuses[rank].state in ("ended", "destroyed") for rank in gone)
    advice = _LOST if gone and not has_left else _ALL_CALL
    title = f"{_waiting(statuses, waiting)}, and these ranks have not come:"
    elsewhere = _begun_elsewhere([statuses[rank] for rank in sorted({*waiting, *awaited})])
    return "\n".join([title, *_described(statuses, shown), *elsewhere, advice])


def _passing(statuses: Sequence[RankStatus], lacking: Mapping[int, Sequence[int]]) -> Diagnosis:
    """Say who waits for whom, if the waits may still end."""
    waiting = sorted(r for r in lacking if what_is_awaited(statuses[r]) is not None)
    first = statuses[waiting[0]]
    awaited = sorted({other for rank in waiting for other in lacking[rank]})
    # Ranks that wait themselves come when the other ranks have come.
    awaited = [rank for rank in awaited if not lacking.get(rank)] or awaited
    said = _waiting(statuses, waiting)
    if awaited:
        lines = [f"{said}, for these ranks:", *_described(statuses, awaited), _GOES_ON]
        text = "\n".join(lines)
    else:
        text = f"{said}. All ranks have issued it, and it is not done. {_GOES_ON}"
    return Diagnosis(is_final=False, text=text, told_by=first.rank)


def _described(statuses: Sequence[RankStatus], ranks: Sequence[int]) -> list[str]:
    lines = listed_lines([describe(statuses[rank]) for rank in ranks])
    return [f"  {line}" for line in lines]


_STATES = {
    "gone": "is gone: process {pid} on {host} does not exist any more",
    "stopped": "is stopped (SIGSTOP, a debugger): process {pid} on {host} goes on by `kill -CONT`",
    "silent": "has not answered for {silent_s:.0f} s: native code may hold Python in process {pid} "
    "on {host}, or that host is lost",
    "reachable": "does not answer, but process {pid} on {host} lives: it may be stopped, or native "
    "code may hold Python there",
    "busy": "does not answer, but process {pid} on {host} lives: native code may hold Python there",
    "unborn": "has not made a mesh yet",
    "raised": "has ended by {error}",
    "ended": "has ended: its script is through, after step {step}",
    "destroyed": "has destroyed its process group after step {step}, and is at {place}",
}


def describe(status: RankStatus) -> str:
    """Say where a rank is, in one line."""
    error = f"; before that it met {status.error}" if status.error else ""
    if status.state in _STATES:
        known: dict[str, Any] = {name: getattr(status, name) for name in status.__slots__}
        said = _STATES[status.state].format(**known)
        error = error if status.state == "destroyed" else ""
    elif status.wait is not None:
        said = f"waits for {status.wait.of} itself, step {status.step}, at {status.place}"
    else:
        said = f"is at {status.place}, in step {status.step}"
    return f"rank {status.rank} {said}{error}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {listed(numbers, str)}"
