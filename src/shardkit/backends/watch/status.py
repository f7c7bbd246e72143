"""Where a rank is, and what it tells the others of itself: a short part, and details on demand.

What comes from the store is read as a file from a stranger is: types and lengths are checked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardkit._compat import torch_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType


# --- places in the user's code --------------------------------------------------------------------

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH, "distributed", "distributed_c10d.py"))
_ENGINE = str(Path(_TORCH, "autograd", "graph.py"))
_LIBRARIES = (_OURS, _TORCH, *{sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_NAMES = {"Module._wrapped_call_impl": "forward", "Module._call_impl": "forward"}


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Where a thread is.

    Attributes:
        file: Name of the user's file.
        line: Number of the line, from 1.
        function: Name of the function.
        inside: Function that the user's code called there: ``"Tensor.backward"``, or empty.
    """

    file: str = "?"
    line: int = 0
    function: str = "?"
    inside: str = ""

    def __str__(self) -> str:
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.file}:{self.line}, `{self.function}`{inside}"


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if it has ended."""
    ident = threading.main_thread().ident
    assert ident is not None
    return sys._current_frames().get(ident)  # noqa: SLF001 - Python's documented function


def place_of(frame: FrameType | None) -> CodePlace:
    """Return the user's line that a frame runs for, and what that line called."""
    called: list[CodeType] = []
    while frame is not None and _is_library(frame.f_code.co_filename):
        called.append(frame.f_code)
        frame = frame.f_back
    if frame is None:
        return CodePlace()
    code = frame.f_code
    return CodePlace(Path(code.co_filename).name, frame.f_lineno, code.co_name, _inside(called))


def stack_of(frame: FrameType | None) -> str:
    """Return the whole stack, as tracebacks show it; empty for None."""
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


Lines = tuple[tuple["CodeType", int], ...]
"""Lines of the user's code that called each other, the innermost first."""
_MAX_LINES = 4


def lines_of(frame: FrameType | None) -> Lines:
    """Return the innermost of the user's lines that a frame runs for; refers to no frame."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MAX_LINES:
        if not _is_library(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def lines_in_words(lines: Lines) -> str:
    """Return the innermost line, and who called it."""
    shown = [f"{Path(c.co_filename).name}:{line}, `{c.co_name}`" for c, line in lines]
    return ", called at ".join(shown)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<")


def _inside(called: list[CodeType]) -> str:
    """Return the function that the user's line called, by the name that users know."""
    for code in reversed(called):
        name = code.co_qualname
        if "<locals>" not in name:  # Else a decorator's.
            return _NAMES.get(name, name)
    return ""


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is inside a function of torch.distributed itself.

    What that function calls does not count: to write a checkpoint is no collective.
    """
    return frame is not None and frame.f_code.co_filename == _COLLECTIVES


class Call(NamedTuple):
    """A function of torch.distributed that a thread is inside of.

    Attributes:
        name: Function that the user called, or that called torch.distributed for the user.
        group: Name of the process group.
        ranks: Members of the group, ranks of the world.
    """

    name: str
    group: str
    ranks: Sequence[int]


def call_of(frame: FrameType | None) -> Call | None:
    """Return the collective that a thread is inside of; None if its group cannot be told."""
    name, group, is_known = "", None, False
    while is_in_collective(frame):
        assert frame is not None
        if not is_known and "group" in frame.f_locals:
            group, is_known = frame.f_locals["group"], True
        if "wrapper" not in frame.f_code.co_name:
            name = frame.f_code.co_name
        frame = frame.f_back
    group = group or dist.group.WORLD
    if not is_known or not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return Call(name, group.group_name, dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):  # It has been destroyed meanwhile.
        return None


def is_in_backward(frame: FrameType | None) -> bool:
    """Whether a thread waits for autograd, which may compute in a thread of its own."""
    return frame is not None and frame.f_code.co_filename == _ENGINE


def instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return what a frame is at, to see later whether it has moved."""
    return (id(frame), frame.f_lasti) if frame is not None else None


# --- NCCL's flight recorder -----------------------------------------------------------------------
#
# Torch keeps the last collectives of each communicator (``TORCH_FR_BUFFER_SIZE``; 2000 of them
# where it is not set). It tells which of them the card has begun and ended, of users' groups as
# well.


def flight_record() -> list[str]:
    """Return the lines of this process; none where NCCL is not in use."""
    record = torch_groups.nccl_flight_record()
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


# --- statuses -------------------------------------------------------------------------------------

MAX_TEXT = 1 << 20
STATES = ("runs", "destroyed", "ended", "raised")
"""What a rank says of itself."""
UNHEARD = ("unborn", "silent", "busy", "stopped", "gone")
"""What others find out of a rank that does not answer."""


@dataclass(slots=True)
class GroupStatus:
    """What a rank did on one process group.

    Attributes:
        ranks: Members, ranks of the world.
        position: Number of collectives so far.
        wish: The collective that this rank would issue next, if the others agreed; or None.
        is_main: The last one was issued by the main thread, or in its backward.
        recent: The last collectives, up to `position`; in details only.
    """

    ranks: Sequence[int]
    position: int
    wish: str | None = None
    is_main: bool = True
    recent: list[str] = field(default_factory=list)

    def at(self, position: int) -> str | None:
        """Return the collective that was issued, or is wished for, at a position, if known."""
        if position == self.position:
            return self.wish
        first = self.position - len(self.recent)
        return self.recent[position - first] if first <= position < self.position else None


@dataclass(slots=True)
class WaitStatus:
    """What a rank waits for.

    Attributes:
        group: Name of the process group.
        position: Place of the collective in the sequence of its group.
        of: The collective.
        for_s: Seconds so far.
        is_main: The main thread waits, or what runs in its place.
        is_issued: This rank has issued it; else it waits for the others to agree to it.
    """

    group: str
    position: int
    of: str
    for_s: float
    is_main: bool = True
    is_issued: bool = True


@dataclass(slots=True)
class CallStatus:
    """A collective of torch.distributed that the main thread is inside of, not shardkit's own.

    Attributes:
        name: Function of torch.distributed.
        group: Name of the process group.
        ranks: Members, ranks of the world.
        number: Count of such calls that were seen; another number is another call, but calls in a
            loop may have one number.
        for_s: Seconds since it was first seen.
    """

    name: str
    group: str
    ranks: Sequence[int]
    number: int
    for_s: float


@dataclass(slots=True)
class RankStatus:
    """What is known of a rank.

    Attributes:
        state: One of `STATES`, or of `UNHEARD`.
        step: Number of root forwards so far.
        place: Place where its main thread is.
        error: The last exception that left a forward, or ended the process; or None.
        groups: Process groups by name.
        wait: The wait of its main thread or device, or None.
        call: Collective of the user's that its main thread is in, or None.
        gave_up: The error that it raised, or None: it comes no more.
        silent_s: Seconds for which it has not answered.
        stack: Stack of the main thread; in details only.
        engine: Lines of the engine of an accelerator (NCCL's flight recorder); in details only.
        begun: Places that called the last root forwards, up to `step`; in details only.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    state: str = "runs"
    step: int = 0
    place: CodePlace = field(default_factory=CodePlace)
    error: str | None = None
    groups: dict[str, GroupStatus] = field(default_factory=dict)
    wait: WaitStatus | None = None
    call: CallStatus | None = None
    gave_up: str | None = None
    silent_s: float = 0.0
    stack: str = ""
    engine: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def dump(self, *, details: bool = True) -> str:
        """Return it as text, with details or without."""
        content = dataclasses.asdict(self, dict_factory=_without_defaults)
        for group in content.get("groups", {}).values():
            group["ranks"] = _shortened(group["ranks"])
            if not details:
                group.pop("recent", None)
        if content.get("call"):
            content["call"]["ranks"] = _shortened(content["call"]["ranks"])
        if not details:
            content.pop("stack", None)
            content.pop("engine", None)
            content.pop("begun", None)
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def load(cls, text: str | bytes) -> RankStatus:
        """Return what was dumped.

        Raises:
            ValueError: It is no status.
        """
        if len(text) > MAX_TEXT:
            msg = "too long"
            raise ValueError(msg)
        try:
            found: dict[str, Any] = json.loads(text)
            found["place"] = _made(CodePlace, found.get("place", {}))
            found["groups"] = {
                str(name): _made(GroupStatus, {**of, "ranks": _whole(of["ranks"])})
                for name, of in found.get("groups", {}).items()
            }
            if found.get("wait") is not None:
                found["wait"] = _made(WaitStatus, found["wait"])
            if call := found.get("call"):
                found["call"] = _made(CallStatus, {**call, "ranks": _whole(call["ranks"])})
            status: RankStatus = _made(cls, found)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            msg = f"no status of a rank: {error}"
            raise ValueError(msg) from error
        if status.state not in (*STATES, *UNHEARD):
            msg = f"unknown state {status.state!r}"
            raise ValueError(msg)
        return status


def _without_defaults(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value not in (None, "", [], {}, ())}


def _shortened(ranks: Sequence[int]) -> list[Any]:
    """Return members as first, step and number, as nearly all groups have them; else as a list."""
    members = list(ranks)
    step = members[1] - members[0] if len(members) > 1 else 1
    if step and members == list(range(members[0], members[0] + step * len(members), step)):
        return ["range", members[0], step, len(members)]
    return members


def _whole(shortened: list[Any]) -> Sequence[int]:
    if shortened and shortened[0] == "range":
        _, first, step, number = shortened
        return range(int(first), int(first) + int(step) * int(number), int(step))
    return [int(rank) for rank in shortened]


_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "str | None": (str, type(None)),
    "list[str]": list,
}


def _made(cls: Any, found: dict[str, Any]) -> Any:
    """Return an object of one of the classes here, from fields of the right types.

    Raises:
        TypeError: A field is missing, unknown, or of another type.
    """
    for each in dataclasses.fields(cls):
        wanted = _TYPES.get(str(each.type))
        if wanted is None or each.name not in found:
            continue
        value = found[each.name]
        is_flag_for_number = isinstance(value, bool) and wanted is not bool
        if not isinstance(value, wanted) or is_flag_for_number:
            msg = f"{each.name} is {value!r}"
            raise TypeError(msg)
        lines: list[Any] = value if isinstance(value, list) else []
        if each.type == "list[str]" and not all(isinstance(line, str) for line in lines):
            msg = f"{each.name} has entries that are no text"
            raise TypeError(msg)
    return cls(**found)
