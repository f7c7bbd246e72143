"""What all fuzzers share: junk, an oracle, and how much of it is tried."""

from __future__ import annotations

import collections
import os
import time
import typing
import warnings

from hypothesis import settings
from hypothesis import strategies as st

from shardkit._errors import ShardkitError

if typing.TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = int(os.environ.get("SHARDKIT_FUZZ_EXAMPLES", "3"))  # `nox -s fuzz`: until time is up
MAX_S = 30.0
REFUSED = object()


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    """Try a test with `EXAMPLES`, new ones if the profile is fresh: it is chosen after this."""
    decorated: Callable[..., None] = settings(max_examples=EXAMPLES)(test)
    return decorated


outcomes: collections.Counter[str] = collections.Counter()
"""How often what was tried did what; printed at the end."""


def tried(act: Callable[[], typing.Any], *, also: tuple[type[Exception], ...] = ()) -> typing.Any:
    """Do something with junk; return what it returns, or `REFUSED`.

    Args:
        act: What is done.
        also: Exceptions that are right beside shardkit's own.

    Raises:
        AssertionError: It ended in an error that nobody has written for this, or took too long.
    """
    begin = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = act()
        outcomes["accepted"] += 1
    except (ShardkitError, *also) as error:
        outcomes["refused" if str(error) else "raw"] += 1
        result = REFUSED
    except Exception as error:
        outcomes["raw"] += 1
        msg = f"a raw error: {error!r}"
        raise AssertionError(msg) from error
    taken_s = time.monotonic() - begin
    if taken_s > MAX_S:
        outcomes["hung"] += 1
        msg = f"it took {taken_s} s"
        raise AssertionError(msg)
    return result


numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(),
    st.booleans(),
)
texts = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["", ".", "..", "../x", "a/b", "\0", "\ud800", "nan", "-1"]),
)
junk = st.one_of(
    st.none(),
    numbers,
    texts,
    st.lists(numbers, max_size=2),
    st.dictionaries(texts, numbers, max_size=2),
)


@st.composite
def changes(draw: typing.Any) -> Callable[[bytes], bytes]:
    """Draw what is done to the bytes of a file."""
    kind = draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat", "zeros", "nothing"]))
    place, value = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 255))
    many = draw(st.integers(1, 40))

    def change(content: bytes) -> bytes:
        at = int(place * len(content))
        old = content[at] if content else 0
        before, after = content[:at], content[at + 1 :]
        return {
            "flip": before + bytes([old ^ (1 << value % 8)]) + after,
            "set": before + bytes([value]) + after,
            "cut": before,
            "insert": before + bytes([value]) * many + content[at:],
            "repeat": before + content[at : at + many] * 2 + content[at + many :],
            "zeros": before + bytes(many) + content[at + many :],
            "nothing": content,
        }[kind]

    return change


@st.composite
def replacements(draw: typing.Any) -> Callable[[typing.Any], None]:
    """Draw what is done to nested dicts and lists: one value in them becomes junk, or is gone."""
    path = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    value, is_removed = draw(junk), draw(st.booleans())

    def change(tree: typing.Any) -> None:
        for depth, step in enumerate(path):
            keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
            if not keys:
                return
            key = keys[step % len(keys)]
            if depth + 1 < len(path) and isinstance(tree[key], (dict, list)) and tree[key]:
                tree = tree[key]
            else:
                if is_removed:
                    del tree[key]
                else:
                    tree[key] = value
                return

    return change
