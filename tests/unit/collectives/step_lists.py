"""What a step of a model of three layers issues and computes, as lists of words."""

from __future__ import annotations

import pytest
from recorded import listed

# A forward that knows what comes next: layer i+1 is gathered before layer i computes.
FORWARD = listed("""
    gather root, wait root, gather 0,
    wait 0, gather 1, forward 0,
    wait 1, gather 2, forward 1,
    wait 2, forward 2,
""")
FIRST_FORWARD = listed("""
    all_reduce_max,
    gather root, wait root,
    gather 0, wait 0, forward 0,
    gather 1, wait 1, forward 1,
    gather 2, wait 2, forward 2,
""")
# Layer 2 is still there from forward. Reductions and gathers run beside the next layer's backward.
BACKWARD = listed("""
    backward 2, gather 1, reduce 2,
    wait 1, backward 1, reduced 2, gather 0, reduce 1,
    wait 0, backward 0, reduced 1, reduce 0,
    reduced 0, reduce root,
    start check, reduced root, wait check,
""")
REGATHERED_BACKWARD = ["gather root", "wait root", *BACKWARD]
GATHERS = {"gather 0", "wait 0", "gather 1", "wait 1"}
KEPT_BACKWARD = [entry for entry in BACKWARD if entry not in GATHERS]

RESHARDING = pytest.mark.parametrize(
    ("reshard_after_forward", "backward"),
    [(True, REGATHERED_BACKWARD), (False, KEPT_BACKWARD), (None, BACKWARD)],
    ids=["resharded", "kept", "default"],
)


def unreduced(backward: list[str]) -> list[str]:
    """Return a backward without its reductions and its check."""
    words = ("reduce", "start check", "wait check")
    return [entry for entry in backward if not entry.startswith(words)]


def with_all_reduce(backward: list[str]) -> list[str]:
    """Return a backward with an all-reduce after each reduce-scatter."""
    result = []
    for entry in backward:
        result.append(entry)
        if entry.startswith("reduce "):
            result.append(entry.replace("reduce", "all-reduce"))
    return result
