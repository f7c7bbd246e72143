"""What is foretold, and how often ranks have to talk."""

from __future__ import annotations

import gc
import random

from shardkit.backends.watch import history as module
from shardkit.backends.watch.history import Collective, CollectiveSequence


def surprises(names: str, sequence: CollectiveSequence | None = None) -> int:
    """Return how many of a row of collectives, named by letters, were not foretold."""
    sequence = sequence or CollectiveSequence()
    before = sequence.num_surprises
    for name in names:
        sequence.append(Collective("all-gather", name, 8))
    return sequence.num_surprises - before


STEP = "rabcdcba"


def test_a_first_step_is_news_and_later_ones_are_not() -> None:
    sequence = CollectiveSequence()
    assert surprises(STEP, sequence) == len(STEP)
    assert surprises(STEP, sequence) <= 2, "how the first step goes over into the next one"
    assert surprises(STEP * 50, sequence) == 0


def test_evaluation_between_steps_costs_where_it_begins_and_ends() -> None:
    sequence = CollectiveSequence()
    surprises(STEP * 3 + "rabcd" * 3, sequence)
    assert surprises(STEP * 3, sequence) <= 2
    assert surprises("rabcd" * 3, sequence) <= 2


def test_what_differs_in_its_bytes_is_another_collective() -> None:
    sequence = CollectiveSequence()
    for nbytes in (8, 8, 8):
        sequence.append(Collective("all-reduce", "", nbytes))
    assert sequence.foretold == Collective("all-reduce", "", 8)
    assert sequence.foretold != Collective("all-reduce", "", 16)


def test_ranks_with_one_history_foretell_the_same() -> None:
    """Also when what is known is forgotten: else one would speak and others would not."""
    numbers = random.Random(0)
    one, other = CollectiveSequence(), CollectiveSequence()
    for _ in range(2000):
        collective = Collective("all-gather", numbers.choice("abcd"), 8)
        assert one.foretold == other.foretold
        one.append(collective)
        other.append(collective)


def test_what_is_known_does_not_grow_for_ever(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(module, "_MAX_KNOWN", 10)
    sequence = CollectiveSequence()
    for number in range(1000):
        sequence.append(Collective("all-gather", str(number), 8))
    assert len(sequence._after) <= 10  # noqa: SLF001
    assert len(sequence._history) == 10  # noqa: SLF001


def test_later_steps_keep_no_objects() -> None:
    def number() -> int:
        return sum(type(each) is Collective for each in gc.get_objects())

    sequence = CollectiveSequence()
    surprises(STEP * 2, sequence)
    before = number()
    surprises(STEP * 100, sequence)
    assert number() == before


def test_the_last_ones_are_told() -> None:
    sequence = CollectiveSequence()
    surprises("abc" * 100, sequence)
    assert sequence.recent(2) == ["all-gather of b (8 bytes)", "all-gather of c (8 bytes)"]
    assert len(sequence.recent()) == 128


def test_micro_batches_are_no_news() -> None:
    """Of which only the last one reduces, on the process group of the gathers."""
    step = "rabcdcba" * 3 + "rabcdcDbCaBAR"
    sequence = CollectiveSequence()
    surprises(step * 3, sequence)
    assert surprises(step * 20, sequence) == 0


def test_a_ring_that_is_full_foretells_as_before(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(module, "_MAX_KNOWN", 64)
    sequence = CollectiveSequence()
    surprises(STEP * 3, sequence)
    assert surprises(STEP * 100, sequence) == 0
    assert sequence.recent(3) == [f"all-gather of {name} (8 bytes)" for name in STEP[-3:]]
